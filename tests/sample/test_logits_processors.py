# SPDX-License-Identifier: Apache-2.0
"""Custom logits processors: what they are told of the batch, and what they do to it."""

import random
from importlib.metadata import EntryPoint

import numpy as np
import pytest
import torch

import vllmx.sample.logits_processor as logits_processor
from vllmx.config import VllmConfig
from vllmx.sample.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdateBuilder,
    LogitsProcessor,
    LogitsProcessors,
    MoveDirectionality,
    build_logitsprocs,
    process_dict_updates,
    validate_logits_processors_parameters,
)
from vllmx.sample.sampler import Sampler
from vllmx.sampling_params import SamplingParams
from vllmx.worker.states import RequestState

VOCAB = 64
CPU = torch.device("cpu")


class OnlyToken(LogitsProcessor):
    """Leaves requests with extra_args["only"] that token, as one of the whole batch."""

    invariant = False

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        only = (sampling_params.extra_args or {}).get("only")
        if only is not None and not isinstance(only, int):
            raise ValueError(f"only must be a token id, got {only!r}")

    def __init__(self, vllm_config, device, is_pin_memory) -> None:
        self.only: dict[int, int] = {}
        self.updates = 0

    def is_argmax_invariant(self) -> bool:
        return self.invariant

    def update_state(self, batch_update) -> None:
        self.updates += batch_update is not None
        process_dict_updates(self.only, batch_update, lambda p, _, __: (p.extra_args or {})["only"])

    def apply(self, logits):
        rows, tokens = list(self.only), list(self.only.values())
        kept = logits[rows, tokens]
        logits[rows] = float("-inf")
        logits[rows, tokens] = kept
        return logits


class NotTheLast(AdapterLogitsProcessor):
    """Excludes the token generated last and the first of the prompt, where it is asked to."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params):
        if not (params.extra_args or {}).get("change"):
            return None

        def processor(prompt_ids, output_ids, logits):
            logits = logits.clone()
            logits[[prompt_ids[0], *output_ids[-1:]]] = float("-inf")
            return logits

        return processor


class Batch:
    def __init__(self, *classes) -> None:
        self.states = RequestState(8, 64, VOCAB, "cpu")
        made = LogitsProcessors(cls(VllmConfig(), CPU, False) for cls in classes)
        self.sampler = Sampler(self.states, "raw_logprobs", 0, processors=made)
        self.processor = next(made.all)

    def add(self, name: str, extra_args: dict, prompt=(1, 2), output=()) -> int:
        row = self.states.add_request(name, len(prompt), [*prompt, *output], 0)
        params = SamplingParams(temperature=0.0, extra_args=extra_args)
        self.sampler.add_request(row, len(prompt), params)
        return row

    def remove(self, name: str) -> None:
        self.sampler.remove_request(self.states.remove_request(name))

    def step(self, rows: list[int], logits: torch.Tensor | None = None) -> list[int]:
        index = np.array(rows)
        logits = torch.zeros(len(rows), VOCAB) if logits is None else logits
        out = self.sampler(logits, index, self.states.total_len[index] - 1)
        tokens = out.sampled_token_ids.tolist()
        self.states.all_token_ids.np[index, self.states.total_len[index]] = tokens
        self.states.total_len[index] += 1
        return tokens


def test_requests_that_come_go_and_change_order_keep_their_processors() -> None:
    batch, rng = Batch(OnlyToken), random.Random(5)
    live: dict[str, tuple[int, int]] = {}
    for step in range(200):
        for name in rng.sample(sorted(live), min(len(live), rng.randrange(3))):
            batch.remove(name)
            del live[name]
        for i in range(rng.randrange(4)):
            if len(live) < 8:
                only = rng.randrange(VOCAB)
                live[f"{step}-{i}"] = (batch.add(f"{step}-{i}", {"only": only}), only)
        # Some are in the middle of their prompt, and get no token.
        chosen = rng.sample(sorted(live), rng.randrange(len(live) + 1))
        chosen = [name for name in chosen if batch.states.total_len[live[name][0]] < 60]
        if chosen:
            rows = [live[name][0] for name in chosen]
            assert batch.step(rows) == [live[name][1] for name in chosen]


def test_a_batch_that_stays_the_same_is_told_so() -> None:
    batch = Batch(OnlyToken)
    rows = [batch.add("a", {"only": 3}), batch.add("b", {"only": 4})]
    for _ in range(3):
        batch.step(rows)
    assert batch.processor.updates == 1


def test_a_processor_of_a_request_sees_prompt_and_output_as_they_are() -> None:
    batch = Batch(NotTheLast)
    logits = torch.zeros(2, VOCAB)
    logits[:, 7], logits[:, 9], logits[:, 4] = 5.0, 6.0, 4.0
    asked = batch.add("asked", {"change": True}, prompt=(9, 2))
    other = batch.add("other", {}, prompt=(9, 2))
    seen = [batch.step([asked, other], logits) for _ in range(3)]
    assert [tokens[0] for tokens in seen] == [7, 4, 7]
    assert [tokens[1] for tokens in seen] == [9, 9, 9]


class KeepsAll(OnlyToken):
    """Keeps what it was told of every request, as a processor of the whole batch may."""

    def update_state(self, batch_update) -> None:
        for added in batch_update.added if batch_update else ():
            self.only[added[0]] = added[3]

    def apply(self, logits):
        return logits


@pytest.mark.parametrize(
    ("kind", "kept"), [(NotTheLast, 2), (OnlyToken, 0), (KeepsAll, 4)], ids=lambda v: str(v)
)
def test_only_requests_whose_output_a_processor_keeps_cost_a_step_anything(kind, kept) -> None:
    batch = Batch(kind)
    rows = [batch.add(f"r{i}", {"only": 3, "change": i % 2}, output=(8,)) for i in range(4)]
    said = [batch.step(rows) for _ in range(3)]
    outputs = batch.sampler.custom.outputs
    assert len(outputs) == kept
    batch.step(rows)
    for row, output in outputs.items():
        assert output == [8, *(tokens[rows.index(row)] for tokens in said)]
    batch.remove("r1")
    batch.step(rows[:1])
    assert rows[1] not in outputs


def test_a_preempted_request_brings_its_output_along() -> None:
    batch = Batch(NotTheLast)
    logits = torch.zeros(1, VOCAB)
    logits[:, 7], logits[:, 4] = 5.0, 4.0
    row = batch.add("r", {"change": True}, prompt=(9, 2), output=(3, 7))
    assert batch.step([row], logits) == [4]


def test_argmax_invariant_ones_work_after_the_temperature_and_the_others_before() -> None:
    seen = {}

    class Seen(OnlyToken):
        def apply(self, logits):
            seen[self.invariant] = float(logits[0, 5])
            return logits

    class Invariant(Seen):
        invariant = True

    batch = Batch(Seen, Invariant)
    row = batch.states.add_request("r", 1, [1], 0)
    params = SamplingParams(temperature=0.5, logit_bias={5: 3.0}, extra_args={"only": 5})
    batch.sampler.add_request(row, 1, params)
    batch.step([row])
    assert seen == {False: 3.0, True: 6.0}


def test_classes_come_from_installed_packages_and_from_names(monkeypatch) -> None:
    place = f"{__name__}:OnlyToken"
    monkeypatch.setattr(
        logits_processor,
        "entry_points",
        lambda group: [EntryPoint("only", place, group)] if group.startswith("vllm.") else [],
    )
    logits_processor.load_custom_logitsprocs.cache_clear()
    try:
        made = build_logitsprocs(VllmConfig(), CPU, False, custom_logitsprocs=[NotTheLast, place])
        assert [type(p).__name__ for p in made.all] == ["OnlyToken", "NotTheLast", "OnlyToken"]
        with pytest.raises(ValueError, match="only must be a token id, got 'x'"):
            validate_logits_processors_parameters([], SamplingParams(extra_args={"only": "x"}))
    finally:
        logits_processor.load_custom_logitsprocs.cache_clear()


@pytest.mark.parametrize(
    ("named", "kind", "message"),
    [
        ("nothing", ValueError, "not of the form MODULE:CLASS"),
        ("no_such_module:X", RuntimeError, "Failed to load 0th LogitsProcessor plugin"),
        ("math:nothing", ValueError, "there is no nothing"),
        ("math:pi", ValueError, "must be a type"),
        ("pathlib:Path", ValueError, "Path must be a subclass of LogitsProcessor"),
        (dict, ValueError, "dict is not a subclass of LogitsProcessor"),
    ],
)
def test_what_is_no_processor_is_refused_by_name(named, kind, message: str) -> None:
    with pytest.raises(kind, match=message):
        build_logitsprocs(VllmConfig(), CPU, False, custom_logitsprocs=[named])


def test_pooling_and_drafting_engines_refuse_processors() -> None:
    with pytest.raises(ValueError, match="Pooling models do not support"):
        build_logitsprocs(VllmConfig(), CPU, False, True, [OnlyToken])
    config = VllmConfig()
    config.speculative_config = object()
    with pytest.raises(ValueError, match="speculative decoding"):
        build_logitsprocs(config, CPU, False, False, [OnlyToken])


def test_free_places_are_given_from_the_lowest_and_none_is_added_after_the_first_look() -> None:
    builder = BatchUpdateBuilder()
    for place in (2, 5, 1):
        builder.removed_append(place)
    assert builder.peek_removed() == 1 and builder.pop_removed() == 1
    with pytest.raises(RuntimeError, match="has been read"):
        builder.removed_append(0)
    update = builder.get_and_reset(4)
    assert update.removed == [5, 2] and update.batch_size == 4
    assert builder.get_and_reset(4) is None and not builder.has_removed()


def test_swaps_and_moves_of_states() -> None:
    entries = {0: "a", 1: "b", 2: "c"}
    builder = BatchUpdateBuilder(
        moved=[(0, 1, MoveDirectionality.SWAP), (1, 2, MoveDirectionality.UNIDIRECTIONAL)],
    )
    assert process_dict_updates(entries, builder.get_and_reset(3), lambda *_: None)
    assert entries == {0: "b", 2: "a"}
    assert not process_dict_updates(entries, None, lambda *_: None)

# SPDX-License-Identifier: Apache-2.0
"""A grammar goes before every other rule, and all that is told of a token is told of that token."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllmx.config import ReasoningConfig
from vllmx.core.output import GrammarOutput
from vllmx.sample.logits_processor.interface import LogitsProcessor
from vllmx.sample.logits_processor.state import LogitsProcessors
from vllmx.sample.sampler import Sampler
from vllmx.sampling_params import SamplingParams
from vllmx.worker.states import RequestState
from vllmx.worker.structured_outputs import StructuredOutputsWorker

VOCAB, STOP, PROMPT = 64, 7, [1, 2, 3]
MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


def params(**more) -> SamplingParams:
    made = SamplingParams(**{"temperature": 0.0, "logprobs": 0, **more})
    made.all_stop_token_ids.add(STOP)
    return made


def bad_words(*token_ids: int, **more) -> SamplingParams:
    made = params(**more)
    made._bad_words_token_ids = [[token] for token in token_ids]
    return made


RULES = {
    "min_tokens": (params(min_tokens=5), [STOP]),
    "allowed_token_ids": (params(allowed_token_ids=[9, 10]), [STOP, 11]),
    "bad_words": (bad_words(STOP, 11), [STOP, 11]),
    "logit_bias": (params(logit_bias={9: 100.0, 11: -5.0}), [11]),
    "several": (bad_words(11, min_tokens=5, allowed_token_ids=[9]), [STOP, 11]),
    "presence": (params(min_tokens=5, presence_penalty=1.5), [STOP]),
    "drawn": (params(min_tokens=5, temperature=0.7, top_p=0.5, top_k=4, seed=3), [STOP]),
    "min_p": (params(allowed_token_ids=[9], temperature=1.0, min_p=0.2), [STOP, 11]),
}


class Rows:
    """A sampler with a row for each request; `grammars`: what the grammar of a row allows."""

    def __init__(self, requests: list[SamplingParams], mode: str = MODES[0], **settings) -> None:
        self.states = RequestState(8, 64, VOCAB, "cpu")
        self.sampler = Sampler(self.states, mode, 0, **settings)
        self.worker = StructuredOutputsWorker(8, VOCAB, "cpu")
        for i, request in enumerate(requests):
            row = self.states.add_request(f"r{i}", len(PROMPT), PROMPT, 0)
            self.sampler.add_request(row, len(PROMPT), request)
        self.rows = np.array([self.states.req_id_to_index[f"r{i}"] for i in range(len(requests))])

    def step(self, logits: torch.Tensor, grammars: dict[int, list[int]]):
        bits = np.zeros((len(grammars), VOCAB), dtype=np.uint8)
        for mask, token_ids in zip(bits, grammars.values(), strict=True):
            mask[token_ids] = 1
        bitmask = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        req_ids = [f"r{i}" for i in range(len(self.rows))]
        batch = SimpleNamespace(req_ids=req_ids, sample_reqs=np.arange(len(req_ids)))
        output = GrammarOutput([f"r{i}" for i in grammars], bitmask)
        constrained = self.worker.apply_grammar_bitmask(logits, batch, output)
        positions = self.states.total_len[self.rows].astype(np.int64) - 1
        return self.sampler(logits, self.rows, positions, constrained)


def some_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1)) * 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", RULES)
def test_a_token_that_only_the_grammar_allows_has_its_logprob(rule: str, mode: str) -> None:
    request, allowed = RULES[rule]
    made = Rows([request], mode)
    out = made.step(some_logits(1), {0: allowed})
    (token,) = out.sampled_token_ids.tolist()
    assert token in allowed
    assert out.logprobs.logprob_token_ids[0].tolist() == [token]
    assert np.isfinite(out.logprobs.logprobs[0]).all()
    assert out.logprobs.sampled_token_ranks[0] <= len(allowed)
    if made.sampler.penalties_state.output_counts is not None:
        assert made.sampler.penalties_state.output_counts[made.rows[0]].nonzero().tolist() == [
            [token]
        ]


def test_rules_that_leave_something_still_count() -> None:
    made = Rows([params(allowed_token_ids=[9, 10, 11]), params(min_tokens=5)])
    logits = torch.zeros(2, VOCAB)
    logits[0, 8], logits[0, 11], logits[1, STOP] = 5.0, 1.0, 9.0
    out = made.step(logits, {0: [8, 10, 11], 1: [STOP, 20]})
    assert out.sampled_token_ids.tolist() == [11, 20]


def test_a_row_without_a_grammar_is_the_same_beside_one_with_it() -> None:
    nothing_left = bad_words(9, allowed_token_ids=[9])
    alone = Rows([nothing_left]).step(some_logits(1), {})
    beside = Rows([nothing_left, params(min_tokens=5)]).step(some_logits(2), {1: [STOP]})
    assert alone.sampled_token_ids[0] == beside.sampled_token_ids[0]
    assert beside.sampled_token_ids[1] == STOP


class Wants(LogitsProcessor):
    """Leaves no token but 9."""

    def __init__(self, invariant: bool) -> None:
        self.invariant = invariant

    def is_argmax_invariant(self) -> bool:
        return self.invariant

    def update_state(self, batch_update) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        changed = torch.full_like(logits, float("-inf"))
        changed[:, 9] = 50.0
        return changed


@pytest.mark.parametrize("invariant", [False, True])
def test_a_processor_cannot_break_a_grammar(invariant: bool) -> None:
    made = Rows([params()], processors=LogitsProcessors([Wants(invariant)]))
    out = made.step(some_logits(1), {0: [STOP]})
    assert out.sampled_token_ids.tolist() == [STOP] and np.isfinite(out.logprobs.logprobs).all()


def test_an_end_of_reasoning_that_a_grammar_forbids_is_forced_once_it_may_be() -> None:
    config = ReasoningConfig(reasoning_start_str="s", reasoning_end_str="e")
    config.initialize_token_ids([PROMPT[-1]], [22, 23])
    made = Rows([params(thinking_token_budget=0)], reasoning_config=config)
    anything = list(range(VOCAB))
    got = []
    for allowed in ([STOP], anything, [STOP], anything, anything):
        out = made.step(torch.zeros(1, VOCAB), {0: allowed})
        (token,) = out.sampled_token_ids.tolist()
        assert np.isfinite(out.logprobs.logprobs).all()
        row = made.rows[0]
        made.states.all_token_ids.np[row, made.states.total_len[row]] = token
        made.states.total_len[row] += 1
        got.append(token)
    assert got == [STOP, 22, STOP, 22, 23]

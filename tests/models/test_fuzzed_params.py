# SPDX-License-Identifier: Apache-2.0
"""Many sets of parameters, sane and insane: a refusal that names the parameter, or an answer that
keeps to them; never anything else."""

import json
import math
import random
import re
from inspect import signature
from typing import Any

import pytest
from checkpoints import POOL_BYTES, VOCAB, save_tiny
from front_helpers import EOS, piece_tokenizer

from vllmx import LLM, SamplingParams
from vllmx.engine import EngineCoreRequest
from vllmx.engine.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllmx.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    StructuredOutputsParams,
)

SETS = 1500
END = 2  # of the model
NAN, INF = math.nan, math.inf
ODD: list[Any] = [None, -1, 0, 1, 2, 3, 0.5, -0.0, 1e-9, 1e9, -1e9, NAN, INF, -INF, 2**70, True]
ODD += ["x", [], {}, [1], ["a"], b"x", VOCAB, VOCAB - 1, 1 + 1j]
ODD += [
    2**63,
    -(2**70),
    10**400,
    10**5000,
    "\ud800",
    [2**70],
    ["\ud800"],
    [None],
    [[1]],
    {1: 10**400},
]
ODD += [{"a": 2**70}, {"a": "\ud800"}, {10**9}, [[10**9]], object()]

CONSTRAINTS: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": {"a": {"enum": [1, None]}}, "required": ["a"]}},
    {"json": '{"type": "array", "maxItems": 2}', "disable_any_whitespace": True},
    {"json": {"type": "array", "uniqueItems": True}},
    {"json": "{"},
    {"json": 3},
    {"json_object": True},
    {"json_object": False},
    {"regex": "[ab]{1,3}"},
    {"regex": "(["},
    {"choice": ["a", "bc", "d"]},
    {"choice": []},
    {"choice": [1]},
    {"grammar": 'root ::= "a" | "b" root'},
    {"grammar": "root ::= missing"},
    {"structural_tag": "{"},
    {"json": {"type": "integer", "maximum": 2**70}},
    {"json": True},
]
WELL_FORMED = [each for each in CONSTRAINTS if each not in ({"json": 3}, {"choice": [1]})]
KNOWN = [StructuredOutputsParams(**constraint) for constraint in WELL_FORMED]
DETECTION = {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 2}


def choose_ids(rng: random.Random) -> list[int]:
    return [rng.choice([0, 2, 5, 9, VOCAB - 1]) for _ in range(rng.randrange(4))]


SANE = {
    "n": lambda rng: rng.choice([1, 1, 1, 2, 3]),
    "temperature": lambda rng: rng.choice([0.0, 1e-5, 0.001, 0.7, 1.0, 2.0]),
    "top_p": lambda rng: rng.choice([1e-9, 0.3, 0.99, 1.0]),
    "top_k": lambda rng: rng.choice([-1, 0, 1, 7, VOCAB, 10 * VOCAB]),
    "min_p": lambda rng: rng.choice([0.0, 0.1, 1.0]),
    "presence_penalty": lambda rng: rng.uniform(-2, 2),
    "frequency_penalty": lambda rng: rng.uniform(-2, 2),
    "repetition_penalty": lambda rng: rng.choice([1e-30, 0.5, 1.0, 3.0, 1e30]),
    "seed": lambda rng: rng.choice([None, -1, 0, 7, 2**63 - 1, -(2**63)]),
    "stop_token_ids": choose_ids,
    "ignore_eos": lambda rng: rng.random() < 0.5,
    "max_tokens": lambda rng: rng.randrange(1, 5),
    "min_tokens": lambda rng: rng.randrange(3),
    "logprobs": lambda rng: rng.choice([None, -1, 0, 3, 20]),
    "prompt_logprobs": lambda rng: rng.choice([None, None, -1, 0, 2]),
    "logprob_token_ids": lambda rng: rng.choice([None, choose_ids(rng)]),
    "flat_logprobs": lambda rng: rng.random() < 0.3,
    "logit_bias": lambda rng: {t: rng.choice([-100.0, 5.0, 100.0, -INF]) for t in choose_ids(rng)},
    "allowed_token_ids": lambda rng: rng.choice([None, choose_ids(rng), list(range(VOCAB))]),
    "extra_args": lambda rng: rng.choice([None, {"a": 1}]),
    "repetition_detection": lambda rng: DETECTION,
    "skip_reading_prefix_cache": lambda rng: rng.choice([None, True, False]),
    "stop": lambda rng: rng.choice([None, "a", ["a", "bc"], ["\x00", "zz"]]),
    "bad_words": lambda rng: rng.choice([None, ["a"], ["bc", "d"]]),
    "thinking_token_budget": lambda rng: rng.choice([None, None, 0, 3]),
    "output_kind": lambda rng: rng.choice(list(RequestOutputKind)),
    "include_stop_str_in_output": lambda rng: rng.random() < 0.5,
    "skip_special_tokens": lambda rng: rng.random() < 0.5,
    "spaces_between_special_tokens": lambda rng: rng.random() < 0.5,
    "detokenize": lambda rng: rng.random() < 0.5,
    "structured_outputs": lambda rng: rng.choice(CONSTRAINTS),
    "skip_clone": lambda rng: rng.random() < 0.5,
    "routed_experts_prompt_start": lambda rng: rng.randrange(3),
    # What only the input processor should set; whoever copies parameters may.
    "output_text_buffer_length": lambda rng: rng.randrange(3),
    "_eos_token_id": lambda rng: rng.choice([None, 5]),
    "_all_stop_token_ids": lambda rng: set(choose_ids(rng)),
    "_bad_words_token_ids": lambda rng: rng.choice([None, [[5, 9], [0]]]),
}
MADE = {
    "repetition_detection": RepetitionDetectionParams,
    "structured_outputs": StructuredOutputsParams,
}
REFUSALS = (ValueError, TypeError)  # VLLMValidationError is a ValueError


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    folder = tmp_path_factory.mktemp("fuzz") / "llama"
    save_tiny("llama", folder)
    # Bytes alone: a token for each, and fewer than the model has.
    tokenizer = piece_tokenizer(*(bytes([byte]) for byte in range(128)))
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    settings = {"num_threads": 1, "use_tqdm_on_load": False}
    pool = {"kv_cache_memory_bytes": POOL_BYTES}
    settings["reasoning_config"] = {"reasoning_start_str": "<", "reasoning_end_str": ">"}
    return LLM(str(folder), max_logprobs=-1, max_num_seqs=64, **settings, **pool)


def draw_params(rng: random.Random) -> dict[str, Any]:
    """Few parameters, most of them in range; one in three sets has an odd value."""
    names = rng.sample(sorted(SANE), rng.randrange(1, 9))
    chosen = {name: SANE[name](rng) for name in names}
    if rng.random() < 0.35:
        chosen[rng.choice(list(SANE))] = rng.choice(ODD)
    for name in set(MADE).intersection(chosen):
        if isinstance(chosen[name], dict) and rng.random() < 0.25:
            field = rng.choice(sorted(fields_of(name)))
            chosen[name] = {**chosen[name], field: rng.choice(ODD)}
    return chosen


def fields_of(name: str) -> set[str]:
    return set(signature(MADE[name]).parameters)


def make(chosen: dict[str, Any]) -> SamplingParams:
    """The parameters, and what they hold."""
    inner = {
        name: MADE[name](**chosen[name])
        for name in MADE
        if isinstance(chosen.get(name), dict) and chosen[name].keys() <= fields_of(name)
    }
    return SamplingParams(**{**chosen, **inner})


def may_begin(constraint: StructuredOutputsParams, text: str) -> bool:
    """Whether an answer that keeps to the constraint may begin with `text`."""
    if constraint.choice:
        return any(choice.startswith(text) for choice in constraint.choice)
    if constraint.regex or constraint.grammar:
        return re.fullmatch("[ab]{0,3}" if constraint.regex else "b*a?", text) is not None
    schema = str(constraint.json)
    begin = r"\s*(\{.*)?"
    for word, pattern in (
        ("True", r'\s*([-0-9"\[{tfn].*)?'),
        ("array", r"\s*(\[.*)?"),
        ("integer", r"\s*-?[0-9]*\s*"),
    ):
        begin = pattern if word in schema else begin
    return re.fullmatch(begin, text, re.DOTALL) is not None


def check(params: SamplingParams, output: Any, decode: Any) -> None:
    """An answer is as long as it may be, has allowed tokens only, keeps to its constraint, and has
    finite log-probabilities."""
    assert len(output.outputs) == params.n
    for answer in output.outputs:
        tokens = list(answer.token_ids)
        assert 1 <= len(tokens) <= (params.max_tokens or 10**9)
        assert all(0 <= token < VOCAB for token in tokens)
        assert answer.finish_reason in ("stop", "length", "repetition")
        if params.structured_outputs in KNOWN:
            said = decode([token for token in tokens if token < 128 and token != END])
            assert may_begin(params.structured_outputs, said), (params, said)
        elif params.allowed_token_ids is not None and params.structured_outputs is None:
            assert set(tokens) <= set(params.allowed_token_ids)
        if answer.finish_reason == "stop" and params.structured_outputs is None:
            assert len(tokens) >= params.min_tokens
        if params.num_logprobs is not None:
            assert len(answer.logprobs) == len(tokens)
            for token, position in zip(tokens, answer.logprobs, strict=True):
                assert math.isfinite(position[token].logprob)


def test_a_set_is_refused_by_name_or_answered_within_its_bounds(llm: LLM) -> None:
    rng = random.Random(20)
    accepted: list[SamplingParams] = []
    refused = 0
    used: set[str] = set()
    for _ in range(SETS):
        chosen = draw_params(rng)
        try:
            params = make(chosen)
            request = llm.input_processor.process_inputs("r", [5, 6, 7], params)
        except REFUSALS as error:
            refused += 1
            # The API gives a client both.
            named = getattr(error, "parameter", None)
            words = re.findall(r"\w+", str(error))
            assert named in chosen or any(name in words for name in chosen), (chosen, error)
            assert named is None or named in SANE, (chosen, error)
            continue
        # The engine may be another process.
        sent = MsgpackEncoder().encode(request)
        arrived = MsgpackDecoder(EngineCoreRequest).decode(sent)
        assert arrived.sampling_params == request.sampling_params
        used.update(chosen)
        accepted.append(params)
    assert 100 < refused < SETS - 300
    assert used == set(SANE) == set(signature(SamplingParams).parameters)
    outputs = llm.generate([[5, 6, 7]] * len(accepted), accepted, use_tqdm=False)
    constrained = [params for params in accepted if params.structured_outputs is not None]
    assert len(constrained) > 30
    tokenizer = llm.get_tokenizer()
    for params, output in zip(accepted, outputs, strict=True):
        check(params, output, tokenizer.decode)
    # The engine is none the worse for it.
    (output,) = llm.generate([[5]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3

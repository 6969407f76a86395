# SPDX-License-Identifier: Apache-2.0
"""kernel.batch_invariant: the same request, the same bits, whatever shares its steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB, build_engine, save_tiny
from interpreter import multiply_row_by_row

from vllmx import LLM, SamplingParams
from vllmx.exceptions import UserError
from vllmx.ir.op import OpContext
from vllmx.ir.select import OpTable, load_ops

LIMITS: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 8, "max_num_batched_tokens": 256}
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
PARAMS = [
    SamplingParams(**GREEDY, logprobs=3, prompt_logprobs=2),
    SamplingParams(temperature=0.9, seed=7, max_tokens=8, ignore_eos=True, logprobs=3),
    SamplingParams(**GREEDY, repetition_penalty=1.3, logprobs=3),
    SamplingParams(temperature=1.1, seed=3, top_p=0.8, top_k=40, max_tokens=8, logprobs=3),
    SamplingParams(**GREEDY, logprobs=3),
    SamplingParams(**GREEDY, logprobs=3, prompt_logprobs=0),
]


def prompts() -> list[list[int]]:
    """Ragged, some with a common beginning of more than a block."""
    rng = random.Random(11)
    common = [rng.randrange(3, VOCAB) for _ in range(33)]
    own = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (5, 1, 30, 17, 3, 40)]
    return [own[0], own[1], common + own[2], common + own[3], common + own[4], own[5]]


def bits(output: Any) -> tuple:
    """Tokens and every log-probability of an answer and of its prompt, exactly."""
    answer = output.outputs[0]

    def rows(logprobs: Any) -> list:
        return [
            None if row is None else [(t, v.logprob, v.rank) for t, v in row.items()]
            for row in logprobs or []
        ]

    return tuple(answer.token_ids), rows(answer.logprobs), rows(output.prompt_logprobs)


def run(llm: LLM, which: list[int]) -> dict[int, tuple]:
    given = [{"prompt_token_ids": prompts()[i]} for i in which]
    outputs = llm.generate(given, [PARAMS[i] for i in which], use_tqdm=False)
    return {i: bits(output) for i, output in zip(which, outputs, strict=True)}


def alone(llm: LLM) -> dict[int, tuple]:
    found: dict[int, tuple] = {}
    for i in range(len(PARAMS)):
        llm.reset_prefix_cache()
        found |= run(llm, [i])
    return found


EVERYBODY = list(range(len(PARAMS)))
SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {},
    "in small steps": {"max_num_batched_tokens": 9},
    "in pieces": {"long_prefill_token_threshold": 5, "max_num_seqs": 3},
    "preempted": {"enable_prefix_caching": False},
    "backwards": {"max_num_seqs": 2},
    "two threads": {},
}


def engine(folder: Path, invariant: bool = True, **options: Any) -> LLM:
    threads = options.pop("threads", 1)
    llm = build_engine(folder, batch_invariant=invariant, **{**LIMITS, **options})
    torch.set_num_threads(threads)
    return llm


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3"])
def folder(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / request.param
    save_tiny(request.param, path)
    return path


@pytest.fixture(scope="module", params=["own choice", "torch"])
def priority(request) -> list[str]:
    return [] if request.param == "own choice" else ["torch"]


@pytest.fixture(scope="module")
def want(folder: Path, priority: list[str]) -> dict[int, tuple]:
    return alone(engine(folder, default_priority=priority))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_same_bits_under_every_schedule(folder, priority, want, schedule: str) -> None:
    threads = 2 if schedule == "two threads" else 1
    options = SCHEDULES[schedule]
    if schedule == "preempted":
        # Room for most of the prompts, and not for all that they grow to.
        options = options | {"num_gpu_blocks_override": {"gemma3": 18}.get(folder.name, 11)}
    llm = engine(folder, default_priority=priority, threads=threads, **options)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []
    scheduler._preempt_request = lambda *args: preempted.append(args) or preempt(*args)
    order = list(reversed(EVERYBODY)) if schedule == "backwards" else EVERYBODY
    try:
        assert run(llm, order) == want
    finally:
        torch.set_num_threads(1)
    assert bool(preempted) == (schedule == "preempted")


def test_the_same_bits_after_a_prefix_hit(folder, priority, want) -> None:
    llm = engine(folder, default_priority=priority)
    run(llm, EVERYBODY)
    which = [i for i in EVERYBODY if PARAMS[i].prompt_logprobs is None]
    given = [{"prompt_token_ids": prompts()[i]} for i in which]
    outputs = llm.generate(given, [PARAMS[i] for i in which], use_tqdm=False)
    assert sum(output.num_cached_tokens for output in outputs) >= 64
    assert {i: bits(o) for i, o in zip(which, outputs, strict=True)} == {i: want[i] for i in which}


def test_what_was_decoded_has_the_bits_of_a_prompt(folder, priority) -> None:
    """As upstream's test: the logprobs of an answer are those of the same tokens in a prompt."""
    llm = engine(folder, default_priority=priority)
    prompt = prompts()[3]
    params = SamplingParams(**GREEDY, logprobs=0)
    (first,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    answer = first.outputs[0]
    decoded = [row[t].logprob for t, row in zip(answer.token_ids, answer.logprobs, strict=True)]
    llm.reset_prefix_cache()
    again = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    given = [{"prompt_token_ids": prompt + list(answer.token_ids)}]
    (second,) = llm.generate(given, again, use_tqdm=False)
    rows = second.prompt_logprobs[len(prompt) :]
    read = [row[t].logprob for t, row in zip(answer.token_ids, rows, strict=True)]
    assert read == decoded


def test_without_it_there_is_a_difference(folder) -> None:
    """The negative control, with torch's matrix products: 1 row and many rows take two kernels."""
    options = {"invariant": False, "ir_op_priority": {"linear": ["torch"]}}
    first = alone(engine(folder, **options))
    assert run(engine(folder, **options), EVERYBODY) != first
    # Nor is the default choice of a CPU free of it: a chunk's attention is another matrix product.
    whole = run(engine(folder, invariant=False), [5])
    assert run(engine(folder, invariant=False, max_num_batched_tokens=9), [5]) != whole


def test_answers_stay_those_of_the_model(folder, priority, want) -> None:
    # By weights as exact as in this mode, which on a CPU without AVX-512 can't have fbgemm's.
    options: dict[str, Any] = {"default_priority": priority}
    if not load_ops()["linear"].impls["fbgemm"].batch_invariant:
        options["ir_op_priority"] = {"linear": ["torch"]}
    plain = alone(engine(folder, invariant=False, **options))
    for i in EVERYBODY:
        assert plain[i][0] == want[i][0]
        for mine, other in zip(want[i][1], plain[i][1], strict=True):
            assert dict(x[:2] for x in mine) == pytest.approx(dict(x[:2] for x in other), abs=1e-4)


def test_providers_that_depend_on_the_batch_are_refused(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    with pytest.raises(UserError, match=r"attention\.backend=sdpa.*kernel\.batch_invariant"):
        engine(tmp_path, attention_backend="sdpa")
    with pytest.raises(UserError, match=r"ir_op_priority\.rms_norm: provider cpu"):
        engine(tmp_path, ir_op_priority={"rms_norm": ["cpu"]})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_recurrent_layers_are_refused_where_their_chunks_depend_on_the_schedule(
    tmp_path, dtype
) -> None:
    save_tiny("qwen3_5", tmp_path)
    with pytest.raises(UserError, match=r"op \w+: no provider takes it on cpu: "):
        engine(tmp_path, dtype=dtype)


# ---------------------------------------------------------------- a GPU's kernels


def choose_as_on_a_gpu(table: OpTable, op_name: str, **facts: Any) -> Any:
    """What an engine on a GPU would choose, whose kernels run in Triton's interpreter."""
    device, table.device = table.device, "cuda"
    try:
        context = OpContext("cuda", table.dtype, facts)
        for provider in ("triton", "triton_fixed", "torch"):
            impl = table.registry[op_name].impls.get(provider)
            if impl is not None and table._refusal(impl, context) is None:
                return table._in_this_mode(impl)
    finally:
        table.device = device
    raise AssertionError(op_name)


@pytest.fixture
def on_a_gpu(monkeypatch) -> None:
    multiply_row_by_row(monkeypatch)
    monkeypatch.setattr(OpTable, "choose", choose_as_on_a_gpu)
    monkeypatch.setattr(
        OpTable,
        "choose_attention",
        lambda table, backend, **facts: table.choose("paged_attention", **facts),
    )


def test_kernels_of_a_gpu_give_the_same_bits(tmp_path: Path, on_a_gpu) -> None:
    save_tiny("qwen3", tmp_path)
    limits = {"max_model_len": 48, "block_size": 16}
    given = [[5], prompts()[0], prompts()[3][:35]]
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2)

    def answers(llm: LLM, which: list[int]) -> list[tuple]:
        asked = [{"prompt_token_ids": given[i]} for i in which]
        return [bits(o) for o in llm.generate(asked, params, use_tqdm=False)]

    llm = engine(tmp_path, **limits, enable_prefix_caching=False)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner
    layer = runner.model.model.layers[0]
    assert runner.model.model.few_tokens is None
    backend = layer.self_attn.attn.backend
    assert backend.__name__ == "PrefillTriton" and backend.supports_cudagraph()
    # Such a graph decodes some of its requests by another kernel.
    assert not backend.supports_mixed_cudagraph() and not backend.joins_decode()
    assert layer.self_attn.fused_qkv is not None and layer.self_attn.fused_qkv._decode is None
    want = [answers(llm, [i])[0] for i in range(3)]
    assert answers(llm, [0, 1, 2]) == want
    chunked = engine(tmp_path, **limits, max_num_batched_tokens=11)
    assert answers(chunked, [2, 1, 0]) == want[::-1]
    assert answers(chunked, [2, 1, 0]) == want[::-1], "after a prefix hit"


def test_kernels_of_a_gpu_do_depend_on_the_batch_without_it(tmp_path: Path, on_a_gpu) -> None:
    """The kernels for few rows cut a matrix by their number; decode's attention splits the keys."""
    save_tiny("qwen3", tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=2)
    llm = engine(tmp_path, invariant=False, max_model_len=48, enable_prefix_caching=False)
    asked = [{"prompt_token_ids": p} for p in (prompts()[3][:35], [5], [6, 7])]
    first = bits(llm.generate(asked[:1], params, use_tqdm=False)[0])
    assert bits(llm.generate(asked, params, use_tqdm=False)[0]) != first

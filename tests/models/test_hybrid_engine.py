# SPDX-License-Identifier: Apache-2.0
"""Models with gated delta nets through the engine give transformers' answers, however requests are
cut, mixed, preempted or begun from cached states."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import HYBRID, VOCAB, build_engine, save_tiny
from gpu_helpers import on_a_gpu, runner_of

from vllmx import LLM, SamplingParams
from vllmx.core.kv_cache_interface import FullAttentionSpec, MambaSpec

LENGTHS = (1, 3, 17, 40, 90)


@pytest.fixture(scope="module", params=sorted(HYBRID))
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("hybrid") / request.param
    return folder, save_tiny(request.param, folder)


def prompts(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in lengths]


def engine(folder: Path, **settings: Any) -> LLM:
    """With weights in float32, as packed ones are rounded."""
    return build_engine(folder, ir_op_priority={"linear": ["torch"]}, **settings)


def run(llm: LLM, asked: list[list[int]], max_tokens: int = 8) -> list[Any]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=3)
    return llm.generate([{"prompt_token_ids": p} for p in asked], params, use_tqdm=False)


def assert_right(outputs: list[Any], twin: torch.nn.Module, tolerance: float = 1e-4) -> None:
    for output in outputs:
        prompt, answer = list(output.prompt_token_ids), output.outputs[0]
        tokens = list(answer.token_ids)
        with torch.inference_mode():
            logits = twin(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        want = logits.float().log_softmax(-1)
        assert logits.argmax(-1).tolist() == tokens
        for row, entries in zip(want, answer.logprobs, strict=True):
            for token, entry in entries.items():
                assert entry.logprob == pytest.approx(float(row[token]), abs=tolerance)


def test_a_batch_and_its_pages(hybrid: tuple) -> None:
    folder, twin = hybrid
    llm = engine(folder)
    core = llm.llm_engine.engine_core.engine_core
    specs = [group.kv_cache_spec for group in core.kv_cache_config.kv_cache_groups]
    assert [type(spec) for spec in specs] == [MambaSpec, MambaSpec, MambaSpec, FullAttentionSpec]
    (page,) = {spec.page_size_bytes for spec in specs}
    # 256 channels of 3 inputs and 4 matrices of 32 by 32, of 4 bytes; tokens take 512 bytes.
    states = 4 * (256 * 3 + 4 * 32 * 32)
    assert page == -(-states // (16 * 512)) * 16 * 512 == specs[-1].block_size * 512
    assert not core.vllm_config.cache_config.enable_prefix_caching
    assert_right(run(llm, prompts(0)), twin)
    for prompt in prompts(1):
        assert_right(run(llm, [prompt]), twin)


@pytest.mark.parametrize("budget", [4, 33])
def test_prompts_in_pieces(hybrid: tuple, budget: int) -> None:
    folder, twin = hybrid
    llm = engine(folder, max_num_batched_tokens=budget, max_num_seqs=4)
    assert_right(run(llm, prompts(2)), twin)


def test_prefix_hits(hybrid: tuple) -> None:
    folder, twin = hybrid
    llm = engine(folder, enable_prefix_caching=True)
    block = llm.llm_engine.vllm_config.cache_config.block_size
    shared = prompts(3, (block + 9,))[0]
    asked = [shared + more for more in prompts(4, (2, 30, 70))]
    assert_right(run(llm, asked[:1]), twin)
    warm = run(llm, asked[1:])
    assert [output.num_cached_tokens for output in warm] == [block, block]
    assert_right(warm, twin)
    again = run(llm, [[*asked[2], 5]])
    assert again[0].num_cached_tokens == len(asked[2]) // block * block
    assert_right(again, twin)


@pytest.mark.parametrize("caching", [False, True])
def test_preemptions(hybrid: tuple, caching: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, twin = hybrid
    llm = engine(
        folder,
        enable_prefix_caching=caching,
        num_gpu_blocks_override=14,
        max_model_len=112,
        max_num_seqs=4,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempted = []
    preempt = scheduler._preempt_request
    monkeypatch.setattr(
        scheduler, "_preempt_request", lambda *args: preempted.append(args) or preempt(*args)
    )
    assert_right(run(llm, prompts(5, (45, 40, 47, 30)), 50), twin)
    assert preempted


@pytest.mark.parametrize("caching", [False, True])
def test_a_gpus_steps_and_graphs(hybrid: tuple, caching: bool, monkeypatch) -> None:
    folder, twin = hybrid
    llm = on_a_gpu(
        monkeypatch,
        folder,
        [1, 2, 4],
        ir_op_priority={"linear": ["torch"]},
        enable_prefix_caching=caching,
        async_scheduling=True,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=128,
        num_gpu_blocks_override=40,
    )
    asked = prompts(7)
    for _ in range(2):
        assert_right(run(llm, asked), twin)
    graphs = runner_of(llm).gpu_steps.cudagraph_manager.graphs
    assert sum(graph.replays for graph in graphs.values())


def test_states_of_half_precision_take_half_the_room(hybrid: tuple) -> None:
    folder, twin = hybrid
    llm = engine(folder, mamba_cache_dtype="bfloat16", mamba_ssm_cache_dtype="bfloat16")
    core = llm.llm_engine.engine_core.engine_core
    spec = core.kv_cache_config.kv_cache_groups[0].kv_cache_spec
    assert spec.dtypes == ("bfloat16", "bfloat16")
    assert spec.page_size_bytes == 32 * 512
    short = prompts(6, (1, 9, 20))
    outputs = run(llm, short, 3)
    assert_right(outputs, twin, tolerance=0.05)
    exact = run(engine(folder), short, 3)
    assert any(a.outputs[0].logprobs != b.outputs[0].logprobs for a, b in zip(outputs, exact))

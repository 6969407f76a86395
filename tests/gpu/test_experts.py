# SPDX-License-Identifier: Apache-2.0
"""Models with experts on a GPU: their decode steps are graphs, which wait for nothing."""

import pytest
import torch
from checkpoints import save_tiny
from gpu_engine import answers, engine, greedy, prompts, runner_of


@pytest.fixture(scope="module", params=["mixtral", "qwen3moe", "glm4moe", "olmoe"])
def sparse(request, tmp_path_factory):
    """A tiny checkpoint with experts in float32."""
    path = tmp_path_factory.mktemp("moe") / request.param
    save_tiny(request.param, path)
    return path


def test_graphs_of_experts_give_the_tokens_of_eager_steps(sparse) -> None:
    given = prompts(24)
    params = [greedy(3 + 3 * i % 30) for i in range(len(given))]
    want = answers(engine(sparse, enforce_eager=True, async_scheduling=False), given, params)
    llm = engine(sparse, async_scheduling=False)
    runner = runner_of(llm)
    assert runner.gpu_steps.cudagraph_manager.graphs
    assert runner.ops.choices["fused_experts"].provider == "triton"
    assert answers(llm, given, params) == want


def test_a_steady_decode_of_experts_does_not_wait(sparse) -> None:
    llm = engine(sparse)
    for number, prompt in enumerate(prompts(8, longest=10)):
        llm.llm_engine.add_request(str(number), prompt, greedy(100))
    for _ in range(20):
        llm.llm_engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(30):
            llm.llm_engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_eager_steps_of_experts_do_not_wait_either() -> None:
    from vllmx.ir.select import load_ops

    ops = load_ops()
    logits = torch.randn(33, 8, device="cuda")
    w13, w2 = torch.randn(8, 128, 64, device="cuda"), torch.randn(8, 64, 64, device="cuda")
    x = torch.randn(33, 64, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        weights, ids = ops["topk_softmax"].impls["triton"].fn(logits, 2, True)
        got = ops["fused_experts"].impls["triton"].fn(x, w13, w2, weights, ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want = ops["fused_experts"].fn(x, w13, w2, weights, ids)
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-4)

# SPDX-License-Identifier: Apache-2.0
"""Norm, rotation and gate of Qwen3-Next's attention in one call: where it is chosen, and that a
model says the same with it as with the steps one after another."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB, build_engine, save_tiny
from hybrid_driver import HybridDriver

from vllmx.config import KernelConfig
from vllmx.ir.op import IrOpImpl
from vllmx.ir.select import OpTable, load_ops
from vllmx.layers.fused_qk_norm_rope import FusedQKNormRopeGate
from vllmx.layers.layernorm import GemmaRMSNorm
from vllmx.layers.rotary_embedding import get_rope
from vllmx.models.qwen3_next import Qwen3NextAttention

OP = "fused_qk_rmsnorm_rope_gate"
NAMES = ("qwen3next_dense", "qwen3_5")


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> IrOpImpl:
    """The kernel, which Triton's interpreter runs here, as if a CPU could."""
    impl = load_ops()[OP].impls["triton"]
    monkeypatch.setattr(impl, "supports", None)
    return impl


@pytest.fixture(params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    save_tiny(request.param, tmp_path)
    return tmp_path


def attention_of(model: torch.nn.Module) -> list[Qwen3NextAttention]:
    return [part for part in model.modules() if isinstance(part, Qwen3NextAttention)]


def logits_of(driver: HybridDriver) -> torch.Tensor:
    """Of two prompts, a piece of one, and both going on token by token."""
    rng = random.Random(5)
    first, second = ([rng.randrange(3, VOCAB) for _ in range(n)] for n in (40, 9))
    steps = [{0: first[:30], 1: second[:7]}, {0: first[30:38], 1: second[7:8]}]
    steps += [{0: [first[38]], 1: [second[8]]}, {0: [first[39]]}]
    return torch.cat([part for step in steps for _, part in sorted(driver.step(step).items())])


def test_the_logits_are_those_of_the_steps_one_after_another(
    folder: Path, triton: IrOpImpl, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = HybridDriver(folder)
    want = logits_of(apart)
    calls, fn = [], triton.fn

    def counted(*args: object) -> object:
        calls.append(args)
        return fn(*args)

    monkeypatch.setattr(triton, "fn", counted)
    joined = HybridDriver(folder, ir_op_priority={OP: ["triton"]})
    got = logits_of(joined)
    assert len(calls) == 4 * len(attention_of(joined.model.model)) > 0
    assert not any(layer.fused_gate for layer in attention_of(apart.model.model))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_by_default_a_cpu_takes_the_steps_one_after_another(folder: Path) -> None:
    llm = build_engine(folder, max_model_len=48, max_num_seqs=2, dtype="float32")
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner
    layers = attention_of(runner.model)
    assert layers and all(layer.fused_gate is None for layer in layers)


def test_a_position_for_each_section_takes_the_steps_one_after_another(
    tmp_path: Path, triton: IrOpImpl
) -> None:
    save_tiny("qwen3_5", tmp_path)
    driver = HybridDriver(tmp_path, ir_op_priority={OP: ["triton"]})
    layer = attention_of(driver.model.model)[0]
    positions = torch.tensor([7, 0, 3])
    q_gate, k = torch.randn(3, 2 * layer.q_size), torch.randn(3, layer.kv_size)
    assert layer.fused_gate is not None and layer.fused_gate.takes(positions)
    assert not layer.fused_gate.takes(positions.expand(3, 3))
    # Of text all sections say the same.
    want = layer._separately(positions.expand(3, 3), q_gate, k)
    for got, part in zip(layer.fused_gate(positions, q_gate, k), want, strict=True):
        torch.testing.assert_close(got, part, atol=1e-5, rtol=1e-5)


def test_layers_that_rotate_pairs_take_the_steps_one_after_another(triton: IrOpImpl) -> None:
    config = KernelConfig(ir_op_priority={OP: ["triton"]})
    table = OpTable(config, "cpu", torch.float32)
    norms = [GemmaRMSNorm(32, 1e-6, table) for _ in range(2)]
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    for neox in (True, False):
        rope = get_rope(32, 64, plain, table, neox, max_model_len=64)
        assert (FusedQKNormRopeGate.of(*norms, rope, table) is not None) == neox


def test_a_gpu_has_it_in_one_also_where_results_may_not_depend_on_the_batch() -> None:
    for batch_invariant in (False, True):
        config = KernelConfig(batch_invariant=batch_invariant)
        table = OpTable(config, "cuda", torch.bfloat16)
        assert table.choose(OP, head_size=256, rotary_dim=64).provider == "triton"

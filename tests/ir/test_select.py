# SPDX-License-Identifier: Apache-2.0
"""Which provider is bound, and what is said of the others."""

import pytest
import torch

from vllmx.config import KernelConfig
from vllmx.exceptions import UserError
from vllmx.ir.op import OpContext
from vllmx.ir.select import OpTable, explain


def table(**kernel: object) -> OpTable:
    return OpTable(KernelConfig(**kernel), "cpu", torch.float32)


def test_auto_takes_packed_linears_and_keeps_every_refusal() -> None:
    choices = {c.op: c for c in explain(KernelConfig(), "cpu", torch.float32)}
    assert choices["linear"].provider == "fbgemm"
    assert choices["rms_norm"].provider == "native"
    assert choices["paged_attention"].provider == "native"
    assert "runs on a GPU, not on cpu" in choices["rms_norm"].refused["triton"]
    for op, choice in choices.items():
        others = set(table().registry[op].impls) - {choice.provider}
        assert set(choice.refused) == others
        assert all(choice.refused.values())


def test_a_half_precision_engine_passes_over_float32_providers() -> None:
    ops = OpTable(KernelConfig(), "cpu", torch.bfloat16)
    assert ops.choose("linear").provider == "torch"
    assert "float32 only" in ops.choices["linear"].refused["fbgemm"]


def test_a_named_provider_wins_over_the_defaults() -> None:
    ops = table(ir_op_priority={"linear": ["torch"]})
    assert ops.choose("linear").provider == "torch"
    assert ops.choose("rms_norm").provider == "native"


def test_a_named_provider_that_cannot_run_stops_the_start_with_its_reason() -> None:
    ops = table(ir_op_priority={"rms_norm": ["triton", "torch"]})
    with pytest.raises(UserError, match="rms_norm: provider triton cannot be used: runs on a GPU"):
        ops.bind("rms_norm")


def test_unknown_ops_and_providers_are_named() -> None:
    with pytest.raises(UserError, match="no such op"):
        table(ir_op_priority={"rms_nrom": ["torch"]})
    with pytest.raises(UserError, match="no provider 'cudnn'"):
        table(ir_op_priority={"linear": ["cudnn"]})
    with pytest.raises(UserError, match="no op has a provider 'tritton'"):
        table(default_priority=["tritton"])


def test_an_unknown_attention_backend_is_named() -> None:
    with pytest.raises(
        UserError, match=r"attention.backend='flash': choose one of torch, flashinfer"
    ):
        table().choose_attention("flash")


def test_a_refusal_without_words_still_has_a_reason() -> None:
    impl = table().registry["rms_norm"].impls["cpu"]
    before = impl.supports
    try:
        impl.supports = lambda context: False
        assert impl.refusal(OpContext("cpu", torch.float32)) == "refuses such calls"
    finally:
        impl.supports = before


def test_a_default_provider_that_serves_nothing_is_told() -> None:
    ops = table(default_priority=["triton", "cpu", "torch"])
    for op_name in ops.registry:
        ops.choose(op_name)
    idle = ops.idle_providers()
    assert set(idle) == {"triton"}
    assert "runs on a GPU, not on cpu" in idle["triton"]

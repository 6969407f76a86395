# SPDX-License-Identifier: Apache-2.0
"""FlashInfer itself on a GPU: goldens of its ops, attention, graphs. Without it, its refusal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_tiny
from gpu_engine import answers, engine, greedy, prompts

from parity import op_cells
from parity.op_replay import Lane
from vllmx.exceptions import UserError
from vllmx.ir.op import OpContext
from vllmx.ir.select import load_ops
from vllmx.kernels import triton_top_k
from vllmx.kernels.flashinfer_ops import missing
from vllmx.sample.ops import get_sampler_ops

OPS = load_ops()
NAMES = ("rms_norm", "fused_add_rms_norm", "silu_and_mul", "rotary_embedding", "paged_attention")


@pytest.mark.parametrize("op", NAMES)
def test_upstreams_goldens(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(op_cells.OUTSIDE, ("flashinfer", "cuda"))
    found = op_cells.expected("cuda", f"op.{op}/", "flashinfer")
    if missing() is not None:
        why = OPS[op].impls["flashinfer"].refusal(OpContext("cuda", torch.bfloat16))
        assert why == missing()
        return
    taken = [replace(cell, blocked="") for cell in found if not cell.refused]
    lane = Lane("cuda")
    lane.prepare(taken)
    rows = [lane.row(cell) for cell in taken]
    assert rows
    assert [(row["case"], row["reason"]) for row in rows if row["verdict"] != "pass"] == []


@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY"])
@pytest.mark.parametrize("ahead", [False, True])
def test_an_engine_answers_as_with_triton(mode: str, ahead: bool, tmp_path: Path) -> None:
    folder = tmp_path / "qwen3"
    save_tiny("qwen3", folder)
    settings: dict[str, Any] = {"dtype": "bfloat16", "cudagraph_mode": mode}
    settings |= {"async_scheduling": ahead, "max_num_batched_tokens": 64}
    given = prompts(20, longest=60)
    if missing() is not None:
        with pytest.raises(UserError, match=r"attention.backend=flashinfer: it cannot be used"):
            engine(folder, attention_backend="flashinfer", **settings)
        return
    want = answers(engine(folder, attention_backend="triton", **settings), given, greedy(12))
    got = answers(engine(folder, attention_backend="flashinfer", **settings), given, greedy(12))
    # Roundings differ, and tiny models have near ties: most answers are the same to the end.
    assert sum(g[0] == w[0] for g, w in zip(got, want, strict=True)) >= 16


@pytest.mark.parametrize("which", ["k", "p", "both"])
def test_top_k_and_top_p_keep_what_triton_keeps(which: str) -> None:
    chosen = get_sampler_ops("cuda", priority=["flashinfer"])
    if missing() is not None:
        assert chosen.provider == "triton"
        return
    assert chosen.provider == "flashinfer"
    logits = torch.randn(16, 151_936, device="cuda", generator=torch.Generator("cuda")) * 3
    logits[0, :100] = 20.0
    top_k = torch.arange(1, 17, device="cuda") * 97 if which != "p" else None
    top_p = torch.linspace(0.1, 1.0, 16, device="cuda") if which != "k" else None
    want = triton_top_k.apply_top_k_top_p(logits.clone(), top_k, top_p) > float("-inf")
    got = chosen.apply_top_k_top_p(logits.clone(), top_k, top_p) > float("-inf")
    # Sums of many float32 may put the edge of p one token further.
    assert int((want != got).sum()) <= (0 if which == "k" else 16)

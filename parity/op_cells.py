# SPDX-License-Identifier: Apache-2.0
"""What a replay of ops must show, listed before anything runs: op, case, dtype, provider, device.

A provider that declares that it doesn't take such calls has no cell, and its reason is kept; one
that takes them and lacks something here (a library) is blocked. Nothing is left out silently.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vllmx.ir.op import IrOpImpl, OpContext
from vllmx.ir.select import load_ops

from . import golden
from .dtypes import Array
from .inputs import Case
from .op_table import GPU_OPS, OPS, OWN, OpEntry, golden_name
from .torch_calls import TORCH_DTYPES, tensors_of

DEVICES = ("cpu", "cuda")
MODE = "eager"
GPU_LANE = "gpu-lane"
"""Mode of cells on a GPU that are judged against upstream's CUDA kernels."""
OUTSIDE = {
    ("triton", "cpu"): "Triton kernels run on a GPU",
    ("triton_fixed", "cpu"): "Triton kernels run on a GPU",
    ("flashinfer", "cpu"): "FlashInfer's kernels run on a GPU",
    ("flashinfer", "cuda"): "tests/gpu/test_flashinfer.py replays its cells, where it is installed",
}


@dataclass(frozen=True)
class OpCell:
    """One cell. refused: why the provider takes no such call, then there is nothing to show;
    blocked: what it lacks here."""

    op: str
    case: str
    dtype: str
    provider: str
    device: str
    refused: str = ""
    blocked: str = ""
    mode: str = MODE

    @property
    def entry(self) -> OpEntry:
        """The op."""
        return (GPU_OPS if self.mode == GPU_LANE else OPS)[self.op]

    @property
    def feature(self) -> str:
        """As evidence names it."""
        return self.entry.feature

    @property
    def case_name(self) -> str:
        """As evidence names it."""
        return f"{self.case}/{self.dtype}"

    @property
    def golden(self) -> str:
        """Path of its golden under goldens/ops."""
        return golden_name(self.op, self.case, self.dtype)

    @property
    def name(self) -> str:
        """The cell in words."""
        return f"{self.feature} {self.case_name} {self.provider} {self.device}"


def expected(
    device: str = "cpu", select: str | None = None, provider: str | None = None
) -> list[OpCell]:
    """Every cell on a device, refusals included; `select`: prefixes of a feature, op or
    "op/case", separated by commas."""
    wanted = [word.strip() for word in select.split(",") if word.strip()] if select else []
    cells: list[OpCell] = []
    for entry in OPS.values():
        for case in entry.cases:
            names = (f"{entry.feature}/{case.name}", f"{entry.name}/{case.name}")
            if wanted and not any(name.startswith(w) for name in names for w in wanted):
                continue
            for dtype in case.dtypes:
                cells += _providers(entry, case, dtype, device)
    return [cell for cell in cells if provider in (None, cell.provider)]


def expected_of_gpu_lane(
    select: str | None = None, provider: str | None = None, folder: Path = golden.OPS_GPU
) -> list[OpCell]:
    """The cells on a GPU of ops that upstream has a CUDA kernel for, but those cases that the
    kernel declined when the lane was recorded."""
    declined = golden.declined(folder)
    return [
        replace(cell, mode=GPU_LANE)
        for cell in expected("cuda", select, provider)
        if cell.op in GPU_OPS and cell.golden not in declined
    ]


def ops_without_cases() -> list[str]:
    """Ops of vllmx's op table that have no golden here; there must be none."""
    return sorted(set(load_ops()) - set(OPS))


def implementation(cell: OpCell) -> IrOpImpl | None:
    """The provider behind a cell; None for an op that has no choice of them."""
    if cell.provider == OWN:
        return None
    return load_ops()[cell.op].impls[cell.provider]


def _providers(entry: OpEntry, case: Case, dtype: str, device: str) -> Sequence[OpCell]:
    key = (entry.name, case.name, dtype)
    registry = load_ops()
    if entry.name not in registry:
        return [OpCell(*key, OWN, device)]
    facts = _facts(entry.name, case.name, dtype)
    context = OpContext(device, TORCH_DTYPES[dtype], facts)
    found = []
    for name, impl in registry[entry.name].impls.items():
        missing = "" if impl.supported is True else str(impl.supported)
        # What it takes doesn't depend on what is installed here: a cell must be asked for anywhere.
        answer = True if impl.supports is None else impl.supports(context)
        refusal = OUTSIDE.get((name, device)) or ("" if answer is True else str(answer))
        blocked = "" if refusal else missing
        found.append(OpCell(*key, name, device, refusal, blocked))
    return found


@functools.cache
def _facts(op: str, case: str, dtype: str) -> dict[str, Any]:
    """The static facts that a layer would tell when it binds the op."""
    arguments = OPS[op].table.cases[op, case].arguments(dtype)
    given = {k: tensors_of(v, "cpu") if isinstance(v, Array) else v for k, v in arguments.items()}
    facts = load_ops()[op].facts_of(**given)
    hidden = given.get("x")
    if isinstance(hidden, torch.Tensor):
        facts = {"hidden_size": hidden.shape[-1], **facts}
    if op == "paged_attention":
        facts = {
            "head_size": given["query"].shape[-1],
            "sliding_window": given["sliding_window"],
            "soft_cap": given["soft_cap"],
            **facts,
        }
    return facts

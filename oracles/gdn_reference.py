# SPDX-License-Identifier: Apache-2.0
"""Upstream's gated delta net on a CPU in float32: its three kernels replaced by a recurrence.

Upstream refuses hybrid models in float32 on a CPU, where its kernels are of bfloat16. With
`patch()` the module that calls them finds float32 functions in their place: everything else,
convolution, gates' inputs, states, scheduler, is upstream's. A golden made so names its lane
`vllm-cpu-f32-gdnref`.
"""

from __future__ import annotations

import json
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MODULE = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
_patched: list[str] = []


def _config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def is_nested(folder: Path) -> bool:
    """Whether the checkpoint in `folder` has a language model beside others."""
    return "text_config" in _config(folder)


def is_hybrid(folder: Path) -> bool:
    """Whether the checkpoint in `folder` has gated delta nets."""
    config = _config(folder)
    return "linear_num_key_heads" in config.get("text_config", config)


def patched() -> bool:
    """Whether upstream's kernels are replaced in this process."""
    return bool(_patched)


def patch() -> None:
    """Replace them."""
    module: Any = import_module(MODULE)
    module.torch = _Instead(torch, bfloat16=torch.float32)
    module.ops = _Instead(
        module.ops,
        fused_gdn_gating_cpu=_gating,
        chunk_gated_delta_rule_cpu=_prefill,
        fused_sigmoid_gating_delta_rule_update_cpu=_decode,
    )
    _patched.append(MODULE)


class _Instead:
    """A module some of whose names are others."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _gating(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    g = -A_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias.float())
    return g.unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def _recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One request: q, k [T, H, K], v [T, HV, V], g, beta [T, HV], state [HV, K, V]."""
    group = v.shape[1] // q.shape[1]
    q, k = (
        (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)).repeat_interleave(group, dim=1)
        for x in (q, k)
    )
    q = q * q.shape[-1] ** -0.5
    out = torch.empty_like(v)
    for t in range(len(v)):
        state = state * g[t].exp()[:, None, None]
        told = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], (v[t] - told) * beta[t][:, None])
        out[t] = torch.einsum("hkv,hk->hv", state, q[t])
    return out, state


def _prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    out, states = torch.empty_like(value), initial_state.clone()
    starts = cu_seqlens.tolist()
    for i, (first, last) in enumerate(pairwise(starts)):
        parts = (x[0, first:last] for x in (query, key, value, g, beta))
        out[0, first:last], states[i] = _recurrence(*parts, states[i])
    return out, states


def _decode(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    **_: Any,
) -> Tensor:
    g, beta = _gating(A_log, a, b, dt_bias)
    out = torch.empty_like(v[0])
    for i, block in enumerate(initial_state_indices.tolist()):
        row = slice(i, i + 1)
        parts = (x[0, row] for x in (q, k, v, g, beta))
        out[row], state = _recurrence(*parts, initial_state_source[block])
        initial_state_source[block] = state
    return out.unsqueeze(1)

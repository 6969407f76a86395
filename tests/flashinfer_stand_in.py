# SPDX-License-Identifier: Apache-2.0
"""Stands for the package flashinfer: its wrappers, planned and run as 0.6.13's are, in torch.

What is planned is checked as the library checks it, and attention reads the cache through the
planned pages alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Wrapper:
    """made: every wrapper so far; plans, runs: how often each was planned and run."""

    made: list[Any] = []

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str, **options: Any) -> None:
        assert kv_layout == "NHD" and float_workspace_buffer.dtype == torch.uint8
        self.options = options
        self.graph = options.get("use_cuda_graph", False)
        self.index_workspace: Tensor | None = None
        self.plans = self.runs = 0
        _Wrapper.made.append(self)

    def reset_workspace_buffer(self, float_workspace: Tensor, int_workspace: Tensor) -> None:
        self.index_workspace = int_workspace

    def _keep(
        self,
        query_starts: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        *,
        causal: bool = True,
        **facts: Any,
    ) -> None:
        for told in (query_starts, indptr, last_page_len):
            assert told.device.type == "cpu" and told.dtype == torch.int32
        assert indices.dtype == torch.int32 and causal
        assert len(last_page_len) == len(indptr) - 1 == len(query_starts) - 1
        assert ((last_page_len >= 1) & (last_page_len <= facts["page_size"])).all()
        assert (indptr.diff() >= 1).all() and indptr[0] == 0
        if self.graph:
            starts = self.options["paged_kv_indptr_buffer"]
            assert len(indptr) == len(starts) and len(indices) == 0
            starts.copy_(indptr)
            self.options["paged_kv_last_page_len_buffer"].copy_(last_page_len)
            self.pages = (
                starts,
                self.options["paged_kv_indices_buffer"],
                self.options["paged_kv_last_page_len_buffer"],
            )
        else:
            assert len(indices) == int(indptr[-1])
            self.pages = (indptr, indices, last_page_len)
        self.query_starts, self.facts = query_starts, facts
        self.plans += 1

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        out: Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Tensor:
        facts, (indptr, indices, last) = self.facts, self.pages
        assert q.dtype == facts["q_data_type"] and paged_kv_cache[0].dtype == facts["kv_data_type"]
        assert q.shape[1] == facts["num_qo_heads"] and len(q) == int(self.query_starts[-1])
        group = facts["num_qo_heads"] // facts["num_kv_heads"]
        for i in range(len(last)):
            pages = indices[indptr[i] : indptr[i + 1]].long()
            length = (len(pages) - 1) * facts["page_size"] + int(last[i])
            keys, values = (
                c[pages].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1)
                for c in paged_kv_cache
            )
            rows = slice(int(self.query_starts[i]), int(self.query_starts[i + 1]))
            scores = torch.einsum("qhd,khd->hqk", q[rows].float(), keys)
            scores = scores * facts["sm_scale"] * k_scale
            cap = facts["logits_soft_cap"]
            if cap > 0:
                scores = cap * torch.tanh(scores / cap)
            new = rows.stop - rows.start
            own = torch.arange(length - new, length)[:, None]
            behind = own - torch.arange(length)
            hidden = behind < 0
            if facts["window_left"] >= 0:
                hidden = hidden | (behind > facts["window_left"])
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[rows] = (torch.einsum("hqk,khd->qhd", weights, values) * v_scale).to(q.dtype)
        self.runs += 1
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, *, head_dim: int, **facts: Any
    ) -> None:
        assert self.options["use_tensor_cores"] and head_dim > 0
        starts = torch.arange(len(indptr), dtype=torch.int32)
        self._keep(starts, indptr, indices, last_page_len, **facts)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        *,
        head_dim_qk: int,
        causal: bool,
        **facts: Any,
    ) -> None:
        assert head_dim_qk > 0
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._keep(qo_indptr, *pages, causal=causal, **facts)


def rmsnorm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    assert rows.dim() == 2 and weight.dtype == rows.dtype
    wide = rows.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(rows.dtype)


def fused_add_rmsnorm(rows: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    assert rows.is_contiguous() and residual.is_contiguous()
    residual.copy_((residual.float() + rows.float()).to(rows.dtype))
    rows.copy_(rmsnorm(residual, weight, eps))


def silu_and_mul(x: Tensor) -> Tensor:
    assert x.is_contiguous() and x.shape[-1] * x.itemsize % 16 == 0
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def apply_rope_with_cos_sin_cache(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> tuple[Tensor, Tensor]:
    from vllmx.ir.ops.rotary import rotary_embedding

    assert cos_sin_cache.dtype == torch.float32 and query.dim() == key.dim() == 2
    turned = rotary_embedding.fn(positions, query, key, head_size, cos_sin_cache, is_neox)
    assert turned[1] is not None
    return turned

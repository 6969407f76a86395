# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/attention/backends/flashinfer.py @ v0.25.0
"""Backend `flashinfer`: FlashInfer's kernels over the paged cache, for a GPU.

A batch is cut in two: the requests of one new token, which come first, are decoded, the others
prefilled, on Hopper by FlashAttention 3's kernel. Each kind of layer has a plan for either, made on
the host once a step from the lengths alone; the pages are put in a row on the device. A CUDA graph
of decodes has plans of its own, renewed before each replay.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllmx.attention.backend import (
    NO_CHUNKS,
    NO_SINKS,
    NO_SLOPES,
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllmx.ir.op import OpContext
from vllmx.kernels.flashinfer_ops import DTYPES, HEAD_SIZES, library, missing
from vllmx.kernels.triton_pages import join_pages

CACHE_DTYPES = (*DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)
WORKSPACE_BYTES = 256 * 2**20
"""Of partial results; all plans share it, as only one kernel runs at a time."""
INDEX_BYTES = 8 * 2**20
"""Of what a plan tells its kernel."""


@dataclass(frozen=True)
class LayerShape:
    """What a plan depends on beside the batch; window_left: keys seen before a token's own."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    page_size: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    scale: float
    window_left: int
    soft_cap: float

    def arguments(self) -> dict[str, Any]:
        """As both kinds of `plan` take them by name."""
        return {
            "num_qo_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "page_size": self.page_size,
            "window_left": self.window_left,
            "logits_soft_cap": self.soft_cap,
            "q_data_type": self.dtype,
            "kv_data_type": self.cache_dtype,
            "sm_scale": self.scale,
        }


@dataclass
class Pages:
    """The pages of some requests on the host: starts int32 [num_reqs + 1], last_lens int32
    [num_reqs], the tokens in the last page of each."""

    starts: Tensor
    last_lens: Tensor

    @classmethod
    def of(cls, seq_lens: np.ndarray, page_size: int) -> Pages:
        """Of requests of these lengths; one of length 0, which is padding, has a token."""
        lengths = np.maximum(seq_lens, 1).astype(np.int64)
        counts = -(-lengths // page_size)
        starts = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        last = (lengths - (counts - 1) * page_size).astype(np.int32)
        return cls(torch.from_numpy(starts), torch.from_numpy(last))

    def part(self, first: int, stop: int) -> Pages:
        """Those of the requests first:stop, counted from 0."""
        starts = self.starts[first : stop + 1]
        return Pages(starts - starts[0], self.last_lens[first:stop])


@dataclass
class GraphPlan:
    """What the graph of a number of decodes reads: buffers that stay in place, plans by layer."""

    starts: Tensor
    indices: Tensor
    last_lens: Tensor
    wrappers: dict[LayerShape, Any] = field(default_factory=dict)


class FlashInferMetadataBuilder(AttentionMetadataBuilder):
    """Builds FlashInferMetadata, and keeps what outlives a step: workspaces and wrappers."""

    plans_replays = True

    def __init__(self, block_size: int, device: torch.device) -> None:
        super().__init__(block_size, device)
        self._workspaces: dict[str, Tensor] = {}
        self._wrappers: dict[tuple[str, LayerShape], Any] = {}
        self._graphs: dict[int, GraphPlan] = {}
        self._sent: torch.cuda.Event | None = None

    def build(self, common: CommonAttentionMetadata) -> FlashInferMetadata:
        """See AttentionMetadataBuilder.build."""
        pages = Pages.of(common.seq_lens_np, self.block_size)
        self._wait_for_the_last_plan()
        starts = pages.starts.to(self.device, non_blocking=True)
        indices = torch.empty(int(pages.starts[-1]), dtype=torch.int32, device=self.device)
        join_pages(common.block_table_tensor, starts, indices)
        return FlashInferMetadata(self, common, pages, indices, None)

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> FlashInferMetadata:
        """See AttentionMetadataBuilder.build_for_cudagraph_capture."""
        graph = self._graphs.get(common.num_reqs)
        if graph is None:
            graph = self._graphs[common.num_reqs] = self._graph_plan(common)
        join_pages(common.block_table_tensor, graph.starts, graph.indices)
        pages = Pages.of(np.ones(common.num_reqs, dtype=np.int32), self.block_size)
        return FlashInferMetadata(self, common, pages, graph.indices, graph)

    def plan_replay(self, num_reqs: int, seq_lens: np.ndarray) -> None:
        """See AttentionMetadataBuilder.plan_replay."""
        graph = self._graphs[num_reqs]
        padded = np.ones(num_reqs, dtype=np.int32)
        padded[: len(seq_lens)] = seq_lens
        pages = Pages.of(padded, self.block_size)
        self._wait_for_the_last_plan()
        for shape, wrapper in graph.wrappers.items():
            self._plan_decode(wrapper, shape, pages, graph.indices[:0])
        self._plans_are_made()

    def decode(self, shape: LayerShape, pages: Pages, indices: Tensor) -> Any:
        """A planned wrapper for decodes outside of graphs."""
        wrapper = self._wrappers.get(("decode", shape))
        if wrapper is None:
            wrapper = library().BatchDecodeWithPagedKVCacheWrapper(
                self._workspace(), "NHD", use_tensor_cores=True
            )
            self._wrappers["decode", shape] = wrapper
        self._plan_decode(wrapper, shape, pages, indices)
        self._plans_are_made()
        return wrapper

    def prefill(self, shape: LayerShape, starts: Tensor, pages: Pages, indices: Tensor) -> Any:
        """A planned wrapper for prompts; starts: int32 [num_reqs + 1] of their new tokens."""
        wrapper = self._wrappers.get(("prefill", shape))
        if wrapper is None:
            # auto: fa3 on Hopper, but for caches of one byte a number, else fa2.
            wrapper = library().BatchPrefillWithPagedKVCacheWrapper(
                self._workspace(), "NHD", backend="auto"
            )
            self._wrappers["prefill", shape] = wrapper
        wrapper.plan(
            starts,
            pages.starts,
            indices,
            pages.last_lens,
            head_dim_qk=shape.head_size,
            causal=True,
            **shape.arguments(),
        )
        self._plans_are_made()
        return wrapper

    def graph_decode(self, graph: GraphPlan, shape: LayerShape, pages: Pages) -> Any:
        """The wrapper of a graph's layers of `shape`, planned when the step first runs, which it
        does once before it is captured."""
        wrapper = graph.wrappers.get(shape)
        if wrapper is None:
            wrapper = library().BatchDecodeWithPagedKVCacheWrapper(
                self._workspace(),
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=graph.starts,
                paged_kv_indices_buffer=graph.indices,
                paged_kv_last_page_len_buffer=graph.last_lens,
            )
            # Plans of graphs are made right before a replay: one place for them is enough.
            wrapper.reset_workspace_buffer(self._workspace(), self._index_workspace(shape))
            graph.wrappers[shape] = wrapper
            self._wait_for_the_last_plan()
            self._plan_decode(wrapper, shape, pages, graph.indices[:0])
            self._plans_are_made()
        return wrapper

    def _plan_decode(self, wrapper: Any, shape: LayerShape, pages: Pages, indices: Tensor) -> None:
        wrapper.plan(
            pages.starts, indices, pages.last_lens, head_dim=shape.head_size, **shape.arguments()
        )

    def _graph_plan(self, common: CommonAttentionMetadata) -> GraphPlan:
        num_reqs, width = common.block_table_tensor.shape
        starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=self.device)
        indices = torch.zeros(num_reqs * width, dtype=torch.int32, device=self.device)
        last_lens = torch.ones(num_reqs, dtype=torch.int32, device=self.device)
        return GraphPlan(starts, indices, last_lens)

    def _workspace(self) -> Tensor:
        return self._bytes("results", WORKSPACE_BYTES)

    def _index_workspace(self, shape: LayerShape) -> Tensor:
        return self._bytes(repr(shape), INDEX_BYTES)

    def _bytes(self, name: str, size: int) -> Tensor:
        found = self._workspaces.get(name)
        if found is None:
            found = torch.zeros(size, dtype=torch.uint8, device=self.device)
            self._workspaces[name] = found
        return found

    def _wait_for_the_last_plan(self) -> None:
        """Plans lie in pinned memory until the device has fetched them."""
        if self._sent is not None:
            self._sent.synchronize()

    def _plans_are_made(self) -> None:
        if self.device.type == "cuda":
            if self._sent is None:
                self._sent = torch.cuda.Event()
            self._sent.record()


class FlashInferMetadata:
    """One step's batch: the first `num_decodes` requests bring one new token each.

    pages, indices: of all requests, in a row; graph: the buffers of the graph that is captured.
    """

    def __init__(
        self,
        builder: FlashInferMetadataBuilder,
        common: CommonAttentionMetadata,
        pages: Pages,
        indices: Tensor,
        graph: GraphPlan | None,
    ) -> None:
        self.builder = builder
        self.slot_mapping = common.slot_mapping
        several = np.flatnonzero(np.diff(common.query_start_loc_np) != 1)
        self.num_decodes = int(several[0]) if len(several) else common.num_reqs
        self.num_reqs = common.num_reqs
        self.pages = pages
        self.indices = indices
        self.graph = graph
        self._starts = common.query_start_loc_np
        self._planned: dict[tuple[str, LayerShape], Any] = {}

    def decode(self, shape: LayerShape) -> Any:
        """The planned wrapper of layers of `shape` for the decodes."""
        if self.graph is not None:
            return self.builder.graph_decode(self.graph, shape, self.pages)
        if ("decode", shape) not in self._planned:
            pages = self.pages.part(0, self.num_decodes)
            indices = self.indices[: int(pages.starts[-1])]
            self._planned["decode", shape] = self.builder.decode(shape, pages, indices)
        return self._planned["decode", shape]

    def prefill(self, shape: LayerShape) -> Any:
        """The same for the other requests."""
        if ("prefill", shape) not in self._planned:
            first = self.num_decodes
            starts = torch.from_numpy(self._starts[first:] - self._starts[first])
            pages = self.pages.part(first, self.num_reqs)
            indices = self.indices[int(self.pages.starts[first]) :]
            planned = self.builder.prefill(shape, starts.to(torch.int32), pages, indices)
            self._planned["prefill", shape] = planned
        return self._planned["prefill", shape]


class FlashInferBackend(AttentionBackend):
    """FlashInfer's decode and prefill."""

    name = "flashinfer"

    @staticmethod
    def refusal(context: OpContext) -> bool | str:
        """A GPU, the library and its compiler, 16-bit activations, heads it has kernels for."""
        facts = context.facts
        if context.device != "cuda":
            return f"runs on a GPU, not on {context.device}"
        if context.dtype not in DTYPES:
            return f"computes in float16 and bfloat16, not in {context.dtype}"
        if facts.get("sinks"):
            return NO_SINKS
        if facts.get("attention_chunk_size"):
            return NO_CHUNKS
        if facts.get("alibi"):
            return NO_SLOPES
        head_size = facts.get("head_size", HEAD_SIZES[0])
        if head_size not in HEAD_SIZES:
            return f"has kernels for heads of {', '.join(map(str, HEAD_SIZES))}, not of {head_size}"
        cache = facts.get("kv_cache_dtype", context.dtype)
        if cache not in CACHE_DTYPES or (cache in DTYPES and cache != context.dtype):
            return f"reads no cache of {cache} in {context.dtype}"
        return missing() or True

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """FlashInferMetadataBuilder."""
        return FlashInferMetadataBuilder

    @classmethod
    def indexes_kv_by_block_stride(cls) -> bool:
        """Keys and values are found by their strides."""
        return True

    @classmethod
    def supports_cudagraph(cls) -> bool:
        """With a plan before each replay."""
        return True

    @staticmethod
    def run(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: FlashInferMetadata,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Tensor:
        """See AttentionBackend.run."""
        shape = LayerShape(
            num_heads=query.shape[1],
            num_kv_heads=key_cache.shape[2],
            head_size=query.shape[2],
            page_size=key_cache.shape[1],
            dtype=query.dtype,
            cache_dtype=key_cache.dtype,
            scale=scale,
            window_left=-1 if sliding_window is None else sliding_window - 1,
            soft_cap=soft_cap or 0.0,
        )
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        scales = {name: s for name, s in (("k_scale", k_scale), ("v_scale", v_scale)) if s != 1.0}
        decodes, cache = metadata.num_decodes, (key_cache, value_cache)
        if decodes:
            metadata.decode(shape).run(query[:decodes], cache, out=out[:decodes], **scales)
        if decodes < metadata.num_reqs:
            metadata.prefill(shape).run(query[decodes:], cache, out=out[decodes:], **scales)
        return out

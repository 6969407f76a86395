# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/cudagraph_utils.py @ v0.25.0
"""CUDA graphs: a whole decode step, from the rows to the sampled tokens, in one launch.

A graph is made for each of some batch sizes; a batch runs in the smallest that holds it, filled
up with padding. All graphs share one pool of memory, as only one runs at a time.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllmx.config import CompilationConfig, VllmConfig
from vllmx.exceptions import UserError

logger = logging.getLogger(__name__)

PROFILED_GRAPHS = 4
"""Graphs that are captured to tell what all of them will take."""
LARGEST_CAPTURE_SIZE = 512
"""Largest batch that is captured unless compilation.cudagraph_capture_sizes says otherwise."""


@dataclass(frozen=True)
class BatchExecutionDescriptor:
    """The shape of a batch that runs as a graph."""

    cg_mode: str
    num_tokens: int
    num_reqs: int


def resolve_cudagraph_mode(vllm_config: VllmConfig, device: str) -> str:
    """NONE, FULL_DECODE_ONLY or FULL, the default on a GPU; UserError for what is not there."""
    mode = vllm_config.compilation_config.cudagraph_mode
    if device != "cuda":
        if mode not in (None, "NONE"):
            raise UserError(
                f"compilation.cudagraph_mode={mode}: CUDA graphs need a GPU; leave it unset."
            )
        return "NONE"
    if vllm_config.model_config.enforce_eager:
        return "NONE"
    return "FULL" if mode is None else mode


def capture_sizes(config: CompilationConfig, max_num_seqs: int) -> list[int]:
    """The batch sizes to capture, ascending: as configured, else 1, 2, 4, then every 8, then every
    16, and the largest batch there is. Sizes above that are left out."""
    sizes = config.cudagraph_capture_sizes
    if sizes is None:
        largest = min(max_num_seqs, LARGEST_CAPTURE_SIZE)
        sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16), largest]
    elif any(size < 1 for size in sizes):
        raise UserError(
            f"compilation.cudagraph_capture_sizes={sizes}: batch sizes are positive numbers."
        )
    return sorted({size for size in sizes if size <= max_num_seqs})


def capture(
    step: Callable[[], Tensor], pool: Any, stream: torch.cuda.Stream
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """The graph of `step`, and what it returns when the graph is replayed.

    Not torch.cuda.graph: that collects garbage and empties the caches each time.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool)
        try:
            result = step()
        except BaseException:
            # The end of a capture that an error broke has one of its own, which says nothing.
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    return graph, result


class _Memory:
    """What `borrowed` reads, in the protocol that libraries share arrays by."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.element_size() for stride in tensor.stride()),
            "typestr": f"<i{tensor.element_size()}",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def borrowed(tensor: Tensor) -> Tensor:
    """The same memory of a graph's, without keeping it: whole from a replay of that graph to the
    next of any, and in a pool that all share, so that it need not be there for each of them."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)


class CudaGraphManager:
    """Which batch sizes have a graph, and which graph a batch runs in."""

    def __init__(self, vllm_config: VllmConfig, cudagraph_mode: str) -> None:
        self.cudagraph_mode = cudagraph_mode
        self.lazy = vllm_config.compilation_config.cudagraph_capture == "lazy"
        self.sizes: list[int] = []
        if cudagraph_mode != "NONE":
            self.sizes = capture_sizes(
                vllm_config.compilation_config, vllm_config.scheduler_config.max_num_seqs
            )

    def needs_capture(self) -> bool:
        """Whether there is any size to capture at the start."""
        return bool(self.sizes) and not self.lazy

    def dispatch(self, num_reqs: int, num_tokens: int) -> BatchExecutionDescriptor | None:
        """The graph for a batch; None where it runs without: it has prefills, or is too large."""
        if num_reqs != num_tokens or not self.sizes or num_reqs > self.sizes[-1]:
            return None
        size = self.sizes[bisect_left(self.sizes, num_reqs)]
        return BatchExecutionDescriptor("FULL", size, size)


class ModelCudaGraphManager(CudaGraphManager):
    """The graphs of a model's decode steps.

    decode_step: runs one for a number of requests on the input buffers and returns the hidden
    states; prepare: puts that many padding requests into the buffers.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        cudagraph_mode: str,
        prepare: Callable[[int], None],
        decode_step: Callable[[int], Tensor],
    ) -> None:
        super().__init__(vllm_config, cudagraph_mode)
        self.prepare = prepare
        self.decode_step = decode_step
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.hidden_states: dict[int, Tensor] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def capture(self) -> int:
        """Capture every size, the largest first, and return the bytes that the graphs take."""
        start = time.perf_counter()
        taken = sum(self._capture(list(reversed(self.sizes))))
        logger.info(
            "captured %d CUDA graphs of up to %d requests in %.1f s, %.2f GiB",
            *(len(self.graphs), self.sizes[-1], time.perf_counter() - start, taken / 2**30),
        )
        return taken

    def profile_memory(self) -> int:
        """About the bytes that all graphs take, by capturing the largest; they are dropped again.

        The largest takes the pool that all share, each further one what it needs of its own.
        """
        first, *further = self._capture(list(reversed(self.sizes))[:PROFILED_GRAPHS])
        self.graphs.clear()
        self.hidden_states.clear()
        self._pool = None
        each = -(-sum(further) // len(further)) if further else 0
        return max(first, 0) + max(each, 0) * (len(self.sizes) - 1)

    def _capture(self, sizes: list[int]) -> list[int]:
        """Capture `sizes`, the largest first; the bytes of the device that each took."""
        self.pool_and_stream()
        taken = []
        for size in sizes:
            # Once without a graph: kernels are compiled and loaded, libraries make their handles.
            self.prepare(size)
            self.decode_step(size)
            torch.cuda.synchronize()
            before = torch.cuda.mem_get_info()[0]
            graph, self.hidden_states[size] = capture(
                partial(self.decode_step, size), *self.pool_and_stream()
            )
            self.graphs[size] = graph
            torch.cuda.synchronize()
            taken.append(before - torch.cuda.mem_get_info()[0])
        return taken

    def pool_and_stream(self) -> tuple[Any, torch.cuda.Stream]:
        """Where graphs have their memory, and where they are captured."""
        if self._pool is None or self._stream is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        return self._pool, self._stream

    def dispatch(self, num_reqs: int, num_tokens: int) -> BatchExecutionDescriptor | None:
        """As the class above; a graph that is not there yet is captured now, before the batch's
        own inputs are sent."""
        desc = super().dispatch(num_reqs, num_tokens)
        if self.lazy and desc is not None and desc.num_reqs not in self.graphs:
            start = time.perf_counter()
            self._capture([desc.num_reqs])
            seconds = time.perf_counter() - start
            logger.info("captured the CUDA graph of %d requests in %.2f s", desc.num_reqs, seconds)
        return desc

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> Tensor:
        """Replay the graph; its hidden states [desc.num_reqs, H] stay until the next replay."""
        self.graphs[desc.num_reqs].replay()
        return self.hidden_states[desc.num_reqs]

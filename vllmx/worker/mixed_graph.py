# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/cudagraph_utils.py (FULL mode of mixed batches) @ v0.25.0
"""CUDA graphs for steps with prompts in them, one for each of some numbers of tokens.

A host that launches each kernel of such a step by itself is longer at it than the device is, unless
the model is large. A graph has room for every request there may be and for every tile that their
prompts may be cut into; what a batch doesn't use of it is padding. Sampling comes after it. That of
the whole token budget is captured with the graphs of decode steps, a smaller one when the first
batch comes that it holds.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from vllmx.attention.backends.triton_attn import prefill_tiles
from vllmx.forward_context import ForwardContext, set_forward_context
from vllmx.kernels.triton_attention import processors_of, tokens_of_a_tile
from vllmx.layers.attention import attention_layers
from vllmx.layers.fused_moe import FusedMoE
from vllmx.layers.parameter import WeightHolder
from vllmx.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllmx.worker.buffer_utils import PackedBuffer
from vllmx.worker.cudagraph_utils import capture
from vllmx.worker.input_batch import HostBatch

if TYPE_CHECKING:
    from vllmx.worker.gpu_steps import GPUSteps

logger = logging.getLogger(__name__)

SMALLEST_BUDGET = 1024
"""Tokens of a step below which the device would wait for padding rather than for the host."""
FULL_ENOUGH = 0.9
"""Share of the budget that a batch must fill: the rest is computed for nothing."""
SIZES = (64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 6144)
"""Tokens of the smaller graphs."""
HIDDEN_WORK = 1.0e9
"""Parameters of a layer times tokens, for each processor of the device, that it gets through while
the host launches the layer's kernels: 0.45 ms of an H200's 132 processors at 600 TFLOP/s. A smaller
graph of more than that would be waited for longer than the host."""
TABLES = (VocabParallelEmbedding, ParallelLMHead)
"""Layers that a step does not run over all of its tokens."""
LONGEST_DECODE = 16384
"""Tokens of a decoding request's context, at most: its keys are not split over programs here."""


class MixedGraph:
    """The graph of `steps` for batches of nearly `num_tokens` tokens."""

    def __init__(self, steps: GPUSteps, num_tokens: int) -> None:
        self.steps = steps
        self.num_tokens = num_tokens
        self.max_reqs = steps.runner.req_states.max_num_reqs
        layers = attention_layers(steps.runner.model).values()
        groups = {
            tokens_of_a_tile(
                layer.num_heads // layer.num_kv_heads, steps.runner.ops.dtype, layer.head_size
            )
            for layer in layers
        }
        device = steps.buffers.device
        # Every request may end with a tile that is not full.
        self.rooms = {tokens: num_tokens // tokens + self.max_reqs for tokens in sorted(groups)}
        self.packet = PackedBuffer(2 * sum(self.rooms.values()), device)
        self.tiles: dict[int, Tensor] = {}
        start = 0
        for tokens, room in self.rooms.items():
            self.tiles[tokens] = self.packet.gpu[start : start + 2 * room].view(room, 2)
            start += 2 * room
        self.graph: torch.cuda.CUDAGraph | None = None
        self.hidden_states: Tensor | None = None
        self.without = False  # no memory was left for it

    def holds(self, host: HostBatch) -> bool:
        """Whether a batch of at most `num_tokens` tokens can run in the graph."""
        reqs, tokens = len(host.req_ids), host.num_tokens
        if tokens < self.num_tokens and reqs == self.max_reqs:
            return False  # padding tokens belong to a request that is none
        decodes = host.seq_lens_np[host.num_scheduled_tokens == 1]
        return not len(decodes) or int(decodes.max()) <= LONGEST_DECODE

    def send(self, host: HostBatch) -> None:
        """Send the packet of a batch, filled up, and its tiles."""
        self.steps.buffers.send(host, padded_to=self.max_reqs, tokens_padded_to=self.num_tokens)
        counts = host.num_scheduled_tokens
        several = np.flatnonzero(counts != 1)
        first = int(several[0]) if len(several) else len(counts)
        packet = self.packet.next()
        packet[:] = -1
        start = 0
        for tokens, room in self.rooms.items():
            tiles = prefill_tiles(counts, host.seq_lens_np, first, tokens)
            packet[start : start + tiles.size] = tiles.ravel()
            start += 2 * room
        self.packet.send(start)

    def step(self) -> Tensor:
        """From the packet to the hidden states [num_tokens, H]."""
        runner, buffers = self.steps.runner, self.steps.buffers
        n = self.max_reqs
        max_model_len = runner.req_states.max_model_len
        rows = np.zeros(n, dtype=np.int64)
        host = HostBatch(
            req_ids=[],
            idx_mapping_np=rows,
            num_scheduled_tokens=rows + 1,
            query_start_loc_np=np.arange(n + 1, dtype=np.int32),
            seq_lens_np=np.full(n, max_model_len, dtype=np.int32),
            sample_reqs=np.zeros(0, dtype=np.int64),
            num_tokens=self.num_tokens,
        )
        batch = buffers.batch(host)
        buffers.prepare(n)
        inputs = buffers.attention_inputs(host)
        metadata = runner.attn_builders.build(batch, *inputs, self.tiles)
        with set_forward_context(ForwardContext(metadata)):
            return runner.model(batch.input_ids, batch.positions)

    def send_padding(self) -> None:
        """A packet of nothing but padding."""
        nothing = np.zeros(0, dtype=np.int64)
        starts = np.zeros(1, dtype=np.int32)
        self.send(HostBatch([], nothing, nothing, starts, nothing, nothing, 0))

    def capture(self, pool: Any, stream: torch.cuda.Stream) -> int:
        """Capture the graph; the bytes of the device that it takes."""
        self.send_padding()
        self.step()
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0]
        self.graph, self.hidden_states = capture(self.step, pool, stream)
        torch.cuda.synchronize()
        taken = before - torch.cuda.mem_get_info()[0]
        logger.info(
            "captured the graph of steps of %d tokens, %.2f GiB", self.num_tokens, taken / 2**30
        )
        return taken

    def drop(self) -> None:
        """Let go of the graph and its memory."""
        self.graph = self.hidden_states = None

    def run(self, num_tokens: int) -> Tensor:
        """Replay; the hidden states of the batch stay until the next replay of any graph."""
        assert self.graph is not None
        self.graph.replay()
        assert self.hidden_states is not None
        return self.hidden_states[:num_tokens]


class MixedGraphs:
    """The graphs of `steps`, of `sizes` tokens, the last of which is the token budget."""

    def __init__(self, steps: GPUSteps, sizes: Sequence[int]) -> None:
        self.steps = steps
        self.graphs = {size: MixedGraph(steps, size) for size in sorted(sizes)}
        self.sizes = list(self.graphs)

    @classmethod
    def of(cls, steps: GPUSteps) -> MixedGraphs | None:
        """None where they would not pay, or where some layer can't be captured so."""
        runner = steps.runner
        budget = runner.vllm_config.scheduler_config.max_num_batched_tokens
        assert budget is not None
        layers = attention_layers(runner.model)
        if (
            steps.cudagraph_manager.cudagraph_mode != "FULL"
            or budget < SMALLEST_BUDGET
            or runner.model_state is not None
            or runner.vllm_config.kernel_config.batch_invariant
            or not all(layer.backend.supports_mixed_cudagraph() for layer in layers.values())
        ):
            return None
        most = most_tokens(runner.model, len(layers), processors_of(torch.device(runner.device)))
        return cls(steps, [*(size for size in SIZES if size < min(budget, most)), budget])

    @property
    def whole(self) -> MixedGraph:
        """The graph of steps that fill the budget."""
        return self.graphs[self.sizes[-1]]

    def find(self, host: HostBatch) -> MixedGraph | None:
        """The smallest graph that a batch runs in, captured if it has not been; None: it runs
        without one."""
        place = bisect_left(self.sizes, host.num_tokens)
        if place == len(self.sizes):
            return None
        graph = self.graphs[self.sizes[place]]
        whole = graph is self.whole
        if whole and host.num_tokens < FULL_ENOUGH * graph.num_tokens:
            return None
        if not graph.holds(host):
            return None
        if graph.graph is None and not self._capture(graph):
            return None
        return graph

    def _capture(self, graph: MixedGraph) -> bool:
        """Capture a graph now, if its time is not the start; whether it is there."""
        manager = self.steps.cudagraph_manager
        if graph.without or (graph is self.whole and not manager.lazy):
            return False
        try:
            graph.capture(*manager.pool_and_stream())
        except torch.OutOfMemoryError as error:
            logger.warning(
                "steps of %d tokens run without a graph, for which no memory is left (%s); lower "
                "--gpu-memory-utilization to leave some",
                *(graph.num_tokens, str(error).partition("\n")[0]),
            )
            graph.without = True
        return graph.graph is not None


def most_tokens(model: nn.Module, num_layers: int, processors: int) -> int:
    """Tokens of a step up to which the host, launching it, is longer at it than the device."""
    work = 0
    for part in model.modules():
        if not isinstance(part, WeightHolder) or isinstance(part, TABLES):
            continue
        size = sum(math.prod(shape) for shape in part.expected_weights().values())
        work += size * part.top_k // part.num_experts if isinstance(part, FusedMoE) else size
    return int(HIDDEN_WORK * processors * num_layers / max(work, 1))

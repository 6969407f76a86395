# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/cudagraph_utils.py (FULL mode of mixed batches) @ v0.25.0
"""One CUDA graph for steps that fill the token budget, whatever prompts and decodes are in them.

Such steps keep the device busy for long, and a host that launches each kernel by itself is longer
at it than the device is. The graph has room for every request there may be and for every tile that
their prompts may be cut into; what a batch doesn't use of it is padding. Sampling comes after it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vllmx.attention.backends.triton_attn import prefill_tiles
from vllmx.forward_context import ForwardContext, set_forward_context
from vllmx.kernels.triton_attention import tokens_of_a_tile
from vllmx.layers.attention import attention_layers
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

    @classmethod
    def of(cls, steps: GPUSteps) -> MixedGraph | None:
        """None where it would not pay, or where some layer can't be captured so."""
        runner = steps.runner
        budget = runner.vllm_config.scheduler_config.max_num_batched_tokens
        assert budget is not None
        backends = {layer.backend for layer in attention_layers(runner.model).values()}
        if (
            steps.cudagraph_manager.cudagraph_mode != "FULL"
            or budget < SMALLEST_BUDGET
            or runner.model_state is not None
            or runner.vllm_config.kernel_config.batch_invariant
            or not all(backend.supports_mixed_cudagraph() for backend in backends)
        ):
            return None
        return cls(steps, budget)

    def takes(self, host: HostBatch) -> bool:
        """Whether a batch runs in the graph."""
        reqs, tokens = len(host.req_ids), host.num_tokens
        if tokens < FULL_ENOUGH * self.num_tokens:
            return False
        if tokens < self.num_tokens and reqs == self.max_reqs:
            return False  # padding tokens belong to a request that is none
        decodes = host.seq_lens_np[host.num_scheduled_tokens == 1]
        if len(decodes) and int(decodes.max()) > LONGEST_DECODE:
            return False
        manager = self.steps.cudagraph_manager
        if self.graph is None and manager.lazy:
            self.capture(*manager.pool_and_stream())
        return self.graph is not None

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

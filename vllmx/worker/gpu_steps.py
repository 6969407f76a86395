# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/model_runner.py (execute_model, sample_tokens) @ v0.25.0
"""A model runner's steps on a GPU: as CUDA graphs where they can be, never waiting for the device.

What the host must know of a step's result, it learns when the step's AsyncOutput is asked for it.
Everything else (input tokens, positions, slots) is worked out on the device, so that a step can be
launched while the one before it still runs.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vllmx.core.output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from vllmx.forward_context import ForwardContext, set_forward_context
from vllmx.ir.op import REFERENCE
from vllmx.layers.attention import attention_layers
from vllmx.layers.mamba_base import mamba_layers
from vllmx.worker.buffer_utils import PackedBuffer
from vllmx.worker.cudagraph_utils import ModelCudaGraphManager, borrowed, resolve_cudagraph_mode
from vllmx.worker.input_batch import HostBatch, InputBatch, gather_on_host
from vllmx.worker.input_buffers import AsyncOutput, InputBuffers
from vllmx.worker.mixed_graph import MixedGraphs

if TYPE_CHECKING:
    from vllmx.worker.model_runner import GPUModelRunner

logger = logging.getLogger(__name__)

ASKING_DEFINITIONS = {
    "reshape_and_cache": "its padding",
    "fused_experts": "the experts of each token",
}
"""Ops whose torch definition waits for numbers of the device, which a capture can't."""


class GPUSteps:
    """Runs the steps of `runner`, whose rows and tables stay where they are from now on."""

    def __init__(self, runner: GPUModelRunner) -> None:
        self.runner = runner
        scheduler_config = runner.vllm_config.scheduler_config
        assert scheduler_config.max_num_batched_tokens is not None
        self.buffers = InputBuffers(
            runner.req_states, runner.block_tables, scheduler_config.max_num_batched_tokens
        )
        mode = resolve_cudagraph_mode(runner.vllm_config, runner.device)
        self.graph_refusal = None if mode == "NONE" else graph_refusal(runner)
        if self.graph_refusal is not None:
            mode = "NONE"
        self.cudagraph_manager = ModelCudaGraphManager(
            runner.vllm_config, mode, self._send_padding, self._decode_step
        )
        self.mixed_graphs = MixedGraphs.of(self)
        self.events = [torch.cuda.Event() for _ in range(PackedBuffer.DEPTH)]
        # The last steps' outputs; more are not under way.
        self.pending: deque[AsyncOutput] = deque(maxlen=PackedBuffer.DEPTH)
        self.graph_logits: dict[int, Tensor] = {}
        # Of the step under way, where a graph has computed them and taken the likeliest tokens.
        self.logits: Tensor | None = None

    def reset(self) -> None:
        """Forget the steps that are under way, once the device is through with them."""
        torch.cuda.synchronize()
        self.pending.clear()

    @torch.inference_mode()
    def capture_model(self) -> int:
        """Capture the CUDA graphs, if there are to be any; the bytes that they take."""
        if self.graph_refusal is not None:
            logger.warning("no CUDA graphs: %s", self.graph_refusal)
        if not self.cudagraph_manager.needs_capture():
            return 0
        taken = self._capture_mixed()
        return taken + self.cudagraph_manager.capture()

    def _capture_mixed(self) -> int:
        """Capture the graph of full steps, if there is to be one; the bytes that it takes."""
        if self.mixed_graphs is None:
            return 0
        return self.mixed_graphs.whole.capture(*self.cudagraph_manager.pool_and_stream())

    @torch.inference_mode()
    def profile_cudagraph_memory(self) -> int:
        """Bytes that the graphs will take, by a few that are captured and dropped again."""
        if not self.cudagraph_manager.sizes:
            return 0
        taken = self._capture_mixed() + self.cudagraph_manager.profile_memory()
        if self.mixed_graphs is not None:
            self.mixed_graphs.whole.drop()
        return taken

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run once, without a graph, each step that is to be captured at the start."""
        if not self.cudagraph_manager.needs_capture():
            return
        if self.mixed_graphs is not None:
            self.mixed_graphs.whole.send_padding()
            self.mixed_graphs.whole.step()
        for size in self.cudagraph_manager.sizes:
            self._send_padding(size)
            self._decode_step(size)

    # ------------------------------------------------------------------ execute

    def execute(self, scheduler_output: SchedulerOutput) -> tuple[InputBatch, Tensor]:
        """Launch the model on a step; the batch, and the hidden states of its tokens."""
        runner, buffers = self.runner, self.buffers
        host = gather_on_host(scheduler_output, runner.req_states)
        num_reqs = len(host.req_ids)
        batch = buffers.batch(host)
        states = runner.model_state
        desc = None
        if (
            len(host.sample_reqs) == num_reqs
            and not host.shares_new_blocks
            and (states is None or not states.has_fresh(host))
        ):
            desc = self.cudagraph_manager.dispatch(num_reqs, host.num_tokens)
        self.logits = None
        if desc is not None:
            buffers.send(host, padded_to=desc.num_reqs)
            if states is not None:
                states.preprocess_state(host)
            runner.attn_builders.plan_replay(desc.num_reqs, host.seq_lens_np)
            hidden_states = self.cudagraph_manager.run_fullgraph(desc)[:num_reqs]
            self.logits = self.graph_logits[desc.num_reqs][:num_reqs]
            return batch, hidden_states
        mixed = None if self.mixed_graphs is None else self.mixed_graphs.find(host)
        if mixed is not None:
            mixed.send(host)
            return batch, mixed.run(host.num_tokens)
        buffers.send(host)
        if states is not None:
            states.preprocess_state(host)
        buffers.prepare(num_reqs)
        metadata = runner.attn_builders.build(batch, *buffers.attention_inputs(host))
        return batch, runner.forward(batch, metadata, scheduler_output)

    def _send_padding(self, num_reqs: int) -> None:
        """A packet of `num_reqs` padding requests."""
        nothing = np.zeros(0, dtype=np.int64)
        starts = np.zeros(1, dtype=np.int32)
        host = HostBatch([], nothing, nothing, starts, nothing, nothing, 0)
        self.buffers.send(host, padded_to=num_reqs)

    def _decode_step(self, num_reqs: int) -> Tensor:
        """From the packet to the sampled tokens of `num_reqs` decoding requests."""
        runner, buffers = self.runner, self.buffers
        max_model_len = runner.req_states.max_model_len
        rows = np.zeros(num_reqs, dtype=np.int64)
        host = HostBatch(
            req_ids=[],
            idx_mapping_np=rows,
            num_scheduled_tokens=rows + 1,
            query_start_loc_np=np.arange(num_reqs + 1, dtype=np.int32),
            seq_lens_np=np.full(num_reqs, max_model_len, dtype=np.int32),
            sample_reqs=np.arange(num_reqs),
            num_tokens=num_reqs,
        )
        batch = buffers.batch(host)
        buffers.prepare(num_reqs)
        inputs = buffers.attention_inputs(host)
        metadata = runner.attn_builders.build(batch, *inputs, captured=True)
        with set_forward_context(ForwardContext(metadata)):
            hidden_states = runner.model(batch.input_ids, batch.positions)
        logits = runner.model.compute_logits(hidden_states)
        buffers.sample_greedy(logits)
        self.graph_logits[num_reqs] = borrowed(logits)
        return hidden_states

    # ------------------------------------------------------------------ sample

    def sample(
        self,
        batch: InputBatch,
        hidden_states: Tensor,
        output: ModelRunnerOutput,
        grammar_output: GrammarOutput | None = None,
    ) -> AsyncOutput:
        """Launch what samples the step's tokens, and complete `output` when they are there."""
        states, sampling = self.runner.req_states, batch.sample_reqs
        rows = batch.idx_mapping_np[sampling]
        if len(sampling):
            plain = self.runner.sampler.is_plain(rows)
            if grammar_output is not None or not plain or self.logits is None:
                self._sample(batch, hidden_states, rows, plain, output, grammar_output)
        turn = self.buffers.packet.turn
        event = self.events[turn]
        event.record()
        sampled = self.buffers.sampled_np[turn, : len(sampling)]
        places, generation = states.total_len[rows], states.generation[rows]
        states.total_len[rows] += 1

        def write_back(token_ids: np.ndarray) -> None:
            mine = states.generation[rows] == generation
            states.all_token_ids.np[rows[mine], places[mine]] = token_ids[mine]

        wanted = self.runner.sampler.reads_sampled_tokens
        result = AsyncOutput(output, sampling, sampled, event, write_back if wanted else None)
        self.pending.append(result)
        return result

    def _sample(
        self,
        batch: InputBatch,
        hidden_states: Tensor,
        rows: np.ndarray,
        plain: bool,
        output: ModelRunnerOutput,
        grammar_output: GrammarOutput | None,
    ) -> None:
        runner = self.runner
        logits = self.logits
        if logits is None:
            if len(rows) < batch.num_tokens:
                hidden_states = hidden_states.index_select(0, batch.logits_indices)
            logits = runner.model.compute_logits(hidden_states)
        constrained = None
        if grammar_output is not None:
            constrained = runner.structured_outputs.apply_grammar_bitmask(
                logits, batch, grammar_output
            )
        if plain:
            self.buffers.sample_greedy(logits)
            return
        if runner.sampler.reads_sampled_tokens:
            for earlier in self.pending:
                earlier.wait()
        positions = batch.seq_lens_np[batch.sample_reqs].astype(np.int64) - 1
        sampled = runner.sampler(logits, rows, positions, constrained)
        self.buffers.commit_tokens(sampled.sampled_token_ids)
        runner.place_logprobs(batch, sampled.logprobs, output)


def graph_refusal(runner: GPUModelRunner) -> str | None:
    """Why a decode step of `runner` can't be captured, or None."""
    if runner.kv_connector is not None:
        return "a KV connector has its turns between the layers"
    backends = {layer.backend for layer in attention_layers(runner.model).values()}
    for backend in backends:
        if not backend.supports_cudagraph():
            return f"attention.backend={backend.name} asks the device for its lengths"
    for name, layer in mamba_layers(runner.model).items():
        if not layer.supports_cudagraph:
            return f"layer {name} asks the device for its states"
    for op_name, asked in ASKING_DEFINITIONS.items():
        choice = runner.ops.choices.get(op_name)
        if choice is not None and choice.provider == REFERENCE:
            return f"op {op_name}: provider {REFERENCE} asks the device for {asked}"
    return None

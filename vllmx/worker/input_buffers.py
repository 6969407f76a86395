# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/input_batch.py (InputBuffers), async_utils.py @ v0.25.0
"""How a GPU gets a step's inputs and how the host gets its tokens, without waiting for each other.

A step sends one packet: which rows run, how far each is, what changed in the tables. The device
works out the rest with kernels whose tensors stay where they are, so that a CUDA graph can hold
them. Sampled tokens are appended to the rows on the device, where the next step finds them, and
written to memory of the host, which reads them once the step's event has come.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vllmx.core.output import AsyncModelRunnerOutput, ModelRunnerOutput
from vllmx.kernels.triton_input import (
    apply_writes,
    commit_tokens,
    prepare_inputs,
    prepare_states,
    sample_greedy,
)
from vllmx.worker.block_table import BlockTables
from vllmx.worker.buffer_utils import PackedBuffer, StagedWriteTensor
from vllmx.worker.input_batch import HostBatch, InputBatch
from vllmx.worker.states import RequestState

STAGED_ROOM = 32768
"""Numbers of a packet for changes of the tables; more go in packets of their own."""


class InputBuffers:
    """The tensors of a step, one after another in place.

    Packet: slot of the ring of sampled tokens, rows, query_start_loc, seq_lens, requests that are
    sampled, their last tokens' places, changes. All int32.
    """

    def __init__(
        self, states: RequestState, block_tables: BlockTables, max_num_tokens: int
    ) -> None:
        """max_num_tokens: most tokens of a step."""
        self.states = states
        self.tables = block_tables
        self.device = device = states.device
        n = states.max_num_reqs
        sizes = (1, n, n + 1, n, n, n)
        offsets = np.cumsum((0, *sizes)).tolist()
        self._room = STAGED_ROOM
        self._offsets = offsets
        self.packet = PackedBuffer(offsets[-1] + self._room, device)
        parts = [self.packet.gpu[a:b] for a, b in itertools.pairwise(offsets)]
        self.ring_slot, self.rows, self.query_start_loc = parts[:3]
        self.seq_lens, self.sample_reqs, self.logits_indices = parts[3:]
        self.input_ids = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)
        self.positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        tables = [table.gpu for table in block_tables.tables]
        self.block_tables = [torch.zeros_like(table) for table in tables]
        self.slot_mappings = [
            torch.full((max_num_tokens,), -1, dtype=torch.int64, device=device) for _ in tables
        ]
        recurrent = sorted(block_tables.state_groups)
        # The first of these groups also tells the tokens and their positions.
        paged = [g for g in range(len(tables)) if g not in recurrent] or [0]
        self._paged = (
            [tables[g] for g in paged],
            [block_tables.block_sizes[g] for g in paged],
            self.input_ids,
            self.positions,
            [self.block_tables[g] for g in paged],
            [self.slot_mappings[g] for g in paged],
        )
        # Groups of recurrent layers: the one block of each request, and whether it has states.
        self.has_initial_state: Tensor | None = None
        if recurrent:
            self.has_initial_state = torch.zeros(n, dtype=torch.bool, device=device)
        self._states = []
        for g in recurrent:
            self.block_tables[g] = torch.zeros((n, 1), dtype=torch.int32, device=device)
            self._states.append((tables[g], block_tables.block_sizes[g], self.block_tables[g]))
        # The device writes to the host's memory: there is nothing to launch for it.
        self.sampled = torch.zeros(
            (PackedBuffer.DEPTH, n), dtype=torch.int32, pin_memory=device != "cpu"
        )
        self.sampled_np = self.sampled.numpy()

    def send(
        self,
        batch: HostBatch,
        padded_to: int | None = None,
        tokens_padded_to: int | None = None,
    ) -> None:
        """Send the packet of `batch`; filled up to `padded_to` requests, of one token each for a
        batch of decodes, else the first with what `tokens_padded_to` lacks and the others with
        none."""
        packet = self.packet.next()
        slot, rows, starts, lens, samples, last, free = self._offsets
        n, m = len(batch.idx_mapping_np), len(batch.sample_reqs)
        packet[slot] = self.packet.turn
        packet[rows : rows + n] = batch.idx_mapping_np
        packet[starts : starts + n + 1] = batch.query_start_loc_np
        packet[lens : lens + n] = batch.seq_lens_np
        packet[samples : samples + m] = batch.sample_reqs
        packet[last : last + m] = batch.query_start_loc_np[1:][batch.sample_reqs] - 1
        if tokens_padded_to is not None:
            assert padded_to is not None
            packet[rows + n : rows + padded_to] = 0
            packet[starts + n + 1 : starts + padded_to + 1] = tokens_padded_to
            packet[lens + n : lens + padded_to] = 0
        elif padded_to is not None:
            assert n == m == batch.num_tokens, "only batches of decodes are padded"
            packet[rows + n : rows + padded_to] = 0
            packet[starts + n : starts + padded_to + 1] = np.arange(n, padded_to + 1)
            packet[lens + n : lens + padded_to] = 0
            packet[samples + n : samples + padded_to] = np.arange(n, padded_to)
        self._send_changes(packet, free)

    def _send_changes(self, packet: np.ndarray, free: int) -> None:
        """Put what changed in the tables behind place `free`, send the packet, and apply it."""
        writes: list[tuple[StagedWriteTensor, int, int]] = []
        later: list[tuple[StagedWriteTensor, np.ndarray, np.ndarray]] = []
        for table in (self.states.all_token_ids, *self.tables.tables):
            staged = table.take_staged()
            if staged is None:
                continue
            places, values = staged
            count = len(places)
            if free + 2 * count > self.packet.size:
                later.append((table, places, values))
                continue
            packet[free : free + count] = places
            packet[free + count : free + 2 * count] = values
            writes.append((table, free, count))
            free += 2 * count
        self.packet.send(free)
        for table, start, count in writes:
            places_t = self.packet.gpu[start : start + count]
            apply_writes(table.gpu, places_t, self.packet.gpu[start + count : start + 2 * count])
        for table, places, values in later:
            both = torch.from_numpy(np.concatenate((places, values)))
            both = both.pin_memory().to(self.device, non_blocking=True)
            apply_writes(table.gpu, both[: len(places)], both[len(places) :])

    def prepare(self, num_reqs: int) -> None:
        """Work the inputs of the first `num_reqs` requests of the packet out, on the device."""
        rows = self.rows[:num_reqs]
        prepare_inputs(
            rows, self.query_start_loc, self.seq_lens, self.states.all_token_ids.gpu, *self._paged
        )
        for table in self._states:
            assert self.has_initial_state is not None
            prepare_states(
                rows, self.query_start_loc, self.seq_lens, *table, self.has_initial_state
            )

    def batch(self, host: HostBatch) -> InputBatch:
        """`host` with its tensors; they hold its numbers once `send` and `prepare` have run."""
        n, tokens, m = len(host.idx_mapping_np), host.num_tokens, len(host.sample_reqs)
        return InputBatch(
            req_ids=host.req_ids,
            num_reqs=n,
            num_tokens=tokens,
            idx_mapping_np=host.idx_mapping_np,
            idx_mapping=self.rows[:n],
            num_scheduled_tokens=host.num_scheduled_tokens,
            token_rows=None,
            positions_np=None,
            input_ids=self.input_ids[:tokens],
            positions=self.positions[:tokens],
            query_start_loc=self.query_start_loc[: n + 1],
            query_start_loc_np=host.query_start_loc_np,
            seq_lens=self.seq_lens[:n],
            seq_lens_np=host.seq_lens_np,
            sample_reqs=host.sample_reqs,
            logits_indices=self.logits_indices[:m],
            has_initial_state=(
                None if self.has_initial_state is None else self.has_initial_state[:n]
            ),
            shares_new_blocks=host.shares_new_blocks,
        )

    def attention_inputs(self, host: HostBatch) -> tuple[list[Tensor], list[Tensor]]:
        """Block tables and slots of the batch, a KV cache group."""
        n, tokens = len(host.idx_mapping_np), host.num_tokens
        return [t[:n] for t in self.block_tables], [s[:tokens] for s in self.slot_mappings]

    def sample_greedy(self, logits: Tensor) -> None:
        """Append the likeliest tokens to the rows of the requests that are sampled."""
        sample_greedy(logits, *self._where(len(logits)))

    def commit_tokens(self, sampled: Tensor) -> None:
        """Append `sampled`, one token of each request that is sampled."""
        commit_tokens(sampled, *self._where(len(sampled)))

    def _where(self, count: int) -> tuple[Tensor, ...]:
        return (
            self.sample_reqs[:count],
            self.rows,
            self.seq_lens,
            self.ring_slot,
            self.states.all_token_ids.gpu,
            self.sampled,
        )


class AsyncOutput(AsyncModelRunnerOutput):
    """A step's output whose tokens may still be on their way.

    write_back: called with the tokens, int32 [number of requests that are sampled], when they
    are there.
    """

    def __init__(
        self,
        output: ModelRunnerOutput,
        sample_reqs: np.ndarray,
        sampled: np.ndarray,
        event: torch.cuda.Event,
        write_back: Callable[[np.ndarray], None] | None,
    ) -> None:
        self.output = output
        self.sample_reqs = sample_reqs
        self.sampled = sampled
        self.event = event
        self.write_back = write_back

    def wait(self) -> None:
        """Wait for the tokens and write them back, once."""
        self.event.synchronize()
        if self.write_back is not None:
            self.write_back(self.sampled)
            self.write_back = None

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the tokens; see AsyncModelRunnerOutput."""
        self.wait()
        output = self.output
        if len(self.sample_reqs) == len(output.req_ids):
            output.sampled_token_ids = self.sampled[:, None].tolist()
            return output
        output.sampled_token_ids = [[] for _ in output.req_ids]
        for i, token_id in zip(self.sample_reqs.tolist(), self.sampled.tolist(), strict=True):
            output.sampled_token_ids[i] = [token_id]
        return output

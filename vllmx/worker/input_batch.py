# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/input_batch.py @ v0.25.0
"""The batch of one step, gathered from the request rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from vllmx.core.output import SchedulerOutput
from vllmx.worker.buffer_utils import to_device
from vllmx.worker.states import RequestState


@dataclass
class InputBatch:
    """Tokens of all scheduled requests, one request after another, shortest first.

    idx_mapping_np: row of each request, int64 [num_reqs]; token_rows: row of each token;
    input_ids: int32 [num_tokens]; positions: int64 [num_tokens]; query_start_loc: int32
    [num_reqs + 1]; seq_lens: int32 [num_reqs]. sample_reqs: the requests whose last known token is
    in this step, which therefore get a new one; logits_indices: that token's place in the batch.
    token_rows and positions_np are None on a GPU, which works them out itself; there it also says
    has_initial_state, bool [num_reqs], for recurrent layers: whether tokens are computed already.
    """

    req_ids: list[str]
    num_reqs: int
    num_tokens: int
    idx_mapping_np: np.ndarray
    idx_mapping: Tensor
    num_scheduled_tokens: np.ndarray
    token_rows: np.ndarray | None
    positions_np: np.ndarray | None
    input_ids: Tensor
    positions: Tensor
    query_start_loc: Tensor
    query_start_loc_np: np.ndarray
    seq_lens: Tensor
    seq_lens_np: np.ndarray
    sample_reqs: np.ndarray
    logits_indices: Tensor
    has_initial_state: Tensor | None = None
    shares_new_blocks: bool = False


@dataclass(slots=True)
class HostBatch:
    """A step's batch on the host; the fields are those of InputBatch.

    shares_new_blocks: some request begins with its last token alone, all others being cached; the
    blocks that it takes over may be those that another request fills in this very step.
    """

    req_ids: list[str]
    idx_mapping_np: np.ndarray
    num_scheduled_tokens: np.ndarray
    query_start_loc_np: np.ndarray
    seq_lens_np: np.ndarray
    sample_reqs: np.ndarray
    num_tokens: int
    shares_new_blocks: bool = False


def gather_on_host(scheduler_output: SchedulerOutput, states: RequestState) -> HostBatch:
    """Order the requests of a step that schedules at least one token, and look up their rows."""
    scheduled = sorted(scheduler_output.num_scheduled_tokens.items(), key=lambda item: item[1])
    req_ids = [req_id for req_id, _ in scheduled]
    num_reqs = len(req_ids)
    index_of = states.req_id_to_index
    rows = np.fromiter((index_of[req_id] for req_id in req_ids), np.int64, num_reqs)
    counts = np.fromiter((count for _, count in scheduled), np.int64, num_reqs)
    starts = np.zeros(num_reqs + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    seq_lens = (states.num_computed_tokens[rows] + counts).astype(np.int32)
    sample_reqs = np.flatnonzero(seq_lens >= states.total_len[rows])
    shares = any(
        new.num_computed_tokens and scheduler_output.num_scheduled_tokens[new.req_id] == 1
        for new in scheduler_output.scheduled_new_reqs
    )
    num_tokens = int(starts[-1])
    return HostBatch(req_ids, rows, counts, starts, seq_lens, sample_reqs, num_tokens, shares)


def make_input_batch(scheduler_output: SchedulerOutput, states: RequestState) -> InputBatch:
    """Gather the inputs of a step that schedules at least one token, on a CPU."""
    device = states.device
    host = gather_on_host(scheduler_output, states)
    rows, counts, starts = host.idx_mapping_np, host.num_scheduled_tokens, host.query_start_loc_np
    num_reqs, num_tokens = len(rows), host.num_tokens
    computed = states.num_computed_tokens[rows]
    if num_tokens == num_reqs:
        token_rows, positions = rows, computed
    else:
        token_rows = np.repeat(rows, counts)
        positions = np.arange(num_tokens) + np.repeat(computed - starts[:-1], counts)

    positions_t = to_device(positions, device)
    idx_mapping = to_device(rows, device)
    token_rows_t = idx_mapping if token_rows is rows else to_device(token_rows, device)
    return InputBatch(
        req_ids=host.req_ids,
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        idx_mapping_np=rows,
        idx_mapping=idx_mapping,
        num_scheduled_tokens=counts,
        token_rows=token_rows,
        positions_np=positions,
        input_ids=states.all_token_ids.gpu[token_rows_t, positions_t],
        positions=positions_t,
        query_start_loc=to_device(starts, device),
        query_start_loc_np=starts,
        seq_lens=to_device(host.seq_lens_np, device),
        seq_lens_np=host.seq_lens_np,
        sample_reqs=host.sample_reqs,
        logits_indices=to_device((starts[1:][host.sample_reqs] - 1).astype(np.int64), device),
    )

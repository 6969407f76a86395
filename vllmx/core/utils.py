# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/sched/utils.py @ v0.25.0
"""Small decisions of the scheduler that need no state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from vllmx.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllmx.sampling_params import RepetitionDetectionParams

T = TypeVar("T")


def check_sequence_repetition(token_ids: Sequence[int], params: RepetitionDetectionParams) -> bool:
    """Whether `token_ids` ends in `min_count` copies of a pattern of a length `params` allows."""
    shortest = max(params.min_pattern_size, 1)
    if params.max_pattern_size < shortest or params.min_count < 2:
        return False
    for pattern_len in range(shortest, params.max_pattern_size + 1):
        span = pattern_len * params.min_count
        if span > len(token_ids):
            return False
        # A tail of copies equals itself shifted by one pattern.
        tail = range(1, span - pattern_len + 1)
        if all(token_ids[-i] == token_ids[-i - pattern_len] for i in tail):
            return True
    return False


def remove_all(lst: list[T], items_to_remove: set[T]) -> list[T]:
    """`lst` without `items_to_remove`; use the result, as one item is removed in place."""
    if not items_to_remove:
        return lst
    if len(items_to_remove) == 1:
        (item,) = items_to_remove
        if item in lst:
            lst.remove(item)
        return lst
    return [item for item in lst if item not in items_to_remove]


def check_stop(request: Request, max_model_len: int) -> bool:
    """Whether the newest token ends `request`; if so, sets its status and stop_reason.

    Below min_tokens only max_model_len ends it. Stop strings are the detokenizer's business.
    """
    params = request.sampling_params
    output_token_ids = request._output_token_ids
    num_output_tokens = len(output_token_ids)
    if num_output_tokens < params.min_tokens:
        if len(request._all_token_ids) < max_model_len:
            return False
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return True

    last_token_id = output_token_ids[-1]
    if last_token_id == params.eos_token_id:
        request.status = RequestStatus.FINISHED_STOPPED
        return True
    stop_token_ids = params.stop_token_ids
    if stop_token_ids and last_token_id in stop_token_ids:
        request.status = RequestStatus.FINISHED_STOPPED
        request.stop_reason = last_token_id
        return True
    if num_output_tokens >= request.max_tokens or len(request._all_token_ids) >= max_model_len:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return True
    repetition_detection = params.repetition_detection
    if repetition_detection is not None and check_sequence_repetition(
        output_token_ids, repetition_detection
    ):
        request.status = RequestStatus.FINISHED_REPETITION
        request.stop_reason = "repetition_detected"
        return True
    return False

# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/sched/scheduler.py @ v0.25.0
"""Requests whose prompt arrives in pieces, with an answer to each piece.

Such a session is `resumable`. When it stops it keeps its blocks, and its place in the runner, and
waits for the next piece; `streaming_queue` holds the pieces that came too early, None being the
last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from vllmx.core.request_queue import RequestQueue
from vllmx.engine import EngineCoreEventType
from vllmx.request import Request, RequestStatus, StreamingUpdate


class StreamingSessions:
    """The scheduler's part that deals with sessions."""

    log_stats: bool
    hash_block_size: int
    skipped_waiting: RequestQueue
    # Sessions that hold a place in the runner while they wait for a piece of prompt.
    num_waiting_for_streaming_input = 0

    if TYPE_CHECKING:

        def _enqueue_waiting_request(self, request: Request) -> None: ...

        def finish_requests(
            self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
        ) -> list[tuple[str, int]]: ...

    def _handle_stopped_request(self, request: Request) -> bool:
        """Whether `request` is done; if not, it goes on with its next piece of prompt, or waits
        for one."""
        if not request.resumable:
            return True
        if not request.streaming_queue:
            request.status = RequestStatus.WAITING_FOR_STREAMING_REQ
            self.num_waiting_for_streaming_input += 1
        elif (update := request.streaming_queue.popleft()) is None:
            return True
        else:
            self._update_request_as_session(request, update)
        self._enqueue_waiting_request(request)
        return False

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        """Give a session that has stopped its next piece of prompt."""
        if session.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
            self.num_waiting_for_streaming_input -= 1
        continue_session(session, update, self.hash_block_size)
        if self.log_stats:
            session.record_event(EngineCoreEventType.QUEUED)

    def _add_to_session(self, session: Request, update: StreamingUpdate | None) -> None:
        """Hand a piece of prompt (None: there are no more) to a session."""
        if session.streaming_queue is None:
            raise ValueError(
                f"Request id {session.request_id!r} is in use; wait for that request to end or "
                "give this one another id."
            )
        if session.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            session.streaming_queue.append(update)
        elif update is None:
            self.finish_requests(session.request_id, RequestStatus.FINISHED_ABORTED)
        else:
            # Out of the queue meanwhile, as its place there depends on what changes.
            self.skipped_waiting.remove_request(session)
            self._update_request_as_session(session, update)
            self.skipped_waiting.add_request(session)


def continue_session(session: Request, update: StreamingUpdate, hash_block_size: int) -> None:
    """Append a piece of prompt to what `session` has computed so far, and make it ready to run.

    What it has answered becomes part of the prompt, but for the last token: that one was sampled
    to end the answer and never computed.
    """
    num_kept = min(session.num_computed_tokens, session.num_tokens)
    answer = session._all_token_ids[session.num_prompt_tokens : num_kept]
    del session._all_token_ids[num_kept:]
    del session.block_hashes[num_kept // hash_block_size :]
    session._output_token_ids.clear()
    for feature in update.mm_features or ():
        position = feature.mm_position
        feature.mm_position = replace(position, offset=position.offset + num_kept)
        session.mm_features.append(feature)
    piece = update.prompt_token_ids or []
    assert session.prompt_token_ids is not None and update.sampling_params is not None
    session._all_token_ids.extend(piece)
    session.prompt_token_ids = [*session.prompt_token_ids, *answer, *piece]
    session.num_prompt_tokens = len(session.prompt_token_ids)
    session.update_block_hashes()

    session.arrival_time = update.arrival_time
    session.sampling_params = update.sampling_params
    session.max_tokens = update.max_tokens
    session.stop_reason = None
    session.status = RequestStatus.WAITING

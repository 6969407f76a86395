# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/engine/output_processor.py @ v0.25.0
"""From the engine core's outputs to what callers see: text, stop strings, RequestOutputs.

`OutputProcessor.process_outputs` is the one loop of the front end over all running requests. It
makes nothing that nobody asked for: a request with FINAL_ONLY costs a list extension a step.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllmx.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllmx.engine.detokenizer import IncrementalDetokenizer
from vllmx.engine.logprobs import LogprobsProcessor
from vllmx.engine.parallel_sampling import ParentRequest
from vllmx.exceptions import EngineGenerateError
from vllmx.metrics.stats import IterationStats, RequestStateStats
from vllmx.outputs import CompletionOutput, RequestOutput
from vllmx.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from vllmx.logprobs import SampleLogprobs
    from vllmx.model_loader.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class RequestOutputCollector:
    """Hands the outputs of one request to the task that waits for them.

    It holds one output. Where the producer is ahead of the consumer, a new output is merged into
    the one that waits: appended for DELTA, put in its place otherwise.
    """

    def __init__(self, output_kind: RequestOutputKind, request_id: str) -> None:
        self.aggregate = output_kind == RequestOutputKind.DELTA
        self.request_id = request_id
        self.output: RequestOutput | Exception | None = None
        self.ready = asyncio.Event()

    def put(self, output: RequestOutput | Exception) -> None:
        """Add an output, or an error that ends the request; never waits."""
        if self.output is None or isinstance(output, Exception):
            self.output = output
            self.ready.set()
        elif isinstance(self.output, RequestOutput):
            self.output.add(output, aggregate=self.aggregate)

    async def get(self) -> RequestOutput:
        """The next output; waits for it, and raises it if it is an error."""
        while (output := self.get_nowait()) is None:
            await self.ready.wait()
        return output

    def get_nowait(self) -> RequestOutput | None:
        """The next output if there is one; raises it if it is an error."""
        output, self.output = self.output, None
        self.ready.clear()
        if isinstance(output, Exception):
            raise output
        return output


@dataclass
class OutputProcessorOutput:
    """What `process_outputs` leaves for its caller to do."""

    request_outputs: list[RequestOutput]
    """Outputs of the requests that have no queue."""
    reqs_to_abort: list[str]
    """Requests that a stop string ended: the engine core does not know yet."""


class RequestState:
    """What the front end remembers of a running request."""

    __slots__ = (
        "_num_sent_logprobs",
        "delta",
        "detokenizer",
        "external_req_id",
        "final_only",
        "is_prefilling",
        "logprobs_processor",
        "max_tokens_param",
        "num_cached_tokens",
        "parent_req",
        "prompt",
        "prompt_len",
        "prompt_token_ids",
        "queue",
        "request_id",
        "request_index",
        "sent_tokens_offset",
        "stats",
        "stream_interval",
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None,
        request_index: int,
        logprobs_processor: LogprobsProcessor,
        detokenizer: IncrementalDetokenizer,
        queue: RequestOutputCollector | None,
        log_stats: bool,
        stream_interval: int,
    ) -> None:
        params = request.sampling_params
        assert params is not None and request.external_req_id is not None
        self.request_id = request.request_id
        self.external_req_id = request.external_req_id
        self.parent_req = parent_req
        self.request_index = request_index
        self.delta = params.output_kind == RequestOutputKind.DELTA
        self.final_only = params.output_kind == RequestOutputKind.FINAL_ONLY
        self.prompt = prompt
        self.prompt_token_ids = request.prompt_token_ids or []
        self.prompt_len = len(self.prompt_token_ids)
        self.logprobs_processor = logprobs_processor
        self.detokenizer = detokenizer
        self.max_tokens_param = params.max_tokens
        self.queue = queue
        self.stats = RequestStateStats(arrival_time=request.arrival_time) if log_stats else None
        self.stream_interval = stream_interval
        self.is_prefilling = True
        self.num_cached_tokens = 0
        self.sent_tokens_offset = 0
        self._num_sent_logprobs = 0

    @classmethod
    def from_new_request(
        cls,
        tokenizer: Tokenizer | None,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None,
        request_index: int,
        queue: RequestOutputCollector | None,
        log_stats: bool,
        stream_interval: int,
    ) -> RequestState:
        """The state of a request that has just been added."""
        assert request.sampling_params is not None
        if not request.sampling_params.detokenize:
            tokenizer = None
        return cls(
            request,
            prompt,
            parent_req,
            request_index,
            LogprobsProcessor.from_new_request(tokenizer, request),
            IncrementalDetokenizer.from_new_request(tokenizer, request),
            queue,
            log_stats,
            stream_interval,
        )

    def make_request_output(
        self,
        new_token_ids: list[int],
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
    ) -> RequestOutput | None:
        """The output to show now; None where there is nothing to show yet."""
        finished = finish_reason is not None
        if not finished:
            if self.final_only:
                return None
            if self.stream_interval > 1 and not self._interval_is_over():
                return None
        if self.stream_interval > 1 and self.delta:
            new_token_ids = self.detokenizer.output_token_ids[self.sent_tokens_offset :]
            self.sent_tokens_offset = self.detokenizer.num_output_tokens()

        processor = self.logprobs_processor
        delta = self.delta
        logprobs = processor.logprobs
        if logprobs is not None:
            logprobs = self._logprobs_to_show(logprobs, finished)
        text = self.detokenizer.get_next_output_text(finished, delta)
        if not delta:
            new_token_ids = self.detokenizer.output_token_ids
            if not finished:  # the list grows on, the caller's must not
                new_token_ids = new_token_ids[:]
        completion = CompletionOutput(
            self.request_index,
            text,
            new_token_ids,
            processor.cumulative_logprob,
            logprobs,
            None,
            str(finish_reason) if finished else None,
            stop_reason if finished else None,
        )
        outputs = [completion]
        if self.parent_req is not None:
            outputs, finished = self.parent_req.get_outputs(self.request_id, completion)
            if not outputs:
                return None
        prompt_logprobs = processor.prompt_logprobs
        if prompt_logprobs is not None and delta:
            prompt_logprobs = processor.pop_prompt_logprobs()
        return RequestOutput(
            self.external_req_id,
            self.prompt,
            self.prompt_token_ids,
            prompt_logprobs,
            outputs,
            finished,
            self.stats,
            None,
            None,
            None,
            self.num_cached_tokens,
        )

    def _interval_is_over(self) -> bool:
        """Whether this is the first token or a full interval after the last one that was sent."""
        num_unsent = self.detokenizer.num_output_tokens() - self.sent_tokens_offset
        if self.sent_tokens_offset != 0 and num_unsent < self.stream_interval:
            return False
        if not self.delta:  # with DELTA the offset moves when the tokens are taken
            self.sent_tokens_offset += num_unsent
        return True

    def _logprobs_to_show(self, logprobs: SampleLogprobs, finished: bool) -> SampleLogprobs:
        if self.delta:
            start, self._num_sent_logprobs = self._num_sent_logprobs, len(logprobs)
            return logprobs[start:]
        return logprobs if finished else logprobs[:]


class OutputProcessor:
    """Turns EngineCoreOutputs into RequestOutputs."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        log_stats: bool,
        stream_interval: int = 1,
    ) -> None:
        """`stream_interval`: tokens between two outputs of a request."""
        self.tokenizer = tokenizer
        self.log_stats = log_stats
        self.stream_interval = stream_interval
        self.request_states: dict[str, RequestState] = {}
        self.parent_requests: dict[str, ParentRequest] = {}
        # The caller's id -> ids of the requests that were made of it, as the keys of a dict: there
        # may be thousands, which end one by one.
        self.external_req_ids: defaultdict[str, dict[str, None]] = defaultdict(dict)

    def get_num_unfinished_requests(self) -> int:
        """Number of requests that have not finished; each of n answers counts."""
        return len(self.request_states)

    def has_unfinished_requests(self) -> bool:
        """Whether any request has not finished."""
        return bool(self.request_states)

    def propagate_error(self, e: Exception) -> None:
        """Raise `e` in every task that waits for an output."""
        for state in self.request_states.values():
            if state.queue is not None:
                state.queue.put(e)

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None = None,
        request_index: int = 0,
        queue: RequestOutputCollector | None = None,
    ) -> None:
        """Expect outputs for `request`; they go to `queue`, or else to process_outputs' caller."""
        if request.request_id in self.request_states:
            raise ValueError(f"Request id {request.request_id} is already running.")
        state = RequestState.from_new_request(
            self.tokenizer,
            request,
            prompt,
            parent_req,
            request_index,
            queue,
            self.log_stats,
            self.stream_interval,
        )
        self.request_states[request.request_id] = state
        self.external_req_ids[state.external_req_id][request.request_id] = None
        if parent_req is not None:
            self.parent_requests[parent_req.request_id] = parent_req

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> list[str]:
        """Forget requests and give their queues a last output; unknown ids are passed over.

        The ids are the callers', or with `internal` the engine's own. The id of a request with
        n > 1 stands for all its children. Returns the ids that the engine core has to abort.
        """
        aborted: list[str] = []
        for request_id in request_ids:
            for child_id in self._resolve(request_id, internal):
                state = self.request_states.get(child_id)
                if state is None:
                    continue
                self._forget(state)
                aborted.append(child_id)
                output = state.make_request_output([], FinishReason.ABORT, None)
                if output is not None and state.queue is not None:
                    state.queue.put(output)
        return aborted

    def _resolve(self, request_id: str, internal: bool) -> list[str]:
        if not internal:
            return list(self.external_req_ids.get(request_id, ()))
        parent = self.parent_requests.get(request_id)
        return [request_id] if parent is None else sorted(parent.child_requests)

    def process_outputs(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: float | None = None,
        iteration_stats: IterationStats | None = None,
    ) -> OutputProcessorOutput:
        """Take the outputs of one step: detokenize, look for stop strings, make RequestOutputs.

        Those of a request with a queue go there, the others are returned. Outputs of requests
        that were aborted meanwhile are dropped. `engine_core_timestamp` is monotonic seconds.
        """
        request_outputs: list[RequestOutput] = []
        reqs_to_abort: list[str] = []
        states = self.request_states
        for output in engine_core_outputs:
            state = states.get(output.request_id)
            if state is None:
                continue
            try:
                if iteration_stats is not None:
                    assert engine_core_timestamp is not None and state.stats is not None
                    iteration_stats.update_from_output(
                        output, engine_core_timestamp, state.is_prefilling, state.stats
                    )
                if state.is_prefilling:
                    state.is_prefilling = False
                    if output.prefill_stats is not None:
                        state.num_cached_tokens = output.prefill_stats.num_cached_tokens

                new_token_ids = output.new_token_ids
                finish_reason = output.finish_reason
                stop_reason = output.stop_reason
                stop_string = state.detokenizer.update(
                    new_token_ids, finish_reason is FinishReason.STOP
                )
                if stop_string is not None:
                    finish_reason, stop_reason = FinishReason.STOP, stop_string
                if (
                    output.new_logprobs is not None
                    or output.new_prompt_logprobs_tensors is not None
                ):
                    state.logprobs_processor.update_from_output(output)

                if finish_reason is None and state.final_only:
                    continue
                request_output = state.make_request_output(
                    new_token_ids, finish_reason, stop_reason
                )
                if request_output is not None:
                    if finish_reason is not None:
                        request_output.kv_transfer_params = output.kv_transfer_params
                    if state.queue is not None:
                        state.queue.put(request_output)
                    else:
                        request_outputs.append(request_output)
                if finish_reason is not None:
                    self._forget(state)
                    if output.finish_reason is None:
                        reqs_to_abort.append(state.request_id)
                    if iteration_stats is not None:
                        self._update_stats_from_finished(state, finish_reason, iteration_stats)
            except Exception as error:
                # A fault of this front end with one request must not end the others.
                if state.queue is None:
                    raise
                logger.exception("Request %s failed", state.request_id)
                self._fail(state, error)
                reqs_to_abort.append(state.request_id)
        return OutputProcessorOutput(request_outputs, reqs_to_abort)

    def _forget(self, state: RequestState) -> None:
        request_id, external_id = state.request_id, state.external_req_id
        del self.request_states[request_id]
        siblings = self.external_req_ids[external_id]
        del siblings[request_id]
        if not siblings:
            del self.external_req_ids[external_id]
        parent = state.parent_req
        # The request may have left the parent's set already.
        if parent is not None and len(parent.child_requests) == (
            request_id in parent.child_requests
        ):
            self.parent_requests.pop(parent.request_id, None)

    def _fail(self, state: RequestState, error: Exception) -> None:
        if state.request_id in self.request_states:
            self._forget(state)
        if state.parent_req is not None:
            state.parent_req.child_requests.discard(state.request_id)
        failure = EngineGenerateError(f"Request {state.external_req_id} failed: {error}")
        failure.__cause__ = error
        assert state.queue is not None
        state.queue.put(failure)

    @staticmethod
    def _update_stats_from_finished(
        state: RequestState, finish_reason: FinishReason, iteration_stats: IterationStats
    ) -> None:
        assert state.stats is not None
        iteration_stats.update_from_finished_request(
            finish_reason=finish_reason,
            request_id=state.external_req_id,
            num_prompt_tokens=state.prompt_len,
            max_tokens_param=state.max_tokens_param,
            req_stats=state.stats,
            num_cached_tokens=state.num_cached_tokens,
        )
        ParentRequest.observe_finished_request(
            state.parent_req, iteration_stats, state.stats.num_generation_tokens
        )

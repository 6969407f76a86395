# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/engine/async_llm.py @ v0.25.0
"""The asynchronous front end: each request is an async iterator, all share one engine.

The engine core runs in a process of its own, or in a thread where
`parallel.enable_multiprocessing` is false. One task takes its outputs, makes text of them and puts
them into the collector of each request, where `generate` waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any

from vllmx.engine import EngineCoreRequest, PauseMode
from vllmx.engine.core_client import AsyncEngineCoreClient, EngineCoreClient
from vllmx.engine.executor import Executor
from vllmx.engine.front import (
    EngineFront,
    fan_out,
    find_model,
    has_reasoning_markers,
    make_logger_manager,
)
from vllmx.engine.input_processor import PromptType
from vllmx.engine.input_processor import prompt_text as text_of
from vllmx.engine.output_processor import RequestOutputCollector
from vllmx.exceptions import EngineDeadError, EngineGenerateError
from vllmx.metrics.stats import IterationStats
from vllmx.model_loader.tokenizer import Tokenizer
from vllmx.outputs import RequestOutput
from vllmx.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllmx.config import VllmConfig
    from vllmx.engine.arg_utils import EngineArgs
    from vllmx.metrics.loggers import StatLoggerFactory

logger = logging.getLogger(__name__)

_OUTPUT_CHUNK = 128
"""Outputs that are processed without letting other tasks run."""
_OUTPUTS_SETTLE_S = 0.02
"""Seconds after a pause in which the outputs before it are handed out."""


class AsyncLLM(EngineFront):
    """Runs an engine for an event loop. All its coroutines belong to one loop."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        log_stats: bool,
        log_requests: bool = False,
        stat_loggers: list[StatLoggerFactory] | None = None,
    ) -> None:
        """Finds the model and starts the engine, which loads it; needs no running loop.

        Raises UserError for what the config or the model lacks.
        """
        self.log_requests = log_requests
        self.engine_core = self._start_engine(vllm_config, executor_class, log_stats)
        self.logger_manager = make_logger_manager(vllm_config, log_stats, stat_loggers)
        self.output_handler: asyncio.Task[None] | None = None

    def _start_engine(
        self, vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool
    ) -> AsyncEngineCoreClient:
        """The engine core's client, once both it and the front end are ready."""

        def load_front() -> None:
            super(AsyncLLM, self).__init__(vllm_config, log_stats)

        if vllm_config.parallel_config.enable_multiprocessing is not False:
            find_model(vllm_config)
            # The tokenizer is read while the engine's process loads the model, unless that is to
            # know markers of reasoning as tokens.
            is_first = has_reasoning_markers(vllm_config)
            if is_first:
                load_front()
            return EngineCoreClient.make_async_mp_client(
                vllm_config,
                executor_class,
                log_stats,
                while_starting=None if is_first else load_front,
            )
        load_front()
        client = EngineCoreClient.make_client(False, True, vllm_config, executor_class, log_stats)
        assert isinstance(client, AsyncEngineCoreClient)
        return client

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: VllmConfig,
        stat_loggers: list[StatLoggerFactory] | None = None,
        enable_log_requests: bool = False,
        disable_log_stats: bool = False,
    ) -> AsyncLLM:
        """The engine of a config, with the executor that it names."""
        return cls(
            vllm_config,
            Executor.get_class(vllm_config),
            log_stats=not disable_log_stats,
            log_requests=enable_log_requests,
            stat_loggers=stat_loggers,
        )

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: Any = None,
        stat_loggers: list[StatLoggerFactory] | None = None,
    ) -> AsyncLLM:
        """The engine that `engine_args` describes; they are left as they are."""
        config = engine_args.create_engine_config(usage_context)
        return cls.from_vllm_config(
            config,
            stat_loggers,
            enable_log_requests=getattr(engine_args, "enable_log_requests", False),
            disable_log_stats=not config.observability_config.log_stats,
        )

    async def add_request(
        self,
        request_id: str,
        prompt: EngineCoreRequest | PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: Any | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        prompt_text: str | None = None,
        data_parallel_rank: int | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> RequestOutputCollector:
        """Check and queue a request; returns the collector of its outputs.

        The `reasoning_` arguments tell a grammar where it begins: whether it does at once, None to
        find out from the prompt, and what the reasoning parser is made with.
        Raises ValueError for a bad request and EngineDeadError where nothing can be served.
        """
        if self.errored:
            raise self.dead_error
        if isinstance(prompt, EngineCoreRequest):
            request = prompt
        else:
            if params.structured_outputs is not None:
                constrained = copy(params)  # marked by process_inputs, which gets the answer again
                await asyncio.to_thread(
                    self.input_processor.validate_structured_outputs, constrained
                )
            request = self.input_processor.process_inputs(
                request_id,
                prompt,
                params,
                arrival_time,
                lora_request,
                tokenization_kwargs,
                trace_headers,
                priority,
                data_parallel_rank,
            )
            request.reasoning_ended = reasoning_ended
            request.reasoning_parser_kwargs = reasoning_parser_kwargs
            prompt_text = text_of(prompt)
        assert request.sampling_params is not None
        self.input_processor.assign_request_id(request)
        self._run_output_handler()
        queue = RequestOutputCollector(request.sampling_params.output_kind, request.request_id)
        try:
            for child, parent, index in fan_out(request):
                self.output_processor.add_request(child, prompt_text, parent, index, queue)
                await self.engine_core.add_request_async(child)
        except BaseException:
            await self.abort(queue.request_id, internal=True)
            raise
        if self.log_requests:
            logger.info("Added request %s.", request.request_id)
        return queue

    async def generate(
        self,
        prompt: EngineCoreRequest | PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request as they come; the last one has `finished`.

        A consumer that stops early (break, aclose, cancellation) aborts the request. Raises
        ValueError for a bad request, EngineDeadError where the engine has stopped, and
        EngineGenerateError for a fault that concerns this request alone.
        """
        queue: RequestOutputCollector | None = None
        try:
            queue = await self.add_request(
                request_id,
                prompt,
                sampling_params,
                lora_request=lora_request,
                tokenization_kwargs=tokenization_kwargs,
                trace_headers=trace_headers,
                priority=priority,
                prompt_text=prompt_text,
                data_parallel_rank=data_parallel_rank,
                reasoning_ended=reasoning_ended,
                reasoning_parser_kwargs=reasoning_parser_kwargs,
            )
            finished = False
            while not finished:
                # Without await where one is ready: a switch of tasks costs more than the look.
                output = queue.get_nowait() or await queue.get()
                finished = output.finished
                yield output
        except (asyncio.CancelledError, GeneratorExit):
            await self._give_up(queue, request_id, "aborted")
            raise
        except EngineDeadError:
            self._log_end(request_id, "failed (engine dead)")
            raise
        except ValueError as error:
            self._log_end(request_id, f"failed (bad request): {error}")
            raise
        except EngineGenerateError:
            await self._give_up(queue, request_id, "failed")
            raise
        except Exception as error:
            await self._give_up(queue, request_id, f"failed: {type(error).__name__}: {error}")
            raise EngineGenerateError(f"Request {request_id} failed: {error}") from error

    async def _give_up(
        self, queue: RequestOutputCollector | None, request_id: str, how: str
    ) -> None:
        if queue is not None:
            await self.abort(queue.request_id, internal=True)
        self._log_end(request_id, how)

    def _log_end(self, request_id: str, how: str) -> None:
        if self.log_requests:
            logger.info("Request %s %s.", request_id, how)

    def _run_output_handler(self) -> None:
        """Start the task that takes the engine's outputs, if it doesn't run yet."""
        if self.output_handler is None:
            self.output_handler = asyncio.create_task(self._handle_outputs())

    async def _handle_outputs(self) -> None:
        try:
            while True:
                await self._handle_step()
        except EngineDeadError as error:
            self.output_processor.propagate_error(error)
        except Exception as error:
            logger.exception("The output handler failed.")
            dead = EngineDeadError(f"The output handler failed: {error}")
            dead.__cause__ = error
            self.output_processor.propagate_error(dead)

    async def _handle_step(self) -> None:
        outputs = await self.engine_core.get_output_async()
        count = len(outputs.outputs)
        iteration_stats = IterationStats() if self.log_stats and count else None
        for start in range(0, count, _OUTPUT_CHUNK):
            if start:
                await asyncio.sleep(0)
            processed = self.output_processor.process_outputs(
                outputs.outputs[start : start + _OUTPUT_CHUNK], outputs.timestamp, iteration_stats
            )
            assert not processed.request_outputs, "every request here has a queue"
            if processed.reqs_to_abort:
                await self.engine_core.abort_requests_async(processed.reqs_to_abort)
        if self.logger_manager is not None:
            self.logger_manager.record(outputs.scheduler_stats, iteration_stats)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End requests by the ids given to `generate`; each gets a last output, reason abort.

        `internal`: the ids are the engine's own. Unknown ids, and a dead engine, are no error.
        """
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await self.engine_core.abort_requests_async(
            self.output_processor.abort_requests(request_ids, internal)
        )

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine; requests in flight get `timeout` seconds, then EngineDeadError.

        May be called twice, from any thread, with or without a loop. Blocks until the engine has
        ended.
        """
        self.engine_core.shutdown(timeout)
        handler = self.output_handler
        if handler is not None and not handler.done():
            loop = handler.get_loop()
            if loop.is_closed():
                return
            loop.call_soon_threadsafe(self._end_output_handler)

    def _end_output_handler(self) -> None:
        """Runs in the loop after what the engine still had to say has been delivered there."""
        asyncio.get_running_loop().call_soon(self._drop_output_handler)

    def _drop_output_handler(self) -> None:
        handler = self.output_handler
        if handler is not None and not handler.done():
            handler.cancel()
            self.output_processor.propagate_error(self.dead_error)

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None with skip_tokenizer_init."""
        return self.tokenizer

    async def check_health(self) -> None:
        """Raise EngineDeadError if requests cannot be served."""
        if self.errored:
            raise self.dead_error

    async def do_log_stats(self) -> None:
        """Let every logger write its line now."""
        if self.logger_manager is not None:
            self.logger_manager.log()

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empty the prefix cache; False if running requests still hold blocks."""
        self._run_output_handler()
        return await self.engine_core.reset_prefix_cache_async(
            reset_running_requests, reset_connector
        )

    async def pause_generation(
        self,
        *,
        mode: PauseMode = "abort",
        wait_for_inflight_requests: bool | None = None,
        clear_cache: bool = True,
    ) -> None:
        """Stop generating: end the requests in flight (abort), let them finish (wait) or freeze
        them (keep). New requests queue up until `resume_generation`.

        `wait_for_inflight_requests=True` is the older way to say mode "wait". `clear_cache`: empty
        the prefix cache as well, for new weights.
        """
        if wait_for_inflight_requests:
            mode = "wait"
        self._run_output_handler()
        await self.engine_core.pause_scheduler_async(mode, clear_cache)
        # Outputs of the steps before the pause have arrived; let their readers have them first.
        await asyncio.sleep(_OUTPUTS_SETTLE_S)

    async def resume_generation(self) -> None:
        """Go on after a pause."""
        self._run_output_handler()
        await self.engine_core.resume_scheduler_async()

    async def is_paused(self) -> bool:
        """Whether a pause is in force."""
        self._run_output_handler()
        return await self.engine_core.is_scheduler_paused_async()

    async def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker by name, or a function on every worker."""
        self._run_output_handler()
        return await self.engine_core.collective_rpc_async(method, timeout, args, kwargs)

    @property
    def is_running(self) -> bool:
        """Whether outputs are taken from the engine, or will be once there is a request."""
        return self.output_handler is None or not self.output_handler.done()

    @property
    def is_stopped(self) -> bool:
        """Whether requests cannot be served any more."""
        return self.errored

    @property
    def errored(self) -> bool:
        """Whether the engine or the output handler has ended."""
        return not self.engine_core.is_alive or not self.is_running

    @property
    def dead_error(self) -> EngineDeadError:
        """What callers get once `errored`; names the cause."""
        return self.engine_core.dead_error or EngineDeadError()

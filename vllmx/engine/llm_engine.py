# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/engine/llm_engine.py @ v0.25.0
"""The synchronous front end: requests in, one `step` at a time, RequestOutputs out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllmx.engine import EngineCoreRequest
from vllmx.engine.core_client import EngineCoreClient, SyncEngineCoreClient
from vllmx.engine.executor import Executor
from vllmx.engine.front import EngineFront, fan_out, make_logger_manager
from vllmx.engine.input_processor import PromptType
from vllmx.engine.input_processor import prompt_text as text_of
from vllmx.exceptions import UserError
from vllmx.metrics.stats import IterationStats
from vllmx.model_loader.tokenizer import Tokenizer
from vllmx.outputs import RequestOutput
from vllmx.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllmx.config import VllmConfig
    from vllmx.engine.arg_utils import EngineArgs
    from vllmx.metrics.loggers import StatLoggerFactory
    from vllmx.metrics.reader import Metric


class LLMEngine(EngineFront):
    """Owns the engine core and both ends of its front: input and output processor."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        log_stats: bool,
        stat_loggers: list[StatLoggerFactory] | None = None,
    ) -> None:
        """Finds the model and loads it. Raises UserError for what the config or the model lacks."""
        super().__init__(vllm_config, log_stats)
        client = EngineCoreClient.make_client(
            multiprocess_mode=bool(vllm_config.parallel_config.enable_multiprocessing),
            asyncio_mode=False,
            vllm_config=vllm_config,
            executor_class=executor_class,
            log_stats=log_stats,
        )
        assert isinstance(client, SyncEngineCoreClient)
        self.engine_core = client
        self.logger_manager = make_logger_manager(vllm_config, log_stats, stat_loggers)
        self._last_log_time = time.monotonic()

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: VllmConfig,
        stat_loggers: list[StatLoggerFactory] | None = None,
        disable_log_stats: bool = False,
    ) -> LLMEngine:
        """The engine of a config, with the executor that it names."""
        return cls(
            vllm_config,
            Executor.get_class(vllm_config),
            log_stats=not disable_log_stats,
            stat_loggers=stat_loggers,
        )

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: Any = None,
        stat_loggers: list[StatLoggerFactory] | None = None,
    ) -> LLMEngine:
        """The engine that `engine_args` describes; they are left as they are."""
        config = engine_args.create_engine_config(usage_context)
        return cls.from_vllm_config(
            config, stat_loggers, disable_log_stats=not config.observability_config.log_stats
        )

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer; ValueError with skip_tokenizer_init."""
        return self.input_processor.get_tokenizer()

    def get_num_unfinished_requests(self) -> int:
        """Requests that have not finished; each of n answers counts."""
        return self.output_processor.get_num_unfinished_requests()

    def has_unfinished_requests(self) -> bool:
        """Whether there is anything to step for."""
        return self.output_processor.has_unfinished_requests()

    def add_request(
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
    ) -> str:
        """Check and queue a request; returns the unique id made of `request_id`.

        Raises ValueError for a bad request, which leaves the engine as it was. `prompt_text` is
        the text of a prompt that comes as an EngineCoreRequest.
        """
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {type(request_id)}")
        if isinstance(prompt, EngineCoreRequest):
            request, text = prompt, prompt_text
        else:
            request = self.input_processor.process_inputs(
                request_id,
                prompt,
                params,
                arrival_time,
                lora_request,
                tokenization_kwargs,
                trace_headers,
                priority,
            )
            text = text_of(prompt)
        self.input_processor.assign_request_id(request)
        unique_id = request.request_id
        try:
            for child, parent, index in fan_out(request):
                self.output_processor.add_request(child, text, parent, index)
                self.engine_core.add_request(child)
        except BaseException:
            self.abort_request([unique_id], internal=True)
            raise
        return unique_id

    def abort_request(self, request_ids: Iterable[str], internal: bool = False) -> None:
        """End requests by the caller's ids, or by those of `add_request` with `internal`.

        They have no further output. Unknown ids are passed over.
        """
        self.engine_core.abort_requests(self.output_processor.abort_requests(request_ids, internal))

    def abort_all(self) -> None:
        """End every request, without outputs."""
        self.abort_request(list(self.output_processor.external_req_ids))

    def step(self) -> list[RequestOutput]:
        """One step of the engine core; returns what it brought for the callers."""
        try:
            outputs = self.engine_core.get_output()
        except BaseException:
            self.abort_all()  # nothing more will come of them
            raise
        iteration_stats = IterationStats() if self.log_stats and outputs.outputs else None
        processed = self.output_processor.process_outputs(
            outputs.outputs, outputs.timestamp, iteration_stats
        )
        if processed.reqs_to_abort:
            self.engine_core.abort_requests(processed.reqs_to_abort)
        if self.logger_manager is not None and outputs.scheduler_stats is not None:
            # Even of a step without outputs: what it counted is not counted again.
            self.logger_manager.record(outputs.scheduler_stats, iteration_stats)
            self._log_stats_with_interval()
        return processed.request_outputs

    def _log_stats_with_interval(self) -> None:
        now = time.monotonic()
        if now - self._last_log_time >= self.vllm_config.observability_config.log_stats_interval:
            self._last_log_time = now
            self.do_log_stats()

    def get_metrics(self) -> list[Metric]:
        """The engine's metrics as they stand; UserError where no statistics are kept."""
        if self.logger_manager is None:
            raise UserError(
                "get_metrics: no statistics are kept; make the engine with disable_log_stats=False."
            )
        from vllmx.metrics.reader import get_metrics_snapshot

        return get_metrics_snapshot(self.logger_manager.registry)

    def do_log_stats(self) -> None:
        """Let every logger write its line now."""
        if self.logger_manager is not None:
            self.logger_manager.log()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empty the prefix cache; False if running requests still hold blocks."""
        return self.engine_core.reset_prefix_cache(reset_running_requests, reset_connector)

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker by name, or a function on every worker."""
        return self.engine_core.collective_rpc(method, timeout, args, kwargs)

    def shutdown(self) -> None:
        """Stop the workers and free what they hold."""
        self.engine_core.shutdown()

# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/engine/core.py @ v0.25.0
"""The engine core: schedule, execute, update, again and again."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllmx.core.block_hash import (
    get_hash_fn_by_name,
    get_request_block_hasher,
    init_none_hash,
)
from vllmx.core.interface import PauseState, SchedulerInterface
from vllmx.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllmx.core.output import AsyncModelRunnerOutput, ModelRunnerOutput, SchedulerOutput
from vllmx.engine import EngineCoreOutputs, EngineCoreRequest, PauseMode
from vllmx.engine.executor import Executor
from vllmx.engine.startup import (
    get_scheduler_cls,
    initialize_kv_caches,
    resolve_scheduler_limits,
)
from vllmx.request import Request, RequestStatus
from vllmx.structured_output.manager import StructuredOutputManager

if TYPE_CHECKING:
    from vllmx.config import VllmConfig

logger = logging.getLogger(__name__)


class EngineCore:
    """Owns the scheduler and, through an executor, the model."""

    def __init__(
        self, vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool
    ) -> None:
        """Load the model and size the KV cache, which fills in what `vllm_config` left open."""
        self.vllm_config = vllm_config
        self.log_stats = log_stats
        resolve_scheduler_limits(vllm_config)
        self.structured_output_manager = StructuredOutputManager(vllm_config)
        self.model_executor = executor_class(vllm_config)
        try:
            self.kv_cache_config = initialize_kv_caches(vllm_config, self.model_executor)
            self.block_size, self.hash_block_size = resolve_kv_cache_block_sizes(
                self.kv_cache_config, vllm_config
            )
            self.scheduler = self._make_scheduler()
            self.structured_output_manager.prepare()
        except BaseException:
            self.model_executor.shutdown()
            raise

        self.request_block_hasher: Callable[[Request], list[Any]] | None = None
        if vllm_config.cache_config.enable_prefix_caching:
            hash_fn = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
            init_none_hash(hash_fn)
            self.request_block_hasher = get_request_block_hasher(self.hash_block_size, hash_fn)

        self.use_spec_decode = vllm_config.speculative_config is not None
        # With async scheduling one step is planned while another is on the device.
        self.batch_queue_size = vllm_config.max_concurrent_batches
        self.batch_queue: deque[tuple[SchedulerOutput, Any]] | None = None
        if self.batch_queue_size > 1:
            self.batch_queue = deque()

    def _make_scheduler(self, **kwargs: Any) -> SchedulerInterface:
        scheduler = get_scheduler_cls(self.vllm_config.scheduler_config)(
            vllm_config=self.vllm_config,
            kv_cache_config=self.kv_cache_config,
            structured_output_manager=self.structured_output_manager,
            block_size=self.block_size,
            hash_block_size=self.hash_block_size,
            log_stats=self.log_stats,
            **kwargs,
        )
        connector = scheduler.get_kv_connector()
        if connector is not None:
            handshakes = self.collective_rpc("get_kv_connector_handshake_metadata")
            known = {(0, rank): data for rank, data in enumerate(handshakes) if data is not None}
            if known:
                connector.set_xfer_handshake_metadata_pp_aware(known)
        return scheduler

    # ------------------------------------------------------------------ requests

    @staticmethod
    def check_request(request: EngineCoreRequest) -> None:
        """ValueError for what no engine core does; clients ask before they send a request."""
        params = request.sampling_params
        if params is None or request.pooling_params is not None:
            raise ValueError("This engine generates text; pooling_params are not supported.")
        if request.mm_features or request.prompt_embeds is not None:
            what = "multi_modal_data" if request.mm_features else "prompt_embeds"
            raise ValueError(f"{what}: no model of vllmx takes them; send text or token ids.")
        if request.resumable:
            raise ValueError(
                "resumable is not supported: no front end merges the answers to the pieces of a "
                "prompt. Send the whole conversation as one prompt; its begin is in the cache."
            )

    def preprocess_add_request(self, request: EngineCoreRequest) -> tuple[Request, int]:
        """Turn a front end's message into a Request and hash its blocks; also its wave.

        May run in any thread. ValueError for what this engine does not do.
        """
        self.check_request(request)
        prepared = Request.from_engine_core_request(
            request, self.request_block_hasher, self.hash_block_size
        )
        self.structured_output_manager.grammar_init(prepared)
        # For the requests that bring further answers to the same prompt.
        request.block_hashes = prepared.block_hashes.copy()
        return prepared, request.current_wave

    def add_request(self, request: Request, request_wave: int = 0) -> None:
        """Hand a request to the scheduler; waves are of data parallelism."""
        if not isinstance(request.request_id, str):
            raise TypeError(f"request_id must be a string, got {type(request.request_id)}")
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests at once; ids that are unknown or have ended are ignored."""
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def _process_aborts_queue(self) -> None:
        """Take in the aborts that came while the model ran; nobody can send any here."""

    # ------------------------------------------------------------------ steps

    @property
    def step_fn(self) -> Callable[[], tuple[dict[int, EngineCoreOutputs], bool]]:
        """`step`, or `step_with_batch_queue` with async scheduling."""
        return self.step if self.batch_queue is None else self.step_with_batch_queue

    def step(self) -> tuple[dict[int, EngineCoreOutputs], bool]:
        """Schedule, execute, update: outputs by client, and whether the model ran."""
        if not self.scheduler.has_requests():
            return {}, False
        scheduler_output = self.scheduler.schedule()
        model_output = self._wait_for(scheduler_output, self._execute(scheduler_output))
        self._process_aborts_queue()
        outputs = self.scheduler.update_from_output(scheduler_output, model_output)
        model_executed = scheduler_output.total_num_scheduled_tokens > 0
        if self.use_spec_decode:
            self.post_step(model_executed)
        return outputs, model_executed

    def post_step(self, model_executed: bool) -> None:
        """Hand the drafts that followed a step to the scheduler. With async scheduling they stay
        with the worker, and the scheduler plans with placeholders."""
        if model_executed and self.batch_queue is None:
            drafts = self.model_executor.take_draft_token_ids()
            if drafts is not None:
                self.scheduler.update_draft_token_ids(drafts)

    def step_with_batch_queue(self) -> tuple[dict[int, EngineCoreOutputs], bool]:
        """Like `step`, but the results that are taken in are those of an earlier batch.

        Putting a batch on the device goes before waiting for one: nothing is returned as long as
        the queue has room and there is more to schedule.
        """
        batch_queue = self.batch_queue
        assert batch_queue is not None
        model_executed = False
        # A step that can be sampled only when the tokens of the one before it are known.
        deferred: SchedulerOutput | None = None
        if self.scheduler.has_requests():
            scheduler_output = self.scheduler.schedule()
            result = self._execute(scheduler_output)
            model_executed = scheduler_output.total_num_scheduled_tokens > 0
            if result is None:
                deferred = scheduler_output
            else:
                batch_queue.append((scheduler_output, result))
                if len(batch_queue) < self.batch_queue_size and (
                    model_executed or self.scheduler.has_requests()
                ):
                    return {}, model_executed
        if not batch_queue:
            return {}, False
        scheduler_output, result = batch_queue.popleft()
        model_output = self._wait_for(scheduler_output, result)
        self._process_aborts_queue()
        outputs = self.scheduler.update_from_output(scheduler_output, model_output)
        if deferred is not None:
            batch_queue.append((deferred, self._sample_deferred(deferred)))
        return outputs, model_executed

    def _execute(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Launch a step; the result may still be on its way. None if it is not sampled yet, as its
        bitmask depends on tokens that are not known."""
        try:
            output = self.model_executor.execute_model(scheduler_output)
            if output is None and not scheduler_output.pending_structured_output_tokens:
                output = self._sample(scheduler_output)
            return output
        except Exception:
            self._log_failed_step(scheduler_output)
            raise

    def _sample(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        grammar_output = self.scheduler.get_grammar_bitmask(scheduler_output)
        return self.model_executor.sample_tokens(grammar_output)

    def _sample_deferred(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Sample a step that was executed and had to wait, with the drafts that its grammars
        allow."""
        try:
            if self.use_spec_decode:
                drafts = self.model_executor.take_draft_token_ids()
                if drafts is not None:
                    self.scheduler.update_draft_token_ids_in_output(drafts, scheduler_output)
            return self._sample(scheduler_output)
        except Exception:
            self._log_failed_step(scheduler_output)
            raise

    def _wait_for(self, scheduler_output: SchedulerOutput, result: Any) -> ModelRunnerOutput:
        if isinstance(result, ModelRunnerOutput):
            return result
        try:
            return result.get_output()
        except Exception:
            self._log_failed_step(scheduler_output)
            raise

    def _log_failed_step(self, scheduler_output: SchedulerOutput) -> None:
        num_running, num_waiting = self.scheduler.get_request_counts()
        logger.error(
            "A step of %d tokens failed (%d new and %d known requests; %d run, %d wait): %s",
            scheduler_output.total_num_scheduled_tokens,
            len(scheduler_output.scheduled_new_reqs),
            scheduler_output.scheduled_cached_reqs.num_reqs,
            num_running,
            num_waiting,
            scheduler_output.num_scheduled_tokens,
        )

    # ------------------------------------------------------------------ control

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empty the prefix cache; False if running requests still hold blocks."""
        return self.scheduler.reset_prefix_cache(reset_running_requests, reset_connector)

    def start_over(self) -> None:
        """Forget all requests and what the KV cache holds, after a step that was interrupted.

        Blocks may be known by prefixes that were never computed, and the interruption may have
        hit scheduler and runner halfway through any change, so both begin anew.
        """
        pause_state = self.scheduler.pause_state
        connector = self.scheduler.get_kv_connector()
        if connector is not None:
            connector.shutdown()
        if self.vllm_config.kv_events_config is None:
            self.scheduler = self._make_scheduler()
        else:
            # Its socket and the numbers of its messages go on; listeners hear of the empty cache.
            publisher = self.scheduler.kv_event_publisher
            self.scheduler = self._make_scheduler(kv_event_publisher=publisher)
            self.scheduler.reset_prefix_cache()
        self.scheduler.set_pause_state(pause_state)
        if self.batch_queue is not None:
            self.batch_queue.clear()
        self.model_executor.collective_rpc("forget_requests")

    def pause_scheduler(self, mode: PauseMode = "abort", clear_cache: bool = True) -> Any:
        """Stop scheduling: end the requests in flight (abort) or freeze them (keep).

        New requests queue up until `resume_scheduler`. Mode "wait" needs a busy loop that lets the
        running ones finish, so only EngineCoreProc has it.
        """
        if mode not in ("keep", "abort", "wait"):
            raise ValueError(f"Invalid pause mode: {mode}")
        if mode == "wait":
            raise ValueError("'wait' mode can't be used in inproc-engine mode")
        if mode == "abort":
            self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self.scheduler.set_pause_state(
            PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW
        )
        if clear_cache:
            self.reset_prefix_cache(reset_running_requests=True)
        return None

    def resume_scheduler(self) -> None:
        """Go on, with the requests that queued up as well."""
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def is_scheduler_paused(self) -> bool:
        """Whether anything is paused."""
        return self.scheduler.pause_state != PauseState.UNPAUSED

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker."""
        return self.model_executor.collective_rpc(method, timeout, args, kwargs)

    def check_health(self) -> None:
        """Raise if a worker cannot serve any more."""
        self.model_executor.check_health()

    def shutdown(self) -> None:
        """Stop the workers; nobody is told."""
        self.model_executor.shutdown()
        self.scheduler.shutdown()
        self.structured_output_manager.clear_backend()

# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/sched/scheduler.py @ v0.25.0
"""What the scheduler tells of a request after a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx.core.output import ModelRunnerOutput
from vllmx.engine import EngineCoreOutput, EngineCoreOutputs
from vllmx.metrics.stats import SchedulerStats
from vllmx.request import Request, RequestStatus


def make_output(
    request: Request,
    new_token_ids: list[int],
    req_index: int = -1,
    model_runner_output: ModelRunnerOutput | None = None,
) -> EngineCoreOutput:
    """All there is to tell of `request`, row `req_index` of `model_runner_output` if there is one.

    Takes the request's events and statistics out of it.
    """
    request_id = request.request_id
    output = EngineCoreOutput(request_id, new_token_ids)
    if request.status > RequestStatus.PREEMPTED:
        output.finish_reason = request.get_finished_reason()
        output.stop_reason = request.stop_reason
    if request.events:
        output.events = request.take_events()
    if request.trace_headers is not None:
        output.trace_headers = request.trace_headers
    is_first = request.prefill_stats is not None
    if is_first:
        output.prefill_stats = request.take_prefill_stats()
    if model_runner_output is None:
        return output
    if is_first:
        # A prompt that is computed again after a preemption brings its log-probs again.
        prompt_logprobs = model_runner_output.prompt_logprobs_dict.get(request_id)
        output.new_prompt_logprobs_tensors = prompt_logprobs
    logprobs = model_runner_output.logprobs
    if logprobs is not None and request.sampling_params.num_logprobs is not None:
        output.new_logprobs = logprobs.slice_request(req_index, len(new_token_ids))
    if model_runner_output.num_nans_in_logits is not None:
        num_nans = model_runner_output.num_nans_in_logits.get(request_id, 0)
        output.num_nans_in_logits = num_nans
    return output


def add_transfer_params(
    outputs: Mapping[int, list[EngineCoreOutput]], transfer_params: dict[str, dict[str, Any]]
) -> None:
    """Add to the outputs of ended requests, by client, what their callers need for a KV transfer,
    by request id."""
    for client_outputs in outputs.values():
        for output in client_outputs:
            output.kv_transfer_params = transfer_params.get(output.request_id)


def by_client(
    outputs: dict[int, list[EngineCoreOutput]],
    finished_req_ids: dict[int, set[str]] | None,
    stats: SchedulerStats | None,
) -> dict[int, EngineCoreOutputs]:
    """The outputs by client, with the requests that ended (they are taken out of
    `finished_req_ids`) and the step's statistics."""
    engine_core_outputs = {
        client_index: EngineCoreOutputs(outputs=client_outputs)
        for client_index, client_outputs in outputs.items()
    }
    if finished_req_ids:
        for client_index, finished in finished_req_ids.items():
            if client_index not in engine_core_outputs:
                engine_core_outputs[client_index] = EngineCoreOutputs()
            engine_core_outputs[client_index].finished_requests = finished
        finished_req_ids.clear()
    if stats is not None:
        # One client is enough, and there must be one even if nobody has an output.
        if not engine_core_outputs:
            engine_core_outputs[0] = EngineCoreOutputs()
        next(iter(engine_core_outputs.values())).scheduler_stats = stats
    return engine_core_outputs

# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/engine/parallel_sampling.py @ v0.25.0
"""Several answers to one prompt: n requests for the engine, one for the caller."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from vllmx.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from vllmx.engine import EngineCoreRequest
    from vllmx.metrics.stats import IterationStats
    from vllmx.outputs import CompletionOutput


class ParentRequest:
    """The request that the caller made, and which of its children still run."""

    def __init__(self, request: EngineCoreRequest) -> None:
        assert request.external_req_id is not None
        assert request.sampling_params is not None
        self.request_id = request.request_id
        self.external_req_id = request.external_req_id
        self.sampling_params: SamplingParams = request.sampling_params
        self.child_requests: set[str] = set()
        self.max_num_generation_tokens = 0
        self._final_only = self.sampling_params.output_kind == RequestOutputKind.FINAL_ONLY
        # Answers by index, complete ones only; used where the caller gets them all at once.
        self.output_aggregator: dict[int, CompletionOutput] = {}
        self._shared_child_params: SamplingParams | None = None

    def _get_child_sampling_params(self, index: int) -> SamplingParams:
        if self._shared_child_params is not None:
            return self._shared_child_params
        params = copy(self.sampling_params)
        params.n = 1
        if self.sampling_params.seed is None:
            self._shared_child_params = params
        else:  # answer i is the same whatever n is, and no two are
            params.seed = self.sampling_params.seed + index
        return params

    def get_child_info(self, index: int) -> tuple[str, SamplingParams]:
        """Request id and parameters of answer `index`, which now counts as running."""
        child_request_id = f"{index}_{self.request_id}"
        self.child_requests.add(child_request_id)
        return child_request_id, self._get_child_sampling_params(index)

    @property
    def n(self) -> int:
        """Number of answers."""
        return self.sampling_params.n

    def get_outputs(
        self, child_request_id: str, completion_output: CompletionOutput
    ) -> tuple[list[CompletionOutput], bool]:
        """What to pass on now that a child has new output, and whether all have finished.

        A stream passes each output on; with FINAL_ONLY nothing goes out before the last answer.
        """
        seen_before = False
        if completion_output.finished():
            seen_before = child_request_id not in self.child_requests
            self.child_requests.discard(child_request_id)
        finished = not self.child_requests
        if not self._final_only:
            return ([] if seen_before else [completion_output]), finished
        self.output_aggregator[completion_output.index] = completion_output
        if not finished:
            return [], False
        return [output for _, output in sorted(self.output_aggregator.items())], True

    def observe_num_generation_tokens(self, num_generation_tokens: int) -> int:
        """The longest answer so far, in tokens, this one included."""
        self.max_num_generation_tokens = max(num_generation_tokens, self.max_num_generation_tokens)
        return self.max_num_generation_tokens

    @staticmethod
    def observe_finished_request(
        parent_req: ParentRequest | None,
        iteration_stats: IterationStats,
        num_generation_tokens: int,
    ) -> None:
        """Record n and the longest answer once the last child (or an only child) has finished."""
        n = 1
        if parent_req is not None:
            n = parent_req.n
            num_generation_tokens = parent_req.observe_num_generation_tokens(num_generation_tokens)
            if parent_req.child_requests:
                return
        iteration_stats.max_num_generation_tokens_iter.append(num_generation_tokens)
        iteration_stats.n_params_iter.append(n)

# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/sched/output.py, vllm/v1/outputs.py @ v0.25.0
"""The contract between scheduler and model runner: everything that crosses it, and nothing else.

`core/` does not import torch, so what a runner hands back is numpy or plain lists.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from vllmx.core.kv_events import KVConnectorKVEvents
    from vllmx.ec_transfer.base import ECConnectorMetadata
    from vllmx.kv_transfer.base import KVConnectorMetadata, KVConnectorWorkerMetadata
    from vllmx.kv_transfer.metrics import KVConnectorStats
    from vllmx.multimodal import MultiModalFeatureSpec
    from vllmx.request import Request
    from vllmx.sampling_params import SamplingParams


@dataclass
class NewRequestData:
    """A request that a runner sees for the first time, or again after a preemption.

    `prefill_token_ids` is the prompt plus what was already generated: a resumed request is sent
    as a new one, as Model Runner V2 expects.
    """

    req_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[MultiModalFeatureSpec]
    sampling_params: SamplingParams | None
    pooling_params: Any | None
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    lora_request: Any | None = None
    prompt_embeds: Any | None = None
    prompt_is_token_ids: list[bool] | None = None
    prefill_token_ids: list[int] | None = None

    @classmethod
    def from_request(
        cls,
        request: Request,
        block_ids: tuple[list[int], ...],
        prefill_token_ids: list[int] | None = None,
    ) -> NewRequestData:
        """Collect from `request` what a runner needs; `block_ids` holds one list a KV group."""
        return cls(
            req_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            mm_features=request.mm_features,
            sampling_params=request.sampling_params,
            pooling_params=request.pooling_params,
            block_ids=block_ids,
            num_computed_tokens=request.num_computed_tokens,
            lora_request=request.lora_request,
            prompt_embeds=request.prompt_embeds,
            prompt_is_token_ids=request.prompt_is_token_ids,
            prefill_token_ids=prefill_token_ids,
        )

    def __repr__(self) -> str:
        return self._describe(
            f"prompt_token_ids={self.prompt_token_ids}, prefill_token_ids={self.prefill_token_ids}"
        )

    def anon_repr(self) -> str:
        """The repr with lengths in place of the prompt's tokens."""
        prompt, prefill = (
            None if ids is None else len(ids)
            for ids in (self.prompt_token_ids, self.prefill_token_ids)
        )
        return self._describe(f"prompt_token_ids_len={prompt}, prefill_token_ids_len={prefill}")

    def _describe(self, tokens: str) -> str:
        shape = None if self.prompt_embeds is None else self.prompt_embeds.shape
        return (
            f"NewRequestData(req_id={self.req_id}, {tokens}, mm_features={self.mm_features}, "
            f"sampling_params={self.sampling_params}, block_ids={self.block_ids}, "
            f"num_computed_tokens={self.num_computed_tokens}, "
            f"lora_request={self.lora_request}, prompt_embeds_shape={shape})"
        )


@dataclass
class CachedRequestData:
    """What changed for the requests that the runner already holds, column by column.

    `new_block_ids[i]` is None where request i got no new block; otherwise one list a KV group.
    """

    req_ids: list[str]
    resumed_req_ids: set[str]
    new_token_ids: list[list[int]]
    all_token_ids: dict[str, list[int]]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]
    num_output_tokens: list[int]

    @property
    def num_reqs(self) -> int:
        """Number of requests in this diff."""
        return len(self.req_ids)

    @classmethod
    def make_empty(cls) -> CachedRequestData:
        """The diff of a step that touches no known request."""
        return cls([], set(), [], {}, [], [], [])


@dataclass
class SchedulerOutput:
    """The decisions of one `Scheduler.schedule`."""

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]
    scheduled_encoder_inputs: dict[str, list[int]]
    num_common_prefix_blocks: list[int]
    finished_req_ids: set[str]
    free_encoder_mm_hashes: list[str]
    preempted_req_ids: set[str] | None = None
    has_structured_output_requests: bool = False
    pending_structured_output_tokens: bool = False
    num_invalid_spec_tokens: dict[str, int] | None = None
    kv_connector_metadata: KVConnectorMetadata | None = None
    ec_connector_metadata: ECConnectorMetadata | None = None
    new_block_ids_to_zero: list[int] | None = None
    num_spec_tokens_to_schedule: int = 0

    @classmethod
    def make_empty(cls) -> SchedulerOutput:
        """A step that schedules nothing."""
        return cls(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData.make_empty(),
            num_scheduled_tokens={},
            total_num_scheduled_tokens=0,
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=[],
            finished_req_ids=set(),
            free_encoder_mm_hashes=[],
        )


@dataclass
class GrammarOutput:
    """Token bitmask of the structured-output requests of one step.

    `grammar_bitmask` is int32 [len(structured_output_request_ids), ceil(vocab_size / 32)].
    """

    structured_output_request_ids: list[str]
    grammar_bitmask: np.ndarray


class LogprobsLists(NamedTuple):
    """Log-probabilities of one step on the host; column 0 is the sampled token.

    logprob_token_ids: int32 [num_positions, max_num_logprobs + 1]
    logprobs: float32, same shape; sampled_token_ranks: int32 [num_positions], 1 is the best.
    cu_num_generated_tokens: where request i starts, or None with one position a request.
    """

    logprob_token_ids: np.ndarray
    logprobs: np.ndarray
    sampled_token_ranks: np.ndarray
    cu_num_generated_tokens: list[int] | None = None

    def slice_request(self, req_idx: int, num_positions: int) -> LogprobsLists:
        """The rows of request `req_idx`, `num_positions` of them."""
        if self.cu_num_generated_tokens is not None:
            req_idx = self.cu_num_generated_tokens[req_idx]
        end = req_idx + num_positions
        return LogprobsLists(
            self.logprob_token_ids[req_idx:end],
            self.logprobs[req_idx:end],
            self.sampled_token_ranks[req_idx:end],
        )


@dataclass
class KVConnectorOutput:
    """What the workers' KV connectors report of a step."""

    finished_sending: set[str] | None = None
    """Ended requests whose blocks are sent."""
    finished_recving: set[str] | None = None
    """Requests whose load has ended, well or not."""
    kv_connector_stats: KVConnectorStats | None = None
    kv_cache_events: KVConnectorKVEvents | None = None
    kv_connector_worker_meta: KVConnectorWorkerMetadata | None = None
    invalid_block_ids: set[int] = field(default_factory=set)
    """Blocks whose load failed."""
    expected_finished_count: int = 0
    """Workers that must report a transfer before it has ended, if that has changed; else 0."""

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not (
            self.finished_sending
            or self.finished_recving
            or self.kv_connector_stats
            or self.kv_cache_events
            or self.invalid_block_ids
            or self.kv_connector_worker_meta
        )


@dataclass
class ECConnectorOutput:
    """What the workers' encoder-cache connectors report of a step."""

    finished_sending: set[str] | None = None
    """Ended requests whose encoder outputs are sent."""
    finished_recving: set[str] | None = None
    """Requests whose encoder outputs have been fetched in the background."""


@dataclass
class ModelRunnerOutput:
    """What a runner returns for one step. `sampled_token_ids[i]` is [] while i still prefills.

    `prompt_logprobs_dict` maps a request whose prompt is now complete to LogprobsLists over all
    prompt positions but the last (position p belongs to prompt token p + 1).
    """

    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]] = field(default_factory=list)
    logprobs: LogprobsLists | None = None
    prompt_logprobs_dict: dict[str, LogprobsLists | None] = field(default_factory=dict)
    pooler_output: list[Any] | None = None
    kv_connector_output: KVConnectorOutput | None = None
    ec_connector_output: ECConnectorOutput | None = None
    num_nans_in_logits: dict[str, int] | None = None
    cudagraph_stats: Any | None = None
    routed_experts: Any | None = None

    @classmethod
    def with_kv_conn_output_only(
        cls, kv_connector_output: KVConnectorOutput | None
    ) -> ModelRunnerOutput:
        """The output of a step without tokens."""
        if kv_connector_output is None or kv_connector_output.is_empty():
            return EMPTY_MODEL_RUNNER_OUTPUT
        return cls([], {}, kv_connector_output=kv_connector_output)


class AsyncModelRunnerOutput(ABC):
    """A ModelRunnerOutput that may still be on its way from the device."""

    @abstractmethod
    def get_output(self) -> ModelRunnerOutput:
        """Wait for it. Called once, in the order of the steps."""


@dataclass
class DraftTokenIds:
    """Proposed tokens of a drafter, `draft_token_ids[i]` for `req_ids[i]`."""

    req_ids: list[str]
    draft_token_ids: list[list[int]]


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput(req_ids=[], req_id_to_index={})

# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/attention/backend.py @ v0.25.0
"""What an attention backend is: a cache layout, a metadata builder, and the computation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from vllmx.ir.op import OpContext

NO_SINKS = "has no attention sinks"
"""Why a backend refuses layers with a score beside those of the keys."""
NO_CHUNKS = "has no chunked local attention"
"""Why a backend refuses layers whose tokens see nothing of other chunks than their own."""

NO_SLOPES = "has no slopes of the scores (ALiBi)"
"""Why a backend refuses layers that weigh keys by their distance."""


@dataclass
class CommonAttentionMetadata:
    """The batch of one step, as every backend of one KV cache group gets it.

    query_start_loc: int32 [num_reqs + 1]; seq_lens: int32 [num_reqs], cached plus new tokens;
    block_table_tensor: int32 [num_reqs, max_blocks]; slot_mapping: int64 [num_actual_tokens].
    The `_np` fields hold the same numbers on the host. Requests with one new token come first.

    A group of recurrent states has one block of each request in its table, int32 [num_reqs, 1],
    and no slots. has_initial_state: bool [num_reqs], which requests have computed tokens; None
    where the device has not worked it out. shares_new_blocks: a request may read, of the tokens
    before its own, some that others bring in this step.
    """

    query_start_loc: Tensor
    query_start_loc_np: np.ndarray
    seq_lens: Tensor
    seq_lens_np: np.ndarray
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    has_initial_state: Tensor | None = None
    shares_new_blocks: bool = False


class AttentionMetadataBuilder(ABC):
    """Turns the batch into what this backend's `run` wants, once a step and KV cache group."""

    plans_replays: ClassVar[bool] = False
    """Whether `plan_replay` does anything."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.device = device

    @abstractmethod
    def build(self, common: CommonAttentionMetadata) -> Any:
        """The backend's own metadata; it has `slot_mapping` beside what `run` needs."""

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> Any:
        """The same for a batch of decodes that is run once and then captured."""
        return self.build(common)

    def plan_replay(self, num_reqs: int, seq_lens: np.ndarray) -> None:  # noqa: B027
        """Get ready for a replay of the graph of `num_reqs` decodes, for a batch of these lengths.

        Called before each, where `plans_replays`.
        """


class AttentionBackend(ABC):
    """A way to attend over the paged cache; one file in vllmx/attention/backends each."""

    name: ClassVar[str]

    @staticmethod
    @abstractmethod
    def refusal(context: OpContext) -> bool | str:
        """True, or why calls with these facts (head_size, sliding_window, soft_cap, sinks,
        attention_chunk_size, alibi) can't run."""

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """The class that builds this backend's metadata."""

    @staticmethod
    @abstractmethod
    def run(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: Any,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Tensor:
        """Attention of query [num_tokens, num_heads, head_size] to the cache; same shape back.

        k_scale, v_scale: as of the op `paged_attention`. A backend that does not refuse the fact
        `sinks` or `attention_chunk_size` also takes that argument of the op, by name; one that does
        not refuse `alibi` takes `alibi_slopes`.
        """

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Shape of one layer's cache: key and value of a slot lie side by side."""
        return (num_blocks, block_size, 2, num_kv_heads, head_size)

    @classmethod
    def indexes_kv_by_block_stride(cls) -> bool:
        """Whether `run` can read a cache whose blocks lie further apart than their slots do."""
        return False

    @classmethod
    def supports_cudagraph(cls) -> bool:
        """Whether `run` on a batch of decodes may be recorded once and replayed for others: it
        takes lengths, tables and slots from the tensors of the metadata, which stay in place."""
        return False

    @classmethod
    def supports_mixed_cudagraph(cls) -> bool:
        """Whether the same is true of batches with prompts in them: the builder has
        `build_for_mixed_graph`."""
        return False

    @classmethod
    def joins_decode(cls) -> bool:
        """Whether op `qk_norm_rope_decode` may stand in for a step whose metadata says `joins`; it
        has slot_mapping, block_table, seq_lens and max_seq_len as well."""
        return False

    @classmethod
    def op_call(
        cls,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        sinks: Tensor | None = None,
        attention_chunk_size: int | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        """This backend as a provider of the op `paged_attention`: build the metadata, then run."""
        starts, lengths = query_start_loc.cpu().numpy(), seq_lens.cpu().numpy()
        common = CommonAttentionMetadata(
            query_start_loc=query_start_loc,
            query_start_loc_np=starts,
            seq_lens=seq_lens,
            seq_lens_np=lengths,
            num_reqs=len(lengths),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(np.diff(starts).max()),
            max_seq_len=int(lengths.max()),
            block_table_tensor=block_table,
            slot_mapping=torch.empty(0, dtype=torch.int64, device=query.device),
        )
        metadata = cls.get_builder_cls()(key_cache.shape[1], query.device).build(common)
        how = (scale, sliding_window, soft_cap, k_scale, v_scale)
        more: dict[str, Any] = {} if sinks is None else {"sinks": sinks}
        if attention_chunk_size is not None:
            more["attention_chunk_size"] = attention_chunk_size
        if alibi_slopes is not None:
            more["alibi_slopes"] = alibi_slopes
        return cls.run(query, key_cache, value_cache, metadata, *how, **more)

# SPDX-License-Identifier: Apache-2.0
"""Requests, groups and managers for the tests of the KV cache."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from vllmx.core.block_hash import get_request_block_hasher, init_none_hash, sha256
from vllmx.core.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllmx.core.kv_cache_manager import KVCacheManager
from vllmx.request import Request
from vllmx.sampling_params import SamplingParams

init_none_hash(sha256)

HEAD = {"num_kv_heads": 1, "head_size": 1, "dtype": "float32"}


def full(block_size: int, **kwargs: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, **(HEAD | kwargs))


def window(block_size: int, sliding_window: int, **kwargs: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size, sliding_window=sliding_window, **(HEAD | kwargs)
    )


def chunked(block_size: int, chunk: int, **kwargs: Any) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=block_size, attention_chunk_size=chunk, **(HEAD | kwargs)
    )


def mamba(block_size: int, mode: str = "none", num_speculative_blocks: int = 0) -> MambaSpec:
    return MambaSpec(
        block_size=block_size,
        shapes=((2, 3), (4,)),
        dtypes=("float32", "float16"),
        mamba_cache_mode=mode,
        num_speculative_blocks=num_speculative_blocks,
    )


def make_kv_request(
    request_id: str, tokens: list[int], hash_block_size: int = 4, **kwargs: Any
) -> Request:
    skip_reading = kwargs.pop("skip_reading_prefix_cache", False)
    request = Request(
        request_id=request_id,
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=64),
        pooling_params=None,
        block_hasher=get_request_block_hasher(hash_block_size, sha256),
        hash_block_size=hash_block_size,
        **kwargs,
    )
    request.skip_reading_prefix_cache = skip_reading
    return request


def make_manager(
    specs: list[KVCacheSpec],
    num_blocks: int = 32,
    hash_block_size: int | None = None,
    **kwargs: Any,
) -> KVCacheManager:
    """A manager with one group a spec; layers are called l0, l1, ..."""
    sizes = [spec.block_size for spec in specs]
    settings = {"max_model_len": 4096, "scheduler_block_size": math.lcm(*sizes)}
    groups = [KVCacheGroupSpec([f"l{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheManager(
        KVCacheConfig(num_blocks, [], groups),
        hash_block_size=hash_block_size or math.gcd(*sizes),
        **(settings | kwargs),
    )


def admit(manager: KVCacheManager, request: Request, num_tokens: int | None = None) -> int:
    """Look up, allocate and count `num_tokens` (all) as computed; returns the hit's length."""
    hits, num_hits = manager.get_computed_blocks(request)
    num_new = (num_tokens or request.num_tokens) - num_hits
    assert manager.allocate_slots(request, num_new, num_hits, hits) is not None
    request.num_computed_tokens = num_hits + num_new
    return num_hits


def mm_item(identifier: str, offset: int, length: int) -> SimpleNamespace:
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=identifier, mm_position=position)

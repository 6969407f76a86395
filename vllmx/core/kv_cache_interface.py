# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/kv_cache_interface.py @ v0.25.0
"""What a layer stores in the KV cache, and how the pool is cut into blocks.

Dtypes are names ("float32"), so that neither the scheduler nor a config needs torch.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum, StrEnum
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from vllmx.config import VllmConfig

DTYPE_SIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


def get_dtype_size(dtype: str) -> int:
    """Bytes of one element of `dtype`; ValueError for a name that is not known."""
    try:
        return DTYPE_SIZES[dtype]
    except KeyError:
        raise ValueError(
            f"Unknown KV cache dtype {dtype!r}: use one of {', '.join(DTYPE_SIZES)}."
        ) from None


def cdiv(a: int, b: int) -> int:
    """`a / b` rounded up."""
    return -(a // -b)


class KVQuantMode(IntEnum):
    """How keys and values are quantised in the cache."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4
    NVFP4 = 5

    @property
    def is_per_token_head(self) -> bool:
        """Whether each token and head has its own pair of float32 scales."""
        return self in _PER_TOKEN_HEAD

    @property
    def is_nvfp4(self) -> bool:
        """Whether data is packed as fp4 with one fp8 scale for 16 elements."""
        return self is KVQuantMode.NVFP4


_PER_TOKEN_HEAD = frozenset(
    {
        KVQuantMode.INT8_PER_TOKEN_HEAD,
        KVQuantMode.FP8_PER_TOKEN_HEAD,
        KVQuantMode.INT4_PER_TOKEN_HEAD,
    }
)


def get_kv_quant_mode(kv_cache_dtype: str) -> KVQuantMode:
    """The mode that a `cache.cache_dtype` name stands for; plain float names are NONE."""
    named = {
        "int4_per_token_head": KVQuantMode.INT4_PER_TOKEN_HEAD,
        "int8_per_token_head": KVQuantMode.INT8_PER_TOKEN_HEAD,
        "fp8_per_token_head": KVQuantMode.FP8_PER_TOKEN_HEAD,
        "nvfp4": KVQuantMode.NVFP4,
    }
    if kv_cache_dtype in named:
        return named[kv_cache_dtype]
    return KVQuantMode.FP8_PER_TENSOR if kv_cache_dtype.startswith("fp8") else KVQuantMode.NONE


def _stored_head_size(head_size: int, mode: KVQuantMode) -> int:
    """Elements that one head takes in the cache, packing and inline scales included."""
    if mode is KVQuantMode.NVFP4:
        return head_size // 2 + head_size // 16
    if mode is KVQuantMode.INT4_PER_TOKEN_HEAD:
        return head_size // 2
    return head_size


class KVCacheSpecKind(StrEnum):
    """Label of a spec in KV events."""

    FULL_ATTENTION = "full_attention"
    MLA_ATTENTION = "mla_attention"
    SLIDING_WINDOW = "sliding_window"
    SLIDING_WINDOW_MLA = "sliding_window_mla"
    MAMBA = "mamba"
    CHUNKED_LOCAL_ATTENTION = "chunked_local_attention"
    SINK_FULL_ATTENTION = "sink_full_attention"
    ENCODER_ONLY_ATTENTION = "encoder_only_attention"
    CROSS_ATTENTION = "cross_attention"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class KVCacheSpec:
    """KV cache format of one layer. A page is one layer's share of a block, in bytes."""

    kind: ClassVar[KVCacheSpecKind] = KVCacheSpecKind.UNKNOWN
    """Label in KV events."""
    block_size: int
    """Tokens in a block."""

    @property
    def page_size_bytes(self) -> int:
        """Bytes of a page, padding included."""
        raise TypeError(f"{type(self).__name__} does not define page_size_bytes")

    @property
    def storage_block_size(self) -> int:
        """Rows that a page holds; equal to `block_size` unless tokens are compressed."""
        return self.block_size

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Most bytes that one request of `max_model_len` tokens takes in this layer."""
        raise TypeError(f"{type(self).__name__} does not define max_memory_usage_bytes")

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """This spec with another block size."""
        return replace(self, block_size=block_size)

    @classmethod
    def can_merge(cls, specs: Sequence[KVCacheSpec]) -> bool:
        """Whether layers with these specs can share one block table and one spec."""
        return all(spec == specs[0] for spec in specs[1:])

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """The one spec of a group whose layers have `specs`."""
        assert cls.can_merge(specs), "All layers in the same KV cache group must be the same."
        return copy.deepcopy(specs[0])

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Whether all of `kv_cache_specs` need the same number of token slots as this one."""
        return all(isinstance(spec, type(self)) for spec in kv_cache_specs.values())


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values of every token, `num_kv_heads` heads of `head_size` elements."""

    num_kv_heads: int
    head_size: int
    dtype: str
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE
    page_size_padded: int | None = None
    """Bytes of a page if it is larger than its content."""
    indexes_kv_by_block_stride: bool = False
    """Whether the attention backend can read pages that are padded."""

    @property
    def page_size_bytes(self) -> int:
        """Bytes of a page, with per-head scales and padding."""
        size = self.real_page_size_bytes
        if self.kv_quant_mode.is_per_token_head:
            size += 2 * self.block_size * self.num_kv_heads * DTYPE_SIZES["float32"]
        if self.page_size_padded is None:
            return size
        assert self.page_size_padded >= size
        return self.page_size_padded

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of the keys and values alone."""
        return self._page_bytes(2 * _stored_head_size(self.head_size, self.kv_quant_mode))

    def _page_bytes(self, elements_per_head: int) -> int:
        elements = self.block_size * self.num_kv_heads * elements_per_head
        return elements * get_dtype_size(self.dtype)


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Attention to every earlier token.

    A windowed or chunked layer is described by this spec too when the hybrid manager is off:
    blocks are then kept for the whole context, and the window only limits the computation.
    """

    kind = KVCacheSpecKind.FULL_ATTENTION
    head_size_v: int = None  # type: ignore[assignment]
    """Elements of a value head; None: `head_size`."""
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    non_causal: bool = False
    """Whether tokens also attend forwards, which rules out chunked prefill."""

    def __post_init__(self) -> None:
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of the keys and values alone."""
        mode = self.kv_quant_mode
        return self._page_bytes(
            _stored_head_size(self.head_size, mode) + _stored_head_size(self.head_size_v, mode)
        )

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of `max_model_len` tokens, rounded up to blocks."""
        _check_no_context_parallel(vllm_config)
        blocks = cdiv(max_model_len_of(vllm_config), self.block_size)
        return blocks * self.page_size_bytes

    @classmethod
    def merge_window_sizes(cls, window_sizes: set[int]) -> int | None:
        """The one member of `window_sizes`, or None if it is empty."""
        if len(window_sizes) > 1:
            raise ValueError(
                "All attention layers in the same KV cache group must have the same window size."
            )
        return next(iter(window_sizes), None)

    @classmethod
    def can_merge(cls, specs: Sequence[KVCacheSpec]) -> bool:
        """True for specs of one class that differ in nothing but at most one window."""
        if not all(type(spec) is cls for spec in specs):
            return False
        windows, chunks = _window_sizes(specs), _chunk_sizes(specs)
        return _same_layout(specs) and len(windows) + len(chunks) <= 1

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """The common spec; a window of some layers becomes the window of the group."""
        assert all(type(spec) is cls for spec in specs), (
            f"All attention layers in the same KV cache group must be {cls.__name__}."
        )
        assert _same_layout(specs), (
            "All attention layers in the same KV cache group must have the same attention spec."
        )
        window = cls.merge_window_sizes(_window_sizes(specs))
        chunk = cls.merge_window_sizes(_chunk_sizes(specs))
        assert window is None or chunk is None, (
            "Model with both sliding window layers and chunked local attention layers "
            "is not supported."
        )
        return replace(
            specs[0],
            sliding_window=window,
            attention_chunk_size=chunk,
            non_causal=any(spec.non_causal for spec in specs),
        )

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """True when every layer keeps the whole context."""
        return all(isinstance(spec, FullAttentionSpec) for spec in kv_cache_specs.values())


def _window_sizes(specs: Sequence[Any]) -> set[int]:
    return {spec.sliding_window for spec in specs if spec.sliding_window is not None}


def _chunk_sizes(specs: Sequence[Any]) -> set[int]:
    return {spec.attention_chunk_size for spec in specs if spec.attention_chunk_size is not None}


def _same_layout(specs: Sequence[KVCacheSpec]) -> bool:
    names = [field.name for field in fields(AttentionSpec)] + ["head_size_v"]
    first = [getattr(specs[0], name) for name in names]
    return all([getattr(spec, name) for name in names] == first for spec in specs[1:])


def max_model_len_of(vllm_config: VllmConfig) -> int:
    """Longest request in tokens; loading the model has settled it."""
    max_model_len = vllm_config.model_config.max_model_len
    assert max_model_len is not None, "max_model_len is not resolved yet"
    return max_model_len


def _check_no_context_parallel(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    assert parallel.decode_context_parallel_size == 1, "context parallelism is not supported"
    assert parallel.prefill_context_parallel_size == 1, "context parallelism is not supported"


class _RecyclingSpec(AttentionSpec):
    """A spec whose blocks are freed while the request runs, so that its need has a ceiling."""

    def max_admission_blocks_per_request(
        self, max_num_batched_tokens: int, max_model_len: int
    ) -> int:
        """Most blocks that a request holds at once.

        Start-up sizing and admission both use it: if they disagreed, a request could pass one
        and wait for ever at the other.
        """
        raise TypeError(f"{type(self).__name__} does not define its admission cap")

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of the most blocks that a request holds at once."""
        _check_no_context_parallel(vllm_config)
        max_model_len = max_model_len_of(vllm_config)
        max_num_batched_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        if max_num_batched_tokens is None:
            max_num_batched_tokens = max_model_len
        blocks = self.max_admission_blocks_per_request(max_num_batched_tokens, max_model_len)
        return blocks * self.page_size_bytes


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(_RecyclingSpec):
    """Attention within fixed chunks of `attention_chunk_size` tokens."""

    kind = KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION
    attention_chunk_size: int

    def max_admission_blocks_per_request(
        self, max_num_batched_tokens: int, max_model_len: int
    ) -> int:
        """Blocks of one chunk and of one step's tokens."""
        num_tokens = min(self.attention_chunk_size + max_num_batched_tokens, max_model_len)
        return cdiv(num_tokens, self.block_size)

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """True when every layer is chunked at the same places."""
        return all(
            isinstance(spec, ChunkedLocalAttentionSpec)
            and spec.attention_chunk_size == self.attention_chunk_size
            for spec in kv_cache_specs.values()
        )


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(_RecyclingSpec):
    """Attention to the token itself and the `sliding_window - 1` before it."""

    kind = KVCacheSpecKind.SLIDING_WINDOW
    sliding_window: int
    head_size_v: int = None  # type: ignore[assignment]
    """Elements of a value head; None: `head_size`."""

    def __post_init__(self) -> None:
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of the keys and values alone."""
        # Upstream packs int4 pages in full-attention layers only.
        mode = self.kv_quant_mode if self.kv_quant_mode.is_nvfp4 else KVQuantMode.NONE
        return self._page_bytes(
            _stored_head_size(self.head_size, mode) + _stored_head_size(self.head_size_v, mode)
        )

    def max_admission_blocks_per_request(
        self, max_num_batched_tokens: int, max_model_len: int
    ) -> int:
        """Blocks of the window and of one step's tokens.

        One more than their length, as the window may begin inside a block.
        """
        num_tokens = min(self.sliding_window - 1 + max_num_batched_tokens, max_model_len)
        return cdiv(num_tokens, self.block_size) + 1

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """True when every layer has this window."""
        return all(
            isinstance(spec, SlidingWindowSpec) and spec.sliding_window == self.sliding_window
            for spec in kv_cache_specs.values()
        )


@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    """Recurrent states, one set of `shapes` and `dtypes` a block instead of one entry a token."""

    kind = KVCacheSpecKind.MAMBA
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    page_size_padded: int | None = None
    mamba_type: str = "mamba2"
    mamba_cache_mode: str = "none"
    """none: the last state only; align: states at block ends that a hit may need; all: each."""
    num_speculative_blocks: int = 0

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one set of states, padding included."""
        size = sum(
            prod(shape) * get_dtype_size(dtype)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=False)
        )
        if self.page_size_padded is None:
            return size
        assert self.page_size_padded >= size
        return self.page_size_padded

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of the states that the cache mode keeps for one request."""
        mode = vllm_config.cache_config.mamba_cache_mode
        if mode == "all":
            blocks = cdiv(max_model_len_of(vllm_config), self.block_size)
        else:
            blocks = 2 if mode == "align" else 1
        return (blocks + self.num_speculative_blocks) * self.page_size_bytes

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """True when every layer is recurrent and has as many speculative blocks."""
        return all(
            isinstance(spec, MambaSpec)
            and spec.num_speculative_blocks == self.num_speculative_blocks
            for spec in kv_cache_specs.values()
        )


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers that need the same token slots in pages of different sizes."""

    kv_cache_specs: dict[str, KVCacheSpec]

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Most bytes of one request over all layers."""
        pages = max(
            cdiv(spec.max_memory_usage_bytes(vllm_config), spec.page_size_bytes)
            for spec in self.kv_cache_specs.values()
        )
        return pages * self.page_size_bytes

    @classmethod
    def is_uniform_type(cls, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Whether all layers agree on block size and on which tokens they keep."""
        specs = list(kv_cache_specs.values())
        if any(spec.block_size != specs[0].block_size for spec in specs):
            return False
        return specs[0].is_uniform_with_collection(kv_cache_specs)

    @classmethod
    def from_specs(cls, kv_cache_specs: dict[str, KVCacheSpec]) -> Self | None:
        """The layers as one spec, or None if they are not of one type."""
        if not cls.is_uniform_type(kv_cache_specs):
            return None
        block_size = next(iter(kv_cache_specs.values())).block_size
        return cls(block_size=block_size, kv_cache_specs=kv_cache_specs)

    def get_page_sizes(self) -> list[int]:
        """The page sizes that occur, in bytes."""
        return list({spec.page_size_bytes: None for spec in self.kv_cache_specs.values()})

    def get_num_layer_tuples(self) -> int:
        """How many layers have the page size that occurs most."""
        sizes = Counter(spec.page_size_bytes for spec in self.kv_cache_specs.values())
        return sizes.most_common(1)[0][1]


def get_kv_cache_spec_kind(kv_cache_spec: KVCacheSpec) -> KVCacheSpecKind:
    """The label of `kv_cache_spec` in KV events; mixed layers are UNKNOWN."""
    if isinstance(kv_cache_spec, UniformTypeKVCacheSpecs):
        kinds = {get_kv_cache_spec_kind(spec) for spec in kv_cache_spec.kv_cache_specs.values()}
        return kinds.pop() if len(kinds) == 1 else KVCacheSpecKind.UNKNOWN
    return kv_cache_spec.kind


def get_kv_cache_spec_sliding_window(kv_cache_spec: KVCacheSpec) -> int | None:
    """The window of a group that frees blocks outside it, else None."""
    if isinstance(kv_cache_spec, UniformTypeKVCacheSpecs):
        inner = kv_cache_spec.kv_cache_specs.values()
        windows = {get_kv_cache_spec_sliding_window(spec) for spec in inner}
        return windows.pop() if len(windows) == 1 else None
    if isinstance(kv_cache_spec, SlidingWindowSpec):
        return kv_cache_spec.sliding_window
    return None


@dataclass
class KVCacheTensor:
    """One allocation on the device and the layers that use it."""

    size: int
    """Bytes."""
    shared_by: list[str]
    """Layers; those of different groups use different blocks of it."""
    offset: int = 0
    """Where the layer's page begins within a block."""
    block_stride: int = 0
    """Bytes from one block to the next where blocks of several layers are packed; else 0."""


@dataclass
class KVCacheGroupSpec:
    """Layers that share a block table."""

    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    is_eagle_group: bool = False
    """Whether a drafter's layers are among them."""


@dataclass
class KVCacheConfig:
    """The KV cache of a model: its blocks, tensors and groups of layers."""

    num_blocks: int
    """Blocks of the pool; one of them is the null block and never holds tokens."""
    kv_cache_tensors: list[KVCacheTensor]
    kv_cache_groups: list[KVCacheGroupSpec]

    @property
    def has_mamba_layers(self) -> bool:
        """Whether a group holds recurrent states."""
        return any(isinstance(g.kv_cache_spec, MambaSpec) for g in self.kv_cache_groups)

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        """Whether new attention blocks must be cleared, as they may hold old states."""
        return self.has_mamba_layers

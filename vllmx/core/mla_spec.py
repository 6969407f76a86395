# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/kv_cache_interface.py @ v0.25.0
"""Latent attention: one compressed vector a token instead of keys and values of every head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from vllmx.core.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVCacheSpecKind,
    KVQuantMode,
    SlidingWindowSpec,
    cdiv,
    get_dtype_size,
)

DS_MLA = "fp8_ds_mla"
# Bytes of a token in upstream's packed layouts. Version 3.2: 512 fp8, their 4 float32 scales and
# 64 rotary bfloat16. Version 4: 448 fp8, 64 rotary bfloat16 and 8 bytes of scales.
DS_MLA_TOKEN_BYTES = 656
DS_MLA_V4_TOKEN_BYTES = 584
DEEPSEEK_V4 = "deepseek_v4"


@dataclass(frozen=True, kw_only=True)
class _LatentSpec(AttentionSpec):
    """The fields that the two latent specs have in common."""

    cache_dtype_str: str | None = None
    """`cache.cache_dtype` as given, for layouts that are more than a dtype."""
    alignment: int | None = None
    """Bytes that a page is padded to a multiple of; None: not padded."""
    compress_ratio: int = 1
    """Tokens that share one row of a page."""
    model_version: str | None = None
    """`deepseek_v4`: the packed layout of that model."""

    @property
    def storage_block_size(self) -> int:
        """Rows of a page."""
        return self.block_size // self.compress_ratio

    def _latent_bytes(self, elements: int) -> int:
        """Bytes of a page whose rows have `elements` elements a head."""
        return self.storage_block_size * self.num_kv_heads * elements * get_dtype_size(self.dtype)

    def _pad_to_alignment(self) -> None:
        if self.alignment is None:
            return
        size = self.real_page_size_bytes
        padded = cdiv(size, self.alignment) * self.alignment
        if padded != size:
            object.__setattr__(self, "page_size_padded", padded)

    @classmethod
    def can_merge(cls, specs: Sequence[KVCacheSpec]) -> bool:
        """True for equal specs."""
        return all(spec == specs[0] for spec in specs)

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """The common spec."""
        assert all(type(spec) is cls for spec in specs), (
            f"All attention layers in the same KV cache group must be {cls.__name__}."
        )
        assert cls.can_merge(specs), (
            "All attention layers in the same KV cache group must use the same "
            "quantization method, compress ratio, model version and page layout."
        )
        return specs[0]


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(_LatentSpec, FullAttentionSpec):
    """Latent attention to every earlier token."""

    kind = KVCacheSpecKind.MLA_ATTENTION

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pad_to_alignment()

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of the latent vectors alone."""
        if self.cache_dtype_str == DS_MLA:
            if self.model_version == DEEPSEEK_V4:
                return self.storage_block_size * DS_MLA_V4_TOKEN_BYTES
            return self.block_size * DS_MLA_TOKEN_BYTES
        halved = self.kv_quant_mode is KVQuantMode.INT4_PER_TOKEN_HEAD
        return self._latent_bytes(self.head_size // 2 if halved else self.head_size)


@dataclass(frozen=True, kw_only=True)
class SlidingWindowMLASpec(_LatentSpec, SlidingWindowSpec):
    """Latent attention to the token itself and the `sliding_window - 1` before it."""

    kind = KVCacheSpecKind.SLIDING_WINDOW_MLA

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pad_to_alignment()

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of the latent vectors alone."""
        assert self.model_version in (None, DEEPSEEK_V4), (
            f"Unsupported model version: {self.model_version}"
        )
        if self.model_version == DEEPSEEK_V4 and self.cache_dtype_str == DS_MLA:
            return self.storage_block_size * DS_MLA_V4_TOKEN_BYTES
        return self._latent_bytes(self.head_size)

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """True when every layer is latent and has this window."""
        return all(
            isinstance(spec, SlidingWindowMLASpec) and spec.sliding_window == self.sliding_window
            for spec in kv_cache_specs.values()
        )

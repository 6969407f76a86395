# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/single_type_kv_cache_manager.py @ v0.25.0
"""Full attention with a twist: output that is kept for a window only, and static sink tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from vllmx.core.kv_cache_interface import FullAttentionSpec, KVCacheSpec, KVCacheSpecKind, cdiv
from vllmx.core.single_type_kv_cache_manager import FullAttentionManager

if TYPE_CHECKING:
    from vllmx.request import Request


@dataclass(frozen=True, kw_only=True)
class RSWASpec(FullAttentionSpec):
    """Reference sliding window attention: the whole prompt and the last `rswa_window` tokens of
    the output are seen, what lies between is not."""

    rswa_window: int

    @classmethod
    def can_merge(cls, specs: Sequence[KVCacheSpec]) -> bool:
        """As for full attention, with one window of output."""
        windows = {spec.rswa_window for spec in specs if isinstance(spec, RSWASpec)}
        return super().can_merge(specs) and len(windows) == 1

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """The common spec."""
        merged = super().merge(specs)
        windows = {spec.rswa_window for spec in specs}
        assert len(windows) == 1, f"All R-SWA layers must share the same rswa_window, got {windows}"
        return merged

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """True when every layer gives back the same blocks."""
        return all(
            isinstance(spec, RSWASpec) and spec.rswa_window == self.rswa_window
            for spec in kv_cache_specs.values()
        )


@dataclass(frozen=True, kw_only=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention that also sees `sink_len` tokens common to all requests."""

    kind = KVCacheSpecKind.SINK_FULL_ATTENTION
    sink_len: int | None = None

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """The common spec; the sink tokens are those of the first layer."""
        return replace(super().merge(specs), sink_len=specs[0].sink_len)


class RSWAManager(FullAttentionManager):
    """Gives back the blocks between the end of the prompt and the window of the output."""

    def __init__(self, kv_cache_spec: RSWASpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.rswa_window = kv_cache_spec.rswa_window

    def remove_skipped_blocks(
        self,
        request_id: str,
        total_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Put null blocks where neither the prompt nor the window is; needs the prompt's length."""
        if num_prompt_tokens is None:
            return
        first = cdiv(num_prompt_tokens, self.block_size)
        window_start = max(num_prompt_tokens, total_computed_tokens - self.rswa_window)
        self._remove_blocks(request_id, first, window_start // self.block_size)

    def unchanged_until(self, request_id: str, num_computed_tokens: int) -> int:
        """Also ends where the window may leave a block."""
        full = super().unchanged_until(request_id, num_computed_tokens)
        window_start = max(num_computed_tokens - self.rswa_window, 0)
        leaves_block = (window_start // self.block_size + 1) * self.block_size + self.rswa_window
        return min(full, leaves_block)

    def cache_blocks(
        self, request: Request, num_tokens: int, retention_interval: int | None = None
    ) -> None:
        """Let the blocks of the prompt be found.

        Output was computed without the gap; as a part of another request's prompt the same tokens
        have other keys and values.
        """
        num_tokens = min(num_tokens, request.num_prompt_tokens)
        super().cache_blocks(request, num_tokens, retention_interval)


class SinkFullAttentionManager(FullAttentionManager):
    """Full attention; holds the blocks of the sink tokens for as long as the engine runs."""

    def __init__(self, kv_cache_spec: SinkFullAttentionSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        sink_len = kv_cache_spec.sink_len
        assert sink_len is not None and sink_len > 0 and sink_len % self.block_size == 0, (
            f"sink_len={sink_len} must be a positive multiple of the block size {self.block_size}"
        )
        self.sink_blocks = self.block_pool.reserve_blocks(sink_len // self.block_size)

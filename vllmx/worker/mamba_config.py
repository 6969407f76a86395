# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/config.py, vllm/platforms/interface.py @ v0.25.0
"""What a model with recurrent layers asks of the cache: which states are kept, and how many tokens
of attention take as much room as one set of them."""

from __future__ import annotations

import logging

from vllmx.config import CacheConfig, VllmConfig
from vllmx.core.kv_cache_interface import AttentionSpec, cdiv
from vllmx.exceptions import UserError
from vllmx.layers.attention import Attention
from vllmx.layers.mamba_base import MambaBase

logger = logging.getLogger(__name__)


def verify_and_update_config(
    vllm_config: VllmConfig, attention: dict[str, Attention], states: dict[str, MambaBase]
) -> None:
    """Settle the cache of a model with the recurrent layers `states`, in place.

    Afterwards cache_config says whether prefixes are cached, in which mode states are kept, and
    block sizes and padding by which a page of each layer of `attention` and of `states` has the
    same bytes. UserError for what can't be combined with recurrent layers.
    """
    _refuse(vllm_config, next(iter(states)))
    cache = vllm_config.cache_config
    _resolve_cache_mode(cache)
    if (
        cache.mamba_cache_mode == "align"
        and not vllm_config.scheduler_config.enable_chunked_prefill
    ):
        raise UserError(
            "cache.mamba_cache_mode=align needs scheduler.enable_chunked_prefill=true, as a "
            "prompt's steps end at block ends; or set cache.enable_prefix_caching=false."
        )
    # Settled for now, so that the layers can tell their specs.
    cache.mamba_block_size = vllm_config.model_config.max_model_len
    if attention:
        _align_hybrid_block_size(vllm_config, attention, states)
    if cache.mamba_cache_mode == "align":
        cache.mamba_block_size = cache.block_size


def _refuse(vllm_config: VllmConfig, layer_name: str) -> None:
    transfer = vllm_config.kv_transfer_config
    if transfer is not None:
        raise UserError(
            f"kv_transfer.kv_connector={transfer.kv_connector}: no connector moves recurrent "
            f"states, and the model has some (layer {layer_name}); leave kv_transfer unset."
        )
    if vllm_config.speculative_config is not None:
        raise UserError(
            "speculative.num_speculative_tokens="
            f"{vllm_config.speculative_config.num_speculative_tokens}: a recurrent state can't "
            f"take rejected drafts back, and the model has some (layer {layer_name}); leave "
            "speculative unset."
        )
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise UserError(
            "scheduler.disable_hybrid_kv_cache_manager=true: recurrent states need groups of "
            f"their own, and the model has some (layer {layer_name}); leave it unset."
        )


def _resolve_cache_mode(cache: CacheConfig) -> None:
    if not cache.prefix_caching_is_pinned:
        cache.enable_prefix_caching = False
    asked = cache.mamba_cache_mode
    cache.mamba_cache_mode = "align" if cache.enable_prefix_caching else "none"
    if asked in ("none", cache.mamba_cache_mode):
        return
    if cache.enable_prefix_caching:
        logger.warning(
            "cache.mamba_cache_mode=%s: the model keeps no state at every block end; taking align.",
            asked,
        )
    else:
        logger.warning(
            "cache.mamba_cache_mode=%s has no effect without cache.enable_prefix_caching=true, "
            "which recurrent layers do not imply; taking none.",
            asked,
        )


def _align_hybrid_block_size(
    vllm_config: VllmConfig, attention: dict[str, Attention], states: dict[str, MambaBase]
) -> None:
    """Make blocks so long that a page of attention holds a set of states, and pad the states."""
    cache = vllm_config.cache_config
    assert cache.block_size is not None
    state_page = max(
        layer.get_kv_cache_spec(vllm_config).page_size_bytes for layer in states.values()
    )
    token_bytes = 0
    for layer in attention.values():
        if layer.kv_sharing_target_layer_name is None:
            spec = layer.get_kv_cache_spec(vllm_config)
            assert isinstance(spec, AttentionSpec)
            # A page of the longest tokens: the pages of other layers are stretched to it.
            token_bytes = max(token_bytes, spec.page_size_bytes // spec.block_size)
    block_size = cache.block_size * cdiv(state_page, cache.block_size * token_bytes)
    if cache.block_size < block_size:
        logger.info(
            "cache.block_size raised from %d to %d tokens, so that a page of attention holds a "
            "recurrent layer's states.",
            cache.block_size,
            block_size,
        )
        cache.block_size = block_size
    page = cache.block_size * token_bytes
    if page > state_page:
        cache.mamba_page_size_padded = page  # type: ignore[assignment]
        logger.info(
            "recurrent states padded from %d to %d bytes (%.1f%%), a page of attention.",
            state_page,
            page,
            100 * (page - state_page) / state_page,
        )

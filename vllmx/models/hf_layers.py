# SPDX-License-Identifier: Apache-2.0
"""Which attention each layer has, where a config.json leaves that to its model_type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllmx.exceptions import CheckpointError
from vllmx.models.hf_dense import ALL_SLIDING, SLIDING

if TYPE_CHECKING:
    from vllmx.models.hf_config import HFConfig


def layer_types(config: HFConfig, values: dict[str, Any], layers: int) -> list[str]:
    """Kind of attention of each layer, where config.json leaves it to the model type.

    values: those of `config`, changed where windows are told in another way.
    """
    full, sliding = "full_attention", "sliding_attention"
    if values.get("model_type") == "gemma3_text":
        period = values.get("_sliding_window_pattern") or values["sliding_window_pattern"]
        return [full if (i + 1) % period == 0 else sliding for i in range(layers)]
    if values.get("attention_chunk_size") is not None and "no_rope_layers" in values:
        return ["chunked_attention" if rotated else full for rotated in values["no_rope_layers"]]
    if values.get("model_type") == "plamo3":
        return _plamo3_layers(config, values)
    if values.get("model_type") == "cohere2_moe" and values["sliding_window"] is not None:
        return _cohere2_moe_layers(config, layers)
    if values.get("model_type") == "cwm":
        return [full if i % 4 == 0 else sliding for i in range(layers)]
    if values.get("sliding_window") is not None and values.get("model_type") in SLIDING:
        period = values.get("sliding_window_pattern") or SLIDING[values["model_type"]]
        if isinstance(period, str):  # one letter a layer: L for local
            return [sliding if period[i % len(period)] == "L" else full for i in range(layers)]
        return [full if (i + 1) % period == 0 else sliding for i in range(layers)]
    if "full_attention_interval" in values:
        period = config.read("full_attention_interval", int)
        return [full if (i + 1) % period == 0 else "linear_attention" for i in range(layers)]
    if values.get("sliding_window") is None:
        return [full] * layers
    if values.get("model_type") == "smollm3":  # layers that do not rotate have the window
        use = values["use_sliding_window"]
        return [sliding if use and not r else full for r in values["no_rope_layers"]]
    if values.get("model_type") == "qwen2_moe":  # every other of the first layers
        last = values["max_window_layers"]
        return [sliding if i % 2 == 0 and i < last else full for i in range(layers)]
    if values.get("model_type") in ALL_SLIDING:
        return [sliding] * layers
    if {"use_sliding_window", "max_window_layers"} <= values.keys():  # Qwen: the first stay full
        if not values["use_sliding_window"]:
            return [full] * layers
        return [sliding if i >= values["max_window_layers"] else full for i in range(layers)]
    return [full] * layers


def _cohere2_moe_layers(config: HFConfig, layers: int) -> list[str]:
    """Those without experts, the first ones, have a pattern of their own; the others' begins
    behind them."""
    first = config.read("first_k_dense_replace", int, 0)
    kinds = []
    for count, key in (
        (first, "prefix_dense_sliding_window_pattern"),
        (layers - first, "sliding_window_pattern"),
    ):
        period = config.read(key, int)
        kinds += [(i + 1) % period == 0 for i in range(count)]
    return ["full_attention" if full else "sliding_attention" for full in kinds]


def _plamo3_layers(config: HFConfig, values: dict[str, Any]) -> list[str]:
    """A config.json has the window of each layer, null for none; sliding_window becomes the one."""
    key = "interleaved_sliding_window"
    windows = config.read(key if key in config else "sliding_window", list)
    widths = {width for width in windows if width is not None}
    if len(widths) > 1:
        raise CheckpointError(f"{config.origin}: windows of several widths are not supported.")
    values["sliding_window"] = next(iter(widths), None)
    return ["full_attention" if width is None else "sliding_attention" for width in windows]

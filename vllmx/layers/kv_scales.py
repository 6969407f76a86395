# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/quantization/kv_cache.py,
#   vllm/model_executor/model_loader/weight_utils.py @ v0.25.0
"""Scales of a quantised KV cache, which a checkpoint may bring under one of many names."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from typing import Any

from vllmx.exceptions import CheckpointError
from vllmx.layers.attention import Attention
from vllmx.layers.parameter import to_float

logger = logging.getLogger(__name__)

SCALES = ("q_scale", "k_scale", "v_scale", "prob_scale")
"""What may be said of a layer; queries and probabilities are not quantised here, so that their two
are checked and left aside."""

# How writers of checkpoints name the scale of a letter, {0}: the letters, what stands before the
# module, the module and its scale, and the module that has it here.
_SPELLINGS = (
    ("kv", ".self_attn", "{0}_proj.{0}_scale", ".self_attn.attn"),
    ("kv", ".self_attn", "qkv_proj.{0}_scale", ".self_attn.attn"),
    ("kv", ".self_attn", "qkqkv_proj.{0}_scale", ".self_attn.attn"),
    ("kv", ".mixer", "{0}_proj.{0}_scale", ".mixer.attn"),
    ("q", ".self_attn", "{0}.scale", ".self_attn.attn"),
    ("kv", ".self_attn", "{0}_cache.scale", ".self_attn.attn"),
    ("qkv", ".attn", "{0}_scale", ".attn"),
    ("qkv", "", "{0}_scale", ".attn"),
)
_ENDINGS = [
    (f"{before}.{spelling.format(letter)}", f"{module}.{letter}_scale")
    for letters, before, spelling, module in _SPELLINGS
    for letter in letters
]
_ENDINGS += [(f".{letter}_zero_point", f".attn.{letter}_zero_point") for letter in "qkv"]
_ENDINGS += [(".kv_scale", ".attn.k_scale"), (".prob_scale", ".prob_scale")]
"""(end of a checkpoint's name, what stands in its place), in the order in which they are tried."""


def maybe_remap_kv_scale_name(name: str, params_dict: Collection[str]) -> str | None:
    """The scale of `params_dict` (names of layers' scales) that the weight `name` holds.

    Returns `name` itself for a weight that is no such scale, and None for a scale that no layer has
    a place for.
    """
    if name in params_dict:
        return name
    for ending, replacement in _ENDINGS:
        if name.endswith(ending):
            ours = name.removesuffix(ending) + replacement
            return ours if ours in params_dict else None
    return name


class KVScales:
    """Takes the scales out of a checkpoint's weights, then settles those of each layer."""

    def __init__(self, layers: dict[str, Attention]) -> None:
        self.layers = layers
        self.names = {f"{layer}.{scale}" for layer in layers for scale in SCALES}
        self.found: dict[str, float] = {}
        self._warned: set[str] = set()

    def take(self, name: str, tensor: Any) -> bool:
        """Whether the weight `name` is a scale; it is kept then. CheckpointError if it is none
        that a tensor can be divided by."""
        ours = maybe_remap_kv_scale_name(name, self.names)
        if ours is None:
            self._warn_once(name, "%s of the checkpoint is not loaded: no layer has such a scale.")
            return True
        if ours not in self.names:
            return False
        if name.endswith(".kv_scale"):
            self._warn_once(name, "%s is deprecated: it serves as k_scale and as v_scale.")
        if ours in self.found:
            raise CheckpointError(f"weight {name}: the checkpoint gives {ours} twice.")
        self.found[ours] = _scalar(name, tensor)
        return True

    def finish(self) -> None:
        """Give each layer its scales: 1.0 where it has none, or where its cache is not quantised.

        A layer that reads another's cache takes that one's.
        """
        unscaled = False
        for name, layer in self.layers.items():
            k_scale, v_scale = self._pair(name)
            if layer.kv_cache_dtype.itemsize > 1:
                k_scale = v_scale = 1.0
            layer.k_scale, layer.v_scale = k_scale, v_scale
            unscaled |= k_scale == v_scale == 1.0 and "e4m3" in str(layer.kv_cache_dtype)
        for layer in self.layers.values():
            target = layer.kv_sharing_target_layer_name
            if target is not None:
                layer.k_scale = self.layers[target].k_scale
                layer.v_scale = self.layers[target].v_scale
        if unscaled:
            logger.warning(
                "KV cache in fp8_e4m3 with scaling factors of 1.0: keys and values beyond 448 are "
                "cut off. If this is not meant, look whether the checkpoint has k_scale and "
                "v_scale."
            )

    def _warn_once(self, name: str, message: str) -> None:
        """Log `message` for the first weight whose name ends as that of `name` does."""
        kind = name.rpartition(".")[2]
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(message, name)

    def _pair(self, name: str) -> tuple[float, float]:
        k_scale = self.found.get(f"{name}.k_scale")
        v_scale = self.found.get(f"{name}.v_scale")
        if k_scale is None and v_scale is not None:
            raise CheckpointError(f"layer {name}: the checkpoint has its v_scale but no k_scale.")
        if k_scale is None:
            return 1.0, 1.0
        return k_scale, k_scale if v_scale is None else v_scale


def _scalar(name: str, tensor: Any) -> float:
    if math.prod(tensor.shape) != 1:
        raise CheckpointError(
            f"weight {name} has shape {list(tensor.shape)}: only one scale for a whole tensor is "
            "supported for the KV cache."
        )
    value = float(to_float(tensor).item())
    if not (math.isfinite(value) and value > 0):
        raise CheckpointError(f"weight {name} is {value:g}: a scale is a positive number.")
    return value

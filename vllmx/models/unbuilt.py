# SPDX-License-Identifier: Apache-2.0
"""Keys of a config.json that change what is computed and that no model here heeds.

Whatever architecture has them, they stop the load: silence would be another model.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from vllmx.exceptions import CheckpointError
from vllmx.layers.linear import QKVParallelLinear
from vllmx.models.hf_config import HFConfig

HARMLESS: dict[str, tuple[Any, ...]] = {
    "ada_rms_norm_t_cond": (None, False),
    "add_cross_attention": (None, False),
    "attention_chunk_size": (None,),
    "attn_type": (None, "decoder"),
    "dual_chunk_attention_config": (None,),
    "is_causal": (None, True),
    "layer_scale": (None, False),
    "scale_attn_by_inverse_layer_idx": (None, False),
    "scale_attn_weights": (None, True),
    "use_bidirectional_attention": (None, False),
    "use_cla": (None, False),
}
"""Key -> its values that ask for nothing beyond what is built."""


def refuse_unbuilt(config: HFConfig, layer_kinds: tuple[str, ...]) -> None:
    """CheckpointError, with key and value, where the config asks for what isn't built.

    layer_kinds: the entries of layer_types that the architecture computes.
    """
    for index, kind in enumerate(config.layer_types):
        if kind not in layer_kinds:
            raise CheckpointError(
                f"{config.origin}: layer_types[{index}] is {kind!r}; "
                f"{' and '.join(layer_kinds)} are known."
            )
    for key, harmless in HARMLESS.items():
        if key == "attention_chunk_size" and "chunked_attention" in layer_kinds:
            continue
        if key in config and getattr(config, key) not in harmless:
            raise CheckpointError(
                f"{config.origin}: {key}={getattr(config, key)!r} is not supported."
            )


def refuse_other_biases(config: HFConfig, model: nn.Module) -> None:
    """CheckpointError where attention_bias says of queries, keys and values what `model`, built by
    a class that does not read that key, does not have."""
    told = config.raw.get("attention_bias")
    built = [m.has_bias for m in model.modules() if isinstance(m, QKVParallelLinear)]
    if built and isinstance(told, bool) and told not in built:
        raise CheckpointError(
            f"{config.origin}: attention_bias={told} is not supported; queries, keys and values of "
            f"this architecture {'have' if built[0] else 'have no'} biases."
        )

# SPDX-License-Identifier: Apache-2.0
"""Tiny models whose heads are not of 32 elements, and what else of their config goes with that.

The sizes are those that real models of the families have, or lie between. Upstream's kernels for
CPUs have 32, 64, 80, 96, 112, 128, 160, 192, 224, 256 and 512.
"""

from __future__ import annotations

from typing import Any

from vllmx.tiny.dense_configs import DENSE_FAMILIES


def _by_hidden(head_dim: int) -> dict[str, Any]:
    """Of a family whose heads share the hidden size: four heads."""
    return {"hidden_size": 4 * head_dim, "head_dim": head_dim}


def _longrope(pairs: int) -> dict[str, Any]:
    """Phi-3's rotation with a factor for each of `pairs`."""
    factors = {
        "short_factor": [1.0 + 0.05 * i for i in range(pairs)],
        "long_factor": [1.0 + 0.5 * i for i in range(pairs)],
    }
    return {"rope_parameters": DENSE_FAMILIES["tiny-phi3"]["rope_parameters"] | factors}


HEAD_SIZES: dict[str, dict[str, Any]] = {
    "tiny-llama": {"head_dim": 64},
    "tiny-qwen2": _by_hidden(64),
    "tiny-mixtral": {"head_dim": 64},
    "tiny-qwen3_next": {"head_dim": 64},
    "tiny-stablelm": _by_hidden(80),
    "tiny-gemma3": {"head_dim": 80, "query_pre_attn_scalar": 64},
    "tiny-granite": _by_hidden(80) | {"head_dim": None},
    "tiny-gpt_neox": _by_hidden(96) | {"head_dim": None},
    "tiny-phi3": _by_hidden(96) | _longrope(36),
    "tiny-glm4": {"head_dim": 112},
    "tiny-gemma2": {"head_dim": 112, "query_pre_attn_scalar": 96},
    "tiny-mistral": {"head_dim": 128},
    "tiny-qwen3": {"head_dim": 128},
    # A page of keys must be as large as states of float32: with small heads, of 80 tokens.
    "tiny-qwen3_5-bf16": {"head_dim": 128},
    "tiny-qwen3_5_moe-bf16": {"head_dim": 128},
    "tiny-qwen3_next-bf16": {"head_dim": 128},
    "tiny-qwen3_moe": {"head_dim": 128},
}
"""Name -> what its config says in place of its family and of the common sizes."""

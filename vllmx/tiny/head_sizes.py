# SPDX-License-Identifier: Apache-2.0
"""Tiny models whose heads are not of 32 elements, and what else of their config goes with that.

The sizes are those that real models of the families have, or lie between. Upstream's kernels for
CPUs have 32, 64, 80, 96, 112, 128, 160, 192, 224, 256 and 512.
"""

from __future__ import annotations

from typing import Any


def _by_hidden(head_dim: int) -> dict[str, Any]:
    """Of a family whose heads share the hidden size: four heads."""
    return {"hidden_size": 4 * head_dim, "head_dim": head_dim}


HEAD_SIZES: dict[str, dict[str, Any]] = {
    "tiny-llama": {"head_dim": 64},
    "tiny-mixtral": {"head_dim": 64},
    "tiny-stablelm": _by_hidden(80),
    "tiny-gemma3": {"head_dim": 80, "query_pre_attn_scalar": 64},
    "tiny-granite": _by_hidden(80) | {"head_dim": None},
    "tiny-gpt_neox": _by_hidden(96) | {"head_dim": None},
    "tiny-glm4": {"head_dim": 112},
    "tiny-gemma2": {"head_dim": 112, "query_pre_attn_scalar": 96},
    "tiny-qwen3": {"head_dim": 128},
    "tiny-qwen3_moe": {"head_dim": 128},
}
"""Name -> what its config says in place of its family and of the common sizes."""

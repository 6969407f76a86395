# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/mimo.py @ v0.25.0
"""MiMo: Qwen2, with layers for drafting behind the model's own, which are left out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllmx.models.qwen2 import Qwen2ForCausalLM


class MiMoForCausalLM(Qwen2ForCausalLM):
    """MiMo with its output head."""

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Load a checkpoint's (name, tensor) pairs; CheckpointError where they don't fit."""
        drafting = "model.mtp_layers."
        super().load_weights((name, w) for name, w in weights if not name.startswith(drafting))

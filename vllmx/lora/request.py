# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/lora/request.py @ v0.25.0
"""The adapter that a request asks for."""

from __future__ import annotations

from typing import Any

import msgspec


class LoRARequest(msgspec.Struct, omit_defaults=True, array_like=True):
    """An adapter by name, number and place. Two with one name are the same adapter.

    `lora_int_id` is 1 or more and belongs to one adapter only. `load_inplace` reads the weights
    anew although an adapter with this number is loaded. `is_3d_lora_weight` says how the expert
    weights in it are laid out, where both layouts are served.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    tensorizer_config_dict: dict[str, Any] | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"id must be > 0, got {self.lora_int_id}")
        if not self.lora_path:
            raise ValueError("lora_path cannot be empty")

    @property
    def adapter_id(self) -> int:
        """Its number."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """Its name."""
        return self.lora_name

    @property
    def path(self) -> str:
        """Folder or file with its weights."""
        return self.lora_path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)

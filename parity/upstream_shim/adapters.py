# SPDX-License-Identifier: Apache-2.0
"""Where upstream's call has another shape than vllmx's: the arguments are turned, nothing else.

An argument of a part that vllmx does not have may only say that the part is not wanted.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import yaml

import vllmx.config as config
from vllmx.core import kv_cache_interface, kv_cache_manager
from vllmx.models.hf_config import HFConfig

from .placeholder import MissingSymbol, MissingValue

STUBS = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text(encoding="utf-8"))
DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
# Argument -> the value that asks for nothing.
NEUTRAL: dict[str, Any] = {
    "runner": "generate",
    "is_encoder_decoder": False,
    "disable_chunked_mm_input": False,
    "kv_transfer_config": None,
    "kv_events_config": None,
    "speculative_config": None,
    "ec_transfer_config": None,
    "lora_config": None,
}


def _known(cls: type, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those of `kwargs` that are fields of `cls`; the others must ask for nothing."""
    fields = getattr(cls, "__dataclass_fields__", {})
    for name, value in kwargs.items():
        if name not in fields and (name not in NEUTRAL or value != NEUTRAL[name]):
            raise MissingSymbol(f"vllm.config.{cls.__name__}.{name}")
    return {name: value for name, value in kwargs.items() if name in fields}


class ModelConfig(config.ModelConfig):
    """Resolves a model that models.yaml knows, which vllmx does when the checkpoint is read."""

    def __init__(self, model: str = DEFAULT_MODEL, **kwargs: Any) -> None:
        kwargs["trust_remote_code"] = False  # no code comes with a stub
        super().__init__(model=model, **_known(config.ModelConfig, kwargs))
        if model not in STUBS:
            raise MissingSymbol(f"models.yaml:{model}")
        self.hf_config = HFConfig(dict(STUBS[model]))
        self.original_max_model_len = self.max_model_len
        if self.max_model_len in (None, -1):
            self.max_model_len = self.hf_config.max_position_embeddings

    @property
    def max_model_len_pinned(self) -> bool:
        """Upstream keeps what the user asked for; vllmx whether it was a length."""
        return self.original_max_model_len != -1

    @max_model_len_pinned.setter
    def max_model_len_pinned(self, value: bool) -> None:
        self.original_max_model_len = self.max_model_len if value else -1


def SchedulerConfig(max_model_len: int = 8192, **kwargs: Any) -> config.SchedulerConfig:  # noqa: N802
    """Upstream checks `max_model_len` against the budget there; vllmx in the engine's start."""
    return config.SchedulerConfig(**_known(config.SchedulerConfig, kwargs))


class VllmConfig(config.VllmConfig):
    """Upstream's has a model by default."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("model_config", ModelConfig())
        super().__init__(**_known(config.VllmConfig, kwargs))


def StructuredOutputManager(vllm_config: Any) -> MissingValue:  # noqa: N802
    """A scheduler is given one whether or not a request is constrained."""
    return MissingValue("vllm.v1.structured_output.StructuredOutputManager")


def register_all_kvcache_specs(vllm_config: Any) -> None:
    """Nothing: vllmx has a table from spec to manager."""


def prepare() -> None:
    """Dtypes of torch beside their names, and the setting that upstream reads from the environment
    where vllmx takes an argument."""
    sizes = kv_cache_interface.DTYPE_SIZES
    for name in list(sizes):
        sizes[getattr(torch, name)] = sizes[name]  # type: ignore[index]
    build = kv_cache_manager.get_kv_cache_coordinator

    def with_environment(*args: Any, **kwargs: Any) -> Any:
        interval = os.environ.get("VLLM_PREFIX_CACHE_RETENTION_INTERVAL")
        if kwargs.get("retention_interval") is None and interval is not None:
            kwargs["retention_interval"] = int(interval)
        return build(*args, **kwargs)

    kv_cache_manager.get_kv_cache_coordinator = with_environment

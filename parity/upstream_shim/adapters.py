# SPDX-License-Identifier: Apache-2.0
"""Where upstream's call has another shape than vllmx's: the arguments are turned, nothing else.

An argument of a part that vllmx does not have may only say that the part is not wanted.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
import yaml

import vllmx.config as config
from vllmx.core import kv_cache_interface, kv_cache_manager
from vllmx.engine.arg_utils import engine_args_to_config
from vllmx.model_loader.resolve import resolve_model
from vllmx.model_loader.tokenizer import Tokenizer, get_tokenizer
from vllmx.models.hf_config import HFConfig

from .placeholder import MissingSymbol, MissingValue

MODELS = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text(encoding="utf-8"))
STUBS = MODELS["configs"]
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
            self.max_model_len = self.hf_text_config.max_position_embeddings

    @property
    def max_model_len_pinned(self) -> bool:
        """Upstream keeps what the user asked for; vllmx whether it was a length."""
        return self.original_max_model_len != -1

    @max_model_len_pinned.setter
    def max_model_len_pinned(self, value: bool) -> None:
        self.original_max_model_len = self.max_model_len if value else -1


class SchedulerConfig(config.SchedulerConfig):
    """Upstream checks `max_model_len` against the budget here; vllmx in the engine's start."""

    DEFAULT_MAX_NUM_BATCHED_TOKENS = config.DEFAULT_MAX_NUM_BATCHED_TOKENS

    def __init__(self, max_model_len: int = 8192, **kwargs: Any) -> None:
        super().__init__(**_known(config.SchedulerConfig, kwargs))


class VllmConfig(config.VllmConfig):
    """Upstream's has a model by default."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("model_config", ModelConfig())
        super().__init__(**_known(config.VllmConfig, kwargs))


class EngineArgs:
    """Upstream's dataclass of arguments; vllmx has one table of flags for all ways in."""

    def __init__(self, model: str = DEFAULT_MODEL, **kwargs: Any) -> None:
        self.model = model
        self.kwargs = kwargs

    def create_engine_config(self, usage_context: Any = None) -> config.VllmConfig:
        """The config; the defaults are the same wherever vllmx is used."""
        made = config.finalize(engine_args_to_config(**self.kwargs))
        lengths = {"max_model_len": self.kwargs.get("max_model_len")}
        made.model_config = ModelConfig(self.model, **lengths)
        return made


class AutoTokenizer:
    """What stands for a tokenizer on the model hub: one of conf/model, from the cache."""

    @staticmethod
    def from_pretrained(name: str, **kwargs: Any) -> CallableTokenizer:
        """The tokenizer that models.yaml gives for `name`."""
        if name not in MODELS["tokenizers"]:
            raise MissingSymbol(f"models.yaml:{name}")
        return CallableTokenizer(_cached_tokenizer(MODELS["tokenizers"][name]), name)


@cache
def _cached_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a model of conf/model that has been fetched."""
    run = engine_args_to_config(model=model)
    run.load.offline = True
    vllm_config = config.finalize(run)
    resolve_model(vllm_config)
    tokenizer = get_tokenizer(vllm_config)
    assert tokenizer is not None
    return tokenizer


class CallableTokenizer(Tokenizer):
    """vllmx's tokenizer, called as transformers' are."""

    def __init__(self, inner: Tokenizer, name: str) -> None:
        self.__dict__.update(vars(inner))
        self.name_or_path = name

    def __call__(self, text: str) -> SimpleNamespace:
        """Token ids under `input_ids`."""
        return SimpleNamespace(input_ids=self.encode(text))

    @property
    def vocab(self) -> dict[str, int]:
        """Token -> id."""
        return self.backend.get_vocab()


class current_platform:
    """The machine as upstream's files ask for it; those that need a GPU skip themselves."""

    is_cpu = staticmethod(lambda: True)
    is_cuda = is_rocm = is_xpu = is_tpu = is_cuda_alike = staticmethod(lambda: False)
    device_type = "cpu"


@dataclass
class PlaceholderRange:
    """Where an item lies in a prompt; vllmx's block hash reads the offset and the length."""

    offset: int
    length: int
    is_embed: Any = None


@dataclass
class MultiModalFeatureSpec:
    """An item of a prompt; vllmx's block hash reads the identifier and the position."""

    data: Any
    modality: str
    identifier: str
    mm_position: PlaceholderRange
    mm_hash: str | None = None


class MultiModalKwargsItem(dict[str, Any]):
    """The data of an item, which a scheduler never reads."""

    @classmethod
    def dummy(cls, nbytes: int = 1) -> MultiModalKwargsItem:
        """An item without data."""
        return cls()


def StructuredOutputManager(vllm_config: Any) -> MissingValue:
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
    transformers.AutoTokenizer = AutoTokenizer

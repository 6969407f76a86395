# SPDX-License-Identifier: Apache-2.0
"""Where upstream's call has another shape than vllmx's: the arguments are turned, nothing else.

An argument of a part that vllmx does not have may only say that the part is not wanted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import transformers

import vllmx.config as config
from vllmx.core import kv_cache_interface, kv_cache_manager
from vllmx.models.hf_config import HFConfig
from vllmx.sampling_params import SamplingParams
from vllmx.structured_output import manager
from vllmx.structured_output.validation import validate_structured_outputs

from . import engines
from .engines import (
    DEFAULT_MODEL,
    LLM,
    AsyncEngineArgs,
    ChatRequest,
    EngineArgs,
    UsageContext,
    named_tokenizer,
    set_default_torch_num_threads,
)
from .placeholder import MissingSymbol
from .standins import MODELS
from .v1_rejection import (
    RejectionSampler,
    SamplerOutput,
    SpecDecodeMetadata,
    sample_recovered_tokens,
)
from .v1_sampler import (
    BeamSearchOnlineMixin,
    LogitBiasLogitsProcessor,
    LogprobsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
    Sampler,
    SamplingMetadata,
    apply_top_k_top_p_pytorch,
    build_logitsprocs,
    make_tensor_with_pad,
    random_sample,
    set_random_seed,
)

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "BeamSearchOnlineMixin",
    "ChatRequest",
    "EngineArgs",
    "LogitBiasLogitsProcessor",
    "LogprobsProcessor",
    "MinPLogitsProcessor",
    "MinTokensLogitsProcessor",
    "RejectionSampler",
    "Sampler",
    "SamplerOutput",
    "SamplingMetadata",
    "SpecDecodeMetadata",
    "UsageContext",
    "apply_top_k_top_p_pytorch",
    "build_logitsprocs",
    "make_tensor_with_pad",
    "named_tokenizer",
    "random_sample",
    "sample_recovered_tokens",
    "set_default_torch_num_threads",
    "set_random_seed",
]
STUBS = MODELS["configs"]
# Argument -> the value that asks for nothing.
NEUTRAL: dict[str, Any] = {
    "runner": "generate",
    "kv_events_config": None,
    "speculative_config": None,
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
        self.mm_max_toks_per_item = MODELS["encoders"].get(model, {})
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
    """Upstream checks `max_model_len` against the budget here, and adapts to the model; vllmx in
    the engine's start."""

    DEFAULT_MAX_NUM_BATCHED_TOKENS = config.DEFAULT_MAX_NUM_BATCHED_TOKENS

    def __init__(
        self, max_model_len: int = 8192, is_encoder_decoder: bool = False, **kwargs: Any
    ) -> None:
        # Upstream's dataclass has the default that vllmx settles in the engine's start.
        kwargs.setdefault("max_num_batched_tokens", config.DEFAULT_MAX_NUM_BATCHED_TOKENS)
        super().__init__(**_known(config.SchedulerConfig, kwargs))
        if is_encoder_decoder:
            self.adapt_to_encoder_decoder()


class VllmConfig(config.VllmConfig):
    """Upstream's has a model by default."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("model_config", ModelConfig())
        kwargs.setdefault("scheduler_config", SchedulerConfig())
        super().__init__(**_known(config.VllmConfig, kwargs))


class current_platform:
    """The machine as upstream's files ask for it; those that need a GPU skip themselves."""

    passes_for_cuda = False
    """For the files that the map names: what they test runs on vllmx's CPU engine as well."""
    is_cpu = staticmethod(lambda: not current_platform.passes_for_cuda)
    is_cuda = is_cuda_alike = staticmethod(lambda: current_platform.passes_for_cuda)
    is_rocm = is_xpu = is_tpu = staticmethod(lambda: False)
    device_type = "cpu"
    device_count = staticmethod(lambda: 1)


def create_new_process_for_each_test(method: str | None = None) -> Callable[[Any], Any]:
    """Nothing: what a test leaves behind in vllmx does not reach the next."""
    return lambda function: function


def multi_gpu_test(*, num_gpus: int) -> Callable[[Any], Any]:
    """The mark of a test that needs several GPUs."""
    return pytest.mark.skip(f"needs {num_gpus} GPUs")


def maybe_create_thinking_budget_state_holder(*arguments: Any) -> None:
    """None: budgets of reasoning are rows of the sampler's, beside what a call is told."""


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Nothing: an engine of vllmx leaves no process group behind."""


def large_gpu_mark(min_gb: int) -> Any:
    """The mark of a test that needs a GPU of that size."""
    return pytest.mark.skip(f"needs a GPU of {min_gb} GB")


def is_mistral_tokenizer(tokenizer: Any) -> bool:
    """vllmx has none in Mistral's own format."""
    return False


def is_pin_memory_available() -> bool:
    """A CPU's memory is not pinned."""
    return False


LogprobsMode = Literal["raw_logits", "raw_logprobs", "processed_logits", "processed_logprobs"]
"""The modes that the config has."""


def StructuredOutputManager(vllm_config: Any) -> manager.StructuredOutputManager:
    """Upstream's loads a tokenizer of the hub."""
    model_config = vllm_config.model_config
    tokenizer = None
    if model_config.tokenizer and not model_config.skip_tokenizer_init:
        tokenizer = engines.AutoTokenizer.from_pretrained(model_config.tokenizer)
    return manager.StructuredOutputManager(vllm_config, tokenizer)


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
    # A method there, a function here.
    SamplingParams._validate_structured_outputs = validate_structured_outputs  # type: ignore[attr-defined]
    transformers.AutoTokenizer = engines.AutoTokenizer
    if not torch.accelerator.is_available():
        # Tests tidy a GPU up, which torch refuses where there is none.
        torch.accelerator.empty_cache = lambda: None

# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/__init__.py @ v0.25.0
"""vLLM's V1 engine written anew in Python. Nothing is imported before it is asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllmx.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllmx.engine.async_llm import AsyncLLM
    from vllmx.engine.llm_engine import LLMEngine
    from vllmx.entrypoints.llm import LLM
    from vllmx.outputs import CompletionOutput, RequestOutput
    from vllmx.registry import ModelRegistry
    from vllmx.sampling_params import BeamSearchParams, SamplingParams

    __version__: str

_MODULES = {
    "LLM": "vllmx.entrypoints.llm",
    "LLMEngine": "vllmx.engine.llm_engine",
    "AsyncLLM": "vllmx.engine.async_llm",
    "EngineArgs": "vllmx.engine.arg_utils",
    "AsyncEngineArgs": "vllmx.engine.arg_utils",
    "SamplingParams": "vllmx.sampling_params",
    "BeamSearchParams": "vllmx.sampling_params",
    "RequestOutput": "vllmx.outputs",
    "CompletionOutput": "vllmx.outputs",
    "ModelRegistry": "vllmx.registry",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "ModelRegistry",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("vllmx")
    elif name in _MODULES:
        value = getattr(import_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

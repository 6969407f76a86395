# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/sample/logits_processor/__init__.py @ v0.25.0
"""Custom logits processors: those of installed packages and those that an engine is given."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import torch

from vllmx.sample.logits_processor.adapter import (
    AdapterLogitsProcessor,
    RequestLogitsProcessor,
    process_dict_updates,
)
from vllmx.sample.logits_processor.interface import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)
from vllmx.sample.logits_processor.state import BatchUpdateBuilder, LogitsProcessors
from vllmx.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllmx.config import VllmConfig

__all__ = [
    "LOGITSPROCS_GROUP",
    "STR_POOLING_REJECTS_LOGITSPROCS",
    "STR_SPEC_DEC_REJECTS_LOGITSPROCS",
    "AdapterLogitsProcessor",
    "BatchUpdate",
    "BatchUpdateBuilder",
    "LogitsProcessor",
    "LogitsProcessors",
    "MoveDirectionality",
    "RequestLogitsProcessor",
    "build_logitsprocs",
    "process_dict_updates",
    "validate_logits_processors_parameters",
]
logger = logging.getLogger(__name__)

STR_POOLING_REJECTS_LOGITSPROCS = "Pooling models do not support custom logits processors."
STR_SPEC_DEC_REJECTS_LOGITSPROCS = (
    "Custom logits processors are not supported when speculative decoding is enabled."
)
LOGITSPROCS_GROUP = "vllm.logits_processors"
"""Entry point group of packages that bring logits processors."""

Named = str | type[LogitsProcessor]


def _load_logitsprocs_plugins() -> list[type[LogitsProcessor]]:
    """The processors of installed packages. RuntimeError for one that can't be loaded."""
    classes = []
    for entry_point in entry_points(group=LOGITSPROCS_GROUP):
        try:
            classes.append(entry_point.load())
        except Exception as error:
            raise RuntimeError(f"Failed to load LogitsProcessor plugin {entry_point}") from error
    return classes


def _load_logitsprocs_by_fqcns(
    logits_processors: Sequence[Named] | None,
) -> list[type[LogitsProcessor]]:
    """The classes that are given, or named as MODULE:CLASS.

    RuntimeError for a module that can't be imported, ValueError for what is no LogitsProcessor.
    """
    classes: list[type[LogitsProcessor]] = []
    for i, named in enumerate(logits_processors or ()):
        if isinstance(named, type):
            if not issubclass(named, LogitsProcessor):
                raise ValueError(f"{named.__name__} is not a subclass of LogitsProcessor")
            classes.append(named)
            continue
        module_name, colon, qualname = str(named).partition(":")
        if not (module_name and colon and qualname):
            raise ValueError(f"logits_processors: {named!r} is not of the form MODULE:CLASS.")
        try:
            found = importlib.import_module(module_name)
        except Exception as error:
            raise RuntimeError(f"Failed to load {i}th LogitsProcessor plugin {named}") from error
        for name in qualname.split("."):
            if not hasattr(found, name):
                raise ValueError(f"logits_processors: there is no {name} for {named!r}.")
            found = getattr(found, name)
        if not isinstance(found, type):
            raise ValueError("Loaded logit processor must be a type.")
        if not issubclass(found, LogitsProcessor):
            raise ValueError(f"{found.__name__} must be a subclass of LogitsProcessor")
        classes.append(found)
    return classes


@lru_cache
def load_custom_logitsprocs(
    logits_processors: tuple[Named, ...] = (),
) -> list[type[LogitsProcessor]]:
    """The classes of installed packages, then those that are given or named."""
    return _load_logitsprocs_plugins() + _load_logitsprocs_by_fqcns(logits_processors)


def build_logitsprocs(
    vllm_config: VllmConfig,
    device: torch.device,
    is_pin_memory: bool,
    is_pooling_model: bool = False,
    custom_logitsprocs: Sequence[Named] = (),
) -> LogitsProcessors:
    """The custom processors of an engine. ValueError where it can't have any.

    What upstream has as built-in processors (min_p, logit_bias, min_tokens) are states of the
    sampler here.
    """
    if is_pooling_model:
        if custom_logitsprocs:
            raise ValueError(STR_POOLING_REJECTS_LOGITSPROCS)
        return LogitsProcessors()
    if vllm_config.speculative_config is not None:
        if custom_logitsprocs:
            raise ValueError(STR_SPEC_DEC_REJECTS_LOGITSPROCS)
        return LogitsProcessors()
    classes = load_custom_logitsprocs(tuple(custom_logitsprocs))
    return LogitsProcessors(cls(vllm_config, device, is_pin_memory) for cls in classes)


def validate_logits_processors_parameters(
    logits_processors: Sequence[Named] | None, sampling_params: SamplingParams
) -> None:
    """Let every processor check a request's parameters; ValueError from one that can't use them."""
    for processor in load_custom_logitsprocs(tuple(logits_processors or ())):
        processor.validate_params(sampling_params)

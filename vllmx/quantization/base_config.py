# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/quantization/base_config.py @ v0.25.0
"""A quantisation method packs the weights of a linear layer and says how to apply them.

Each method is one file of this folder, named as `quant_method` in config.json, with a class that
subclasses LinearMethodBase.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vllmx.config import VllmConfig
from vllmx.exceptions import CheckpointError, UserError
from vllmx.ir.select import OpTable
from vllmx.models.hf_config import HFConfig, read_json

MODELOPT = "hf_quant_config.json"
"""Where ModelOpt says what config.json may not."""


@dataclass
class PackedLinear:
    """Weights ready to run. format: how they lie in memory, in words; nbytes: their size.

    dense: the stacked weight [out, in] itself, where it is kept in the activation dtype.
    """

    apply: Callable[[Tensor], Tensor]
    format: str
    nbytes: int
    dense: Tensor | None = None


class LinearMethodBase(ABC):
    """How the linear layers of one checkpoint are packed."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config

    @abstractmethod
    def pack(self, weights: list[Any], biases: list[Any] | None, ops: OpTable) -> PackedLinear:
        """Stack `weights` ([rows_i, in] each) and pack them for the linear provider of `ops`."""


def quantization_methods() -> list[str]:
    """The methods there are, read from the folder."""
    return sorted(
        path.stem
        for path in Path(__file__).parent.glob("*.py")
        if path.stem not in ("__init__", "base_config")
    )


def quant_method_of(vllm_config: VllmConfig) -> str:
    """The method of this checkpoint by name. For one that is not built CheckpointError with the
    file that names it, UserError where model.quantization does."""
    model_config = vllm_config.model_config
    hf_config = model_config.hf_config
    name, where = "gguf" if hf_config.gguf is not None else "unquantized", hf_config.origin
    for origin, key, told in _told(hf_config, Path(model_config.model)):
        if not isinstance(told, dict):
            raise CheckpointError(f"{origin}: {key} is {told!r}, not a JSON object.")
        name, where = str(told.get("quant_method", "unnamed")), origin
        if name == "gguf" and hf_config.gguf is None:
            raise CheckpointError(
                f"{origin}: {key} says gguf, and the weights are not in a GGUF file; load that "
                "file, or leave the key out."
            )
    error: type[UserError] = CheckpointError
    if model_config.quantization:
        name, where, error = model_config.quantization, "model.quantization", UserError
    if name.replace("-", "_") not in quantization_methods():
        raise error(
            f"{where}: quantization method {name!r} is not supported; "
            f"supported are {', '.join(quantization_methods())}."
        )
    return name


def _told(hf_config: HFConfig, folder: Path) -> Iterator[tuple[str, str, Any]]:
    """What a checkpoint says of its quantisation, wherever a tool may have written it: file, key
    and value."""
    for config in (hf_config, hf_config.text_config):
        for key in ("quantization_config", "compression_config"):
            if config.raw.get(key):
                yield config.origin, key, config.raw[key]
    file = folder / MODELOPT
    if file.is_file():
        yield str(file), "quantization", {"quant_method": "modelopt", **read_json(file)}


def get_linear_method(vllm_config: VllmConfig, prefix: str) -> LinearMethodBase:
    """The packing method for the linear layer at `prefix`."""
    stem = quant_method_of(vllm_config).replace("-", "_")
    module = importlib.import_module(f"vllmx.quantization.{stem}")
    return module.LinearMethod(vllm_config)

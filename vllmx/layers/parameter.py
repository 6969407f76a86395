# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/parameter.py @ v0.25.0
"""How a layer receives its weights: shard by shard, and packed as soon as it has them all.

The shards stay views of the memory-mapped checkpoint until then, so that loading never holds
more than one layer's weights expanded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllmx.exceptions import WeightError

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""What a weight may be stored in: one of less bits needs scales that plain layers don't read."""


def to_float(tensor: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """A checkpoint tensor, quantised or not, as a dense tensor of `dtype`."""
    if isinstance(tensor, Tensor):
        return tensor.to(dtype)
    return tensor.dequantize(dtype=dtype)


class WeightHolder:
    """Mixin of every layer that has weights."""

    loaded: dict[tuple[str, str | None], Any] | None = None
    is_loaded: bool = False

    def expected_weights(self) -> dict[tuple[str, str | None], tuple[int, ...]]:
        """Shape of each (parameter, shard) that must come from the checkpoint."""
        raise AssertionError(f"{type(self).__name__} does not say what weights it expects")

    def finish_loading(self) -> None:
        """Turn `self.loaded` into what runs; called by `pack`, maybe in another thread."""
        raise AssertionError(f"{type(self).__name__} does not say how its weights are packed")

    def load_weight(self, param: str, shard_id: str | None, tensor: Any, source_name: str) -> bool:
        """Take one tensor of the checkpoint; WeightError where its shape is another, or it
        is not of FLOATS.

        True once every expected weight is there: then `pack` is due.
        """
        expected = self.expected_weights()
        key = (param, shard_id)
        if key not in expected:
            raise WeightError(
                f"weight {source_name}: by the config its layer, of class {type(self).__name__}, "
                f"has no parameter {param}{'' if shard_id is None else f' with part {shard_id}'}.",
                source_name,
            )
        if tuple(tensor.shape) != expected[key]:
            raise WeightError(
                f"weight {source_name} has shape {list(tensor.shape)}, "
                f"the config wants {list(expected[key])}.",
                source_name,
            )
        if isinstance(tensor, Tensor) and tensor.dtype not in FLOATS:
            raise WeightError(
                f"weight {source_name} is of {tensor.dtype}; floating point is wanted, of 16 bits "
                "at least, as the config names no quantisation that is stored so.",
                source_name,
            )
        if self.loaded is None:
            self.loaded = {}
        if key in self.loaded or self.is_loaded:
            raise WeightError(f"weight {source_name} is in the checkpoint twice.", source_name)
        self.loaded[key] = tensor
        return len(self.loaded) == len(expected)

    def pack(self) -> None:
        """Turn the loaded shards into what runs, and let go of them."""
        self.finish_loading()
        self.is_loaded, self.loaded = True, None

    def checkpoint_name(self, param: str, shard_id: str | None) -> str | None:
        """What a checkpoint calls a weight below this layer's name; None where the model's mapper
        knows."""
        return None

    def take_float(self, param: str) -> Tensor:
        """The one unsharded `param` as float32."""
        assert self.loaded is not None
        return to_float(self.loaded[(param, None)])

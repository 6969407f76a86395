# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/linear.py @ v0.25.0
"""Linear layers; several matrices of a checkpoint may be stacked into one.

The parallel ones keep upstream's names. On one device each holds all of its rows or columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from vllmx.config import VllmConfig
from vllmx.exceptions import WeightError
from vllmx.ir.select import OpTable
from vllmx.layers.parameter import WeightHolder
from vllmx.quantization.base_config import PackedLinear, get_linear_method


class LinearBase(WeightHolder, nn.Module):
    """y = x @ W.T + b with W [sum(output_sizes), input_size], stacked from named shards.

    shards: shard id -> its number of rows, in the order of stacking; {None: n} is one matrix.
    """

    def __init__(
        self,
        input_size: int,
        shards: dict[str | None, int],
        bias: bool,
        vllm_config: VllmConfig,
        ops: OpTable,
        prefix: str,
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.shards = shards
        self.output_size = sum(shards.values())
        self.has_bias = bias
        self.prefix = prefix
        self.method = get_linear_method(vllm_config, prefix)
        self.ops = ops
        self.packed: PackedLinear | None = None
        self.apply_weights: Callable[[Tensor], Tensor]

    def expected_weights(self) -> dict[tuple[str, str | None], tuple[int, ...]]:
        """One weight a shard, and one bias a shard where the layer has biases."""
        expected: dict[tuple[str, str | None], tuple[int, ...]] = {
            ("weight", shard): (rows, self.input_size) for shard, rows in self.shards.items()
        }
        if self.has_bias:
            expected |= {("bias", shard): (rows,) for shard, rows in self.shards.items()}
        return expected

    def load_weight(self, param: str, shard_id: str | None, tensor: Any, source_name: str) -> bool:
        """As of WeightHolder; a matrix that has all shards stacked in our order is taken apart."""
        if shard_id is not None or None in self.shards or not isinstance(tensor, Tensor):
            return super().load_weight(param, shard_id, tensor, source_name)
        rows = len(tensor) if tensor.dim() else 0
        if rows != self.output_size:
            raise WeightError(
                f"weight {source_name} has {rows} rows, the config wants {self.output_size}.",
                source_name,
            )
        parts = tensor.split(list(self.shards.values()))
        return [
            super(LinearBase, self).load_weight(param, shard, part, source_name)
            for shard, part in zip(self.shards, parts, strict=True)
        ][-1]

    def finish_loading(self) -> None:
        """Stack and pack the shards for the chosen provider."""
        assert self.loaded is not None
        weights = [self.loaded[("weight", shard)] for shard in self.shards]
        biases: list[Any] | None = None
        if self.has_bias:
            biases = [self.loaded[("bias", shard)] for shard in self.shards]
        self.set_packed(self.method.pack(weights, biases, self.ops))

    def set_packed(self, packed: PackedLinear) -> None:
        """Use `packed`, which may belong to another layer too (a tied head)."""
        self.packed = packed
        self.apply_weights = packed.apply
        self.is_loaded = True

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, input_size] -> [num_tokens, output_size]."""
        return self.apply_weights(x)


class ReplicatedLinear(LinearBase):
    """A linear layer that every device holds whole."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = False,
        *,
        vllm_config: VllmConfig,
        ops: OpTable,
        prefix: str = "",
    ) -> None:
        super().__init__(input_size, {None: output_size}, bias, vllm_config, ops, prefix)


class ColumnParallelLinear(ReplicatedLinear):
    """A linear layer whose outputs may be split over devices."""


class RowParallelLinear(ReplicatedLinear):
    """A linear layer whose inputs may be split over devices."""


class MergedColumnParallelLinear(LinearBase):
    """Matrices with one input, stacked; shard ids "0", "1", ... in order."""

    def __init__(
        self,
        input_size: int,
        output_sizes: list[int],
        bias: bool = False,
        *,
        vllm_config: VllmConfig,
        ops: OpTable,
        prefix: str = "",
    ) -> None:
        shards: dict[str | None, int] = {str(i): n for i, n in enumerate(output_sizes)}
        super().__init__(input_size, shards, bias, vllm_config, ops, prefix)


class QKVParallelLinear(LinearBase):
    """Query, key and value projections, stacked; shard ids "q", "k", "v"."""

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int,
        bias: bool = False,
        *,
        vllm_config: VllmConfig,
        ops: OpTable,
        prefix: str = "",
    ) -> None:
        kv_size = total_num_kv_heads * head_size
        shards: dict[str | None, int] = {
            "q": total_num_heads * head_size,
            "k": kv_size,
            "v": kv_size,
        }
        super().__init__(hidden_size, shards, bias, vllm_config, ops, prefix)

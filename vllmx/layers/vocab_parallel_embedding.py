# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/vocab_parallel_embedding.py @ v0.25.0
"""Token embedding and output head, one table between them where the model ties them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vllmx.config import VllmConfig
from vllmx.ir.select import OpTable
from vllmx.layers.linear import LinearBase
from vllmx.layers.parameter import WeightHolder


class VocabParallelEmbedding(WeightHolder, nn.Module):
    """A table [num_embeddings, embedding_dim], kept as the checkpoint stores it.

    Rows are brought to the activation dtype when they are looked up, so that a half-precision or
    quantised table is never expanded.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, ops: OpTable, prefix: str = ""
    ) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.ops = ops
        self.prefix = prefix
        self.table: Any = None
        self._embedding = ops.bind("embedding")

    def expected_weights(self) -> dict[tuple[str, str | None], tuple[int, ...]]:
        """The table."""
        return {("weight", None): (self.num_embeddings, self.embedding_dim)}

    def finish_loading(self) -> None:
        """Keep the table on the device in its own type."""
        assert self.loaded is not None
        table = self.loaded[("weight", None)]
        # A copy: the loaded table is a view of the memory-mapped file.
        self.table = (
            table.to(self.ops.device, copy=True)
            if isinstance(table, Tensor)
            else table.to(self.ops.device)
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids: int [num_tokens] -> [num_tokens, embedding_dim] in the activation dtype."""
        if isinstance(self.table, Tensor):
            return self._embedding(input_ids, self.table).to(self.ops.dtype)
        return self.table.dequantize(dtype=self.ops.dtype, rows=input_ids)


class ParallelLMHead(LinearBase):
    """Hidden states to logits over the vocabulary."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        vllm_config: VllmConfig,
        ops: OpTable,
        prefix: str = "",
        bias: bool = False,
    ) -> None:
        super().__init__(embedding_dim, {None: num_embeddings}, bias, vllm_config, ops, prefix)

    def tie_weights(self, embedding: VocabParallelEmbedding) -> None:
        """Use the embedding's table as this head's weight."""
        self.set_packed(self.method.pack([embedding.table], None, self.ops))


def weight_formats(model: nn.Module) -> dict[str, tuple[int, int]]:
    """How the weights of `model` lie in memory: format -> (number of layers, bytes)."""
    formats: dict[str, tuple[int, int]] = {}
    for module in model.modules():
        if isinstance(module, LinearBase) and module.packed is not None:
            name, nbytes = module.packed.format, module.packed.nbytes
        elif isinstance(module, VocabParallelEmbedding) and module.table is not None:
            table = module.table
            kind = str(table.dtype) if isinstance(table, torch.Tensor) else table.qtype.name
            name, nbytes = f"embedding as stored ({kind.removeprefix('torch.')})", table.nbytes
        else:
            continue
        count, total = formats.get(name, (0, 0))
        formats[name] = (count + 1, total + nbytes)
    return formats

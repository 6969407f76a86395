# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/{linear,vocab_parallel_embedding}.py @ v0.25.0
"""Linear layers and embeddings over dense weights."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllmx.ir.op import ANY_DEVICE, REFERENCE, register_op
from vllmx.ir.row_by_row import row_by_row


@register_op(static_args=("weight", "bias"))
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias; x: [num_tokens, in], weight: [out, in], bias: [out].

    A weight of another dtype than x's is converted on each call. Returns [num_tokens, out] in
    x's dtype. A provider with `prepare` takes what that made of weight and bias instead.
    """
    if weight.dtype != x.dtype:
        weight = weight.to(x.dtype)
    return F.linear(x, weight, bias)


@register_op
def embedding(input_ids: Tensor, weight: Tensor) -> Tensor:
    """weight[input_ids]; input_ids: int [num_tokens], weight: [vocab, hidden]."""
    return F.embedding(input_ids, weight)


linear.set_batch_invariant(REFERENCE, ANY_DEVICE, row_by_row(linear.fn, "x"))
embedding.set_batch_invariant(REFERENCE, ANY_DEVICE)


@linear.register_inputs
def _linear_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    tokens, fan_in, fan_out = ((1, 64, 17), (8, 576, 960), (33, 192, 64), (512, 64, 96))[case % 4]
    weight = torch.randn(fan_out, fan_in, generator=generator) * fan_in**-0.5
    bias = torch.randn(fan_out, generator=generator) if case % 2 else None
    return {
        "x": torch.randn(tokens, fan_in, generator=generator).to(device, dtype),
        # bf16 values: a provider that packs to half precision is then exact.
        "weight": weight.to(torch.bfloat16).to(device, dtype),
        "bias": None if bias is None else bias.to(device, dtype),
    }


@embedding.register_inputs
def _embedding_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    tokens, vocab, hidden = ((1, 10, 8), (17, 1000, 64), (63, 257, 576))[case % 3]
    return {
        "input_ids": torch.randint(0, vocab, (tokens,), generator=generator).to(device),
        "weight": torch.randn(vocab, hidden, generator=generator).to(device, dtype),
    }

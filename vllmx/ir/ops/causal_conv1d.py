# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/mamba/ops/causal_conv1d.py @ v0.25.0
"""The short convolution before a recurrence: each channel over its last few tokens, then silu.

Shapes: T tokens, R requests, C channels, W width. The state of a request is its last W - 1 inputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllmx.ir.op import ANY_DEVICE, REFERENCE, register_op
from vllmx.ir.row_by_row import row_by_row


@register_op
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    activation: str | None = "silu",
) -> Tensor:
    """Whole prompts, or pieces of them: the output [T, C] in x's dtype; writes the states.

    x: [T, C], the requests one after another; weight: [C, W]; bias: [C]; conv_states:
    [blocks, C, W - 1], oldest input first; query_start_loc: int32 [R + 1]; cache_indices:
    int32 [R], the block of each request's state; has_initial_state: bool [R], false where the
    tokens before x are zeros. activation: "silu" or None. Summed in float32.
    """
    out = torch.empty_like(x)
    starts = query_start_loc.tolist()
    known = has_initial_state.tolist()
    for i, block in enumerate(cache_indices.tolist()):
        rows = slice(starts[i], starts[i + 1])
        state = conv_states[block].T
        before = state.to(x.dtype) if known[i] else torch.zeros_like(state, dtype=x.dtype)
        inputs = torch.cat((before, x[rows]))
        out[rows] = _convolved(inputs, weight, bias, activation)
        conv_states[block] = inputs[-len(state) :].T.to(conv_states.dtype)
    return out


@register_op
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state_indices: Tensor,
    activation: str | None = "silu",
) -> Tensor:
    """One new token of each request: the output [R, C] in x's dtype; moves the states on.

    Arguments as those of `causal_conv1d_fn`. A request whose block is 0, which is nobody's, is
    padding: its row is zero and no state is written.
    """
    blocks = conv_state_indices.long()
    real = (blocks > 0)[:, None]
    state = conv_state[blocks]
    inputs = torch.cat((state.mT.to(x.dtype), x[:, None]), dim=1)
    out = _convolved(inputs, weight, bias, activation)[:, 0]
    moved = inputs[:, 1:].mT.to(state.dtype)
    conv_state[blocks] = torch.where(real[:, :, None], moved, state)
    return out.masked_fill(~real, 0.0)


def _convolved(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """inputs: [..., tokens + W - 1, C] -> [..., tokens, C].

    Products are added oldest first, so that a token's sum does not depend on its neighbours.
    """
    wide, factors = inputs.float(), weight.float().T
    tokens = inputs.shape[-2] - len(factors) + 1
    total = wide[..., :tokens, :] * factors[0]
    for i in range(1, len(factors)):
        total = total + wide[..., i : i + tokens, :] * factors[i]
    if bias is not None:
        total = total + bias.float()
    return (F.silu(total) if activation == "silu" else total).to(inputs.dtype)


def _token_by_token(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    activation: str | None = "silu",
) -> Tensor:
    """causal_conv1d_fn as a row of decodes."""
    starts, out = query_start_loc.tolist(), torch.empty_like(x)
    known = has_initial_state.tolist()
    for i, block in enumerate(cache_indices.split(1)):
        if not known[i]:
            conv_states[block.long()] = 0
        for t in range(starts[i], starts[i + 1]):
            token = x[t : t + 1].clone()
            out[t] = causal_conv1d_update.fn(token, conv_states, weight, bias, block, activation)
    return out


causal_conv1d_fn.set_batch_invariant(REFERENCE, ANY_DEVICE, _token_by_token)
causal_conv1d_update.set_batch_invariant(
    REFERENCE, ANY_DEVICE, row_by_row(causal_conv1d_update.fn, "x", "conv_state_indices")
)

BATCHES = (
    # (tokens of each request, which have a state, channels, width)
    ([5], [False], 32, 4),
    ([1, 2, 3, 9], [True, False, True, True], 33, 4),
    ([64, 1], [True, True], 16, 2),
    ([7, 7], [False, True], 5, 3),
)


@causal_conv1d_fn.register_inputs
def _causal_conv1d_fn_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    lengths, known, channels, width = BATCHES[case % len(BATCHES)]
    requests = len(lengths)
    blocks = torch.randperm(requests + 1, generator=generator)[:requests] + 1
    states = torch.randn(requests + 2, channels, width - 1, generator=generator)
    weight = torch.randn(channels, width, generator=generator)
    bias = torch.randn(channels, generator=generator) if case % 2 else None
    return {
        "x": torch.randn(sum(lengths), channels, generator=generator).to(device, dtype),
        "weight": weight.to(device, dtype),
        "bias": None if bias is None else bias.to(device, dtype),
        "conv_states": states.to(device, dtype),
        "query_start_loc": torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32),
        "cache_indices": blocks.to(device, torch.int32),
        "has_initial_state": torch.tensor(known, device=device),
        "activation": "silu",
    }


@causal_conv1d_update.register_inputs
def _causal_conv1d_update_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    inputs = _causal_conv1d_fn_inputs(case, dtype, device, generator)
    indices = inputs["cache_indices"]
    if case % 4 == 1:
        indices[-1] = 0
    return {
        "x": inputs["x"][: len(indices)],
        "conv_state": inputs["conv_states"],
        "weight": inputs["weight"],
        "bias": inputs["bias"],
        "conv_state_indices": indices,
        "activation": "silu",
    }

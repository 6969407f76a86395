# SPDX-License-Identifier: Apache-2.0
"""Weights that decide by more than bfloat16 rounds, for models held to a golden of bfloat16.

With random weights two experts, or two next tokens, are often as likely as each other, and a
rounding says which. Here the first elements of the hidden state are a code of the token, which no
layer writes to. A router reads those of its experts, other ones in each layer, and the head those
of two tokens that may come next, between which the layers decide. All else is as random as in the
other models, and so are the weights of the chosen experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

SUFFIX = "-bf16"
"""Ends the names of the models."""
CODE = 32
"""Elements of a token's code, behind which there is one for each expert."""
LOUD = 8.0
"""What each element of a code is in the embedding. What the layers add has 9 to 11 in the end."""
FOLLOWS = (0.25, 0.175)
"""The head's weights on the codes of the two tokens that each may follow."""
HEAD = 0.3
"""What is left of its random weights: logits below 8 are rounded to a 64th, and are so few units
apart that many tokens remain possible."""
ROUTER = 4.0
"""A router's weight on the element of an expert."""
CALM = 0.125
"""What is left of its random weights: how an expert counts is the context's part."""
PEAKED = 2.0
"""What is added to the norms of queries: few tokens are attended to, by what and where they are."""
WRITERS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")
"""Tensors whose results are added to the stream, [..., hidden, inner]."""

Draw = Callable[[str, tuple[int, ...]], np.ndarray]
"""Numbers for a name and a shape, from counter bits."""


def decided(
    tensors: dict[str, np.ndarray], config: dict[str, Any], draw: Draw
) -> dict[str, np.ndarray]:
    """`tensors` of a model of `config`, those that make and heed decisions changed.

    config: of the text, with at most 1024 tokens and a head of its own.
    """
    experts = config.get("num_experts", 0)
    code = codes()[: config["vocab_size"]]
    kept = CODE + experts
    found = {name: tensor.copy() for name, tensor in tensors.items()}
    for name, tensor in found.items():
        if name.endswith("embed_tokens.weight"):
            tensor[:, :CODE] = LOUD * code
            if experts:
                tensor[:, CODE:kept] = LOUD * _wanted(config, draw)
        elif name.endswith(WRITERS):
            tensor[..., :kept, :] = 0.0
        elif name.endswith("self_attn.q_norm.weight"):
            tensor += PEAKED
        elif name.endswith("mlp.gate.weight"):
            tensor *= CALM
            own = CODE + np.argsort(draw(f"{name}/order", (experts,)))
            tensor[:, CODE:kept] = 0.0
            tensor[np.arange(experts), own] = ROUTER
        elif name == "lm_head.weight":
            tensor *= HEAD
            tensor[:, :CODE] = sum(
                share * code[_before(draw(f"{name}/{i}", (len(code),)))]
                for i, share in enumerate(FOLLOWS)
            )
    return found


def _wanted(config: dict[str, Any], draw: Draw) -> np.ndarray:
    """[vocab_size, experts], which experts each token goes to: 1 for the first, 1.5 for the next
    and so on, 0 for those that it does not."""
    chosen, experts = config["num_experts_per_tok"], config["num_experts"]
    drawn = draw("experts", (config["vocab_size"], experts))
    places = np.argsort(np.argsort(drawn, axis=1), axis=1)
    return np.where(places < chosen, 1 + places / 2, 0.0)


def _before(drawn: np.ndarray) -> np.ndarray:
    """The token before each, in one circle of all in the order that is drawn."""
    order = np.argsort(drawn)
    before = np.empty_like(order)
    before[order] = np.roll(order, 1)
    return before


def codes() -> np.ndarray:
    """float32 [1024, CODE] of 1 and -1; any two rows are the same in 12 to 20 elements.

    A row for each pair of five-bit masks: the parity of the one's bits in x and of the other's in
    the cube of x, for all x of the field of CODE elements (Gold's sequences).
    """
    field = range(CODE)
    cubes = [_times(x, _times(x, x)) for x in field]
    odd = [
        [((first & x).bit_count() + (second & cubes[x]).bit_count()) % 2 for x in field]
        for second in field
        for first in field
    ]
    return np.where(odd, np.float32(-1), np.float32(1))


def _times(a: int, b: int) -> int:
    """The product of two elements of that field: of polynomials over two numbers, less x^5+x^2+1
    as often as that is in it."""
    product = 0
    for place in range(5):
        product ^= (a << place) * (b >> place & 1)
    for place in (3, 2, 1, 0):
        product ^= (0b100101 << place) * (product >> place + 5 & 1)
    return product

# SPDX-License-Identifier: Apache-2.0
"""Weights that decide by more than bfloat16 rounds, for models that are compared in bfloat16.

With random weights two experts, or two next tokens, are often as likely as each other, and a
rounding says which. Here the first elements of the hidden state are a code of the token, which no
layer writes to. A router reads those of its experts, other ones in each layer, and the head those
of two tokens that may come next, between which the layers decide. All else is as random as in the
other models, and so are the weights of the chosen experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
UNBIASED = 1 / 64
"""What is left of biases that are added to scores: they decide nothing."""
PEAKED = 2.0
"""What is added to the norms of queries: few tokens are attended to, by what and where they are."""
EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight")
ROUTERS = (".gate.weight", ".gate.wg.weight", ".router.layer.weight", ".router.weight")
BIASES = (".e_score_correction_bias", ".expert_bias")
"""What is added to scores to choose experts by."""
WRITERS = (
    *("o_proj.weight", "o_proj.bias", "out_proj.weight", "attention.dense.weight"),
    *("down_proj.weight", ".w2.weight", "output_linear.weight"),
    *("experts.down_proj", "experts.down_proj_bias", "experts.mlp.w2"),
)
"""Tensors whose results are added to the stream: on the first axis, of the last two, that is as
long as the stream is wide."""
UNNORMED = ("flex_olmo",)
"""Families, by model_type, whose routers read the stream itself: each code there is LOUD, where a
norm before has it near 1."""
SIGMOID = (
    *("afmoe", "axk1", "cohere2_moe", "deepseek_v3", "exaone_moe", "glm4_moe", "glm4_moe_lite"),
    *("hy_v3", "laguna", "llama4_text", "minimax_m2", "sarvam_moe"),
)
"""Families whose scores are sigmoids: what a token wants is around 0, where they differ most."""
BIASED_SHARES = ("ernie4_5_moe",)
"""Families that add a bias to shares of one: a token's experts are alike, or shares are near 0."""
ALIKE = 0.5
"""How much each of those is wanted."""

Draw = Callable[[str, tuple[int, ...]], np.ndarray]
"""Numbers for a name and a shape, from counter bits."""


@dataclass(frozen=True)
class Routing:
    """How many experts a token has, and of how many of the groups that all experts are in."""

    chosen: int
    groups: int
    kept: int


def routing_of(config: dict[str, Any]) -> Routing | None:
    """What a config says, under any family's names; None where it has no experts.

    config: of the text, as config.json has it.
    """
    told = config | config.get("ffn_config", {})
    keys = ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k")
    chosen = next((told[key] for key in keys if key in told), None)
    if chosen is None:
        return None
    return Routing(chosen, told.get("n_group") or 1, told.get("topk_group") or 1)


def decided(
    tensors: dict[str, np.ndarray], config: dict[str, Any], draw: Draw
) -> dict[str, np.ndarray]:
    """`tensors` of a model of `config`, those that make and heed decisions changed.

    config: of the text, with at most 1024 tokens and a head of its own.
    """
    routing = routing_of(config)
    found = {name: tensor.copy() for name, tensor in tensors.items()}
    table = next(tensor for name, tensor in found.items() if name.endswith(EMBEDDINGS))
    experts = next((len(t) for name, t in found.items() if name.endswith(ROUTERS)), 0)
    vocab_size, hidden = table.shape
    code = codes()[:vocab_size]
    kept = CODE + experts
    loud = LOUD / _multiplier(config)
    table[:, :CODE] = loud * code
    if routing:
        wanted = _wanted(routing, vocab_size, experts, draw)
        if config["model_type"] in SIGMOID:
            wanted -= 1.0
        elif config["model_type"] in BIASED_SHARES:
            wanted = np.minimum(wanted, ALIKE)
        table[:, CODE:kept] = loud * wanted
    for name, tensor in found.items():
        if name.endswith(WRITERS):
            rows = tensor if hidden not in tensor.shape[-2:-1] else tensor.swapaxes(-1, -2)
            rows[..., :kept] = 0.0
        elif name.endswith("self_attn.q_norm.weight"):
            tensor += PEAKED
        elif name.endswith(BIASES):
            tensor *= UNBIASED
        elif name.endswith(ROUTERS):
            assert routing is not None
            tensor *= CALM
            tensor[:, CODE:kept] = 0.0
            own = CODE + _order(routing, draw(f"{name}/order", (experts,)))
            tensor[np.arange(experts), own] = ROUTER
            if config["model_type"] in UNNORMED:
                tensor /= LOUD
        elif name == "lm_head.weight":
            tensor *= HEAD
            tensor[:, :CODE] = sum(
                share * code[_before(draw(f"{name}/{i}", (len(code),)))]
                for i, share in enumerate(FOLLOWS)
            )
    return found


def _multiplier(config: dict[str, Any]) -> float:
    """What a model multiplies its embedding with."""
    if config.get("mup_enabled"):
        return float(config["hidden_size"] ** 0.5)
    return float(config.get("embedding_multiplier", 1.0))


def _wanted(routing: Routing, vocab_size: int, experts: int, draw: Draw) -> np.ndarray:
    """[vocab_size, experts], which experts each token goes to: 1 for the first, 1.5 for the next
    and so on, 0 for those that it does not. All are of as many groups as are kept."""
    drawn = draw("experts", (vocab_size, experts))
    if routing.groups > 1:
        groups = draw("groups", (vocab_size, routing.groups)).argsort(axis=1, kind="stable")
        groups = groups.argsort(axis=1, kind="stable")
        out = (groups >= routing.kept).repeat(experts // routing.groups, axis=1)
        drawn = np.where(out, np.inf, drawn)
    places = np.argsort(np.argsort(drawn, axis=1, kind="stable"), axis=1, kind="stable")
    return np.where(places < routing.chosen, 1 + places / 2, 0.0)


def _order(routing: Routing, drawn: np.ndarray) -> np.ndarray:
    """The order of what is drawn for each expert; those of a group stay together."""
    groups = drawn.reshape(routing.groups, -1)
    within = (
        groups.argsort(axis=1, kind="stable") + groups.shape[1] * np.arange(routing.groups)[:, None]
    )
    return within[groups[:, 0].argsort(kind="stable")].ravel()


def _before(drawn: np.ndarray) -> np.ndarray:
    """The token before each, in one circle of all in the order that is drawn, equal ones the last
    first: no sort that is not stable does the same on all processors."""
    order = len(drawn) - 1 - np.argsort(drawn[::-1], kind="stable")
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

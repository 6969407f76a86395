# SPDX-License-Identifier: Apache-2.0
"""Witness inputs of the gated delta net: its convolution, its gates, its rule.

Requests end before, at and after the border of a chunk of 64 tokens; some go on from a state, some
begin, and where one begins its block holds NaN, as does block 0, which is nobody's. Memories fade
within a few tokens or hardly at all; gates lie beyond the threshold of softplus; heads of queries
are shared by heads of values or not.
"""

from __future__ import annotations

import numpy as np

from .inputs import Arguments, CaseTable, Maker

CASES = CaseTable()
SIZE = 32
"""Of a head: the smallest that upstream's CPU kernels take."""


def _blocks(m: Maker, requests: int) -> np.ndarray:
    """A block for each request, out of order, none of them block 0."""
    return m.order("blocks", requests) + 1


def _starts(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def _states(blocks: np.ndarray, known: list[bool], drawn: np.ndarray) -> np.ndarray:
    """The states of all blocks: NaN but for requests that go on."""
    states = np.full((len(blocks) + 1, *drawn.shape[1:]), np.nan)
    for block, state, kept in zip(blocks, drawn, known):
        if kept:
            states[block] = state
    return states


# -------------------------------------------------------------------------------- convolution


def _conv(
    m: Maker,
    lengths: list[int],
    known: list[bool],
    channels: int = 48,
    width: int = 4,
    bias: bool = False,
    activation: str | None = "silu",
) -> Arguments:
    blocks = _blocks(m, len(lengths))
    drawn = m.normal("states", len(lengths), channels, width - 1)
    return {
        "x": m.float(m.normal("x", sum(lengths), channels, std=1.5)),
        "weight": m.float(m.normal("weight", channels, width, std=0.6)),
        "bias": m.float(m.normal("bias", channels)) if bias else None,
        "conv_states": m.float(_states(blocks, known, drawn)),
        "query_start_loc": m.ints(_starts(lengths), "i32"),
        "cache_indices": m.ints(blocks, "i32"),
        "has_initial_state": m.ints(known, "bool"),
        "activation": activation,
    }


@CASES.add("causal_conv1d_fn", "fresh", cells=("one request, no state",))
def _(m: Maker) -> Arguments:
    return _conv(m, [33], [False])


@CASES.add("causal_conv1d_fn", "mixed", cells=("shorter than the state", "with and without state"))
def _(m: Maker) -> Arguments:
    return _conv(m, [1, 2, 3, 17, 2], [True, False, True, True, True])


@CASES.add("causal_conv1d_fn", "bias", cells=("bias", "no activation", "width=3"))
def _(m: Maker) -> Arguments:
    return _conv(m, [9, 5], [True, False], width=3, bias=True, activation=None)


def _conv_update(m: Maker, requests: int, padding: int = 0, **facts: object) -> Arguments:
    made = _conv(m, [1] * requests, [True] * requests, **facts)  # type: ignore[arg-type]
    blocks = made["cache_indices"].data.copy()
    states = made["conv_states"].values().copy()
    # Block 0 is nobody's and holds zeros, as in the engine.
    states[0] = 0.0
    if padding:
        blocks[-padding:] = 0
    return {
        "x": made["x"],
        "conv_state": m.float(states),
        "weight": made["weight"],
        "bias": made["bias"],
        "conv_state_indices": m.ints(blocks, "i32"),
        "activation": made["activation"],
    }


@CASES.add("causal_conv1d_update", "plain", cells=("requests=17",))
def _(m: Maker) -> Arguments:
    return _conv_update(m, 17)


@CASES.add("causal_conv1d_update", "padded", cells=("padding requests",))
def _(m: Maker) -> Arguments:
    return _conv_update(m, 7, padding=2)


@CASES.add("causal_conv1d_update", "bias", cells=("bias", "no activation", "width=3"))
def _(m: Maker) -> Arguments:
    return _conv_update(m, 5, width=3, bias=True, activation=None)


# ---------------------------------------------------------------------------- gates and norms


def _gates(m: Maker, tokens: int, value_heads: int, fade: float = 1.0) -> Arguments:
    decay = np.log(0.02 + m.uniform("decay", value_heads) * 4.0 * fade)
    return {
        "a": m.float(m.normal("a", tokens, value_heads, std=2.0)),
        "b": m.float(m.normal("b", tokens, value_heads, std=2.0)),
        "A_log": m.float(decay, "f32"),
        "dt_bias": m.float(m.normal("dt_bias", value_heads)),
    }


def _prep(m: Maker, tokens: int, heads: int, value_heads: int, std: float = 1.0) -> Arguments:
    mixed = m.normal("mixed", tokens, (2 * heads + value_heads) * SIZE, std=std)
    return {
        "conv_output": m.float(mixed),
        **_gates(m, tokens, value_heads),
        "num_k_heads": heads,
        "head_k_dim": SIZE,
        "head_v_dim": SIZE,
    }


@CASES.add("fused_post_conv_prep", "plain", cells=("GQA 2:4",))
def _(m: Maker) -> Arguments:
    return _prep(m, 13, 2, 4)


@CASES.add("fused_post_conv_prep", "tiny", cells=("squares as small as epsilon",))
def _(m: Maker) -> Arguments:
    return _prep(m, 17, 1, 2, std=2e-4)


@CASES.add("fused_post_conv_prep", "gates", cells=("softplus beyond 20", "gates of +-60"))
def _(m: Maker) -> Arguments:
    made = _prep(m, 24, 2, 2)
    spread = (np.arange(48).reshape(24, 2) - 24.0) * 2.5
    return {**made, "a": m.float(spread), "b": m.float(-spread * 0.25)}


# --------------------------------------------------------------------------------- the rule


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True))


def _rule(
    m: Maker,
    lengths: list[int],
    known: list[bool],
    heads: int = 1,
    value_heads: int = 2,
    fade: float = 0.1,
    likeness: float = 0.0,
) -> Arguments:
    """fade: the mean of -g; likeness: how much of a common direction the keys have."""
    tokens, requests = sum(lengths), len(lengths)
    blocks = _blocks(m, requests)
    drawn = m.normal("states", requests, value_heads, SIZE, SIZE, std=0.3)
    keys = m.normal("k", tokens, heads, SIZE) + likeness * m.normal("common", 1, 1, SIZE)
    return {
        "q": m.float(_unit(m.normal("q", tokens, heads, SIZE))),
        "k": m.float(_unit(keys)),
        "v": m.float(m.normal("v", tokens, value_heads, SIZE)),
        "g": m.float(-2.0 * fade * m.uniform("g", tokens, value_heads), "f32"),
        "beta": m.float(m.uniform("beta", tokens, value_heads), "f32"),
        "ssm_state": m.float(_states(blocks, known, drawn), "f32"),
        "state_indices": m.ints(blocks, "i32"),
        "has_initial_state": m.ints(known, "bool"),
        "query_start_loc": m.ints(_starts(lengths), "i32"),
        "scale": SIZE**-0.5,
    }


def _rules(op: str) -> None:
    @CASES.add(op, "fresh", cells=("one request, no state", "70 tokens"))
    def _(m: Maker) -> Arguments:
        return _rule(m, [70], [False])

    @CASES.add(op, "mixed", cells=("1, 64 and 5 tokens", "with and without state", "GQA 2:2"))
    def _(m: Maker) -> Arguments:
        return _rule(m, [1, 64, 5], [True, True, False], heads=2)

    @CASES.add(op, "fading", cells=("state gone within a chunk", "state goes on"))
    def _(m: Maker) -> Arguments:
        return _rule(m, [66], [True], fade=2.0)

    @CASES.add(op, "alike", cells=("keys nearly alike", "state hardly fades", "GQA 1:3"))
    def _(m: Maker) -> Arguments:
        return _rule(m, [65], [True], value_heads=3, fade=0.005, likeness=1.5)

    @CASES.add(op, "shared", cells=("3 tokens", "state goes on", "GQA 2:4"))
    def _(m: Maker) -> Arguments:
        return _rule(m, [3], [True], heads=2, value_heads=4)


for _op in ("chunk_gated_delta_rule", "recurrent_gated_delta_rule"):
    _rules(_op)


def _decode(m: Maker, requests: int, heads: int, value_heads: int, padding: int = 0) -> Arguments:
    blocks = _blocks(m, requests)
    drawn = m.normal("states", requests, value_heads, SIZE, SIZE, std=0.3)
    states = _states(blocks, [True] * requests, drawn)
    states[0] = 0.0  # nobody's, zeros as in the engine
    if padding:
        blocks[-padding:] = 0
    mixed = m.normal("mixed", requests, (2 * heads + value_heads) * SIZE)
    return {
        "mixed_qkv": m.float(mixed),
        **_gates(m, requests, value_heads, fade=0.2),
        "scale": SIZE**-0.5,
        "ssm_state": m.float(states, "f32"),
        "ssm_state_indices": m.ints(blocks, "i32"),
    }


_PACKED = "fused_recurrent_gated_delta_rule_packed_decode"


@CASES.add(_PACKED, "plain", cells=("requests=3", "GQA 1:2"))
def _(m: Maker) -> Arguments:
    return _decode(m, 3, 1, 2)


@CASES.add(_PACKED, "padded", cells=("padding requests", "GQA 2:2"))
def _(m: Maker) -> Arguments:
    return _decode(m, 3, 2, 2, padding=1)


@CASES.add(_PACKED, "one_row", cells=("rows=1", "GQA 1:3"))
def _(m: Maker) -> Arguments:
    return _decode(m, 1, 1, 3)

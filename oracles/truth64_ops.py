# SPDX-License-Identifier: Apache-2.0
"""What each op means, in float64: the third party of every comparison. Asked by truth64.py.

A function takes the op's arguments with floats as float64 arrays, unrounded from what the op was
given, and returns its outputs by name. What the op rounds on the way is not rounded here; what
it is given rounded (a table of cosines, a cache) is taken as given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Outputs = dict[str, np.ndarray]
TRUTH: dict[str, Callable[..., Outputs]] = {}
"""By op. `parity/truths.py` finds them by their decorator, in files named truth64_*.py."""
_erf = np.vectorize(math.erf, otypes=[np.float64])


def truth(fn: Callable[..., Outputs]) -> Callable[..., Outputs]:
    """Decorator: `fn` is the truth of the op of its name."""
    TRUTH[fn.__name__] = fn
    return fn


def _normed(
    x: np.ndarray, weight: np.ndarray | None, epsilon: float, size: int | None
) -> np.ndarray:
    part = x if size is None else x[..., :size]
    y = x / np.sqrt(np.mean(part * part, axis=-1, keepdims=True) + epsilon)
    return y if weight is None else y * weight


@truth
def rms_norm(
    x: np.ndarray, weight: np.ndarray | None, epsilon: float, variance_size: int | None
) -> Outputs:
    """out: x over its root mean square, times weight."""
    return {"out": _normed(x, weight, epsilon, variance_size)}


@truth
def fused_add_rms_norm(
    x: np.ndarray,
    x_residual: np.ndarray,
    weight: np.ndarray | None,
    epsilon: float,
    variance_size: int | None,
) -> Outputs:
    """residual: the sum; out: its norm, taken before the sum is rounded."""
    total = x + x_residual
    return {"out": _normed(total, weight, epsilon, variance_size), "residual": total}


def _halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


@truth
def silu_and_mul(x: np.ndarray) -> Outputs:
    """out: a / (1 + exp(-a)) * b of the halves a, b."""
    a, b = _halves(x)
    return {"out": a / (1.0 + np.exp(-a)) * b}


@truth
def gelu_and_mul(x: np.ndarray, approximate: str) -> Outputs:
    """out: a * Phi(a) * b of the halves a, b, Phi exact or by tanh."""
    a, b = _halves(x)
    if approximate == "tanh":
        gate = 0.5 * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (a + 0.044715 * a**3)))
    else:
        gate = 0.5 * (1.0 + _erf(a / math.sqrt(2.0)))
    return {"out": a * gate * b}


def _turned(
    x: np.ndarray, cos: np.ndarray, sin: np.ndarray, head_size: int, neox: bool
) -> np.ndarray:
    heads = x.reshape(len(x), -1, head_size)
    out, half = heads.copy(), cos.shape[-1]
    first = slice(0, half) if neox else slice(0, 2 * half, 2)
    second = slice(half, 2 * half) if neox else slice(1, 2 * half, 2)
    a, b = heads[..., first], heads[..., second]
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out.reshape(x.shape)


@truth
def rotary_embedding(
    positions: np.ndarray,
    query: np.ndarray,
    key: np.ndarray | None,
    head_size: int,
    cos_sin_cache: np.ndarray,
    is_neox_style: bool,
) -> Outputs:
    """query, key: turned by the angles of the given table."""
    cos, sin = _halves(cos_sin_cache[positions][:, None, :])
    found = {"query": _turned(query, cos, sin, head_size, is_neox_style)}
    if key is not None:
        found["key"] = _turned(key, cos, sin, head_size, is_neox_style)
    return found


@truth
def mrotary_embedding(
    positions: np.ndarray,
    query: np.ndarray,
    key: np.ndarray | None,
    head_size: int,
    cos_sin_cache: np.ndarray,
    mrope_section: list[int],
    mrope_interleaved: bool,
    is_neox_style: bool,
) -> Outputs:
    """query, key: each angle by the position that is meant for it, one after another."""
    time, height, width = mrope_section
    half = time + height + width
    rows = np.empty((positions.shape[1], 2 * half))
    for angle in range(half):
        axis = 0 if angle < time else 1 if angle < time + height else 2
        if mrope_interleaved:
            axis = angle % 3
            if angle >= 3 * (time, height, width)[axis]:
                axis = 0
        for column in (angle, half + angle):
            rows[:, column] = cos_sin_cache[positions[axis], column]
    cos, sin = _halves(rows[:, None, :])
    found = {"query": _turned(query, cos, sin, head_size, is_neox_style)}
    if key is not None:
        found["key"] = _turned(key, cos, sin, head_size, is_neox_style)
    return found


@truth
def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> Outputs:
    """out: x @ weight.T + bias."""
    return {"out": x @ weight.T + (0.0 if bias is None else bias)}


@truth
def linear_add(x: np.ndarray, residual: np.ndarray, weight: np.ndarray) -> Outputs:
    """out: x @ weight.T + residual; squares: of its rows, summed."""
    total = x @ weight.T + residual
    return {"out": total, "squares": (total * total).sum(axis=-1, keepdims=True)}


@truth
def rms_norm_linear(
    x: np.ndarray,
    squares: np.ndarray,
    norm_weight: np.ndarray,
    epsilon: float,
    weight: np.ndarray,
) -> Outputs:
    """out: x over its root mean square, as the squares tell it, times norm_weight, @ weight.T."""
    mean = squares.sum(axis=-1, keepdims=True) / x.shape[-1]
    return {"out": (x / np.sqrt(mean + epsilon) * norm_weight) @ weight.T}


@truth
def rms_norm_gated_linear(
    x: np.ndarray,
    squares: np.ndarray,
    norm_weight: np.ndarray,
    epsilon: float,
    weight: np.ndarray,
) -> Outputs:
    """out: the product's halves a, b as a / (1 + exp(-a)) * b."""
    return silu_and_mul(rms_norm_linear(x, squares, norm_weight, epsilon, weight)["out"])


@truth
def embedding(input_ids: np.ndarray, weight: np.ndarray) -> Outputs:
    """out: rows of weight."""
    return {"out": weight[input_ids]}


@truth
def reshape_and_cache(
    key: np.ndarray,
    value: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    slot_mapping: np.ndarray,
) -> Outputs:
    """key_cache, value_cache: with every token of a slot >= 0 written there."""
    found = {}
    for name, rows, cache in (("key_cache", key, key_cache), ("value_cache", value, value_cache)):
        slots = cache.reshape(-1, *cache.shape[2:]).copy()
        for row, slot in zip(rows, slot_mapping):
            if slot >= 0:
                slots[slot] = row
        found[name] = slots.reshape(cache.shape)
    return found


@truth
def qk_norm_rope_cache(
    qkv: np.ndarray,
    query_weight: np.ndarray | None,
    key_weight: np.ndarray | None,
    epsilon: float,
    positions: np.ndarray,
    cos_sin_cache: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    slot_mapping: np.ndarray,
    is_neox_style: bool,
) -> Outputs:
    """query: normed and turned; key_cache, value_cache: with the tokens written."""
    kv_heads, head_size = key_cache.shape[2:]
    heads = qkv.reshape(len(qkv), -1, head_size)
    cos, sin = _halves(cos_sin_cache[positions][:, None, :])
    turned = []
    for part, weight in (
        (heads[:, : -2 * kv_heads], query_weight),
        (heads[:, -2 * kv_heads : -kv_heads], key_weight),
    ):
        normed = part if weight is None else _normed(part, weight, epsilon, None)
        turned.append(_turned(normed.reshape(len(qkv), -1), cos, sin, head_size, is_neox_style))
    query, key = turned
    rows = (len(qkv), kv_heads, head_size)
    value = heads[:, -kv_heads:]
    written = reshape_and_cache(key.reshape(rows), value, key_cache, value_cache, slot_mapping)
    return {"query": query, **written}


@truth
def fused_qk_rmsnorm_rope_gate(
    q_gate: np.ndarray,
    k: np.ndarray,
    q_weight: np.ndarray,
    k_weight: np.ndarray,
    cos_sin_cache: np.ndarray,
    positions: np.ndarray,
    epsilon: float,
) -> Outputs:
    """q, k: normed and turned; gate: the second half of what each query head has."""
    head_size = len(q_weight)
    cos, sin = _halves(cos_sin_cache[positions][:, None, :])
    query, gate = _halves(q_gate.reshape(len(q_gate), -1, 2 * head_size))
    found = {"gate": gate.reshape(len(q_gate), -1)}
    for name, part, weight in (("q", query, q_weight), ("k", k, k_weight)):
        normed = _normed(part.reshape(len(k), -1, head_size), weight, epsilon, None)
        found[name] = _turned(normed.reshape(len(k), -1), cos, sin, head_size, True)
    return found


@truth
def paged_attention(
    query: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    block_table: np.ndarray,
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: np.ndarray | None = None,
    attention_chunk_size: int | None = None,
    alibi_slopes: np.ndarray | None = None,
) -> Outputs:
    """out: token by token and head by head, each over the keys it sees and the head's sink."""
    out = np.empty_like(query)
    group = query.shape[1] // key_cache.shape[2]
    block_size = key_cache.shape[1]
    for row, length in enumerate(seq_lens):
        first, last = query_start_loc[row], query_start_loc[row + 1]
        token = np.arange(length)
        slots = block_table[row, token // block_size], token % block_size
        keys, values = key_cache[slots], value_cache[slots]
        for place in range(first, last):
            newest = length - (last - place)
            oldest = 0 if sliding_window is None else max(newest - sliding_window + 1, 0)
            if attention_chunk_size is not None:
                oldest = newest - newest % attention_chunk_size
            for head in range(query.shape[1]):
                seen = keys[oldest : newest + 1, head // group]
                score = seen @ query[place, head] * scale
                if soft_cap is not None:
                    score = soft_cap * np.tanh(score / soft_cap)
                if alibi_slopes is not None:
                    score = score - alibi_slopes[head] * np.arange(newest - oldest, -1, -1)
                sink = -np.inf if sinks is None else sinks[head]
                best = max(score.max(), sink)
                weight = np.exp(score - best)
                weight /= weight.sum() + np.exp(sink - best)
                out[place, head] = weight @ values[oldest : newest + 1, head // group]
    return {"out": out}


@truth
def qk_norm_rope_decode(
    qkv: np.ndarray,
    query_weight: np.ndarray | None,
    key_weight: np.ndarray | None,
    epsilon: float,
    positions: np.ndarray,
    cos_sin_cache: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    slot_mapping: np.ndarray,
    block_table: np.ndarray,
    seq_lens: np.ndarray,
    max_seq_len: int,
    scale: float,
) -> Outputs:
    """out: attention over the caches with the new tokens in them, zero for padding requests."""
    norms = (query_weight, key_weight, epsilon)
    caches = (key_cache, value_cache, slot_mapping)
    made = qk_norm_rope_cache(qkv, *norms, positions, cos_sin_cache, *caches, is_neox_style=True)
    out = made.pop("query")
    query = out.reshape(len(qkv), -1, key_cache.shape[-1])
    real = np.flatnonzero(seq_lens)
    found = paged_attention(
        query[real],
        **made,
        block_table=block_table[real],
        query_start_loc=np.arange(len(real) + 1),
        seq_lens=seq_lens[real],
        scale=scale,
        sliding_window=None,
        soft_cap=None,
    )
    out = np.zeros_like(out)
    out[real] = found["out"].reshape(len(real), -1)
    return {"out": out, **made}


def _scaled_otherwise(
    parameters: dict[str, Any], wave: np.ndarray, max_position: int
) -> tuple[np.ndarray, float]:
    """Waves and their factor of the kinds that change the base, or each wave by its own number."""
    dim, factor = 2 * len(wave), parameters.get("factor", 1.0)
    if parameters["rope_type"] == "longrope":
        original = parameters["original_max_position_embeddings"]
        kind = "long" if parameters["max_model_len"] > original else "short"
        grown = math.sqrt(1 + math.log(max_position / original) / math.log(original))
        told = parameters.get(f"{kind}_mscale", grown)
        return wave / np.array(parameters[f"{kind}_factor"]), told
    if parameters.get("mixed_b") is not None:
        steps = (np.arange(1, dim // 2 + 1) / (dim / 2)) ** parameters["mixed_b"]
        return wave / factor**steps, 1.0
    rest = 1.0
    if parameters["rope_type"] == "ntk":
        base, rest = factor, factor ** (2 / dim)
    else:
        trained = parameters.get("max_trained_positions", max_position)
        grown = parameters.get("alpha", factor * max_position / trained - (factor - 1))
        base = grown ** (dim / (dim - 2))
    return wave * base ** (-np.arange(0, dim, 2) / dim) / rest, 1.0


@truth
def rope_table(
    head_size: int, max_position: int, rope_parameters: dict[str, Any], rows: np.ndarray
) -> Outputs:
    """out: cosines, then sines, of the given positions."""
    read = rope_parameters.get
    dim = read("rope_dim") or int(head_size * read("partial_rotary_factor", 1.0))
    wave = rope_parameters["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    factor, kind = rope_parameters.get("factor", 1.0), rope_parameters["rope_type"]
    original, scale = rope_parameters.get("original_max_position_embeddings", 0), 1.0
    if kind == "linear":
        wave = wave / factor
    elif kind == "llama3":
        low, high = rope_parameters["low_freq_factor"], rope_parameters["high_freq_factor"]
        smooth = np.clip((original * wave / (2 * np.pi) - low) / (high - low), 0.0, 1.0)
        wave = (1 - smooth) * wave / factor + smooth * wave
    elif kind == "yarn":
        # Elements that turn 32 times or more within the original context stay, those that turn
        # once or less are stretched.
        base = math.log(rope_parameters["rope_theta"])
        turns = (read("beta_fast", 32), read("beta_slow", 1))
        at = [dim * math.log(original / (2 * math.pi * turn)) / (2 * base) for turn in turns]
        if read("truncate", True):
            at = [math.floor(at[0]), math.ceil(at[1])]
        low, high = max(at[0], 0), min(at[1], dim - 1)
        ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
        kept = (1 - ramp) * read("extrapolation_factor", 1.0)
        wave, scale = wave / factor * (1 - kept) + wave * kept, read("attn_factor", 1.0)
        if read("apply_yarn_scaling", True):
            scale *= 0.1 * math.log(factor) + 1.0
    elif kind in ("longrope", "dynamic", "ntk"):
        wave, scale = _scaled_otherwise(rope_parameters, wave, max_position)
    angles = rows[:, None] * wave
    return {"out": np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * scale}

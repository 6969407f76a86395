# SPDX-License-Identifier: Apache-2.0
"""The gated delta net in float64; see truth64_ops.py."""

from __future__ import annotations

import numpy as np

from oracles.truth64_ops import TRUTH, Outputs, truth

__all__ = ["TRUTH"]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


@truth
def rms_norm_gated(
    x: np.ndarray, weight: np.ndarray, z: np.ndarray, epsilon: float, activation: str
) -> Outputs:
    """out: x over its root mean square, times weight, times the activation of z."""
    normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight
    gate = _sigmoid(z)
    return {"out": normed * (gate if activation == "sigmoid" else z * gate)}


@truth
def mul_sigmoid(x: np.ndarray, gate: np.ndarray) -> Outputs:
    """out: x / (1 + exp(-gate))."""
    return {"out": x * _sigmoid(gate)}


def _convolved(
    inputs: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, activation: str | None
) -> np.ndarray:
    """inputs: [tokens + width - 1, C] -> [tokens, C]."""
    width = weight.shape[1]
    total = np.stack(
        [(inputs[t : t + width] * weight.T).sum(axis=0) for t in range(len(inputs) - width + 1)]
    )
    total = total if bias is None else total + bias
    return total * _sigmoid(total) if activation == "silu" else total


@truth
def causal_conv1d_fn(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    conv_states: np.ndarray,
    query_start_loc: np.ndarray,
    cache_indices: np.ndarray,
    has_initial_state: np.ndarray,
    activation: str | None,
) -> Outputs:
    """out: each token and those before it, by channel; conv_states: the last inputs."""
    out, states = np.empty_like(x), conv_states.copy()
    for i, block in enumerate(cache_indices):
        rows = slice(query_start_loc[i], query_start_loc[i + 1])
        before = states[block] if has_initial_state[i] else np.zeros_like(states[block])
        inputs = np.concatenate([before.T, x[rows]])
        out[rows] = _convolved(inputs, weight, bias, activation)
        states[block] = inputs[len(inputs) - weight.shape[1] + 1 :].T
    return {"out": out, "conv_states": states}


@truth
def causal_conv1d_update(
    x: np.ndarray,
    conv_state: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    conv_state_indices: np.ndarray,
    activation: str | None,
) -> Outputs:
    """As causal_conv1d_fn of one token each; nothing for requests of block 0."""
    out, states = np.zeros_like(x), conv_state.copy()
    for i, block in enumerate(conv_state_indices):
        if block:
            inputs = np.concatenate([states[block].T, x[i : i + 1]])
            out[i] = _convolved(inputs, weight, bias, activation)[0]
            states[block] = inputs[1:].T
    return {"out": out, "conv_state": states}


def _length_one(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


def _gate_values(
    a: np.ndarray, b: np.ndarray, A_log: np.ndarray, dt_bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    return -np.exp(A_log) * np.logaddexp(0.0, a + dt_bias), _sigmoid(b)


@truth
def fused_post_conv_prep(
    conv_output: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    A_log: np.ndarray,
    dt_bias: np.ndarray,
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
) -> Outputs:
    """q, k of length one, v, g = -exp(A_log) log(1 + exp(a + dt_bias)), beta = sigmoid(b)."""
    size = num_k_heads * head_k_dim
    q, k, v = np.split(conv_output, [size, 2 * size], axis=1)
    keys, values = (len(q), -1, head_k_dim), (len(q), -1, head_v_dim)
    g, beta = _gate_values(a, b, A_log, dt_bias)
    return {
        "q": _length_one(q.reshape(keys)),
        "k": _length_one(k.reshape(keys)),
        "v": v.reshape(values),
        "g": g,
        "beta": beta,
    }


def _token(
    state: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, g: float, beta: float
) -> tuple[np.ndarray, np.ndarray]:
    """One token of one head: state [V, K], q, k [K], v [V]."""
    state = state * np.exp(g)
    state = state + beta * np.outer(v - state @ k, k)
    return state, state @ q


@truth
def recurrent_gated_delta_rule(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    ssm_state: np.ndarray,
    state_indices: np.ndarray,
    has_initial_state: np.ndarray,
    query_start_loc: np.ndarray,
    scale: float,
) -> Outputs:
    """out, ssm_state: token by token and head by head."""
    out, states = np.empty_like(v), ssm_state.copy()
    group = v.shape[1] // q.shape[1]
    for i, block in enumerate(state_indices):
        if not has_initial_state[i]:
            states[block] = 0.0
        for t in range(query_start_loc[i], query_start_loc[i + 1]):
            for h in range(v.shape[1]):
                query, key = q[t, h // group] * scale, k[t, h // group]
                states[block, h], out[t, h] = _token(
                    states[block, h], query, key, v[t, h], g[t, h], beta[t, h]
                )
    return {"out": out, "ssm_state": states}


@truth
def chunk_gated_delta_rule(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    ssm_state: np.ndarray,
    state_indices: np.ndarray,
    has_initial_state: np.ndarray,
    query_start_loc: np.ndarray,
    scale: float,
) -> Outputs:
    """The same rule: chunks are only a way to compute it."""
    gates = (g, beta, ssm_state, state_indices, has_initial_state, query_start_loc)
    return recurrent_gated_delta_rule(q, k, v, *gates, scale)


@truth
def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    A_log: np.ndarray,
    dt_bias: np.ndarray,
    scale: float,
    ssm_state: np.ndarray,
    ssm_state_indices: np.ndarray,
) -> Outputs:
    """out, ssm_state: one token of each request; nothing for requests of block 0."""
    heads, size_v, size_k = ssm_state.shape[1:]
    key_heads = (mixed_qkv.shape[1] - heads * size_v) // (2 * size_k)
    made = fused_post_conv_prep(mixed_qkv, a, b, A_log, dt_bias, key_heads, size_k, size_v)
    out, states = np.zeros_like(made["v"]), ssm_state.copy()
    for i in np.flatnonzero(ssm_state_indices):
        block = ssm_state_indices[i]
        for h in range(heads):
            key_head = h // (heads // key_heads)
            states[block, h], out[i, h] = _token(
                states[block, h],
                made["q"][i, key_head] * scale,
                made["k"][i, key_head],
                made["v"][i, h],
                made["g"][i, h],
                made["beta"][i, h],
            )
    return {"out": out, "ssm_state": states}

# SPDX-License-Identifier: Apache-2.0
"""The sampler's steps in float64; see truth64_ops.py."""

from __future__ import annotations

import numpy as np

from oracles.truth64_ops import TRUTH, Outputs, truth

__all__ = ["TRUTH"]

MASK = 0xFFFFFFFF


@truth
def temperature(logits: np.ndarray, temperature: np.ndarray) -> Outputs:
    """out: logits over the temperature, rows of temperature 0 as they are."""
    return {"out": logits / np.where(temperature == 0, 1.0, temperature)[:, None]}


@truth
def penalties(
    logits: np.ndarray,
    prompt_tokens: list[list[int]],
    output_tokens: list[list[int]],
    presence: np.ndarray,
    frequency: np.ndarray,
    repetition: np.ndarray,
) -> Outputs:
    """out: repetition for what stood anywhere, frequency and presence for what was generated."""
    out = logits.copy()
    for row, values in enumerate(out):
        for token in {*prompt_tokens[row], *output_tokens[row]}:
            positive = values[token] > 0
            values[token] *= 1.0 / repetition[row] if positive else repetition[row]
        for token in set(output_tokens[row]):
            times = output_tokens[row].count(token)
            values[token] -= frequency[row] * times + presence[row]
    return {"out": out}


@truth
def logprobs(logits: np.ndarray, num_logprobs: int, chosen: np.ndarray) -> Outputs:
    """ids, scores [n, 1 + k]: the chosen token, then the likeliest; ranks [n]."""
    top = logits.max(axis=1, keepdims=True)
    scores = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
    best = np.argsort(-scores, axis=1, kind="stable")[:, :num_logprobs]
    ids = np.concatenate([chosen[:, None], best], axis=1)
    mine = np.take_along_axis(scores, chosen[:, None], 1)
    return {
        "ids": ids.astype(np.int32),
        "scores": np.take_along_axis(scores, ids, 1),
        "ranks": (scores >= mine).sum(axis=1).astype(np.int32),
    }


def philox(key: int, counter: int) -> int:
    """First word of Philox 4x32-10 for the counter (counter, 0, 0, 0) and a key of 64 bits."""
    words, keys = [counter & MASK, 0, 0, 0], [key & MASK, key >> 32 & MASK]
    for _ in range(10):
        a, b = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [b >> 32 ^ words[1] ^ keys[0], b & MASK, a >> 32 ^ words[3] ^ keys[1], a & MASK]
        keys = [keys[0] + 0x9E3779B9 & MASK, keys[1] + 0xBB67AE85 & MASK]
    return words[0]


@truth
def gumbel_noise(seeds: np.ndarray, positions: np.ndarray, count: int) -> Outputs:
    """out [n, count]: noise of each token id."""
    out = np.empty((len(seeds), count))
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist())):
        key = philox(seed % 2**64, position)
        words = [philox(key, token) for token in range(count)]
        signed = np.array([w if w < 1 << 31 else MASK - w for w in words], np.float64)
        uniform = np.maximum(signed.astype(np.float32) * np.float32(4.6566127342e-10), 2.0**-31)
        out[row] = -np.log(-np.log1p(-uniform.astype(np.float64)))
    return {"out": out}


@truth
def seeded_token(
    logits: np.ndarray, temperature: np.ndarray, seeds: np.ndarray, positions: np.ndarray
) -> Outputs:
    """token [n]: the first largest of logits and noise, of the logits alone at temperature 0."""
    noise = gumbel_noise(seeds, positions, logits.shape[1])["out"]
    noisy = logits + np.where(temperature[:, None] == 0, 0.0, noise)
    return {"token": noisy.argmax(axis=1)}

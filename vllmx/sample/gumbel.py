# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/sample/gumbel.py @ v0.25.0
"""Sampling by the Gumbel-max trick: argmax(logits + noise).

A seeded request draws its noise from a counter (Philox 4x32-10) keyed by seed, position and token
id, so that neither the batch nor a preemption changes it; these are the numbers that upstream's
Triton kernel draws. Requests without a seed take the engine's generator, which is cheaper.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
SMALLEST_UNIFORM = 4.6566127342e-10
"""2^-31: both the step of the uniforms and what replaces a zero among them."""
SMALLEST_FLOAT64 = 2.2250738585072014e-308


def philox(seed: Tensor, offset: Tensor, rounds: int = 10) -> tuple[Tensor, Tensor]:
    """First two words of Philox 4x32 for counters (offset, 0, 0, 0); int64 in [0, 2^32).

    seed, offset: int64, broadcast against each other; offset in [0, 2^32).
    """
    key0, key1 = seed & MASK, (seed >> 32) & MASK
    c0 = offset & MASK
    c1 = c2 = c3 = torch.zeros_like(c0)
    for _ in range(rounds):
        # Products of two 32-bit words wrap in int64, but keep the right 64 bits.
        low, high = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = ((high >> 32) & MASK) ^ c1 ^ key0, ((low >> 32) & MASK) ^ c3 ^ key1
        c1, c3 = high & MASK, low & MASK
        key0, key1 = (key0 + KEY_STEPS[0]) & MASK, (key1 + KEY_STEPS[1]) & MASK
    # Every round mixes the keys in, so both words have the shape of both arguments.
    return c0, c1


def to_uniform(words: Tensor) -> Tensor:
    """32-bit words as float32 in [2^-31, 1)."""
    signed = torch.where(words >= 1 << 31, (1 << 32) - 1 - words, words)
    return (signed.to(torch.float32) * SMALLEST_UNIFORM).clamp_(min=SMALLEST_UNIFORM)


def to_uniform64(low: Tensor, high: Tensor) -> Tensor:
    """Two 32-bit words as one float64 in (0, 1]."""
    uniform = high.double() * 2.0**-32 + low.double() * 2.0**-64
    return uniform.clamp_(min=SMALLEST_FLOAT64)


def seeded_noise(
    seeds: Tensor, positions: Tensor, token_ids: Tensor, use_fp64: bool = False
) -> Tensor:
    """Gumbel noise, one for each token id, float32, or float64 with `use_fp64`.

    seeds, positions: int64 [n, 1]; token_ids: int64 [n, k] or [1, k]; or all of one shape.
    """
    keys, _ = philox(seeds, positions)
    low, high = philox(keys, token_ids)
    if use_fp64:
        return -torch.log(-torch.log(to_uniform64(low, high)))
    return -torch.log(-torch.log1p(-to_uniform(low)))


def gumbel_sample(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    has_seed: Tensor,
    positions: Tensor,
    generator: torch.Generator,
    use_fp64: bool = False,
) -> Tensor:
    """Sample a token from each row of processed logits; int64 [n].

    logits: float32 [n, vocab], -inf where a token is excluded, temperature already applied;
    temperature: [n], 0 for a greedy row; seeds: int64 [n], meant where has_seed: bool [n];
    positions: int64 [n], of the token whose successor is drawn.
    """
    sampled = logits.argmax(dim=-1)
    free = ((temperature != 0) & ~has_seed).nonzero().flatten()
    if len(free):
        dtype = torch.float64 if use_fp64 else torch.float32
        shape, device = (len(free), logits.shape[1]), logits.device
        exponential = torch.empty(shape, dtype=dtype, device=device)
        exponential.exponential_(generator=generator)
        sampled[free] = (logits[free] - exponential.log_()).argmax(dim=-1)
    seeded = ((temperature != 0) & has_seed).nonzero().flatten()
    if len(seeded):
        sampled[seeded] = _sample_seeded(logits[seeded], seeds[seeded], positions[seeded], use_fp64)
    return sampled


def _sample_seeded(logits: Tensor, seeds: Tensor, positions: Tensor, use_fp64: bool) -> Tensor:
    """Rows that all have a seed. Excluded tokens are drawn no noise for."""
    rows, tokens = (logits > float("-inf")).nonzero(as_tuple=True)
    noise = seeded_noise(seeds[rows], positions[rows], tokens, use_fp64)
    scores = logits.to(noise.dtype, copy=True)
    scores[rows, tokens] += noise
    # Where nothing may be sampled, or logits are NaN, the argmax stands.
    return scores.argmax(dim=-1)

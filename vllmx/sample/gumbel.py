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


def philox(seed: Tensor, offset: Tensor, rounds: int = 10) -> Tensor:
    """First word of Philox 4x32 for counters (offset, 0, 0, 0); int64 in [0, 2^32).

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
    # Every round mixes the key in, so c0 has the shape of both.
    return c0


def to_uniform(words: Tensor) -> Tensor:
    """32-bit words as float32 in [2^-31, 1)."""
    signed = torch.where(words >= 1 << 31, (1 << 32) - 1 - words, words)
    return (signed.to(torch.float32) * SMALLEST_UNIFORM).clamp_(min=SMALLEST_UNIFORM)


def seeded_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Gumbel noise float32, one for each token id; seeds, positions: int64 [n, 1].

    token_ids: int64 [n, k] or [1, k].
    """
    keys = philox(seeds, positions)
    uniform = to_uniform(philox(keys, token_ids))
    return -torch.log(-torch.log1p(-uniform))


def gumbel_sample(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    has_seed: Tensor,
    positions: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """Sample a token from each row of processed logits; int64 [n].

    logits: float32 [n, vocab], -inf where a token is excluded, temperature already applied;
    temperature: [n], 0 for a greedy row; seeds: int64 [n], meant where has_seed: bool [n];
    positions: int64 [n], of the token whose successor is drawn.
    """
    sampled = logits.argmax(dim=-1)
    free = ((temperature != 0) & ~has_seed).nonzero().flatten()
    if len(free):
        exponential = torch.empty_like(logits[free]).exponential_(generator=generator)
        sampled[free] = (logits[free] - exponential.log_()).argmax(dim=-1)
    for row in ((temperature != 0) & has_seed).nonzero().flatten().tolist():
        allowed = (logits[row] > float("-inf")).nonzero().flatten()
        if not len(allowed):
            continue  # nothing may be sampled, or the logits are NaN: the argmax stands
        noise = seeded_noise(seeds[row].view(1, 1), positions[row].view(1, 1), allowed.unsqueeze(0))
        sampled[row] = allowed[(logits[row, allowed] + noise[0]).argmax()]
    return sampled

# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/{bloom,mpt}.py @ v0.25.0
"""Slopes of the scores that stand for positions (ALiBi). Imports no torch."""

from __future__ import annotations


def alibi_slopes(num_heads: int, largest: float = 8.0) -> list[float]:
    """What each head's score of a key is less by for each token between it and the query.

    Of heads as many as a power of two, powers of two from just below 1 to 2 ** -largest. Of other
    counts, those of the power below come first, and every second one of the power above fills up.
    """
    below = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-largest * (i + 1) / below) for i in range(below)]
    between = [2.0 ** (-largest * (2 * i + 1) / (2 * below)) for i in range(num_heads - below)]
    return slopes + between

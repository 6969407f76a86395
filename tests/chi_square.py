# SPDX-License-Identifier: Apache-2.0
"""The chi-square test of counts against a distribution."""

import numpy as np
import torch

FALSE_ALARM = 1e-6
"""How often a test that is right may fail."""


def chi_square_tail(statistic: float, degrees: int) -> float:
    """P(chi-square of `degrees` > statistic)."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def quantile(tail: float, degrees: int) -> float:
    """What a chi-square of `degrees` exceeds with probability `tail`, by bisection."""
    low, high = 0.0, 1e5
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if chi_square_tail(middle, degrees) > tail else (low, middle)
    return high


def statistic(seen: np.ndarray, want: np.ndarray) -> tuple[float, int]:
    """Chi-square and its degrees; tokens expected less than 5 times are one class."""
    expected = want * seen.sum()
    common = expected >= 5
    seen_classes, want_classes = seen[common], expected[common]
    if expected[~common].sum() >= 5:
        seen_classes = np.append(seen_classes, seen[~common].sum())
        want_classes = np.append(want_classes, expected[~common].sum())
    value = ((seen_classes - want_classes) ** 2 / want_classes).sum()
    return float(value), len(want_classes) - 1


def follows(seen: np.ndarray, want: np.ndarray) -> bool:
    """Whether counts `seen` may come from distribution `want`: none where it has nothing, and a
    chi-square below its quantile."""
    value, degrees = statistic(seen, want)
    return not seen[want == 0].any() and value <= quantile(FALSE_ALARM, degrees)

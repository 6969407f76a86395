# SPDX-License-Identifier: Apache-2.0
"""How far a model may be from the oracle's, with the same tokens forced on both.

Every limit is a multiple of the floor, which is how far two oracles are from each other (where the
golden is of bfloat16: how far transformers is there from its own float32), or the smallest amount
that is worth a word for the arithmetic in use (policy.yaml, `models`), whichever is more. Rare
faults hide from means and percentiles: hence the count of large differences. A flip of the most
likely token is a fault only if both sides were sure of theirs. However far two oracles are from
each other, the limits end at `mean_cap` and `p99_cap`.

What a mode asks is judged as a whole, and beside that in classes of positions, each against the
floor of its own: a fault at every first token of a block is a sixteenth of the whole and hides in
its mean. `prefill` and `decode` are parts of a mode (model_engine.py); within each

boundary  the first token of a block of the model's own size: of a page, of a chunk, after a prefix
          that the cache had
long      from the place LONG of a sequence on
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .compare import Check
from .model_golden import Scores
from .policy import ModelLimits

COVERAGE = 0.60
"""Share of the probability that the oracle's listed ids must hold to be held against a model."""
BLOCK = 16
"""Tokens of a block of the cache, of which chunks and cached prefixes have a whole number, where a
model asks for no other size."""
LONG = 128
LEAST_KL = 4e-8
"""No limit of `kl` is less: goldens are of 256-bit registers (oracle_process.py), and transformers
with 512 is by 2.4e-8 more than two standard errors away from them (qwen2.5-coder-0.5b), where ours
by the definitions has its numbers bit for bit."""
PERCENTILE = 100
"""Positions without which a class has no percentile of its own."""


@dataclass(frozen=True)
class Ours:
    """Our scores at the positions of `where` among the golden's.

    ids, val: [n, K'] most likely first; next: [n], log-probability of the token that follows; ulp:
    a unit in the last place of the logits that they were made of, at the smallest of their tops;
    block: tokens of a block of the cache.
    """

    where: np.ndarray
    ids: np.ndarray
    val: np.ndarray
    next: np.ndarray
    ulp: float = 0.0
    block: int = BLOCK

    def only(self, rows: np.ndarray) -> Ours:
        """The scores of some rows."""
        parts = (values[rows] for values in (self.where, self.ids, self.val, self.next))
        return Ours(*parts, self.ulp, self.block)

    def at(self, ids: np.ndarray) -> np.ndarray:
        """Our log-probabilities of `ids` [n, K]; NaN for one that is not among ours."""
        same = ids[:, :, None] == self.ids[:, None, :]
        found = np.where(same, self.val[:, None, :], -np.inf).max(axis=2)
        return np.where(same.any(axis=2), found, np.nan)


def binomial_bound(n: int, rate: float) -> int:
    """The count that a binomial of `n` and `rate` exceeds with probability below 0.1%."""
    total, probability = 0.0, (1.0 - rate) ** n
    for count in range(n + 1):
        total += probability
        if total >= 0.999:
            return count
        probability *= (n - count) / (count + 1) * rate / max(1.0 - rate, 1e-12)
    return n


def classes(want: Scores, at: np.ndarray, block: int = BLOCK) -> dict[str, np.ndarray]:
    """Class -> which of the positions `at` are of it."""
    places = want.places[at]
    return {
        "boundary": np.flatnonzero((places > 0) & (places % block == 0)),
        "long": np.flatnonzero(places >= LONG),
    }


def judge(want: Scores, floor: Scores, got: Ours, limits: ModelLimits) -> dict[str, Check]:
    """The checks of G1 to G7 over the positions that `got` has, and over each class of them."""
    checks = _judge_all(want, floor, got, limits)
    for name, rows in classes(want, got.where, got.block).items():
        if len(rows):
            found = _judge_all(want, floor, got.only(rows), limits)
            if len(rows) < PERCENTILE:
                found.pop("p99", None)
            checks |= {f"{name}.{key}": check for key, check in found.items()}
    return checks


def _judge_all(want: Scores, floor: Scores, got: Ours, limits: ModelLimits) -> dict[str, Check]:
    at = got.where
    ids, val = want.ids[at], want.val[at]
    ours = got.at(ids)
    differences = np.abs(ours - val)
    base = floor.base or want
    floors = np.abs(floor.val[at] - base.val[at])
    top_difference, top_floor = differences[:, 0], floors[:, 0]
    n = len(at)

    checks: dict[str, Check] = {}
    missing = int(np.isnan(ours).sum())
    checks["missing"] = Check(float(missing), float(limits.missing * ids.size))
    seen = differences[~np.isnan(ours)]
    checks["finite"] = Check(float(not np.isfinite(got.val[:, 0]).all() or not len(seen)), 0.0)
    if checks["finite"].measured:
        return checks
    mean_limit = min(max(limits.mean_factor * float(floors.mean()), limits.mean), limits.mean_cap)
    checks["mean"] = Check(float(seen.mean()), mean_limit)
    p99_floor = float(np.quantile(top_floor, 0.99))
    p99_limit = min(max(limits.p99_factor * p99_floor, limits.p99), limits.p99_cap)
    known = top_difference[~np.isnan(top_difference)]
    checks["p99"] = Check(float(np.quantile(known, 0.99)) if len(known) else math.inf, p99_limit)
    large = max(4 * p99_floor, limits.p99)
    floor_count = int((top_floor > large).sum())
    count = int((np.nan_to_num(top_difference, nan=np.inf) > large).sum())
    checks["exceedance"] = Check(float(count), float(max(binomial_bound(n, floor_count / n), 1)))
    checks["coverage"] = Check(float(_uncovered(val, ours, mean_limit)), 0.0)
    checks |= _flips(want, floor, got, limits)
    checks["next"] = Check(float(np.abs(got.next - want.next[at]).mean()), mean_limit)
    truth = (floor.base or floor).val[at]
    paired = _kl(truth, ours) - _kl(truth, val)
    spread = standard_error(paired, want.owners[at])
    checks["kl"] = Check(max(float(paired.mean()), 0.0), 2 * spread + max(limits.mean**2, LEAST_KL))
    return checks


def standard_error(values: np.ndarray, owners: np.ndarray) -> float:
    """Of the mean of `values` [n], whose `owners` are sequences: positions of one are alike, so
    the sums of sequences are what varies. Where few sequences make that more than independent
    positions would have, it is theirs: a limit has never been wider."""
    n = max(len(values), 1)
    alone = float(values.std()) / math.sqrt(n)
    groups = np.unique(owners)
    if len(groups) < 2:
        return alone
    sums = np.array([(values[owners == group] - values.mean()).sum() for group in groups])
    together = math.sqrt(float((sums**2).sum()) * len(groups) / (len(groups) - 1)) / n
    return min(alone, together)


def tie_of(want: Scores, floor: Scores, got: Ours, limits: ModelLimits) -> float:
    """tau: how close two tokens are between which a flip is no fault: two units of the logits'
    last place, four deviations of the margin between two oracles, or the policy's least."""
    at = got.where
    margins = [scores.val[at, 0] - scores.val[at, 1] for scores in (floor.base or want, floor)]
    sigma = float((margins[1] - margins[0]).std()) if len(at) else 0.0
    return max(2 * got.ulp, 4 * sigma, limits.tie)


def farthest(want: Scores, got: Ours) -> dict[str, int | str]:
    """The position at which the oracle's likeliest token is farthest off, and by how much."""
    top = got.at(want.ids[got.where][:, :1])[:, 0] - want.val[got.where][:, 0]
    row = int(np.nan_to_num(np.abs(top), nan=np.inf).argmax())
    position = int(got.where[row])
    return {
        "sequence": int(want.owners[position]),
        "place": int(want.places[position]),
        "token": int(want.ids[position][0]),
        "off": f"{top[row]:.3g}",
    }


def _flips(want: Scores, floor: Scores, got: Ours, limits: ModelLimits) -> dict[str, Check]:
    """Exact share, flips that no near tie excuses, and how many are excused."""
    at = got.where
    n = len(at)
    mine, theirs = got.ids[:, 0], want.top[at]
    flipped = np.flatnonzero(mine != theirs)
    base = floor.base or want
    floor_rate = float((floor.top[at] != base.top[at]).mean()) if n else 0.0
    tie = tie_of(want, floor, got, limits)
    unexcused = 0
    for i in flipped:
        row = at[i]
        place = np.flatnonzero(want.ids[row] == mine[i])
        # An id beyond the oracle's list is less likely than the last that is on it.
        oracle = float(want.val[row][place[0]] if len(place) else want.val[row][-1])
        oracle_margin = float(want.val[row][0]) - oracle
        own = got.ids[i] == theirs[i]
        own_margin = float(got.val[i, 0] - got.val[i][own][0]) if own.any() else math.inf
        cap = 0.30 + 0.35 * -float(want.val[row][0])
        unexcused += min(oracle_margin, own_margin) > min(tie, cap)
    excused = len(flipped) - unexcused
    wanted = max(0.95, 1.0 - floor_rate - 0.02)
    # One flip among less than twenty positions is more than one in twenty.
    unlike = max(1.0 - wanted, 1 / max(n, 1))
    return {
        "flips": Check(float(unexcused), 0.0),
        "ties": Check(float(excused), float(binomial_bound(n, max(floor_rate, 1 / n)))),
        "unlike": Check(len(flipped) / max(n, 1), unlike),
    }


def _uncovered(want: np.ndarray, got: np.ndarray, slack: float) -> int:
    """Positions whose listed ids hold most of the oracle's mass, but not of ours."""
    theirs = np.exp(want).sum(axis=1)
    mine = np.exp(np.where(np.isnan(got), -np.inf, got)).sum(axis=1)
    return int(((theirs >= COVERAGE) & (mine < COVERAGE * math.exp(-slack))).sum())


def _kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL(p || q) over the ids that both have, one bucket for the rest; [n]."""
    known = ~np.isnan(q)
    left, right = np.where(known, p, -np.inf), np.where(known, q, -np.inf)
    mass_p, mass_q = np.exp(left).sum(1), np.exp(right).sum(1)
    inside = np.where(known, np.exp(left) * (np.where(known, p - q, 0.0)), 0.0).sum(1)
    rest_p, rest_q = np.clip(1 - mass_p, 1e-9, 1), np.clip(1 - mass_q, 1e-9, 1)
    return inside + rest_p * np.log(rest_p / rest_q)


def stream_errors(want: np.ndarray, got: np.ndarray) -> np.ndarray:
    """Relative distance of sketches [layers, rows, 64], one number a layer."""
    size = np.sqrt((want.astype(np.float64) ** 2).sum(axis=(1, 2)))
    apart = np.sqrt(((want.astype(np.float64) - got) ** 2).sum(axis=(1, 2)))
    return apart / np.maximum(size, 1e-12)

# SPDX-License-Identifier: Apache-2.0
"""The request traces on which vllmx and upstream must decide alike.

`python -m parity.schedule_traces FILE` writes their specs for `oracles/vllm_scheduler.py`. A spec
is a function of its kind and seed. A trace must avoid what vllmx does otherwise on purpose: an
urgent request that evicts itself stops the step of the others upstream, and cached tokens are
counted anew when a request is admitted again before its first token. The oracle refuses to record
such a trace, so some kinds leave out seeds. The pool always holds the longest request.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oracles.schedule_driver import draw

MAX_MODEL_LEN = 128
MAMBA_ALIGN = "mamba_align"


class Draws:
    """A sequence of small integers that a seed fixes."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.count = 0

    def __call__(self, low: int, high: int) -> int:
        """The next integer in [low, high]."""
        self.count += 1
        return low + draw(self.seed, 99, self.count, high - low + 1)

    def chance(self, percent: int) -> bool:
        """True `percent` times of 100."""
        return self(0, 99) < percent

    def pick(self, values: Iterable[Any]) -> Any:
        """One of `values`."""
        choices = list(values)
        return choices[self(0, len(choices) - 1)]


@dataclass(frozen=True)
class Kind:
    """Traces of one kind: their seeds and the ranges that they are drawn from."""

    seeds: Iterable[int]
    num_requests: tuple[int, int] = (16, 32)
    arrivals: int = 40  # steps over which requests arrive
    prefix: int = 30  # per cent with a shared prefix
    follows: int = 0  # per cent that go on an earlier conversation
    own: tuple[int, int] = (1, 40)
    max_tokens: tuple[int, int] = (1, 30)
    priorities: int = 1
    aborts: int = 0  # per cent
    stops: int = 0  # per cent with stop tokens
    salts: int = 0  # per cent
    reset: bool = False
    extra_blocks: tuple[int, int] = (10, 60)  # above what the longest request needs
    # None: full attention; a window in blocks; MAMBA_ALIGN: recurrent states
    groups: tuple[int | str | None, ...] = (None,)
    config: dict[str, tuple[Any, ...]] = field(default_factory=dict)


# Room for one request of full length and little else, shared by several that answer at length.
CROWD = {
    "num_requests": (16, 26),
    "arrivals": 20,
    "max_tokens": (20, 60),
    "extra_blocks": (0, 4),
}
SEATS = {"max_num_seqs": (5, 8, 12)}
PIECES = {"long_prefill_token_threshold": (5, 16, 24)}

KINDS = {
    "burst": Kind((1, 2, 3, 4, 6), (36, 60), arrivals=2),
    "long_prompts": Kind(
        (1, 2, 3, 8, 9), (20, 36), own=(50, 90), config={"max_num_batched_tokens": (32, 48, 64)}
    ),
    "tiny_pool": Kind((1, 2, 4, 5, 6, 7, 8, 9, 10, 11), **CROWD, prefix=20, config=SEATS),
    "tiny_pool_shared": Kind((3, 4, 5, 6, 7, 8), **CROWD, prefix=80, config=SEATS),
    "shared_prefix": Kind(range(1, 6), (30, 50), prefix=90, own=(1, 12)),
    "conversation": Kind(range(1, 6), (24, 40), prefix=20, follows=70, own=(1, 16)),
    "salt": Kind(range(1, 4), (24, 40), prefix=90, salts=50, own=(1, 12)),
    "priority": Kind((1, 2, 3, 4, 6), (30, 50), priorities=4, config={"policy": ("priority",)}),
    "priority_tiny_pool": Kind(
        (1, 3, 5, 8, 11, 12, 13, 14),
        **{**CROWD, "num_requests": (8, 14), "arrivals": 30},
        priorities=4,
        config={"policy": ("priority",), "max_num_seqs": (3, 4, 6)},
    ),
    "aborts": Kind(range(1, 6), (30, 50), aborts=50),
    "aborts_tiny_pool": Kind(range(1, 6), **CROWD, aborts=40, config=SEATS),
    "hybrid": Kind(range(1, 6), (24, 40), prefix=50, groups=(None, 2)),
    "hybrid_tiny_pool": Kind(range(1, 7), **CROWD, prefix=50, groups=(None, 2), config=SEATS),
    "two_windows": Kind(range(1, 4), **CROWD, prefix=50, groups=(None, 1, 3), config=SEATS),
    "window": Kind(range(1, 6), (24, 40), prefix=50, own=(10, 60), groups=(2,)),
    "window_tiny_pool": Kind(range(1, 6), **CROWD, prefix=50, groups=(3,), config=SEATS),
    "mamba_align": Kind(range(1, 6), (24, 40), prefix=70, own=(1, 60), groups=(None, MAMBA_ALIGN)),
    "mamba_align_tiny_pool": Kind(
        range(1, 6),
        **{**CROWD, "num_requests": (6, 10)},
        prefix=60,
        own=(10, 60),
        groups=(None, MAMBA_ALIGN),
        config=SEATS,
    ),
    "mamba_align_threshold": Kind(
        range(1, 4),
        (20, 36),
        prefix=60,
        own=(20, 60),
        groups=(None, MAMBA_ALIGN, 2),
        config={"long_prefill_token_threshold": (16, 24)},
    ),
    "threshold": Kind((5, 6, 8, 9, 11), (20, 36), own=(20, 80), config=PIECES),
    "scheduled_tokens": Kind(
        (1, 3, 4, 5, 6), (20, 36), config={"max_num_scheduled_tokens": (9, 17, 31)}
    ),
    "watermark": Kind(
        range(1, 6),
        **{**CROWD, "extra_blocks": (2, 8)},
        config={**SEATS, "watermark": (0.1, 0.25)},
    ),
    "partial_admission": Kind(
        range(1, 6),
        **CROWD,
        own=(30, 60),
        config={
            **SEATS,
            "scheduler_reserve_full_isl": (False,),
            "enable_prefix_caching": (False,),
            "max_num_batched_tokens": (16, 24),
        },
    ),
    "stops": Kind((1, 2, 3, 5, 6), (24, 40), stops=60, max_tokens=(5, 50)),
    "reset": Kind((1, 2, 3, 4, 6, 8, 9, 10), (20, 36), prefix=60, reset=True),
    "whole_prompts": Kind(
        range(1, 4),
        (24, 40),
        config={"enable_chunked_prefill": (False,), "max_num_batched_tokens": (MAX_MODEL_LEN,)},
    ),
    "no_caching": Kind(range(1, 6), **CROWD, config={**SEATS, "enable_prefix_caching": (False,)}),
}


def config_of(kind: Kind, draws: Draws) -> dict[str, Any]:
    """Limits of a trace: those the kind names, drawn ones else."""
    block_size = draws.pick((4, 8, 16))
    longest = -(-MAX_MODEL_LEN // block_size) * len(kind.groups)
    max_num_seqs = draws(2, 8)
    config = {
        "block_size": block_size,
        # One is the null block.
        "num_blocks": 1 + longest + draws(*kind.extra_blocks),
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": draws.pick((24, 64, MAX_MODEL_LEN)),
        "max_num_scheduled_tokens": None,
        "long_prefill_token_threshold": 0,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "scheduler_reserve_full_isl": True,
        "watermark": 0.0,
        "policy": "fcfs",
        "async_scheduling": draws.chance(40),
        "groups": [g * block_size + draws(-3, 3) if isinstance(g, int) else g for g in kind.groups],
    }
    config |= {key: draws.pick(values) for key, values in kind.config.items()}
    return config


def request_of(number: int, rows: list[dict[str, Any]], kind: Kind, draws: Draws) -> dict[str, Any]:
    """One request; those before it are `rows`."""
    max_tokens = draws(*kind.max_tokens)
    row: dict[str, Any] = {
        "id": number,
        "at": draws(0, kind.arrivals),
        "prefix": None,
        "follows": None,
        "own": draws(*kind.own),
        "arrival": number / 2,
        "priority": draws(0, kind.priorities - 1),
        "salt": draws.pick(("red", "blue")) if draws.chance(kind.salts) else None,
        "abort": None,
        "sampling": {"max_tokens": max_tokens},
    }
    room = MAX_MODEL_LEN - max_tokens - row["own"]
    if draws.chance(kind.prefix) and room > 2:
        row["prefix"] = [draws(1, 3), draws(1, min(room, 60))]
    earlier = [r for r in rows if _length(r, rows) < room]
    if draws.chance(kind.follows) and earlier and row["prefix"] is None:
        before = draws.pick(earlier)
        row["follows"] = [before["id"], before["sampling"]["max_tokens"]]
        row["at"] = before["at"] + draws(5, 40)
    if draws.chance(kind.aborts):
        row["abort"] = [row["at"] + draws(0, 25), draws.chance(50)]
    if draws.chance(kind.stops):
        row["sampling"] |= {
            "stop_token_ids": [draws(3, 65) for _ in range(draws(1, 4))],
            "min_tokens": min(draws(0, 6), max_tokens),
            "ignore_eos": draws.chance(30),
        }
    return row


def _length(row: dict[str, Any], rows: list[dict[str, Any]]) -> int:
    """Most tokens that a request can come to."""
    before = 0 if row["prefix"] is None else row["prefix"][1]
    if row["follows"] is not None:
        before += _length(rows[row["follows"][0]], rows)
    return before + row["own"] + row["sampling"]["max_tokens"]


def spec_of(name: str, seed: int) -> dict[str, Any]:
    """The spec of trace `seed` of the kind `name`."""
    kind = KINDS[name]
    draws = Draws(draw(seed, 98, sum(name.encode()), 1 << 32))
    rows: list[dict[str, Any]] = []
    config = config_of(kind, draws)
    for number in range(draws(*kind.num_requests)):
        rows.append(request_of(number, rows, kind, draws))
    return {
        "name": f"{name}-{seed}",
        "seed": draws.seed,
        "config": config,
        "requests": rows,
        "reset": draws(5, kind.arrivals) if kind.reset else None,
    }


def specs() -> list[dict[str, Any]]:
    """All traces."""
    return [spec_of(name, seed) for name, kind in KINDS.items() for seed in kind.seeds]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(specs(), indent=1))

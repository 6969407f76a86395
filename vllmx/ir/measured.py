# SPDX-License-Identifier: Apache-2.0
"""Measured times of providers: a file for each device and state of the software, and what it says.

`vllmx bench kernels` writes it; `kernel=auto` goes by it where it exists. Times are kept by op,
dtype and class of shapes, for the numbers of rows that were tried.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

FORMAT = 1
PACKAGES = ("torch", "triton", "flashinfer-python")
SOURCES = ("kernels", "ir/ops", "attention")
"""Folders of vllmx whose change makes a measurement void."""
SIZES = ("hidden_size", "head_size")
"""Facts that are rounded up to a power of two."""
FLAGS = ("sliding_window", "soft_cap")
"""Facts of which it matters whether there are any."""
MARGIN = 0.9
"""A provider must take less than this share of the time of one that stands before it in the
device's list: what is nearly as fast is left as it is."""

Times = dict[str, dict[str, float]]
"""Seconds of one call, by provider and by what was tried."""


def shape_class(facts: dict[str, Any]) -> str:
    """The class of calls with these static facts, in words."""
    words = [f"{name} <= {_power_of_two(facts[name])}" for name in SIZES if facts.get(name)]
    words += [name for name in FLAGS if facts.get(name) is not None]
    cache_dtype = facts.get("kv_cache_dtype")
    if cache_dtype is not None and cache_dtype.itemsize == 1:
        words.append("one-byte cache")
    return ", ".join(words) or "any shape"


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


@cache
def identity(device: str) -> dict[str, str]:
    """What a measurement depends on beside the call: the device, versions, our kernels' source."""
    found = {"device": _device_name(device)}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".c"):
                digest.update(path.relative_to(root).as_posix().encode() + b"\0")
                digest.update(path.read_bytes() + b"\0")
    return {**found, "kernels": digest.hexdigest()[:16]}


def _device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    threads = torch.get_num_threads()
    return f"{device} {torch.backends.cpu.get_cpu_capability()} {threads} threads"


def path_of(device: str, folder: Path) -> Path:
    """The file of `device` as it is now; folder: of `kernel.cache_dir`, here and below."""
    told = json.dumps(identity(device), sort_keys=True)
    name = hashlib.sha256(told.encode()).hexdigest()[:16]
    return folder / f"{device}-{name}.json"


@dataclass
class Measured:
    """Times by op, dtype and class of shapes; see `key`."""

    times: dict[str, Times] = field(default_factory=dict)

    @staticmethod
    def key(op: str, dtype: torch.dtype, facts: dict[str, Any]) -> str:
        """Under which the times of such calls are kept."""
        return f"{op} | {str(dtype).removeprefix('torch.')} | {shape_class(facts)}"

    def scores(self, op: str, dtype: torch.dtype, facts: dict[str, Any]) -> dict[str, float]:
        """Seconds by provider, the geometric mean over what all of them were tried with."""
        times = self.times.get(self.key(op, dtype, facts), {})
        common = set.intersection(*(set(t) for t in times.values())) if times else set()
        if not common:
            return {}
        return {
            provider: math.exp(sum(math.log(tried[name]) for name in common) / len(common))
            for provider, tried in times.items()
        }

    def save(self, device: str, folder: Path) -> Path:
        """Write the file of `device`, whole or not at all."""
        path = path_of(device, folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        told = {"format": FORMAT, "identity": identity(device), "times": self.times}
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(told, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        partial.replace(path)
        return path


def load(device: str, folder: Path) -> Measured:
    """What was measured on `device` as it is now; empty if nothing was, or the file is not right.

    A file that can't be read, or tells of something else than its name says, is named in a warning.
    """
    if not folder.is_dir():
        return Measured()
    path = path_of(device, folder)
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if told["format"] != FORMAT or told["identity"] != identity(device):
            raise ValueError("it tells of another device, version or source")
        times = told["times"]
        for tried in (t for by_provider in times.values() for t in by_provider.values()):
            if not tried or not all(0.0 < float(seconds) < math.inf for seconds in tried.values()):
                raise ValueError("it has times that are no times")
    except FileNotFoundError:
        return Measured()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _warn_once(path, f"{type(error).__name__}: {error}")
        return Measured()
    return Measured(times)


@cache
def _warn_once(path: Path, reason: str) -> None:
    logger.warning(
        "measured kernel times are ignored: %s (%s); `vllmx bench kernels` writes them anew",
        path,
        reason,
    )


def in_order(listed: list[str], scores: dict[str, float]) -> list[str]:
    """Providers, best first: as `listed`, but for those that were measured and are faster.

    Those with a time stand before those without. One overtakes another only by `MARGIN`.
    """
    timed = [provider for provider in listed if provider in scores]
    timed += sorted((p for p in scores if p not in listed), key=lambda p: scores[p])
    ordered: list[str] = []
    for provider in timed:
        place = len(ordered)
        while place and scores[provider] < MARGIN * scores[ordered[place - 1]]:
            place -= 1
        ordered.insert(place, provider)
    return ordered + [provider for provider in listed if provider not in scores]


def in_words(scores: dict[str, float]) -> str:
    """The times, fastest first."""
    fastest = sorted(scores, key=lambda provider: scores[provider])
    return ", ".join(f"{provider} {scores[provider] * 1e6:.1f} us" for provider in fastest)

# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/metrics/reader.py @ v0.25.0
"""The metrics of an engine as Python objects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

PREFIX = "vllm:"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
"""The one counter that is read as a Vector."""


@dataclass
class Metric:
    """One metric of one set of labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A whole number that only grows."""

    value: int


@dataclass
class Vector(Metric):
    """Counters by position, from 0 on."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A number that goes up and down."""

    value: float


@dataclass
class Histogram(Metric):
    """Observations: how many, their sum, and how many up to each bound ("+Inf" is all)."""

    count: int
    sum: float
    buckets: dict[str, int]


def get_metrics_snapshot(registry: CollectorRegistry) -> list[Metric]:
    """Every metric of the engine in `registry` as it stands; those of the process are left out."""
    return [
        metric
        for family in registry.collect()
        if family.name.startswith(PREFIX)
        for metric in _read(family)
    ]


def _read(family: Any) -> Iterator[Metric]:
    if family.type == "gauge":
        for sample in family.samples:
            yield Gauge(family.name, sample.labels, sample.value)
    elif family.type == "histogram":
        yield from _histograms(family)
    elif family.name == PER_POSITION:
        for labels, values in _by_labels(family, "_total", "position").items():
            numbers = [0] * (1 + max(map(int, values)))
            for position, value in values.items():
                numbers[int(position)] = int(value)
            yield Vector(family.name, dict(labels), numbers)
    else:
        for labels, values in _by_labels(family, "_total").items():
            yield Counter(family.name, dict(labels), int(values[""]))


def _histograms(family: Any) -> Iterator[Histogram]:
    counts, sums = _by_labels(family, "_count"), _by_labels(family, "_sum")
    for labels, bounds in _by_labels(family, "_bucket", "le").items():
        yield Histogram(
            family.name,
            dict(labels),
            count=int(counts[labels][""]),
            sum=sums[labels][""],
            buckets={bound: int(value) for bound, value in bounds.items()},
        )


def _by_labels(
    family: Any, suffix: str, key: str | None = None
) -> dict[tuple[tuple[str, str], ...], dict[str, float]]:
    """Values of the samples with a suffix, by their labels and by the label `key` within them."""
    found: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for sample in family.samples:
        if sample.name == family.name + suffix:
            labels = dict(sample.labels)
            within = labels.pop(key) if key is not None else ""
            found.setdefault(tuple(labels.items()), {})[within] = sample.value
    return found

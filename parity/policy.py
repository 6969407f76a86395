# SPDX-License-Identifier: Apache-2.0
"""Limits of the comparison, read from policy.yaml; the file's hash is part of all evidence."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

POLICY = Path(__file__).resolve().parent / "policy.yaml"
NEEDED = ("op", "provider", "dtype", "device", "limits", "reason", "evidence")


class PolicyError(ValueError):
    """A policy that leaves something unsaid."""


@dataclass(frozen=True)
class Limits:
    """Multiples of the golden's own error; see compare.py for each."""

    rmse: float
    row: float
    ulp: float
    gain: float


@dataclass(frozen=True)
class ModelLimits:
    """For whole models; see model_gate.py and policy.yaml."""

    mean_factor: float
    p99_factor: float
    mean: float
    p99: float
    mean_cap: float
    p99_cap: float
    tie: float
    missing: float
    stream: float


@dataclass(frozen=True)
class Policy:
    """Limits by class, exceptions, and the sha256 of the file."""

    models: dict[str, ModelLimits]
    red: dict[str, Limits]
    drift: dict[str, Limits]
    overrides: list[dict[str, Any]]
    sha256: str

    def drift_of(self, kind: str) -> Limits:
        """The drift line of a class."""
        return self.drift.get(kind, self.drift["default"])

    def limits(self, kind: str, op: str, provider: str, dtype: str, device: str) -> Limits:
        """The red line of a cell; PolicyError for a class without one."""
        if kind not in self.red:
            raise PolicyError(f"the policy has no limits for class {kind!r}")
        for entry in self.overrides:
            have = (op, provider, dtype, device)
            if all(entry[name] in ("*", value) for name, value in zip(NEEDED, have)):
                return _limits(entry["limits"], f"the override of {op}")
        return self.red[kind]


def load(path: Path = POLICY) -> Policy:
    """The policy of a file; PolicyError if it is incomplete or an override gives no reason."""
    text = path.read_text()
    raw = yaml.safe_load(text)
    for entry in raw["overrides"]:
        if missing := [name for name in NEEDED if not entry.get(name)]:
            raise PolicyError(f"an override needs its {', '.join(missing)}")
    return Policy(
        {name: _model_limits(values, name) for name, values in raw["models"].items()},
        {kind: _limits(values, kind) for kind, values in raw["red"].items()},
        {kind: _limits(values, f"drift of {kind}") for kind, values in raw["drift"].items()},
        raw["overrides"],
        hashlib.sha256(text.encode()).hexdigest(),
    )


def _limits(values: dict[str, Any], where: str) -> Limits:
    names = [field.name for field in fields(Limits)]
    if set(values) != set(names) or not all(0 < float(v) < 1000 for v in values.values()):
        raise PolicyError(f"{where} needs positive {', '.join(names)}, has {values}")
    return Limits(**{name: float(values[name]) for name in names})


def _model_limits(values: dict[str, Any], where: str) -> ModelLimits:
    names = [field.name for field in fields(ModelLimits)]
    if set(values) != set(names) or not all(0 <= float(v) < 1000 for v in values.values()):
        raise PolicyError(f"models.{where} needs {', '.join(names)}, has {values}")
    return ModelLimits(**{name: float(values[name]) for name in names})

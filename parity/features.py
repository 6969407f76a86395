# SPDX-License-Identifier: Apache-2.0
"""What is declared: the rows of inventory.tsv, and what features.yaml says that each needs.

inventory.tsv names the features of upstream: id, tier, feature, upstream. features.yaml says, by
id, which files of ours are the feature and by what it is to be shown:

    ours: [paths]       files or globs of vllmx
    lacks: [words]      parts of the feature that are not built
    dropped: [words]    "op.NAME PROVIDER why": that provider takes less of the op than it once did;
                        "NAME CASE why": evidence tells of a case or selector that is gone
    ops: [names]        ops of the op table: every case, provider and device of each
    models: [names]     models of parity/goldens/models, in every mode
    text: [prefixes]    specs of parity/text_cases.py, KIND or KIND/CASE
    schedule: [kinds]   kinds of parity/schedule_traces.py; "*" for all
    upstream: [paths]   files, or ids with wildcards, under upstream's tests/
    tests: [selectors]  tests/file.py or tests/file.py::name, with wildcards
    gpu: [selectors]    the same of tests/gpu, which only a GPU can show

A feature that features.yaml does not name is not built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from vllmx.cli_args import did_you_mean
from vllmx.exceptions import UserError

HERE = Path(__file__).resolve().parent
INVENTORY = HERE / "inventory.tsv"
FEATURES = HERE / "features.yaml"
NEEDS = ("ops", "models", "text", "schedule", "upstream", "tests", "gpu")
CANARY = "suite.canary"
"""A row beyond the inventory that is broken for ever: if it isn't red, no row can be believed."""


@dataclass(frozen=True)
class Declared:
    """One feature as declared."""

    id: str
    tier: str
    title: str
    upstream: str
    ours: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()


def load(inventory: Path = INVENTORY, features: Path = FEATURES) -> list[Declared]:
    """The features in the order of the inventory, the canary last; UserError where one slips."""
    rows = read_inventory(inventory)
    declared = yaml.safe_load(features.read_text(encoding="utf-8")) or {}
    if unknown := declared.keys() - {row[0] for row in rows} - {CANARY}:
        raise UserError(f"{features}: not in {inventory.name}: {', '.join(sorted(unknown))}.")
    if CANARY in declared:
        rows.append((CANARY, "T0", "A planted fault that must always be red", "(ours)"))
    return [_declared(row, declared.get(row[0]) or {}, features) for row in rows]


def read_inventory(path: Path = INVENTORY) -> list[tuple[str, str, str, str]]:
    """(id, tier, feature, upstream) of every row; UserError where one is torn or comes twice."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = []
    for number, line in enumerate(lines[1:], 2):
        parts = line.split("\t")
        if len(parts) != 4 or parts[1] not in ("T0", "T1", "T2", "T3"):
            raise UserError(f"{path}:{number}: needs id, tier, feature and upstream.")
        rows.append((parts[0], parts[1], parts[2], parts[3]))
    ids = [row[0] for row in rows]
    if twice := {name for name in ids if ids.count(name) > 1}:
        raise UserError(f"{path}: {', '.join(sorted(twice))} more than once.")
    if not rows:
        raise UserError(f"{path}: no rows.")
    return rows


def _declared(
    row: tuple[str, str, str, str], entry: Mapping[str, list[str]], path: Path
) -> Declared:
    known = {"ours", "lacks", "dropped", *NEEDS}
    if unknown := entry.keys() - known:
        raise UserError(
            f"{path}: {row[0]}: no key {', '.join(sorted(unknown))}; "
            f"there are {', '.join(sorted(known))}."
        )
    for key, value in entry.items():
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise UserError(f"{path}: {row[0]}.{key}: needs a list of strings.")
    needs = {kind: tuple(entry[kind]) for kind in NEEDS if entry.get(kind)}
    if needs and not entry.get("ours"):
        raise UserError(f"{path}: {row[0]}: it needs evidence, but names no file of ours.")
    dropped = tuple(entry.get("dropped", ()))
    if short := [words for words in dropped if len(words.split()) < 4]:
        raise UserError(
            f"{path}: {row[0]}.dropped: {short[0]!r} needs op, provider and the reason."
        )
    lacks = tuple(entry.get("lacks", ()))
    return Declared(*row, tuple(entry.get("ours", ())), lacks, needs, dropped)


def selected(features: list[Declared], select: str | None, tier: str | None) -> list[Declared]:
    """The features of a tier whose ids start with one of `select`; UserError if there is none."""
    prefixes = [part.strip() for part in select.split(",")] if select else [""]
    found = [
        feature
        for feature in features
        if any(feature.id.startswith(p) for p in prefixes) and tier in (None, feature.tier)
    ]
    if not found:
        raise UserError(f"parity: no feature of select={select}, tier={tier}.")
    return found


def named(features: list[Declared], name: str) -> Declared:
    """The feature with id `name`, or the only one that needs an op or a model of that name;
    UserError with all of those if they are several, and with the nearest id if there is none."""
    for feature in features:
        if feature.id == name:
            return feature
    kind, _, bare = name.strip("/").partition(".")
    needs = {"op": "ops", "sample": "ops", "model": "models"}.get(kind, "")
    rows = [feature for feature in features if bare in feature.needs.get(needs, ())]
    if len(rows) == 1:
        return rows[0]
    if rows:
        ids = ", ".join(row.id for row in rows)
        raise UserError(f"parity: {name!r} is no row, but these rows need it: {ids}. Name one.")
    near = did_you_mean(name, [feature.id for feature in features])
    raise UserError(f"parity: no row {name!r}: give an id of {INVENTORY.name}.{near}")

# SPDX-License-Identifier: Apache-2.0
"""Everything that a status is computed from, read from one checkout."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from . import cells, evidence, features, libraries
from .behaviour import Closures
from .catalogue import Listed
from .cells import Catalogue
from .evidence import Row
from .features import CANARY, Declared
from .status import Cell, Feature, FeatureStatus, Golden, Key, Policy, by_key, status, unasked

ROOT = Path(__file__).resolve().parents[1]
HARNESS = ("parity/upstream_map.yaml", "parity/upstream_shim/*.py")
"""What decides on a run of upstream's tests, beside our code."""


class Checkout:
    """The checkout at `root`; each part is read when first asked for, and once."""

    oracle = {"name": "vllm", "version": "0.25.0", "lane": "cpu"}

    def __init__(self, root: Path | None = None, catalogue: Catalogue | None = None) -> None:
        self.root = root = root or ROOT
        self.only: Collection[str] | None = None
        self.parity = root / "parity"
        self.evidence_folder = self.parity / "evidence"
        self.goldens_folder = self.parity / "goldens"
        self.catalogue = Listed(root) if catalogue is None else catalogue
        self.behaviour = Closures(root)
        self._known: dict[Key, Mapping[str, str] | None] = {}

    @cached_property
    def declared(self) -> list[Declared]:
        """The rows of the inventory and what they need."""
        return features.load(self.parity / "inventory.tsv", self.parity / "features.yaml")

    def feature(self, declared: Declared) -> Feature:
        """`declared` with its cells."""
        return cells.spell_out(declared, self.catalogue, self.root)

    def narrowed(self, ids: Collection[str]) -> Checkout:
        """This checkout, which will look at the rows `ids` and the canary and at no others."""
        self.only = ids
        return self

    @cached_property
    def features(self) -> list[Feature]:
        """Every row with its cells; after `narrowed` those rows and the canary."""
        wanted = None if self.only is None else {*self.only, CANARY}
        return [self.feature(row) for row in self.declared if wanted is None or row.id in wanted]

    @cached_property
    def evidence(self) -> list[Row]:
        """All rows of evidence."""
        return evidence.load(self.evidence_folder) if self.evidence_folder.is_dir() else []

    @cached_property
    def goldens(self) -> Mapping[str, Golden]:
        """What goldens there are."""
        return self.catalogue.goldens()

    @cached_property
    def policy(self) -> Policy:
        """The limits."""
        versions = libraries.load(self.parity / libraries.FILE)
        return Policy(sha=self.catalogue.policy_sha(), versions=versions)

    @cached_property
    def by_id(self) -> dict[str, Feature]:
        """The features by their id."""
        return {feature.id: feature for feature in self.features}

    def files(self, cell: Cell) -> list[str]:
        """The files that decide on a cell of tests, helpers aside."""
        own = list(self.by_id[cell.feature].ours)
        if cell.kind == "test":
            place = cell.case.split("::")[0]
            found = sorted((self.root / place).rglob("test_*.py"))
            return [*([p.relative_to(self.root).as_posix() for p in found] or [place]), *own]
        harness = [path for glob in HARNESS for path in self.root.glob(glob)]
        return [*own, *(path.relative_to(self.root).as_posix() for path in harness)]

    def remember(self, cells: Iterable[Cell]) -> dict[Key, Mapping[str, str] | None]:
        """The closures of `cells` as the code was when they were first asked for."""
        for cell in cells:
            if cell.key not in self._known:
                self._known[cell.key] = self.closure(cell)
        return self._known

    def closure(self, cell: Cell) -> Mapping[str, str] | None:
        """The closure of a cell as the code is now; None if there is no such code."""
        if cell.kind in ("test", "upstream"):
            return self.behaviour.closure(self.files(cell))
        return self.catalogue.closure(cell)

    def statuses(self, now: dt.datetime) -> list[FeatureStatus]:
        """The rows of the ledger at the time `now`."""
        evidence = self.evidence
        known = (self.closures, self.policy, now, self.refusals)
        return status(self.features, self.goldens, evidence, *known)

    @cached_property
    def closures(self) -> dict[Key, Mapping[str, str]]:
        """The closure of every cell that is asked for or that evidence tells of."""
        rows = by_key(self.evidence)
        extra = [cell for feature in self.features for cell in unasked(feature, rows)]
        wanted: Sequence[Cell] = [c for f in self.features for c in (*f.cells, *f.watched)] + extra
        return {cell.key: found for cell in wanted if (found := self.closure(cell)) is not None}

    @cached_property
    def refusals(self) -> dict[Key, str]:
        """Why cells that evidence tells of, and nothing asks for, could not be run any more."""
        rows = by_key(self.evidence)
        cells = [cell for feature in self.features for cell in unasked(feature, rows)]
        return {cell.key: why for cell in cells if (why := self.catalogue.refusal(cell))}

    def as_of(self) -> dt.datetime:
        """The time of the newest evidence: what is rendered then is the same on any day."""
        times = [row["ts"] for row in self.evidence]
        return dt.datetime.fromisoformat(max(times, default="1970-01-01T00:00:00Z"))

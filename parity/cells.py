# SPDX-License-Identifier: Apache-2.0
"""The needs of a feature, spelt out: each thing that evidence has to show is one cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from . import libraries
from .features import CANARY, Declared
from .status import Cell, Feature, Golden

PYTEST = "pytest"
UPSTREAM = "upstream-tests"
PROBE = "probe"
LAWS = ("rows", "double", "blocks", "poison", "constant")
"""Names of the probes in probe.py."""


class Catalogue(Protocol):
    """What there is to be shown of ops, models, texts and the scheduler."""

    def ops(self, name: str) -> Sequence[Cell]:
        """The cells of an op of the op table; none if there is no such op."""

    def models(self, name: str) -> Sequence[Cell]:
        """The cells of a model; none if no golden is asked for."""

    def text(self, name: str) -> Sequence[Cell]:
        """The cells of the specs of texts whose names start with `name`."""

    def schedule(self, kind: str) -> Sequence[Cell]:
        """The cells of a kind of scheduler trace, of all for `*`."""

    def canary(self) -> Sequence[Cell]:
        """The planted fault."""

    def mutants(self, files: Sequence[str]) -> Sequence[Cell]:
        """The faults planted in `files`."""

    def goldens(self) -> Mapping[str, Golden]:
        """What goldens there are, by name."""

    def closure(self, cell: Cell) -> Mapping[str, str] | None:
        """The closure of the code that a cell runs; None if there is none."""

    def refusal(self, cell: Cell) -> str:
        """Why a cell of an op that nothing asks for can't be run now; empty if it could."""

    def policy_sha(self) -> str:
        """sha256 of the limits."""


def spell_out(declared: Declared, catalogue: Catalogue, root: Path) -> Feature:
    """`declared` with its files looked up and its needs as cells, each once."""
    files, absent = ours(declared, root)
    imports = libraries.imported(files, root)
    cells: dict[tuple[str, ...], Cell] = {}
    for kind, names in declared.needs.items():
        for name in names:
            for cell in _cells(declared.id, kind, name, catalogue):
                own = kind in ("tests", "upstream")
                cells.setdefault(cell.key, replace(cell, imports=imports) if own else cell)
    if declared.id == CANARY:
        cells |= {cell.key: cell for cell in catalogue.canary()}
    return Feature(
        declared.id,
        declared.tier,
        declared.title,
        declared.upstream,
        ours=files,
        absent=absent,
        lacks=declared.lacks,
        cells=tuple(cells.values()),
        watched=(*_probes(tuple(cells.values())), *catalogue.mutants(files)),
        dropped=tuple((words.split()[0], words.split()[1]) for words in declared.dropped),
    )


def _probes(cells: Sequence[Cell]) -> list[Cell]:
    """The probes of the op cells among `cells`, whether or not a law applies to them."""
    return [
        Cell(
            *(cell.feature, f"{law}:{cell.case}", cell.provider, cell.device, PROBE),
            kind="probe",
            command=f"vllmx parity probe {cell.feature}/",
        )
        for cell in cells
        if cell.kind == "op"
        for law in LAWS
    ]


def ours(declared: Declared, root: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(files, globs that no file matches) of `declared.ours`, relative to the root."""
    files: set[str] = set()
    absent = []
    for pattern in declared.ours:
        found = [path for path in root.glob(pattern) if path.is_file()]
        files |= {path.relative_to(root).as_posix() for path in found}
        if not found:
            absent.append(pattern)
    return tuple(sorted(files)) or tuple(absent), tuple(absent)


def _cells(feature: str, kind: str, name: str, catalogue: Catalogue) -> Sequence[Cell]:
    if kind == "tests":
        command = f"vllmx parity collect {feature}"
        return [Cell(feature, name, "vllmx", "cpu", PYTEST, "test", command=command)]
    if kind == "gpu":
        command = f"vllmx parity collect device=cuda --select {feature}"
        return [Cell(feature, name, "vllmx", "cuda", PYTEST, "test", command=command)]
    if kind == "upstream":
        command = f"vllmx parity upstream-tests --select {name.split('::')[0]}"
        return [Cell(feature, name, "vllmx", "cpu", UPSTREAM, "upstream", command=command)]
    listed = {
        "ops": catalogue.ops,
        "models": catalogue.models,
        "text": catalogue.text,
        "schedule": catalogue.schedule,
    }
    # A name that stands for nothing is a cell that nothing can show.
    nothing = Cell(f"{kind}.{name}", "", "", "cpu", "", kind, golden=f"{kind}/{name}")
    return list(listed[kind](name)) or [nothing]

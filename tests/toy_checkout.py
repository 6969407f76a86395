# SPDX-License-Identifier: Apache-2.0
"""A checkout in small: two features, one op of two cases, one named test, and the canary."""

import functools
from collections.abc import Sequence
from pathlib import Path

from parity import calibrate, canary, checkout, closure, evidence, golden, policy
from parity.catalogue import Listed
from parity.checkout import Checkout
from parity.collect import canary_row
from parity.dtypes import array
from parity.status import Cell

FILES = {
    "parity/inventory.tsv": "id\ttier\tfeature\tupstream\n"
    "op.toy\tT0\tA toy op\tv1/toy.py\n"
    "engine.toy\tT1\tA toy behaviour\tv1/engine.py\n"
    "model.later\tT2\tNot built\tmodels/later.py\n",
    "parity/features.yaml": "op.toy: {ours: [vllmx/toy.py], ops: [toy]}\n"
    "engine.toy: {ours: [vllmx/engine.py], tests: [tests/test_toy.py]}\n"
    "suite.canary: {ours: [parity/canary.py]}\n",
    "parity/policy.yaml": policy.POLICY.read_text(encoding="utf-8"),
    "parity/canary.py": "PLANTED = True\n",
    "vllmx/toy.py": "def double(x):\n    return x + x\n",
    "vllmx/engine.py": "def step():\n    return 1\n",
    "tests/test_toy.py": "def test_one():\n    assert 1 + 1 == 2\n\n\n"
    "def test_two():\n    assert True\n",
}
CASES = ("plain", "wide")
FACTS = {"machine": "toy", "python": "3", "torch": "", "numpy": "", "git": "0" * 40, "dirty": False}
LOOK = functools.cache(canary.look)
"""The planted faults are looked at once; tests/parity/test_canary.py looks again."""


class Toy(Listed):
    """The catalogue of the toy op."""

    def ops(self, name: str) -> Sequence[Cell]:
        if name != "toy":
            return []
        return [
            Cell(
                *("op.toy", f"{case}/f32", "torch", "cpu", "eager"),
                kind="op",
                golden=f"ops/toy/{case}.f32.safetensors",
                graded=True,
                command="vllmx parity replay op.toy/",
            )
            for case in CASES
        ]

    def expected_op_goldens(self) -> set[str]:
        return {f"toy/{case}.f32.safetensors" for case in CASES}

    def closure(self, cell: Cell):
        if cell.kind == "op":
            return closure.closure(["vllmx/toy.py:double"], root=self.root)
        return super().closure(cell)

    def refusal(self, cell: Cell) -> str:
        return ""


def build(root: Path, monkeypatch) -> Path:
    """Write the checkout into `root`, everything in it green, and have the verbs read it."""
    for name, text in FILES.items():
        write(root, name, text)
    folder = root / "parity" / "goldens" / "ops"
    for number, case in enumerate(CASES):
        golden.write(folder / "toy" / f"{case}.f32.safetensors", golden_bytes(case, number))
    golden.write_index(folder)
    calibrate.write(
        {
            name: {"golden_sha": sha, "repeat": True, "lanes": {}}
            for name, sha in golden.read_index(folder).items()
        },
        folder,
    )
    monkeypatch.setattr(checkout, "ROOT", root)
    monkeypatch.setattr(checkout, "Listed", Toy)
    monkeypatch.setattr(evidence, "run_facts", lambda root=root: dict(FACTS))
    monkeypatch.setattr(canary, "look", LOOK)
    show(root)
    return root


def write(root: Path, name: str, text: str) -> None:
    """A text file of the checkout."""
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text, encoding="utf-8")


def golden_bytes(case: str, number: float) -> bytes:
    """A golden of the toy op."""
    out = array([[number, 2.0 * number]], "f32")
    oracle = dict.fromkeys(golden.PROVENANCE, "toy")
    facts = {
        "schema": 1,
        "kind": "op",
        "feature": "op.toy",
        "case": case,
        "dtype": "f32",
        "tensors": {"out.out": golden.describe(out, True)},
        "args": {"n": 1},
        "oracle": oracle,
        "class": "pointwise",
    }
    return golden.pack(facts, {"out.out": out})


def show(root: Path, **fields) -> None:
    """Append a passing row for every cell, with `fields` changed, and the canary's."""
    here = Checkout(root)
    rows = []
    for feature in here.features:
        for cell in feature.cells:
            if cell.kind == "canary":
                rows.append(canary_row(here, cell, dict(FACTS)))
                continue
            found = here.goldens.get(cell.golden) if cell.golden else None
            facts = {
                "feature": cell.feature,
                "case": cell.case,
                "provider": cell.provider,
                "device": {"name": cell.device},
                "mode": cell.mode,
                "golden_sha": found.sha if found else "",
                "closure": dict(here.closure(cell) or {"fine": "", "coarse": ""}),
                "policy_sha": here.policy.sha if cell.graded else "",
                "oracle": {},
                "verdict": "pass",
                "checks": {"rmse": {"measured": 1.0, "limit": 2.0, "headroom": 2.0}},
                "proof": {"selected": cell.provider},
                "run": dict(FACTS),
                **fields,
            }
            rows.append(evidence.make_row(**facts))
    evidence.append(rows, root / "parity" / "evidence")


def forget(root: Path) -> None:
    """Delete all evidence, and the list of it."""
    for path in (root / "parity" / "evidence").iterdir():
        path.unlink()

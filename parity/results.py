# SPDX-License-Identifier: Apache-2.0
"""Results of tests, whoever ran them, and what they come to for a selector of features.yaml."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllmx.exceptions import UserError

from .tree_stamp import PROPERTY

EXPLAINED = ("not applicable", "deselected")
"""Outcomes of upstream's tests that parity/upstream_map.yaml gives a reason for."""


NOT_LOOKED = ("skipped", "missing")
"""Outcomes of tests that showed nothing."""


@dataclass(frozen=True)
class Result:
    """One test: `outcome` is passed, failed, skipped, missing, or one of upstream_tests.tsv."""

    id: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0
    expected: bool = True
    """False for a test of upstream that neither upstream passes nor vllmx: it shows nothing."""


@dataclass(frozen=True)
class Summary:
    """What the tests of one selector come to, in the words of an evidence row."""

    verdict: str
    reason: str
    seconds: float
    details: dict[str, Any]


def matches(selector: str, test_id: str) -> bool:
    """Whether `selector`, a folder, file or id with `*` wildcards, covers `test_id`."""
    pattern = re.escape(selector.rstrip("/")).replace(r"\*", ".*")
    return re.fullmatch(pattern + r"(?:[\[:/].*)?", test_id, re.DOTALL) is not None


def summarise(selector: str, results: Iterable[Result]) -> Summary:
    """pass only if at least one test passed and every other is explained."""
    found = sorted((r for r in results if matches(selector, r.id)), key=lambda r: r.id)
    wanted = [result for result in found if result.expected]
    counts = Counter(result.outcome for result in wanted)
    ids = "\n".join(result.id for result in wanted)
    details = {**counts, "ids": hashlib.sha256(ids.encode()).hexdigest()[:16]}
    seconds = round(sum(result.seconds for result in found), 3)
    skipped = [result for result in wanted if result.outcome in NOT_LOOKED]
    wrong = [r for r in wanted if r.outcome not in ("passed", *NOT_LOOKED, *EXPLAINED)]
    if wrong:
        reason = f"{len(wanted) - len(wrong)} of {len(wanted)} do not fail; first {wrong[0].id}: "
        return Summary("fail", reason + (wrong[0].reason or wrong[0].outcome), seconds, details)
    if skipped:
        reason = f"{len(skipped)} of {len(wanted)} did not run; first {skipped[0].id}: "
        return Summary("skip", reason + (skipped[0].reason or "no reason"), seconds, details)
    if not counts["passed"]:
        reason = "no test of it applies" if wanted else "no test matches"
        return Summary("invalid", f"{selector}: {reason}", seconds, details)
    return Summary("pass", "", seconds, details)


def read_jsonl(path: Path) -> list[Result]:
    """The lines of pytest_recorder; a test that tells of several phases counts by the worst."""
    worst: dict[str, Result] = {}
    order = ("failed", "skipped", "passed", "missing")
    for line in path.read_text(encoding="utf-8").splitlines():
        result = Result(**json.loads(line))
        before = worst.get(result.id)
        if before is None or order.index(result.outcome) < order.index(before.outcome):
            worst[result.id] = result
    return list(worst.values())


def read_junit(path: Path) -> list[Result]:
    """The cases of a JUnit file that pytest wrote, in either of its families."""
    try:
        tree = ElementTree.parse(path)
    except (OSError, ElementTree.ParseError) as error:
        raise UserError(f"{path}: no JUnit file: {error}") from error
    return [_from_junit(case) for case in tree.iter("testcase")]


def _from_junit(case: ElementTree.Element) -> Result:
    module, name = case.get("classname", ""), case.get("name", "")
    file = case.get("file")
    parts = module.split(".")
    if file is None:  # family xunit2 leaves the file out: its last part starts with test_
        last = max((i for i, part in enumerate(parts) if part.startswith("test_")), default=-1)
        file = "/".join(parts[: last + 1]) + ".py"
    classes = parts[len(Path(file).with_suffix("").parts) :]
    outcome, reason = "passed", ""
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            outcome = "skipped" if child.tag == "skipped" else "failed"
            reason = " ".join((child.get("message") or child.text or "").split())[:300]
            break
    test_id = "::".join([file, *classes, name])
    return Result(test_id, outcome, reason, float(case.get("time") or 0))


def stamp_in(path: Path) -> str | None:
    """What a file of results says of the tree that it was made from (tree_stamp.py), else None."""
    if path.suffix == ".xml":
        found = ElementTree.parse(path).iter("property")
        return next((p.get("value") for p in found if p.get("name") == PROPERTY), None)
    lines = path.read_text(encoding="utf-8").splitlines()
    begin = f"{PROPERTY}\t"
    return next((line[len(begin) :] for line in lines if line.startswith(begin)), None)


def read_upstream(path: Path) -> list[Result]:
    """The rows of upstream_tests.tsv; ids without their leading `tests/`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if not line.startswith(f"{PROPERTY}\t")]
    if not lines or lines[0].split("\t")[:3] != ["id", "status", "upstream"]:
        raise UserError(f"{path}: not a table that `vllmx parity upstream-tests` wrote.")
    rows: Sequence[list[str]] = [line.split("\t") for line in lines[1:]]
    return [
        Result(
            row[0].removeprefix("tests/"),
            row[1],
            row[-1],
            expected=row[2] == "passes" or row[1] == "passed",
        )
        for row in rows
    ]


def unnamed(root: Path, selector: str, found: Iterable[Result]) -> list[str]:
    """Tests in the files of `selector` that it covers and `found` doesn't tell of."""
    told = {result.id.split("[")[0] for result in found}
    place = root / selector.split("::")[0]
    files = sorted(place.rglob("test_*.py")) if place.is_dir() else [place]
    names = [
        f"{file.relative_to(root).as_posix()}::{name}"
        for file in files
        if file.is_file()
        for name in _tests_of(ast.parse(file.read_text(encoding="utf-8")))
    ]
    plain = selector.split("[")[0]
    return [name for name in names if name not in told and matches(plain, name)]


def _tests_of(tree: ast.Module) -> Iterator[str]:
    """`test_a`, `TestB::test_c` of a test file."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if node.name.startswith("test"):
                yield node.name
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            for child in node.body:
                name = getattr(child, "name", "")
                if name.startswith("test"):
                    yield f"{node.name}::{name}"

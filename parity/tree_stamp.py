# SPDX-License-Identifier: Apache-2.0
"""The tree that a file of results was made from, written into it when its run begins.

It holds what evidence says of a run (commit, whether the tree differs from it, versions) and a hash
of every source file, so that results of another tree are told apart file by file, whatever their
times are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vllmx.exceptions import UserError

from . import evidence
from .digests import file_sha

PROPERTY = "parity.tree"
"""Name of the property of a JUnit file that holds it, and of the line of a table."""
SOURCES = ("vllmx", "parity", "oracles", "conf", "tests")
SKIPPED = ("__pycache__", "evidence", "goldens")
DIGITS = 16
CURE = "run the tests again on this tree, and collect what that run writes"


def of(root: Path) -> str:
    """The stamp of the tree at `root`, one line of JSON."""
    sources = {name: _sha(root / name) for name in _sources(root)}
    return json.dumps({"run": evidence.run_facts(root), "sources": sources}, sort_keys=True)


def checked(text: str | None, files: Iterable[str], root: Path, path: Path) -> dict[str, Any]:
    """Facts of the run that the stamp `text` of the file `path` names; UserError where it has none
    or one of `files`, relative to `root`, is not what it was then.
    """
    if text is None:
        raise UserError(f"collect: {path} does not say what tree it was made from; {CURE}.")
    try:
        told = json.loads(text)
        facts, sources = dict(told["run"]), dict(told["sources"])
        commit, facts["dirty"] = str(facts["git"]), bool(facts["dirty"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"collect: the stamp in {path} is damaged ({error!r}); {CURE}.") from error
    others = sorted(name for name in set(files) if sources.get(name) != _sha(root / name))
    if others:
        raise UserError(
            f"collect: {path} was made from another {others[0]}"
            + (f" and {len(others) - 1} others" if len(others) > 1 else "")
            + f" (commit {commit[:12] or 'unknown'}); {CURE}."
        )
    return facts


def _sources(root: Path) -> Iterator[str]:
    for top in SOURCES:
        for path in sorted((root / top).rglob("*")):
            name = path.relative_to(root)
            if not set(SKIPPED) & set(name.parts[:-1]) and path.is_file():
                yield name.as_posix()


def _sha(path: Path) -> str:
    return file_sha(path)[:DIGITS] if path.is_file() else ""

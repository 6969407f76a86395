# SPDX-License-Identifier: Apache-2.0
"""What changed between two versions of upstream, and which of our files it touches.

Ours are found by the `# upstream:` line of a file, by upstream_map.yaml and by the upstream column
of inventory.tsv.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from .census import KINDS, Census
from .features import INVENTORY, read_inventory

ROOT = Path(__file__).resolve().parents[1]
MAP = Path(__file__).resolve().parent / "upstream_map.yaml"


def drift(start: Census, end: Census, root: Path = ROOT) -> dict[str, Any]:
    """Both versions, the names that came and went by kind, the files, and what of ours they are."""
    before, after = start.modules, end.modules
    changed = [p for p in before if p in after and before[p][0] != after[p][0]]
    files = {
        "new": sorted(after.keys() - before.keys()),
        "gone": sorted(before.keys() - after.keys()),
        "changed": sorted(changed),
    }
    touching = [*files["changed"], *files["gone"]]
    ours = follow(touching, anchors(root), root)
    return {
        "from": start.version,
        "to": end.version,
        "kinds": [_kind(kind, start, end) for kind in KINDS],
        "files": files,
        "symbols": {path: _symbols(start, end, path) for path in touching if ours[path]["ours"]},
        "ours": {path: hit for path, hit in ours.items() if hit["ours"] or hit["features"]},
    }


def _kind(kind: str, start: Census, end: Census) -> dict[str, Any]:
    before, after = getattr(start, kind), getattr(end, kind)
    return {
        "kind": kind,
        "before": len(before),
        "after": len(after),
        "new": sorted(after - before),
        "gone": sorted(before - after),
    }


def _symbols(start: Census, end: Census, path: str) -> dict[str, list[str]]:
    before, after = start.symbols.get(path, {}), end.symbols.get(path, {})
    changed = [n for n in before if n in after and before[n] != after[n]]
    # A class is changed where a member is; the member says more.
    parents = {name.split(".")[0] for name in changed if "." in name}
    return {
        "new": sorted(after.keys() - before.keys()),
        "gone": sorted(before.keys() - after.keys()),
        "changed": sorted(name for name in changed if name not in parents),
    }


# ---- what of ours follows a file of upstream


def anchors(root: Path) -> dict[str, list[str]]:
    """Pattern of upstream's paths -> our files that follow it."""
    found: dict[str, set[str]] = {}
    for file in sorted((root / "vllmx").rglob("*.py")):
        ours = file.relative_to(root).as_posix()
        for pattern in anchor_patterns(file.read_text(encoding="utf-8")):
            found.setdefault(pattern, set()).add(ours)
    for pattern, files in _mapped(root):
        found.setdefault(pattern, set()).update(files)
    return {pattern: sorted(names) for pattern, names in found.items()}


def anchor_patterns(text: str) -> list[str]:
    """The paths that the `# upstream:` lines of a file name, braces spelt out."""
    patterns = []
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if line.startswith("# upstream:"):
            words = line.removeprefix("# upstream:")
            while not re.search(r"@ v\d", words) and number + 1 < len(lines):
                number += 1
                words += lines[number].lstrip("# ")
            words = re.sub(r"\([^)]*\)", "", words.split("@")[0])
            patterns += [p for part in _top_level(words) for p in braces(part.strip())]
    return patterns


def _top_level(text: str) -> list[str]:
    """`a/{b,c}.py, d.py` -> its two parts: commas within braces don't split."""
    return [part for part in re.split(r",(?![^{]*\})", text) if part.strip()]


def braces(pattern: str) -> list[str]:
    """`a/{b,c}.py` -> `a/b.py`, `a/c.py`; a folder stands for all that is in it."""
    parts = re.split(r"\{([^}]*)\}", pattern)
    choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
    spelt = ["".join(part.strip() for part in combination) for combination in product(*choices)]
    return [p + "*" if p.endswith("/") else p for p in spelt]


def _mapped(root: Path) -> Iterator[tuple[str, list[str]]]:
    """(path of a module of upstream, files that stand for it) of upstream_map.yaml."""
    modules = yaml.safe_load(MAP.read_text(encoding="utf-8"))["modules"]
    for name, target in modules.items():
        targets = [target] if isinstance(target, str) else target
        if isinstance(targets, list):
            paths = [_file(root, dotted) for dotted in targets]
            base = name.replace(".", "/")
            for pattern in (f"{base}.py", f"{base}/__init__.py"):
                yield pattern, [path for path in paths if path]


def _file(root: Path, dotted: str) -> str:
    base = dotted.replace(".", "/")
    for path in (f"{base}.py", f"{base}/__init__.py"):
        if (root / path).is_file():
            return path
    return ""


def follow(
    paths: Iterable[str], patterns: dict[str, list[str]], root: Path
) -> dict[str, dict[str, list[str]]]:
    """Path of upstream -> our files and the features of the inventory that follow it."""
    inventory = root / "parity" / INVENTORY.name
    rows = [(row[0], _column(row[3])) for row in read_inventory(inventory)]
    found = {}
    for path in paths:
        hits = {f for p, files in patterns.items() if fnmatchcase(path, p) for f in files}
        features = [name for name, column in rows if any(_within(path, part) for part in column)]
        found[path] = {"ours": sorted(hits), "features": features}
    return found


def _column(text: str) -> list[str]:
    """The upstream column: paths under vllm/, whose later parts may leave the folder out."""
    parts = [p for part in _top_level(text) for p in braces(part.strip()) if " " not in p]
    folder = parts[0].rpartition("/")[0] if parts else ""
    return [p if "/" in p or not folder else f"{folder}/{p}" for p in parts]


def _within(path: str, part: str) -> bool:
    """Whether `path` is file or folder `part` of vllm/, or of the folders that hold layers."""
    inner = path.removeprefix("vllm/").removeprefix("model_executor/")
    whole = part.removeprefix("model_executor/")
    if len(whole) < 4:
        return False
    return inner == whole or inner.startswith(whole.rstrip("/") + "/") or fnmatchcase(inner, whole)


# ---- in words


def lines(found: dict[str, Any]) -> list[str]:
    """The drift, a line a thing: first the names, then our files."""
    words = [f"upstream {found['from']} -> {found['to']}"]
    for kind in found["kinds"]:
        words.append(f"{kind['kind']}: {kind['before']} -> {kind['after']}")
        words += [f"  + {name}" for name in kind["new"]]
        words += [f"  - {name}" for name in kind["gone"]]
    counts = ", ".join(f"{len(names)} {how}" for how, names in found["files"].items())
    words.append(f"files: {counts}")
    ours: dict[str, list[str]] = {}
    for path, hit in found["ours"].items():
        for file in hit["ours"]:
            ours.setdefault(file, []).append(path)
    words.append(f"our files touched: {len(ours)}")
    for file, paths in sorted(ours.items()):
        words.append(f"  {file}")
        words += [f"    {path}{_named(found['symbols'].get(path))}" for path in paths]
    only = {f for hit in found["ours"].values() if not hit["ours"] for f in hit["features"]}
    if only:
        words.append(f"features touched where no file of ours names it: {', '.join(sorted(only))}")
    return words


def _named(symbols: dict[str, list[str]] | None) -> str:
    if not symbols:
        return ""
    parts = [
        f"{sign}{name}"
        for sign, how in (("~", "changed"), ("+", "new"), ("-", "gone"))
        for name in symbols[how]
    ]
    shown = ", ".join(parts[:8]) + (f" and {len(parts) - 8} more" if len(parts) > 8 else "")
    return f": {shown}" if parts else ": private code only"

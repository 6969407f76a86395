# SPDX-License-Identifier: Apache-2.0
"""The commit that a copy of a checkout is of, where there is no git to ask.

    python -m parity.source_stamp         # in the checkout: writes .commit-stamp

The stamp holds the commit object and the list of its files. A copy is of that commit if the files'
hashes add up to the tree that the object names, and the object has the hash that the stamp says:
nothing is taken on trust. A file that differs, or one that the list doesn't know and that is not of
the kinds that git ignores here, makes the copy a changed tree.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STAMP = ".commit-stamp"
IGNORED = (
    "__pycache__",
    ".git",
    ".pytest_cache",
    ".hypothesis",
    ".ruff_cache",
    ".mypy_cache",
    ".nox",
)
"""Folders that hold nothing of ours; so do those that start with .venv."""
OUTPUTS = ("parity/evidence/", "reports/")
"""What runs write themselves: a change there doesn't make a tree dirty."""


@dataclass(frozen=True)
class Stamped:
    """What a stamp says of a folder: the commit, and the paths that differ from it."""

    commit: str
    changed: tuple[str, ...]


def write(root: Path) -> Path:
    """Write the stamp of the commit that is checked out at `root`."""
    commit = _git(root, "rev-parse", "HEAD").decode().strip()
    body = _git(root, "cat-file", "commit", commit)
    files = _git(root, "ls-tree", "-r", "-z", commit).rstrip(b"\0").replace(b"\0", b"\n")
    path = root / STAMP
    path.write_bytes(b"\n".join((commit.encode(), str(len(body)).encode(), body + files, b"")))
    return path


def read(root: Path) -> Stamped | None:
    """What the stamp at `root` says of the files there; None without one, or one that lies."""
    path = root / STAMP
    if not path.is_file():
        return None
    try:
        commit, size, rest = path.read_bytes().split(b"\n", 2)
        body, listed = rest[: int(size)], rest[int(size) :].decode()
        entries = [line.split("\t", 1) for line in listed.splitlines() if line]
        files = {name: tuple(facts.split()) for facts, name in entries}
    except ValueError:
        return None
    tree = body.split(b"\n", 1)[0].removeprefix(b"tree ").decode()
    if _hash("commit", body) != commit.decode() or _tree(files) != tree:
        return None
    changed = [name for name, facts in files.items() if _blob(root / name) != facts[2]]
    new = [name for name in _found(root) if name not in files and name != STAMP]
    differing = [name for name in (*changed, *new) if not name.startswith(OUTPUTS)]
    return Stamped(commit.decode(), tuple(differing))


def _found(root: Path) -> list[str]:
    """The files below `root` that git would see."""
    found: list[str] = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in IGNORED and not f.startswith(".venv"))
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in sorted(names)]
    return found


def _hash(kind: str, body: bytes) -> str:
    return hashlib.sha1(f"{kind} {len(body)}\0".encode() + body).hexdigest()


def _blob(path: Path) -> str:
    return _hash("blob", path.read_bytes()) if path.is_file() else ""


def _tree(files: dict[str, tuple[str, ...]]) -> str:
    """Hash of the tree of `files`: path -> (mode, kind, hash)."""
    folders: dict[str, dict[str, tuple[str, ...]]] = {}
    entries: list[tuple[bytes, bytes]] = []
    for name, facts in files.items():
        top, _, rest = name.partition("/")
        if rest:
            folders.setdefault(top, {})[rest] = facts
        else:
            entries.append((name.encode(), _entry(facts[0], name, facts[2])))
    for name, below in folders.items():
        # git sorts a folder as if its name ended with a slash.
        entries.append((f"{name}/".encode(), _entry("40000", name, _tree(below))))
    return _hash("tree", b"".join(entry for _, entry in sorted(entries)))


def _entry(mode: str, name: str, sha: str) -> bytes:
    return f"{mode} {name}\0".encode() + bytes.fromhex(sha)


def _git(root: Path, *arguments: str) -> bytes:
    done: Any = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=True)
    return bytes(done.stdout)


if __name__ == "__main__":
    print(write(Path(__file__).resolve().parents[1]))
    sys.exit(0)

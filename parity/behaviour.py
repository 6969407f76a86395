# SPDX-License-Identifier: Apache-2.0
"""Closure hashes of what tests show.

A test reaches nearly everything, so a hash of all that it reaches would be stale after every edit.
`fine` covers the test file, the helpers and conftest files under tests/ that it uses, and the
files of ours that are the feature; `coarse` covers all files of vllmx that those import. Comments
and layout count in neither, nor docstrings in `coarse`: an edited comment is no change that could
take a failure back.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from .closure import code_of, dump

PACKAGES = ("vllmx", "parity", "oracles")


class Closures:
    """Closures of one checkout; files are read once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = cache(lambda name: ast.parse((root / name).read_bytes()))
        self.imports = cache(lambda name: sorted(set(_imports(self.tree(name), name))))
        self.code = cache(self._code)
        self.outer = cache(self._outer)
        self.text = cache(lambda name: _sha((root / name).read_bytes()))
        self.is_file = cache(lambda name: (root / name).is_file())
        self.reachable = cache(self._reachable)

    def closure(self, files: Iterable[str]) -> dict[str, str] | None:
        """{"fine", "coarse"} of `files`, relative to the root; None where one is missing."""
        given = list(files)
        if not given or not all(self.is_file(name) for name in given):
            return None
        return {
            "fine": _sha_lines(f"{name} {self.code(name)}" for name in self._own(given)),
            "coarse": _sha_lines(f"{name} {self.outer(name)}" for name in self.covered(given)),
        }

    def covered(self, files: Iterable[str]) -> list[str]:
        """Every file that the closure of `files` has a hash of."""
        return sorted({path for name in self._own(files) for path in self.reachable(name)})

    def judges(self, file: str) -> list[str]:
        """`file`, its helpers, and what they import of our packages but vllmx, directly or not."""
        found: set[str] = set()
        queue = [file, *self.helpers(file)]
        while queue:
            name = queue.pop()
            if name in found or name.startswith("vllmx/"):
                continue
            found.add(name)
            if name.endswith(".py"):
                queue += [path for dotted in self.imports(name) for path in self._files(dotted)]
        return sorted(found)

    def _own(self, files: Iterable[str]) -> list[str]:
        return sorted({name for file in files for name in (file, *self.helpers(file))})

    def helpers(self, file: str) -> list[str]:
        """The files under tests/ that test `file` uses: conftest.py above it, and imports."""
        found: set[str] = set()
        queue = [file]
        while queue:
            name = queue.pop()
            if not name.startswith("tests/") or not name.endswith(".py"):
                continue
            folders = [folder.as_posix() for folder in Path(name).parents if folder.parts]
            near = {f"{folder}/conftest.py" for folder in folders}
            modules = [dotted.removeprefix("tests.") for dotted in self.imports(name)]
            near |= {f"{top}/{m.replace('.', '/')}.py" for top in folders for m in modules}
            for other in near - found:
                if self.is_file(other):
                    found.add(other)
                    queue.append(other)
        return sorted(found - {file})

    def _reachable(self, name: str) -> frozenset[str]:
        """`name` and every file of our packages that it imports, directly or not."""
        found: set[str] = set()
        queue = [name]
        while queue:
            path = queue.pop()
            if path in found:
                continue
            found.add(path)
            if path.endswith(".py"):
                for dotted in self.imports(path):
                    queue += self._files(dotted)
        return frozenset(found)

    def _files(self, dotted: str) -> list[str]:
        if dotted.split(".")[0] not in PACKAGES:
            return []
        base = dotted.replace(".", "/")
        return [p for p in (f"{base}.py", f"{base}/__init__.py") if self.is_file(p)]

    def _code(self, name: str) -> str:
        if name.endswith(".py"):
            return _sha(dump(self.tree(name)).encode())
        return self.text(name)

    def _outer(self, name: str) -> str:
        if name.endswith(".py"):
            return _sha(code_of((self.root / name).read_bytes()).encode())
        return self.text(name)


def _imports(tree: ast.Module, name: str) -> Iterator[str]:
    """Dotted names that a file imports anywhere in it; `from a import b` gives a and a.b."""
    here = list(Path(name).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            base = [*base, *(node.module or "").split(".")] if node.module else base
            yield ".".join(base)
            yield from (".".join([*base, alias.name]) for alias in node.names)


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sha_lines(lines: Iterable[str]) -> str:
    return _sha("\n".join(lines).encode())

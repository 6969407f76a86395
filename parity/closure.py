# SPDX-License-Identifier: Apache-2.0
"""Closure hashes: whether what ran then is still what is here now.

`fine` covers the code that a symbol reaches: its own syntax tree and, name by name, whatever
functions, classes and constants of the repository it refers to. A name that isn't found where it
should be brings in its whole module. `coarse` covers every file that the symbol's module imports,
directly or not. Comments, docstrings and layout count in neither: an edited comment is no change
that could take a failure back. Evidence is stale when `fine` differs; a difference in `coarse`
alone is only worth a word.

A symbol is "path/of/file.py:Name" or "path/of/file" for all of it, relative to the root. A string
that names a file beside the module ("kernels.c") brings in that file. The sources are read, never
imported, so a hash needs neither torch nor a GPU.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("vllmx", "parity", "oracles")
FILE_NAME = re.compile(r"[\w-]+\.(?!py$)\w{1,8}")


def closure(
    symbols: Iterable[str],
    extra: Mapping[str, str] | None = None,
    root: Path = ROOT,
    sources: Sources | None = None,
    without: tuple[str, ...] = (),
) -> dict[str, str]:
    """{"fine", "coarse"} of `symbols`; `extra` names what else decides (a kernel's version, ...),
    `without` the beginnings of paths that decide nothing, whoever refers to them.

    `sources` saves reading the files again where there are many closures to make.
    FileNotFoundError or KeyError where a symbol doesn't exist.
    """
    listed = list(symbols)
    if not listed:
        raise ValueError("a closure of nothing says nothing")
    sources = sources or Sources(root)
    fine = {
        **items(listed, root, sources, without),
        **{f"+{k}": v for k, v in (extra or {}).items()},
    }
    files = sources.reachable(path_of(symbol) for symbol in listed)
    coarse = {path: sources.code(path) for path in files}
    return {"fine": _sha_items(fine), "coarse": _sha_items(coarse)}


def items(
    symbols: Iterable[str],
    root: Path = ROOT,
    sources: Sources | None = None,
    without: tuple[str, ...] = (),
) -> dict:
    """sha256 of the syntax tree of every symbol in the fine closure, by symbol: what `plan` says
    has changed. `without`: see `closure`."""
    sources = sources or Sources(root)
    found: dict[str, str] = {}
    queue = list(symbols)
    while queue:
        symbol = queue.pop()
        if symbol in found or symbol.startswith(without):
            continue
        if not path_of(symbol).endswith(".py"):
            found[symbol] = _sha((root / symbol).read_text())
            continue
        found[symbol], references = sources.looked_at(symbol)
        queue += references
    return found


def beside(names: Iterable[str], root: Path = ROOT) -> dict[str, str]:
    """sha256 of files that aren't Python and decide nevertheless, as `extra` of a closure."""
    return {name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in names}


def symbol_of(function: Callable[..., Any], root: Path = ROOT) -> str:
    """The symbol of a function or class; a bound class method stands for its class."""
    owner = getattr(function, "__self__", None)
    target: Any = owner if inspect.isclass(owner) else inspect.unwrap(function)
    path = Path(inspect.getfile(target)).resolve().relative_to(root.resolve())
    return f"{path.as_posix()}:{target.__qualname__.split('.')[0]}"


def path_of(symbol: str) -> str:
    """The file of a symbol."""
    return symbol.partition(":")[0]


@dataclass
class Module:
    """One source file: its top-level definitions and what its names are imported from."""

    path: str
    text: str
    tree: ast.Module
    package: str  # dotted name of the package that relative imports start from
    defined: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imported: dict[str, tuple[str, str | None]] = field(default_factory=dict)


class Sources:
    """The files of a root, parsed when first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: dict[str, Module] = {}
        self.known: dict[str, tuple[str, list[str]]] = {}
        self.imports: dict[str, list[str]] = {}
        self.found: dict[str, str | None] = {}
        self.codes: dict[str, str] = {}

    def code(self, path: str) -> str:
        """sha256 of the syntax tree of a whole file, worked out once."""
        if path not in self.codes:
            self.codes[path] = _sha(code_of(self.module(path).text))
        return self.codes[path]

    def module(self, path: str) -> Module:
        """The file `path`, relative to the root."""
        if path not in self.modules:
            text = (self.root / path).read_text()
            package = ".".join(Path(path).parent.parts)
            module = Module(path, text, ast.parse(text), package)
            for statement in module.tree.body:
                _index(module, statement)
            self.modules[path] = module
        return self.modules[path]

    def looked_at(self, symbol: str) -> tuple[str, list[str]]:
        """(sha256 of the tree of a symbol, the symbols that it refers to), worked out once."""
        if symbol not in self.known:
            node = self.node(symbol)
            self.known[symbol] = (_sha(_normal(node)), self.references(symbol, node))
        return self.known[symbol]

    def node(self, symbol: str) -> ast.AST:
        """Syntax tree of a symbol; KeyError if its file has no such name."""
        path, _, name = symbol.partition(":")
        module = self.module(path)
        if not name:
            return module.tree
        if name not in module.defined:
            raise KeyError(f"{path} defines no {name}")
        return ast.Module(body=module.defined[name], type_ignores=[])

    def references(self, symbol: str, node: ast.AST) -> list[str]:
        """Symbols of the repository that the tree of `symbol` refers to."""
        path, _, name = symbol.partition(":")
        module = self.module(path)
        here = self._imports_within(module, node)
        found: list[str] = self._files_named(module, node)
        for used, attribute in _names(node):
            if used == name:
                continue
            if used in here:
                found += self._imported(*here[used], attribute)
            elif used in module.defined:
                found.append(f"{path}:{used}")
            elif used in module.imported:
                found += self._imported(*module.imported[used], attribute)
        return found

    def _files_named(self, module: Module, node: ast.AST) -> list[str]:
        folder = Path(module.path).parent
        words = {
            child.value
            for child in ast.walk(node)
            if isinstance(child, ast.Constant)
            and isinstance(child.value, str)
            and FILE_NAME.fullmatch(child.value)
        }
        return [
            (folder / word).as_posix() for word in words if (self.root / folder / word).is_file()
        ]

    def reachable(self, paths: Iterable[str]) -> list[str]:
        """`paths` and every file of the repository that they import, directly or not."""
        found: set[str] = set()
        queue = list(paths)
        while queue:
            path = queue.pop()
            if path in found:
                continue
            found.add(path)
            queue += self._imported_files(path)
        return sorted(found)

    def _imported_files(self, path: str) -> list[str]:
        """The files of the repository that `path` imports itself, worked out once."""
        if path not in self.imports:
            module = self.module(path)
            within = self._imports_within(module, module.tree).values()
            symbols = [symbol for where in within for symbol in self._imported(*where, None)]
            self.imports[path] = sorted({path_of(symbol) for symbol in symbols})
        return self.imports[path]

    def _imports_within(self, module: Module, node: ast.AST) -> dict[str, tuple[str, str | None]]:
        scratch = Module(module.path, "", module.tree, module.package)
        for child in ast.walk(node):
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                _index(scratch, child)
        return scratch.imported

    def _imported(self, target: str, name: str | None, attribute: str | None) -> list[str]:
        """Symbols behind `from target import name`, of which `.attribute` is used."""
        if target.split(".")[0] not in PACKAGES:
            return []
        if name is not None and self._file(f"{target}.{name}"):
            target, name = f"{target}.{name}", attribute  # a module was imported by its package
        path = self._file(target)
        if path is None:
            return []
        module = self.module(path)
        if name in module.defined:
            return [f"{path}:{name}"]
        if name in module.imported:
            return self._imported(*module.imported[name], attribute)
        return [path]

    def _file(self, dotted: str) -> str | None:
        """The file of a module, if it is one of the repository; looked for once."""
        if dotted not in self.found:
            base = dotted.replace(".", "/")
            paths = (f"{base}.py", f"{base}/__init__.py")
            here = (path for path in paths if (self.root / path).is_file())
            self.found[dotted] = next(here, None)
        return self.found[dotted]


def _index(module: Module, statement: ast.AST) -> None:
    """Enter what a top-level statement defines or imports, also under `if` and `try`."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        module.defined.setdefault(statement.name, []).append(statement)
    elif isinstance(statement, ast.Import):
        for alias in statement.names:
            name = alias.asname or alias.name.split(".")[0]
            module.imported[name] = (alias.name if alias.asname else name, None)
    elif isinstance(statement, ast.ImportFrom):
        target = _absolute(module, statement)
        for alias in statement.names:
            module.imported[alias.asname or alias.name] = (target, alias.name)
    elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For, ast.Expr)):
        # `OP.set_tolerance(...)` and `TABLE[key] = ...` belong to the name that they change.
        for name in _written(statement):
            module.defined.setdefault(name, []).append(statement)
    elif isinstance(statement, (ast.If, ast.Try, ast.With)):
        for part in ("body", "orelse", "finalbody"):
            for child in getattr(statement, part, []):
                _index(module, child)
        for handler in getattr(statement, "handlers", []):
            for child in handler.body:
                _index(module, child)


def _absolute(module: Module, statement: ast.ImportFrom) -> str:
    if not statement.level:
        return statement.module or ""
    base = module.package.split(".")
    base = base[: len(base) - statement.level + 1]
    return ".".join([*base, statement.module] if statement.module else base)


def _written(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Assign):
        targets: list[ast.expr] = statement.targets
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        targets = [statement.target]
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        targets = [statement.value.func]
    else:
        return [n.id for n in ast.walk(statement) if isinstance(n, ast.Name)]
    names = []
    for target in targets:
        parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
        for part in parts:
            while isinstance(part, (ast.Attribute, ast.Subscript, ast.Starred)):
                part = part.value
            if isinstance(part, ast.Name):
                names.append(part.id)
    return names


def _names(node: ast.AST) -> list[tuple[str, str | None]]:
    """(name, attribute read of it or None) of every name in a tree, annotations in quotes too."""
    found: list[tuple[str, str | None]] = []
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name):
            found.append((child.value.id, child.attr))
        elif isinstance(child, ast.Name):
            found.append((child.id, None))
    attributed = {name for name, attribute in found if attribute}
    return [(n, a) for n, a in found if a or n not in attributed]


def code_of(source: str | bytes) -> str:
    """Text of the tree of `source` without positions, comments and docstrings."""
    tree = ast.parse(source)
    for child in ast.walk(tree):
        body = getattr(child, "body", None)
        if (
            isinstance(child, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
            and isinstance(body[0].value.value, str)
        ):
            child.body = body[1:]
    return dump(tree)


def dump(tree: ast.AST) -> str:
    """Text of a tree that every Python from 3.11 on gives: 3.12 added parameters of types, which a
    tree that Python 3.11 reads has none of, and 3.13 leaves empty lists out unless it is asked."""
    options: dict[str, Any] = {"show_empty": True} if sys.version_info >= (3, 13) else {}
    return ast.dump(tree, **options).replace(", type_params=[]", "")


def _normal(node: ast.AST) -> str:
    return code_of(ast.unparse(node))


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _sha_items(parts: Mapping[str, str]) -> str:
    return _sha("\n".join(f"{name} {sha}" for name, sha in sorted(parts.items())))

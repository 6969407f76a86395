# SPDX-License-Identifier: Apache-2.0
"""`vllmx parity census`: what upstream has, and what another version changes for us.

    vllmx parity census                       write the census of the pinned version
    vllmx parity census --check               is the written one that of the archive?
    vllmx parity census from=0.25.0 to=0.26.0 what changed, and which of our files it touches

With output_dir=reports the last one also writes upstream_drift.json, which the report shows.
Sources are read as text and never imported. Counted are public names by module, ops, model
architectures, quantisation methods, metrics and flags.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllmx.config import ParityConfig, RunConfig
from vllmx.exceptions import UserError

from .source_archive import read_sources

HERE = Path(__file__).resolve().parent
CENSUS = HERE / "upstream_census.json"
DRIFT = "upstream_drift.json"
PINNED = "0.25.0"
KINDS = ("ops", "architectures", "quantization", "metrics", "flags")
REGISTRY = "vllm/model_executor/models/registry.py"
QUANTIZATION = "vllm/model_executor/layers/quantization/__init__.py"
ARGUMENTS = "vllm/engine/arg_utils.py"
OP = re.compile(r"""\.def\(\s*"(\w[\w:]*)|op_name=\s*"(\w+)"|register(?:_oot)?\(\s*"(\w+)"\)""")
METRIC = re.compile(r'"(vllm:\w+)"')
FLAG = re.compile(r"""add_argument\(\s*["'](--[\w-]+)["']""")


@dataclass
class Census:
    """What a version has. `modules`: path -> (hash of its code, its public names at top level)."""

    version: str
    modules: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    ops: set[str] = field(default_factory=set)
    architectures: set[str] = field(default_factory=set)
    quantization: set[str] = field(default_factory=set)
    metrics: set[str] = field(default_factory=set)
    flags: set[str] = field(default_factory=set)
    symbols: dict[str, dict[str, str]] = field(default_factory=dict)
    """Path -> public name, members of classes too -> hash; the file does not hold them."""


def run(config: RunConfig) -> int:
    """0: written, fresh or nothing changed; 1: stale or something changed."""
    options = config.parity
    if options.to_version is not None:
        start = take(read_sources(options.from_version or PINNED))
        return _tell(start, take(read_sources(options.to_version)), options)
    found = take(read_sources(options.from_version or PINNED))
    path = Path(options.output_dir) / CENSUS.name if options.output_dir else CENSUS
    text = render(found)
    if options.check:
        fresh = path.is_file() and path.read_text(encoding="utf-8") == text
        print(f"{'fresh' if fresh else 'stale'}: {path}")
        return int(not fresh)
    path.write_text(text, encoding="utf-8")
    print(f"{found.version}: {summary(found)}; {path}")
    return 0


def summary(census: Census) -> str:
    """The counts in words."""
    names = sum(len(entry[1]) for entry in census.modules.values())
    parts = [f"{len(census.modules)} files", f"{names} public names"]
    return ", ".join(parts + [f"{len(getattr(census, kind))} {kind}" for kind in KINDS])


# ---- counting


def take(sources: tuple[str, Mapping[str, str]]) -> Census:
    """The census of (version, path -> text)."""
    version, texts = sources
    census = Census(version)
    for path, text in texts.items():
        census.ops |= {next(filter(None, groups)) for groups in OP.findall(text)}
        census.metrics |= set(METRIC.findall(text))
        if path.endswith(".py"):
            _count_module(census, path, text)
        else:
            census.modules[path] = (_sha(text), ())
    if REGISTRY in texts:
        census.architectures = set(_architectures(ast.parse(texts[REGISTRY])))
    if QUANTIZATION in texts:
        census.quantization = set(_literal(ast.parse(texts[QUANTIZATION]), "QuantizationMethods"))
    return census


def _count_module(census: Census, path: str, text: str) -> None:
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a template with holes is no module, but its change counts
        census.modules[path] = (_sha(text), ())
        return
    names = {name: _sha(ast.dump(node)) for name, node in _public(tree)}
    census.symbols[path] = names
    top = tuple(sorted(name for name in names if "." not in name))
    census.modules[path] = (_sha(ast.dump(tree)), top)
    census.flags |= set(FLAG.findall(text))
    census.ops |= {f"triton:{name}" for name in _kernels(tree)}
    if path == ARGUMENTS:
        for name, node in names_of_class(tree, "EngineArgs"):
            if isinstance(node, ast.AnnAssign):
                census.flags.add("--" + name.replace("_", "-"))


def _public(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """(name, node) of public functions and classes, and of their public methods and fields."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if node.name.startswith("_"):
                continue
            yield node.name, node
            if isinstance(node, ast.ClassDef):
                for name, member in _members(node):
                    yield f"{node.name}.{name}", member


def _members(node: ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
    for member in node.body:
        name = getattr(member, "name", None)
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            name = member.target.id
        if isinstance(name, str) and not name.startswith("_"):
            yield name, member


def names_of_class(tree: ast.Module, name: str) -> Iterator[tuple[str, ast.AST]]:
    """The public members of class `name`."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            yield from _members(node)


def _kernels(tree: ast.Module) -> Iterator[str]:
    """Names of the Triton kernels in a file."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        if any(ast.unparse(d).startswith("triton.jit") for d in node.decorator_list):
            yield node.name


def _architectures(tree: ast.Module) -> Iterator[str]:
    """Keys of the registry's tables of models, those that are gone and our own aside."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            name = ast.unparse(node.targets[0])
            if name.endswith("_MODELS") and "PREVIOUSLY" not in name and "OOT" not in name:
                for key in node.value.keys:
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        yield key.value


def _literal(tree: ast.Module, name: str) -> Iterator[str]:
    """The strings of `name = Literal[...]`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            for child in ast.walk(node.value):
                if isinstance(child, ast.Constant) and isinstance(child.value, str):
                    yield child.value


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


# ---- the file


def render(census: Census) -> str:
    """The census as committed: a line a module."""
    lines = [f'{{"version": "{census.version}",']
    for kind in KINDS:
        lines.append(f'"{kind}": {json.dumps(" ".join(sorted(getattr(census, kind))))},')
    lines.append('"modules": {')
    entries = [
        f"{json.dumps(path)}: {json.dumps(' '.join((sha, *names)))}"
        for path, (sha, names) in sorted(census.modules.items())
    ]
    return "\n".join([*lines, ",\n".join(entries), "}}"]) + "\n"


def load(path: Path = CENSUS) -> Census:
    """The committed census; UserError where it is missing or torn."""
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        census = Census(raw["version"])
        for kind in KINDS:
            setattr(census, kind, set(raw[kind].split()))
        for name, entry in raw["modules"].items():
            sha, *names = entry.split()
            census.modules[name] = (sha, tuple(names))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: no census ({error}); write one: vllmx parity census") from error
    return census


def _tell(start: Census, end: Census, options: ParityConfig) -> int:
    from .drift import drift, lines

    found = drift(start, end)
    if options.output_dir:
        path = Path(options.output_dir) / DRIFT
        path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1) if options.json else "\n".join(lines(found)))
    return int(any(found["files"].values()) or any(k["new"] or k["gone"] for k in found["kinds"]))

# SPDX-License-Identifier: Apache-2.0
"""Rules that a machine can check, by reading source text. `python tests/rules.py` lists breaches.

Each rule is a function of a parsed file that yields (line, message). Nothing of vllmx is imported.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
Breach = tuple[int, str]

# Top to bottom; a file may import from its own row and from those below it. Entries are paths
# under vllmx/ without suffix, longest match first.
LAYERS: list[tuple[str, ...]] = [
    ("__main__",),
    ("cli", "tasks"),
    ("cli_help",),
    ("entrypoints/openai",),
    ("entrypoints",),
    ("engine", "structured_output", "reasoning"),
    ("metrics/aggregate", "metrics/loggers", "metrics/prometheus"),
    ("worker",),
    ("model_loader/loader",),
    ("models",),
    ("sample", "model_loader", "tiny"),
    ("spec_decode",),
    ("worker/states", "worker/input_batch", "worker/buffer_utils"),  # rows shared with sample
    ("quantization",),
    ("layers",),
    ("quantization/base_config",),
    ("ir/select",),  # binds what the rows below it register
    ("attention",),
    ("kernels",),
    ("ir",),
]
"""Rows of the architecture, spine first."""

# Seen by everybody, seeing only each other: the vocabulary of the engine.
BASE = {
    "config",
    "exceptions",
    "platform",
    "cgroup",
    "plugins",
    "registry",
    "forward_context",
    "request",
    "sampling_params",
    "outputs",
    "logprobs",
    "upstream_backends",
    "core/output",
    "ec_transfer/__init__",
    "ec_transfer/base",
    "ec_transfer/factory",
    "kv_transfer/__init__",
    "kv_transfer/base",
    "kv_transfer/factory",
    "metrics/stats",
    "models/hf_config",
    "models/hf_dense",
    "models/hf_latent",
    "models/hf_layers",
    "models/hf_length",
    "models/hf_remote",
    "models/hf_sparse",
    "engine/__init__",
    "lora/request",
    "multimodal",
    "structured_output/__init__",
    "structured_output/backend_types",
    "structured_output/request",
    "cli_args",
    "compose",
}
CORE_SEES = BASE | {"core"}
NO_TORCH = ("core/", "request", "config", "sampling_params", "outputs", "cli", "compose")
NO_TORCH_EITHER = ("tasks/prompts", "tasks/http_client", "tasks/fetch", "tasks/clock")
NO_TORCH_EITHER += ("multimodal", "ec_transfer/")
HYDRA_FILE = "compose"
ENVIRON_FILE = "platform"
# Spelt in pieces so that this file does not break its own rule.
PRIVATE = re.compile("|".join(["/wo" + "rk/", "/tm" + "p/", "/ro" + "ot/", "pypi" + r"\.org"]))
NO_MARKS = re.compile(r"\b(TO" + "DO|FIX" + "ME|XX" + r"X)\b")


@dataclass
class Source:
    """A Python file: its path under the repository and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed text."""
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        """Path under vllmx/ without suffix, empty for a file elsewhere."""
        return self.path.removeprefix("vllmx/").removesuffix(".py") if self.in_vllmx else ""

    @property
    def in_vllmx(self) -> bool:
        """Whether the file belongs to the package."""
        return self.path.startswith("vllmx/")


def imports(source: Source) -> Iterator[tuple[int, str, bool]]:
    """(line, dotted name, at module level) of every import that runs, type checking aside."""

    def walk(node: ast.AST, top: bool) -> Iterator[tuple[int, str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for other in child.orelse:
                    yield from walk(other, top)
            elif isinstance(child, ast.Import):
                for alias in child.names:
                    yield child.lineno, alias.name, top
            elif isinstance(child, ast.ImportFrom):
                for alias in child.names:
                    yield child.lineno, f"{child.module}.{alias.name}", top
            else:
                inner = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from walk(child, top and not inner)

    yield from walk(source.tree, True)


def spdx_line(source: Source) -> Iterator[Breach]:
    """The first line is the licence."""
    if source.text.strip() and not source.text.startswith("# SPDX-License-Identifier: Apache-2.0"):
        yield 1, "the first line must be `# SPDX-License-Identifier: Apache-2.0`"


def upstream_anchor(source: Source) -> Iterator[Breach]:
    """An anchor names upstream files and the version; it may go on over comment lines."""
    lines = source.text.split("\n")
    for number, line in enumerate(lines, 1):
        if line.startswith("# upstream:"):
            block = [line]
            while lines[number + len(block) - 1].startswith("#   "):
                block.append(lines[number + len(block) - 1])
            anchor = " ".join(part.lstrip("# ") for part in block)
            if not re.fullmatch(r"upstream: (vllm|csrc)/.+ @ v\d+\.\d+\.\d+", anchor):
                yield number, "write `# upstream: vllm/path.py @ vX.Y.Z`"


def docstrings(source: Source) -> Iterator[Breach]:
    """Public classes, methods and functions of vllmx say what they are."""
    if not source.in_vllmx:
        return

    def walk(node: ast.Module | ast.ClassDef) -> Iterator[Breach]:
        for child in node.body:
            if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            if child.name.startswith("_"):
                continue
            if not ast.get_docstring(child) and not _is_setter(child):
                yield child.lineno, f"{child.name} needs a docstring"
            if isinstance(child, ast.ClassDef):
                yield from walk(child)

    yield from walk(source.tree)


def _is_setter(node: ast.AST) -> bool:
    names = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
    return any(name.endswith(".setter") or name == "overload" for name in names)


def config_docstrings(source: Source) -> Iterator[Breach]:
    """Every field of vllmx/config.py has a docstring under it."""
    if source.module != "config":
        return
    for node in source.tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, following in zip(node.body, [*node.body[1:], None]):
            if isinstance(field, ast.AnnAssign) and not (
                isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            ):
                yield field.lineno, f"{ast.unparse(field.target)} needs a docstring under it"


def no_environ(source: Source) -> Iterator[Breach]:
    """Environment variables are read in one file."""
    if not source.in_vllmx or source.module == ENVIRON_FILE:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
            yield node.lineno, f"os.{node.attr} belongs in vllmx/{ENVIRON_FILE}.py"


def hydra_in_one_file(source: Source) -> Iterator[Breach]:
    """Hydra and OmegaConf, and so DictConfig, stay behind vllmx/compose.py."""
    if not source.in_vllmx or source.module == HYDRA_FILE:
        return
    for line, name, _ in imports(source):
        if name.split(".")[0] in ("hydra", "omegaconf"):
            yield line, f"{name} belongs in vllmx/{HYDRA_FILE}.py"


def core_without_torch(source: Source) -> Iterator[Breach]:
    """The scheduler's side, the schema and the command line never load torch."""
    if not source.module.startswith(NO_TORCH + NO_TORCH_EITHER):
        return
    for line, name, _ in imports(source):
        if name.split(".")[0] in ("torch", "transformers", "gguf"):
            yield line, f"{source.path} must not import {name}"


def no_heavy_package(source: Source) -> Iterator[Breach]:
    """What only tests and oracles may use."""
    if not source.in_vllmx:
        return
    for line, name, _ in imports(source):
        if name.split(".")[0] in ("transformers", "gguf", "vllm", "oracles", "parity", "tests"):
            yield line, f"vllmx must not import {name}"


def oracles_alone(source: Source) -> Iterator[Breach]:
    """What is compared with vllmx shares nothing with it."""
    if not source.path.startswith("oracles/"):
        return
    for line, name, _ in imports(source):
        if name.split(".")[0] in ("vllmx", "parity", "tests"):
            yield line, f"an oracle must not import {name}"


def layers(source: Source) -> Iterator[Breach]:
    """Imports point down the rows of LAYERS."""
    if not source.in_vllmx or source.module == "__init__":
        return
    here = _row(source.module)
    for line, name, _ in imports(source):
        target = _module_of(name)
        if target is None or target in BASE:
            continue
        if source.module.startswith("core/"):
            if not target.startswith("core/"):
                yield line, f"core/ must not import {name}"
        elif source.module in BASE:
            yield line, f"{source.path} is of the base and must not import {name}"
        elif not target.startswith("core/") and _row(target) < here:
            yield line, f"{name} is in a row above {source.path}"


def _module_of(name: str) -> str | None:
    """`vllmx.a.b.Name` -> `a/b`, the file it is in; None outside vllmx."""
    if name.split(".")[0] != "vllmx":
        return None
    parts = name.split(".")[1:]
    while parts:
        path = ROOT / "vllmx" / Path(*parts)
        if path.with_suffix(".py").is_file():
            return "/".join(parts)
        if (path / "__init__.py").is_file():
            return "/".join([*parts, "__init__"])
        parts.pop()
    return None


def _row(module: str) -> int:
    best, row = "", len(LAYERS)
    for number, entries in enumerate(LAYERS):
        for entry in entries:
            if (module + "/").startswith(entry + "/") and len(entry) > len(best):
                best, row = entry, number
    return row


def no_marks(source: Source) -> Iterator[Breach]:
    """What is not built is absent or refused by name, not promised in a comment."""
    for number, line in enumerate(source.text.split("\n"), 1):
        if NO_MARKS.search(line):
            yield number, "finish it, refuse it, or file an issue"


def clock_of_one_module(source: Source) -> Iterator[Breach]:
    """A test replaces the clock that one module sees, not the one of the whole process: servers
    that other tests left running would wait by it, and one that looked at an early time slept on.
    """
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("setattr"):
            continue
        target = ast.unparse(node.args[0]).strip("'\"") if node.args else ""
        if target.startswith("time.") or (len(node.args) == 3 and target.split(".")[-1] == "time"):
            yield node.lineno, "put an object in the place of the module's own `time`"


def nothing_private(text: str) -> Iterator[Breach]:
    """No folder of a developer's machine and no address of a registry in a committed file."""
    for number, line in enumerate(text.split("\n"), 1):
        if found := PRIVATE.search(line):
            yield number, f"{found[0]} is of one machine or network"


RULES: list[Callable[[Source], Iterator[Breach]]] = [
    spdx_line,
    upstream_anchor,
    docstrings,
    config_docstrings,
    no_environ,
    hydra_in_one_file,
    core_without_torch,
    no_heavy_package,
    oracles_alone,
    layers,
    no_marks,
    clock_of_one_module,
]


def committed_files() -> list[Path]:
    """Files that git tracks or would add; all files where there is no git."""
    try:
        command = ["git", "ls-files", "-co", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        paths = [ROOT / name for name in listed.stdout.splitlines()]
    except (OSError, subprocess.CalledProcessError):
        paths = [p for top in ("vllmx", "conf", "tests") for p in (ROOT / top).rglob("*")]
    return [path for path in paths if path.is_file()]


@cache
def sources() -> list[Source]:
    """The Python files of the repository, read once."""
    found = [path for path in committed_files() if path.suffix == ".py"]
    return [Source(p.relative_to(ROOT).as_posix(), p.read_text(encoding="utf-8")) for p in found]


def breaches(rule: Callable[[Source], Iterator[Breach]]) -> list[str]:
    """`path:line: message` of every breach of `rule` in the repository."""
    return [f"{s.path}:{line}: {words}" for s in sources() for line, words in rule(s)]


def private_breaches() -> list[str]:
    """Breaches of nothing_private in every text file."""
    found = []
    for path in committed_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        name = path.relative_to(ROOT).as_posix()
        found += [f"{name}:{line}: {words}" for line, words in nothing_private(text)]
    return found


def main() -> int:
    """Print every breach; the exit code says whether there was one."""
    found = [line for rule in RULES for line in breaches(rule)] + private_breaches()
    print("\n".join(found) or "rules: no breach")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

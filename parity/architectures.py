# SPDX-License-Identifier: Apache-2.0
"""`python -m parity.architectures [--check] [--upstream REGISTRY]`: what upstream serves, and we.

Writes reports/architectures.md from upstream_architectures.tsv, which names the text-generation
architectures of the pinned upstream, and from the text of vllmx/models; nothing is imported.
`--upstream` makes the .tsv anew from upstream's registry.py. With `--check` nothing is written:
exit code 1 where the table is stale.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMES = ROOT / "parity" / "upstream_architectures.tsv"
REPORT = ROOT / "reports" / "architectures.md"
TABLE = "_TEXT_GENERATION_MODELS"
BACKED = "_TRANSFORMERS_SUPPORTED_MODELS"
"""Those that upstream has no file of its own for: it runs the class of transformers."""
BACKEND = "transformers"
HEAD = "architecture\tmodule\tclass"


@dataclass(frozen=True)
class Served:
    """A class of vllmx: its file, and the architecture that it is nothing but another name of."""

    file: str
    same_as: str | None


def read_upstream(registry: Path) -> list[str]:
    """Lines of the .tsv, by name, from the text of upstream's registry; ValueError without it."""
    tables: dict[str, dict[str, tuple[str, str]]] = {}
    for node in ast.parse(registry.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name) and target.id in (TABLE, BACKED):
                tables[target.id] = ast.literal_eval(node.value)  # type: ignore[attr-defined]
    if TABLE not in tables:
        raise ValueError(f"{registry} has no {TABLE}")
    text = {k: v for k, v in tables.get(BACKED, {}).items() if "MultiModal" not in v[1]}
    rows = sorted((tables[TABLE] | text).items(), key=lambda item: item[0].lower())
    return [f"{name}\t{module}\t{cls}" for name, (module, cls) in rows]


def ours() -> dict[str, Served]:
    """Architecture -> its class here, from the text of vllmx/models."""
    found: dict[str, Served] = {}
    for path in sorted((ROOT / "vllmx" / "models").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and _is_architecture(node.name):
                base = ast.unparse(node.bases[0]) if node.bases else ""
                bare = len(node.body) == 1 and _is_architecture(base)
                found[node.name] = Served(path.name, base if bare else None)
    return found


def _is_architecture(name: str) -> bool:
    return "For" in name or name.endswith("LMHeadModel") or name == "ChatGLMModel"


def tiny_models() -> dict[str, str]:
    """Architecture -> its tiny model, of those that have goldens."""
    from vllmx.tiny.configs import FAMILIES
    from vllmx.tiny.margins import SUFFIX

    index = json.loads((ROOT / "parity/goldens/models/index.json").read_text(encoding="utf-8"))
    recorded = {name.split("/")[0] for name in index["goldens"]}
    return {
        family["architectures"][0]: name
        for name, family in FAMILIES.items()
        if name in recorded and not name.endswith(SUFFIX)
    }


def table() -> str:
    """The text of the report."""
    names = [line.split("\t") for line in NAMES.read_text(encoding="utf-8").splitlines()[1:]]
    known, tiny = ours(), tiny_models()
    rows, counts = [], Counter[str]()
    for architecture, module, _ in names:
        served = known.get(architecture)
        if served is None:
            state, where = "later", ""
        else:
            state = "served" if served.same_as is None else "served by subclass"
            of = "" if served.same_as is None else f" of {served.same_as}"
            where = f"[{served.file}](../vllmx/models/{served.file}){of}"
        counts[state] += 1
        rows.append(
            f"| {architecture} | {module} | {state} | {where} | {tiny.get(architecture, '')} |"
        )
    backed = sum(module == BACKEND for _, module, _ in names)
    beyond = sorted(known.keys() - {row[0] for row in names})
    total = " + ".join(f"{counts[s]} {s}" for s in ("served", "served by subclass", "later"))
    return "\n".join(
        [
            "# Text-generation architectures",
            "",
            "Made by `python -m parity.architectures`; do not edit. Upstream's list is that of its",
            "registry, v0.25.0; where it says `transformers`, upstream has no file but runs",
            "that class. `golden` is the tiny model that is held to upstream's",
            "float32 and to transformers by the gate of [docs/goldens.md](../docs/goldens.md).",
            "",
            f"{len(names) - backed} and {backed} by transformers = {total}. Beyond the list: "
            f"{', '.join(beyond) or 'none'}.",
            "",
            "| architecture | upstream's module | here | file | golden |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--upstream", type=Path)
    args = parser.parse_args(argv)
    if args.upstream is not None:
        NAMES.write_text("\n".join([HEAD, *read_upstream(args.upstream)]) + "\n")
    text = table()
    if not args.check:
        REPORT.write_text(text, encoding="utf-8")
        return 0
    if REPORT.is_file() and REPORT.read_text(encoding="utf-8") == text:
        return 0
    print(f"{REPORT} is stale: python -m parity.architectures", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())

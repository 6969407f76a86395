# SPDX-License-Identifier: Apache-2.0
"""`vllmx parity report`: reports/parity.html, parity.md and report.json, made of the evidence.

`--check` writes nothing and fails if those files are not what would be written now. The report
speaks of the time of the newest evidence, so that it is the same on any day.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllmx.config import RunConfig

from . import report_html, report_md
from .checkout import Checkout
from .ledger import stale_files
from .report_data import build
from .report_lanes import TREND, point, trend_text


def run(config: RunConfig) -> int:
    """0: written, or fresh; 1: a written file is stale; 2: the report can't be believed."""
    options = config.parity
    checkout = Checkout()
    folder = Path(options.output_dir) if options.output_dir else checkout.root / "reports"
    texts, trouble = render(checkout, folder)
    stale = {}
    if options.check:
        stale = stale_files(folder, texts)
        for name, words in stale.items():
            print(f"stale: {folder / name}: {words}; `vllmx parity report` writes it anew")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
            print(folder / name)
    for words in trouble:
        print(f"INVALID: {words}")
    if options.json:
        print(texts["report.json"], end="")
    return 2 if trouble else int(bool(stale))


def json_text(data: Mapping[str, Any]) -> str:
    """`data` as JSON, a line for each entry of a section."""
    sections = []
    for name in sorted(data):
        found = data[name]
        if isinstance(found, dict):
            entries = [f"{json.dumps(key)}: {_line(found[key])}" for key in sorted(found)]
            text = "{\n " + ",\n ".join(entries) + "\n}" if entries else "{}"
        elif isinstance(found, list):
            text = "[\n " + ",\n ".join(map(_line, found)) + "\n]" if found else "[]"
        else:
            text = _line(found)
        sections.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(sections) + "\n}\n"


def _line(found: Any) -> str:
    return json.dumps(found, sort_keys=True, separators=(",", ":"))


def render(checkout: Checkout, folder: Path | None = None) -> tuple[dict[str, str], list[str]]:
    """(name -> text of the files, why the report can't be believed); `folder` has earlier ones."""
    data = build(checkout, checkout.as_of(), folder)
    texts = {
        TREND: trend_text([*data["trend"], point(data)]),
        "report.json": json_text(data),
        "parity.md": report_md.page(data),
        "parity.html": report_html.page(data),
    }
    return texts, data["trouble"]

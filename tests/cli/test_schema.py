# SPDX-License-Identifier: Apache-2.0
"""New options do not slip in: schema.txt is the flattened schema, and a change shows as its diff.

`python tests/cli/test_schema.py` rewrites schema.txt.
"""

import difflib
from pathlib import Path

from vllmx.cli_args import fields, flags
from vllmx.config import RunConfig

SNAPSHOT = Path(__file__).with_name("schema.txt")


def flattened() -> list[str]:
    """A line a key: key, kind, default, flag."""
    option = {flag.field.key: flag.option for flag in flags().values()}
    lines = []
    for key, spec in fields().items():
        if spec.kind == "node":
            continue
        value: object = RunConfig()
        for part in key.split("."):
            value = getattr(value, part, None)
        kind = spec.kind + (" | None" if spec.optional else "")
        lines.append(f"{key}: {kind} = {value!r}  {option.get(key, '')}".rstrip())
    return lines


def test_flattened_schema_is_as_recorded() -> None:
    recorded = SNAPSHOT.read_text().splitlines()
    diff = difflib.unified_diff(recorded, flattened(), "schema.txt", "vllmx/config.py", lineterm="")
    assert not (changes := "\n".join(diff)), changes


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(flattened()) + "\n")

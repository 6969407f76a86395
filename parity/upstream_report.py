# SPDX-License-Identifier: Apache-2.0
"""What a run of upstream's tests came to, in a line and as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from .upstream_ratchet import under
from .upstream_tests import NOT_COLLECTED, STATUSES, Row, lost, unexplained

COLUMNS = ("passed", "not applicable", "deselected", "skipped", "missing symbol", "failed")


def summary(prefix: str, rows: list[Row], expected: Set[str]) -> str:
    """One line on the tests under `prefix`: first those that upstream passes, then the others."""
    mine = [row for row in rows if under(row.id, prefix)]
    wanted = [row for row in mine if row.id in expected]
    counts = Counter(row.status for row in wanted)
    others = Counter(row.status for row in mine if row.id not in expected)
    share = 100 * counts["passed"] / len(wanted) if wanted else 0.0
    rest = [f"{counts['deselected']} deselected", f"{counts['not applicable']} not applicable"]
    rest += [
        f"{counts[status]} {status}"
        for status in (*STATUSES, NOT_COLLECTED)
        if counts[status] and status not in ("passed", "deselected", "not applicable")
    ]
    text = (
        f"{prefix}: {counts['passed']} passed of {len(wanted)} that upstream passes ({share:.1f}%)"
    )
    text += f"; {', '.join(rest)}"
    if others:
        text += "; beside those: " + ", ".join(f"{n} {status}" for status, n in others.items())
    return text


def markdown(rows: list[Row], expected: Set[str], here: Set[str], prefixes: list[str]) -> str:
    """The page: totals, a table by file, and the reasons by how many tests they hold up."""
    lines = [
        "# Upstream's unit tests on vllmx",
        "",
        f"Written by `vllmx parity upstream-tests` for {', '.join(prefixes)}; every row is in",
        "`upstream_tests.tsv` beside this page. The files are those of the pinned source archive,",
        "unedited; `parity/upstream_map.yaml` says what stands for which module of upstream.",
        "`expected` counts the tests that upstream itself passes offline on a CPU; the other",
        "columns count those among them, and in brackets the others of the file.",
        "",
        *[f"- {summary(prefix, rows, expected)}" for prefix in prefixes],
        f"- unexplained: {_names(unexplained(rows, expected))}",
        f"- passed before and no longer: {_names(lost(rows, here))}",
        "",
        "| file | expected | " + " | ".join((*COLUMNS, NOT_COLLECTED)) + " |",
        "|---" * (len(COLUMNS) + 3) + "|",
    ]
    for file in sorted({row.file for row in rows}):
        lines.append(_file_line(file, [row for row in rows if row.file == file], expected))
    for status in (*STATUSES, NOT_COLLECTED):
        lines += _reasons(status, rows, expected)
    return "\n".join(lines) + "\n"


def _names(rows: list[Row]) -> str:
    return f"{len(rows)}" + "".join(f"; `{row.id.removeprefix('tests/')}`" for row in rows)


def _file_line(file: str, rows: list[Row], expected: Set[str]) -> str:
    cells = [str(sum(row.id in expected for row in rows))]
    for status in (*COLUMNS, NOT_COLLECTED):
        wanted = sum(row.status == status and row.id in expected for row in rows)
        others = sum(row.status == status and row.id not in expected for row in rows)
        cells.append((f"{wanted or ''}" + (f" ({others})" if others else "")).strip())
    return f"| {file.removeprefix('tests/')} | " + " | ".join(cells) + " |"


def _reasons(status: str, rows: list[Row], expected: Set[str]) -> list[str]:
    """The reasons of one status with their counts, most frequent first; nothing for `passed`."""
    found = [row for row in rows if row.status == status]
    if not found or status == "passed":
        return []
    counts = Counter((row.symbol, row.reason) for row in found)
    wanted = Counter((row.symbol, row.reason) for row in found if row.id in expected)
    lines = ["", f"## {status}", "", "| tests | expected | symbol | reason |", "|---|---|---|---|"]
    for (symbol, reason), count in counts.most_common():
        text = reason.replace("|", "\\|")[:160]
        name = f"`{symbol}`" if symbol else ""
        lines.append(f"| {count} | {wanted[symbol, reason]} | {name} | {text} |")
    return lines

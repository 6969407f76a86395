# SPDX-License-Identifier: Apache-2.0
"""`vllmx parity collect`: run the named tests and scheduler traces, and append what they show.

What needs a GPU, tests/gpu, is collected with `device=cuda` and without the rest.

With `from=FILE` nothing is run: FILE is pytest's JUnit XML or the table that
`vllmx parity upstream-tests` writes. It says itself what tree it was made from (tree_stamp.py), and
must be of this one and newer than the code that it speaks of.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import Any

from vllmx.config import ParityConfig, RunConfig
from vllmx.exceptions import UserError

from . import comparison, evidence, features, results, tree_stamp
from .cells import PYTEST, UPSTREAM
from .checkout import Checkout
from .evidence import Row
from .features import CANARY
from .results import Result
from .status import Cell, Feature

HERE = Path(__file__).resolve().parent
ROUNDS = (
    ("--numprocesses=auto", "--maxprocesses=4", "--dist=loadfile", "-m", "not alone"),
    ("-m", "alone"),
)
"""Arguments of pytest's runs where it has xdist: on all cores, but for what holds a time to a limit
and wants them for itself."""
NO_SUCH_TEST = 4
"""Exit code of pytest where one of its arguments names no test; it runs none then."""
VLLMX = {"name": "vllmx", "version": "", "lane": "tests"}


def run(config: RunConfig) -> int:
    """0: all passed; 1: a failure; 2: a selector that no test matches, or a canary that passed;
    3: something was skipped.
    """
    options = config.parity
    checkout = Checkout()
    chosen = features.selected(checkout.declared, options.select, options.tier)
    wanted = [checkout.feature(declared) for declared in chosen]
    device = "cuda" if config.device.device == "cuda" else "cpu"
    if device == "cuda" and not _device_facts(device):
        print("there is no cuda device here")
        return 3
    rows = collect(checkout, wanted, options, device)
    folder = Path(options.output_dir) if options.output_dir else checkout.evidence_folder
    path = evidence.append(rows, folder)
    for row in rows:
        if row["verdict"] != "pass":
            print(f"{row['verdict']}: {row['feature']} {row['case']}: {row['reason']}")
    counts = Counter(row["verdict"] for row in rows)
    print(f"{len(rows)} rows: {', '.join(f'{n} {v}' for v, n in sorted(counts.items()))}; {path}")
    if rows[0]["run"]["dirty"]:
        print(evidence.DIRTY)
    canary = [row["verdict"] for row in rows if row["feature"] == CANARY]
    if set(canary) - {"fail"}:
        what = "passed" if "pass" in canary else "was not judged"
        print(f"INVALID: the canary {what}, so nothing here can be believed")
        return 2
    others = [row["verdict"] for row in rows if row["feature"] != CANARY]
    return exit_code(others) if others else 0


def exit_code(verdicts: Iterable[str]) -> int:
    """The code of a run with these verdicts; of none at all it is 2."""
    found = set(verdicts)
    if found & {"fail", "error"}:
        return 1
    if not found or "invalid" in found:
        return 2
    return 3 if "skip" in found else 0


def collect(
    checkout: Checkout, wanted: Sequence[Feature], options: ParityConfig, device: str = "cpu"
) -> list[Row]:
    """The rows of `wanted` on a device; UserError where there is nothing to look at."""
    cells = _by_kind(wanted, device)
    facts = evidence.run_facts(checkout.root)
    for listed in cells.values():  # as the code is before anything is run
        checkout.remember(listed)
    if options.from_version is not None:
        return from_file(checkout, cells, Path(options.from_version), facts)
    deadline = time.monotonic() + 60 * options.minutes
    rows = [*schedule_rows(checkout, cells.get("schedule", []), facts)]
    tests = cells.get("test", [])
    if tests:
        files = test_files(cell.case for cell in tests)
        found = run_tests(checkout.root, files, deadline - time.monotonic())
        rows += [test_row(checkout, cell, found, facts) for cell in tests]
    rows += [canary_row(checkout, cell, facts) for cell in cells.get("canary", [])]
    if not rows:
        names = ", ".join(feature.id for feature in wanted[:5])
        raise UserError(f"collect: {names}: no tests and no scheduler traces are asked for.")
    return rows


def _by_kind(wanted: Iterable[Feature], device: str = "cpu") -> dict[str, list[Cell]]:
    kinds: dict[str, dict[Any, Cell]] = {}
    for feature in wanted:
        for cell in (cell for cell in feature.cells if cell.device == device):
            kinds.setdefault(cell.kind, {}).setdefault(cell.key, cell)
    return {kind: list(cells.values()) for kind, cells in kinds.items()}


def _device_facts(device: str) -> dict[str, str]:
    """What evidence says of a GPU beside its name, empty where there is none; nothing of a CPU."""
    if device == "cpu":
        return {}
    import torch

    from .op_replay import device_facts

    return device_facts(device) if torch.cuda.is_available() else {}


# ---- tests


def test_files(selectors: Iterable[str]) -> list[str]:
    """What pytest has to run for `selectors`: ids where they are plain, else their files."""
    ids: dict[str, set[str]] = {}
    for selector in selectors:
        file, _, rest = selector.partition("::")
        ids.setdefault(file, set()).add(rest if "*" not in rest else "")
    return [
        argument
        for file, names in sorted(ids.items())
        for argument in ([file] if "" in names else [f"{file}::{name}" for name in sorted(names)])
    ]


test_files.__test__ = False  # type: ignore[attr-defined]


def run_tests(root: Path, arguments: list[str], seconds: float) -> list[Result]:
    """Run pytest on `arguments` in a child; what it has not come to after `seconds` is left out."""
    if util.find_spec("pytest") is None:
        raise UserError('collect: there is no pytest here: pip install -e ".[test]"')
    missing = [a for a in arguments if not (root / a.split("::")[0]).exists()]
    present = [argument for argument in arguments if argument not in missing]
    if not present:
        return []
    with tempfile.TemporaryDirectory(prefix="parity-") as scratch:
        path = Path(scratch) / "results.jsonl"
        path.touch()
        search = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(part for part in search if part),
            "VLLMX_TEST_RESULTS": str(path),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "parity.pytest_recorder"]
        command += ["-p", "no:cacheprovider", "--continue-on-collection-errors", *present]
        end = time.monotonic() + seconds
        for options in ROUNDS if util.find_spec("xdist") else ((),):
            try:
                done = subprocess.run(
                    [*command, *options],
                    cwd=root,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=max(end - time.monotonic(), 1.0),
                )
            except subprocess.TimeoutExpired:
                print(f"collect: stopped after {seconds / 60:.0f} minutes; the rest is missing")
                break
            files = sorted({argument.split("::")[0] for argument in present})
            if done.returncode == NO_SUCH_TEST and files != present:
                # One id that is gone must not keep the others from being looked at.
                return run_tests(root, files, end - time.monotonic())
            if done.returncode not in (0, 1, 5):
                last = " ".join((done.stderr or done.stdout).split())[-300:]
                raise UserError(f"collect: pytest ended with {done.returncode}: {last}")
        return results.read_jsonl(path)


def test_row(checkout: Checkout, cell: Cell, found: Iterable[Result], facts: dict[str, Any]) -> Row:
    """The evidence row of a cell of tests."""
    summary = results.summarise(cell.case, found)
    return _row(
        checkout,
        cell,
        facts,
        verdict=summary.verdict,
        reason=summary.reason,
        seconds=summary.seconds,
        details=summary.details,
    )


test_row.__test__ = False  # type: ignore[attr-defined]


def _row(checkout: Checkout, cell: Cell, facts: dict[str, Any], **fields: Any) -> Row:
    closure = checkout.remember([cell])[cell.key]
    if closure is None and fields["verdict"] == "pass":
        fields |= {"verdict": "invalid", "reason": "the files that it speaks of are not there"}
    if not fields.get("reason"):
        fields.pop("reason", None)
    golden = checkout.goldens.get(cell.golden) if cell.golden else None
    return evidence.make_row(
        feature=cell.feature,
        case=cell.case,
        provider=cell.provider,
        device={"name": cell.device, **_device_facts(cell.device)},
        mode=cell.mode,
        golden_sha=golden.sha if golden else "",
        closure=closure or {"fine": "", "coarse": ""},
        oracle=VLLMX if cell.kind == "test" else checkout.oracle,
        checks=fields.pop("checks", {}),
        proof={"selected": cell.provider},
        run=facts,
        **fields,
    )


# ---- the scheduler, and the canary


def schedule_rows(checkout: Checkout, cells: Sequence[Cell], facts: dict[str, Any]) -> list[Row]:
    """Replay the scheduler traces of `cells`."""
    if not cells:
        return []
    from .replay_schedule import check
    from .schedule_traces import specs

    known = {spec["name"]: spec for spec in specs()}
    rows = []
    for cell in cells:
        started = time.monotonic()
        spec = known.get(cell.case)
        if spec is None:
            status, detail = "invalid", f"there is no trace {cell.case}"
        else:
            verdict = check(spec, checkout.goldens_folder / "schedule")
            status, detail = verdict.status, verdict.detail
        name = {"passed": "pass", "differs": "fail"}.get(status, "invalid")
        seconds = time.monotonic() - started
        rows.append(_row(checkout, cell, facts, verdict=name, reason=detail, seconds=seconds))
    return rows


def canary_row(checkout: Checkout, cell: Cell, facts: dict[str, Any]) -> Row:
    """What comes of the planted fault, and with which comparison."""
    from .canary import look

    # As it is before anything is looked at.
    details = {"comparison": comparison.sums(checkout.root)}
    verdict, reason = look()
    fields = {"verdict": verdict, "reason": reason, "details": details}
    return _row(checkout, cell, facts, seconds=0.0, **fields)


# ---- results that are there already


def from_file(
    checkout: Checkout, cells: dict[str, list[Cell]], path: Path, facts: dict[str, Any]
) -> list[Row]:
    """Rows of a file of results, as of the run that wrote it; cells that it tells nothing of are
    left out. UserError where it doesn't say of what tree it is, or is of another (tree_stamp.py).
    """
    if not path.is_file():
        raise UserError(f"collect: no file {path}.")
    junit = path.suffix == ".xml"
    found = results.read_junit(path) if junit else results.read_upstream(path)
    kind = "test" if junit else "upstream"
    mode = PYTEST if junit else UPSTREAM
    told = [cell for cell in cells.get(kind, []) if _is_told(checkout, cell, found)]
    if not told:
        raise UserError(f"collect: {path} tells of nothing that features.yaml asks for ({mode}).")
    _refuse_old(checkout, told, path)
    files = {file for cell in told for file in checkout.behaviour.covered(checkout.files(cell))}
    then = tree_stamp.checked(results.stamp_in(path), files, checkout.root, path)
    then["dirty"] = bool(then["dirty"] or facts["dirty"])
    return [test_row(checkout, cell, found, then) for cell in told]


@contextmanager
def upstream_evidence() -> Iterator[Callable[[Path], None]]:
    """Around a run of upstream's tests: the code is looked at before it, and the function that
    is given appends what upstream_tests.tsv in a folder shows.
    """
    checkout = Checkout()
    facts = evidence.run_facts(checkout.root)
    checkout.remember(_by_kind(checkout.features).get("upstream", []))

    def append(folder: Path) -> None:
        rows = upstream_rows(checkout, folder / "upstream_tests.tsv", facts)
        if rows:
            print(f"evidence: {evidence.append(rows, checkout.evidence_folder)}")

    yield append


def upstream_rows(checkout: Checkout, path: Path, facts: dict[str, Any]) -> list[Row]:
    """The rows of upstream's tests that the table `path` tells of wholly."""
    cells = _by_kind(checkout.features).get("upstream", [])
    found = results.read_upstream(path)
    told = [cell for cell in cells if _is_told(checkout, cell, found)]
    return [test_row(checkout, cell, found, facts) for cell in told]


def _is_told(checkout: Checkout, cell: Cell, found: Sequence[Result]) -> bool:
    """Whether `found` tells of every test of a cell: a part must not stand for the whole."""
    mine = [result for result in found if results.matches(cell.case, result.id)]
    if cell.kind == "test":
        return bool(mine) and not results.unnamed(checkout.root, cell.case, mine)
    from .upstream_ratchet import read_passing
    from .upstream_tests import PASSING

    ids = {result.id for result in mine}
    passing = read_passing(PASSING)
    wanted = {name.removeprefix("tests/") for name in passing.upstream | passing.here}
    return bool(mine) and {name for name in wanted if results.matches(cell.case, name)} <= ids


def _refuse_old(checkout: Checkout, cells: Iterable[Cell], path: Path) -> None:
    written = path.stat().st_mtime
    newest: Callable[[str], float] = lambda name: (checkout.root / name).stat().st_mtime  # noqa: E731
    files = {name for cell in cells for name in checkout.files(cell)}
    if younger := sorted(name for name in files if newest(name) > written):
        raise UserError(
            f"collect: {path} is older than {younger[0]}"
            + (f" and {len(younger) - 1} others" if len(younger) > 1 else "")
            + ", so it doesn't speak of this code; run the tests again."
        )

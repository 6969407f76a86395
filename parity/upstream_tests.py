# SPDX-License-Identifier: Apache-2.0
"""`vllmx parity upstream-tests`: upstream's own unit tests, unedited, run against vllmx.

The pinned source archive comes into a cache outside the repository; upstream_map.yaml says what
stands for which module of upstream; each test file runs in a child process with that map laid
over sys.modules. upstream_passing.txt names the tests that upstream itself passes offline on a CPU,
and those that vllmx passes and must not lose.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from vllmx.config import RunConfig
from vllmx.exceptions import UserError

from . import tree_stamp
from .upstream_ratchet import Passing, add_passed, read_passing
from .upstream_shim.mapping import MapError, UpstreamMap, load_map

HERE = Path(__file__).resolve().parent
MAP = HERE / "upstream_map.yaml"
PASSING = HERE / "upstream_passing.txt"
REPORTS = HERE.parent / "reports"
TEST_SECONDS = 600
FILE_SECONDS = 3600
NAMED = 50  # tests that a run's last lines tell of
DOWNLOAD_SECONDS = 60  # without a byte
# Worst first: what a test comes to when its phases differ.
STATUSES = ("failed", "missing symbol", "not applicable", "skipped", "passed", "deselected")
NOT_COLLECTED = "not collected"
EXPLAINED = ("passed", "not applicable", "deselected")


@dataclass(frozen=True)
class Row:
    """What became of one test, or of a file that could not be imported."""

    id: str
    status: str
    reason: str = ""
    symbol: str = ""

    @property
    def file(self) -> str:
        """Path of the test file."""
        return self.id.split("::")[0]


def run(config: RunConfig) -> int:
    """`vllmx parity upstream-tests [select=...] [output_dir=...]`; what it shows is evidence."""
    from .collect import upstream_evidence

    with upstream_evidence() as told:
        code = run_selected(config.parity.select, config.parity.output_dir)
        folder = config.parity.output_dir
        told(Path(folder) if folder else cache_folder() / "results")
    return code


def run_selected(select: str | None, output: str | None) -> int:
    """Run the tests under `select` (paths under upstream's tests/, comma-separated; None: the
    suites of the map) and write upstream_tests.{tsv,md} into folder `output` (None: the cache).

    Returns 0 if every test that upstream passes passes here too or is explained by the map, and no
    test was lost that passed here before; else 1. UserError (exit code 2) where nothing could be
    run. A run into reports/ marks what passes in upstream_passing.txt.
    """
    upstream_map = _read_map()
    prefixes = re.split(r"[,\s]+", select.strip()) if select else list(upstream_map.suites)
    passing = read_passing(PASSING).under(prefixes)
    _check_plugins()
    source = unpack(fetch(upstream_map), upstream_map)
    stamp = tree_stamp.of(HERE.parent)  # of the tree as it is before anything is run
    rows: list[Row] = []
    for file, nodes in test_files(source, prefixes).items():
        print(f"{file} ...", end=" ", flush=True)
        started = time.monotonic()
        found = run_file(source, file, nodes, MAP)
        counts = Counter(row.status for row in found)
        words = ", ".join(f"{counts[s]} {s}" for s in STATUSES if counts[s]) or "no test"
        print(f"{words} ({time.monotonic() - started:.0f} s)", flush=True)
        rows += found
    rows += not_collected(rows, passing.upstream | passing.here)
    if not rows:
        raise UserError(f"parity: no test under {', '.join(prefixes)}.")
    folder = Path(output) if output else cache_folder() / "results"
    _write_results(rows, passing, prefixes, folder, stamp)
    bad = unexplained(rows, passing.upstream)
    gone = lost(rows, passing.here)
    for what, found in (("unexplained", bad), ("no longer passes", gone)):
        for row in found[:NAMED]:
            print(f"{what}: {row.id}: {row.status}: {row.symbol or row.reason[:120]}")
        if len(found) > NAMED:
            print(f"{what}: {len(found) - NAMED} more, all named in upstream_tests.md")
    return int(bool(bad or gone))


def _read_map() -> UpstreamMap:
    try:
        return load_map(MAP)
    except MapError as error:
        raise UserError(f"{MAP}: {error}") from error


def _check_plugins() -> None:
    missing = [name for name in ("pytest", "pytest_timeout") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"parity upstream-tests needs {' and '.join(missing)}: `pip install -e '.[test]'`."
        )


def _write_results(
    rows: list[Row], passing: Passing, prefixes: list[str], folder: Path, stamp: str
) -> None:
    from .upstream_report import markdown, summary

    folder.mkdir(parents=True, exist_ok=True)
    write_tsv(rows, passing.upstream, folder / "upstream_tests.tsv", stamp)
    page = markdown(rows, passing.upstream, passing.here, prefixes)
    (folder / "upstream_tests.md").write_text(page, encoding="utf-8")
    for prefix in prefixes:
        print(summary(prefix, rows, passing.upstream))
    print(f"rows: {folder / 'upstream_tests.tsv'}")
    if folder.resolve() == REPORTS:
        count = add_passed(PASSING, (row.id for row in rows if row.status == "passed"))
        print(f"{PASSING.name}: {count} tests more")


def unexplained(rows: list[Row], expected: Set[str]) -> list[Row]:
    """Rows of tests that upstream passes, and that neither pass here nor have a reason."""
    return [row for row in rows if row.id in expected and row.status not in EXPLAINED]


def lost(rows: list[Row], here: Set[str]) -> list[Row]:
    """Rows of tests that passed here before and do not any more."""
    return [row for row in rows if row.id in here and row.status != "passed"]


def not_collected(rows: list[Row], expected: Set[str]) -> list[Row]:
    """A row for each expected test that no row tells of, with its file's trouble as the reason."""
    known = {row.id for row in rows}
    whole_files = {row.id: row for row in rows if "::" not in row.id}
    result = []
    for nodeid in sorted(expected - known):
        cause = whole_files.get(nodeid.split("::")[0])
        explained = cause is not None and cause.status == "not applicable"
        status = "not applicable" if explained else NOT_COLLECTED
        reason = cause.reason if cause else "the id does not come up"
        result.append(Row(nodeid, status, reason, cause.symbol if cause else ""))
    return result


def write_tsv(rows: list[Row], expected: Set[str], path: Path, stamp: str) -> None:
    """One line a test: id, status, whether upstream passes it, symbol, reason; last the tree that
    it was made from (tree_stamp.py)."""
    lines = ["id\tstatus\tupstream\tsymbol\treason"]
    for row in sorted(rows, key=lambda row: row.id):
        upstream = "passes" if row.id in expected else ""
        lines.append("\t".join([row.id, row.status, upstream, row.symbol, row.reason]))
    lines.append(f"{tree_stamp.PROPERTY}\t{stamp}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


# ---- running ----


def test_files(source: Path, prefixes: list[str]) -> dict[str, list[str]]:
    """Test file -> what to run in it (the file, or ids), for all that is under `prefixes`."""
    files: dict[str, list[str]] = {}
    for prefix in prefixes:
        path, *ids = prefix.split("::", 1)
        place = source / "tests" / path
        if not place.exists():
            raise UserError(f"parity.select: upstream has no tests/{path}.")
        for file in [place] if place.is_file() else sorted(place.rglob("test_*.py")):
            name = file.relative_to(source).as_posix()
            files.setdefault(name, []).append("::".join([name, *ids]))
    return files


test_files.__test__ = False  # type: ignore[attr-defined]  # not a test, whatever pytest thinks


def run_file(source: Path, file: str, nodes: list[str], map_file: Path) -> list[Row]:
    """Run `nodes` of test file `file` under `source` in a child process; its rows."""
    with tempfile.TemporaryDirectory(prefix="upstream-") as scratch:
        rows = Path(scratch) / "rows.jsonl"
        rows.touch()
        # The bridge serves processes that a test starts: they have no plugin.
        paths = [str(HERE.parent), str(HERE / "upstream_shim" / "bridge")]
        paths += [os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "UPSTREAM_MAP": str(map_file),
            "UPSTREAM_ROWS": str(rows),
            "UPSTREAM_SCRATCH": scratch,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "parity.upstream_shim.plugin"]
        command += ["-p", "no:cacheprovider", "--import-mode=prepend", f"--rootdir={source}"]
        command += ["-c", os.devnull, "--continue-on-collection-errors"]
        command += [f"--timeout={TEST_SECONDS}", f"--confcutdir={source / 'tests' / 'v1'}", *nodes]
        try:
            done = subprocess.run(
                command,
                cwd=source,
                env=environment,
                capture_output=True,
                text=True,
                timeout=FILE_SECONDS,
            )
        except subprocess.TimeoutExpired:
            reason = f"no end within {FILE_SECONDS} s"
            return [*read_rows(rows), Row(file, "failed", reason)]
        found = read_rows(rows)
        if done.returncode not in (0, 1, 5) or (done.returncode != 5 and not found):
            last = " ".join((done.stderr or done.stdout).split())[-300:]
            found.append(Row(file, "failed", f"pytest ended with {done.returncode}: {last}"))
        return found


def read_rows(path: Path) -> list[Row]:
    """The rows that the child wrote, one an id: the worst of its phases."""
    worst: dict[str, Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = Row(**json.loads(line))
        before = worst.get(row.id)
        if before is None or STATUSES.index(row.status) < STATUSES.index(before.status):
            worst[row.id] = row
    return list(worst.values())


# ---- the source archive ----


def cache_folder() -> Path:
    """Where the archive, its tests and the results lie; never in the repository."""
    return Path.home() / ".cache" / "vllmx" / "upstream"


def fetch(upstream_map: UpstreamMap) -> Path:
    """The checked source archive, downloaded from pip's package index where it is not cached."""
    name, _, version = upstream_map.archive["requirement"].partition("==")
    path = cache_folder() / f"{name}-{version}.tar.gz"
    wanted = upstream_map.archive["sha256"]
    if path.is_file() and sha256_of(path) == wanted:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".part{os.getpid()}")
    try:
        url = find_in_index(name, path.name)
        with (
            urllib.request.urlopen(url, timeout=DOWNLOAD_SECONDS) as answer,
            part.open("wb") as file,
        ):
            shutil.copyfileobj(answer, file)
        if (found := sha256_of(part)) != wanted:
            raise UserError(f"{path.name}: the index gives SHA-256 {found}, the map {wanted}.")
        part.replace(path)
    except OSError as error:
        raise UserError(f"{path.name}: {error}; or put the archive at {path}.") from error
    finally:
        part.unlink(missing_ok=True)
    return path


def find_in_index(name: str, filename: str) -> str:
    """URL of `filename` on the page of project `name` of the index that pip uses."""
    page = f"{index_url().rstrip('/')}/{name}/"
    request = urllib.request.Request(page, headers={"Accept": "text/html"})
    with urllib.request.urlopen(request, timeout=DOWNLOAD_SECONDS) as answer:
        text = answer.read().decode("utf-8", "replace")
        base = answer.url
    for link in re.findall(r'href="([^"]+)"', text):
        if urllib.parse.urlsplit(link).path.rpartition("/")[2] == filename:
            return urllib.parse.urljoin(base, link)
    raise UserError(f"{page} has no {filename}.")


def index_url() -> str:
    """The index of pip's environment or configuration, else the one that pip has built in."""
    if url := os.environ.get("PIP_INDEX_URL"):
        return url
    code = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    for command in (["-m", "pip", "config", "get", "global.index-url"], ["-c", code]):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip()
    raise UserError("parity: pip names no package index; install pip or set PIP_INDEX_URL.")


def unpack(archive: Path, upstream_map: UpstreamMap) -> Path:
    """Folder with the archive's tests/ and nothing else of it, so that vllmx alone is imported."""
    folder = cache_folder() / f"tests-{upstream_map.archive['sha256'][:12]}"
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
        with tarfile.open(archive) as tar:
            top = archive.name.removesuffix(".tar.gz")
            wanted = [m for m in tar.getmembers() if m.name.startswith(f"{top}/tests/")]
            tar.extractall(scratch, wanted, filter="data")
        (Path(scratch) / top).rename(folder)
    return folder


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

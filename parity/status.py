# SPDX-License-Identifier: Apache-2.0
"""The status of every feature, computed from evidence and from nothing else.

`status` is a pure function. What a person can do is declare a feature, its files and the kinds of
evidence that it needs (parity/features.yaml); no status is ever typed. A feature's needs are
spelt out as cells. Each cell gets a status from the evidence that matches what is here now, and
the feature gets the worst of its cells.

GREEN     a clean run has shown it, with this code, these goldens and these limits, not long ago
DRIFT     green, but past the line that announces trouble
YELLOW    passed by a comparison that settles less than it should: a planted fault gets past it
PARTIAL   the cells are green, and named parts of the feature are not built
STALE     shown once, but code, golden or limits have changed since, or it was too long ago
UNPROVEN  there is code, and no run that counts: none, a dirty one, no golden, no floor, no teeth
BLOCKED   a run could not look: a model, a device or an oracle was missing
MISSING   not built
SUSPECT   failed once on a device that is not known to repeat itself
RED       failed; or the golden is damaged
"""

from __future__ import annotations

import datetime as dt
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from . import libraries
from .current import Expected, superseded, weakness, when, why
from .evidence import Row

STATUSES = (
    *("GREEN", "DRIFT", "YELLOW", "PARTIAL", "STALE", "UNPROVEN"),
    *("BLOCKED", "MISSING", "SUSPECT", "RED"),
)
"""Best first."""
RANK = {name: rank for rank, name in enumerate(STATUSES)} | {"STALE": 4, "UNPROVEN": 4}
"""STALE and UNPROVEN are equally far from green, so that deleting old lines gains nothing."""
SHOWN = ("GREEN", "DRIFT", "YELLOW")
"""Statuses of a cell that a clean run of what is here now has passed."""
BAD = ("fail", "error")
LOST = "lost: "
WHOLE_KINDS = ("op", "model", "test", "upstream")
"""Kinds of which a feature that asks for some cases asks for all."""


@dataclass(frozen=True)
class Cell:
    """One thing that has to be shown; its first five fields are those of an evidence row."""

    feature: str
    case: str
    provider: str
    device: str
    mode: str
    kind: str = "test"
    """op, model, text, schedule, test, upstream, mutant or canary."""
    golden: str = ""
    """Name of the golden in the index; empty where a test is the expectation."""
    graded: bool = False
    """Whether the limits of parity/policy.yaml decide, so that their change makes it stale."""
    command: str = ""
    """What runs it."""
    imports: tuple[str, ...] = ()
    """Libraries that the files of a cell of tests import."""

    @property
    def libraries(self) -> tuple[str, ...]:
        """Those whose version decides on it."""
        return self.imports or libraries.of_kind(self.kind, self.provider, self.device)

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """What evidence is matched by."""
        return (self.feature, self.case, self.provider, self.device, self.mode)

    @property
    def name(self) -> str:
        """The cell in words."""
        return " ".join(part for part in self.key if part)


Key = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class Feature:
    """A row of the inventory with what it needs, spelt out."""

    id: str
    tier: str
    title: str
    upstream: str
    ours: tuple[str, ...] = ()
    """Files of ours that are the feature."""
    absent: tuple[str, ...] = ()
    """Those of `ours` that don't exist."""
    lacks: tuple[str, ...] = ()
    """Parts of the feature that are declared not built."""
    cells: tuple[Cell, ...] = ()
    watched: tuple[Cell, ...] = ()
    """Probes of its ops, planted faults in its files and, of the comparison, honest alternates;
    none has to be run, but what comes of them counts if it is bad."""
    dropped: tuple[tuple[str, str], ...] = ()
    """(feature of an op, provider) that is declared to take less than it once did, and (feature,
    case) of evidence that is declared to be asked for no more."""


@dataclass(frozen=True)
class Golden:
    """What the index knows of a golden that exists."""

    sha: str
    problem: str = ""
    """Why it can't be used: damaged, of another schema, ..."""
    floor: bool = True
    """Whether the oracle's own noise was measured."""
    floor_sha: str = ""
    """sha256 of that noise, of which the limits are multiples; empty where it is none."""


@dataclass(frozen=True)
class Policy:
    """Limits that a status depends on."""

    sha: str = ""
    max_age_days: Mapping[str, int] = field(default_factory=lambda: {"T0": 14})
    """By tier; `other_age_days` for the rest."""
    other_age_days: int = 30
    repeatable: tuple[str, ...] = ("cpu",)
    """Devices on which one failure is enough."""
    versions: libraries.Versions = field(default_factory=dict)
    """Device -> library -> version that evidence has to be of."""

    def age_limit(self, tier: str) -> dt.timedelta:
        """How old evidence of a tier may get."""
        return dt.timedelta(days=self.max_age_days.get(tier, self.other_age_days))


@dataclass(frozen=True)
class CellStatus:
    """A cell, what it comes to and why."""

    cell: Cell
    status: str
    reason: str
    steps: tuple[str, ...] = ()
    """How the status came about, one sentence a rule."""
    row: Row | None = None
    """The evidence that decided, if any did."""

    @property
    def headroom(self) -> float | None:
        """The tightest limit over measured value of a graded cell; below 1 it fails."""
        if self.row is None or not self.cell.golden:
            return None
        values = [check["headroom"] for check in self.row["checks"].values() if "headroom" in check]
        return min(values, default=None)


@dataclass(frozen=True)
class FeatureStatus:
    """A row of the ledger."""

    feature: Feature
    status: str
    reason: str
    cells: tuple[CellStatus, ...]
    watched: tuple[CellStatus, ...] = ()
    beside: tuple[CellStatus, ...] = ()
    """Cells that nothing asks for, of other providers, devices and modes, that evidence tells of
    and that are not bad: they are shown and decide nothing."""

    @property
    def counts(self) -> Counter[str]:
        """Cells by status."""
        return Counter(cell.status for cell in self.cells)

    @property
    def evidence(self) -> list[str]:
        """Ids of the rows that decided, each once."""
        return list(dict.fromkeys(c.row["id"] for c in self.cells if c.row is not None))

    @property
    def headrooms(self) -> tuple[float, float] | None:
        """(smallest, median) over the graded cells."""
        found = [value for cell in self.cells if (value := cell.headroom) is not None]
        return (min(found), statistics.median(found)) if found else None

    @property
    def lost(self) -> int:
        """Cells that were shown once and that their provider no longer takes."""
        return sum(cell.reason.startswith(LOST) for cell in self.cells)

    @property
    def kills(self) -> tuple[int, int]:
        """(planted faults found by runs that count, planted faults in its files)."""
        mutants = [cell for cell in self.watched if cell.cell.mode == "planted"]
        return sum(cell.status == "GREEN" for cell in mutants), len(mutants)

    @property
    def proven(self) -> str:
        """Time of the oldest run that shows it; empty if any cell is not shown."""
        times = [c.row["ts"] for c in self.cells if c.row is not None and c.status in SHOWN]
        return min(times, default="") if len(times) == len(self.cells) else ""


def status(
    features: Sequence[Feature],
    goldens: Mapping[str, Golden],
    evidence: Iterable[Row],
    closures: Mapping[Key, Mapping[str, str]],
    policy: Policy,
    now: dt.datetime,
    refusals: Mapping[Key, str] | None = None,
) -> list[FeatureStatus]:
    """The rows of the ledger, in the order of `features`.

    closures: cell key -> {"fine", "coarse"} of the code that is here now; a cell that has none
    can't be proven. refusals: cell key -> why its provider takes no such call now, of cells that
    nothing asks for and evidence tells of. The order of `evidence` doesn't matter.
    """
    rows = by_key(evidence)
    found = []
    for feature in features:
        limit = policy.age_limit(feature.tier)

        def judged(cells: Iterable[Cell], limit: dt.timedelta = limit) -> tuple[CellStatus, ...]:
            return tuple(
                judge(cell, goldens, rows[cell.key], closures.get(cell.key), policy, limit, now)
                for cell in cells
            )

        # What nobody asked for counts only when it fails.
        watched = judged(feature.watched)
        probes = tuple(c for c in watched if c.cell.kind == "probe")
        extra = unasked(feature, rows)
        other = judged(extra)
        bad = tuple(c for c in other + probes if RANK[c.status] >= RANK["SUSPECT"])
        good = tuple(c for c in other if RANK[c.status] < RANK["SUSPECT"])
        refused = refusals or {}
        gone = lost(feature, extra, rows, refused) + dropped_cases(feature, rows)
        cells = judged(feature.cells) + bad + gone
        beside = tuple(c for c in good if c.cell.key not in refused)
        decided = fold(feature, cells, watched)
        found.append(FeatureStatus(feature, *decided, cells, watched, beside))
    return found


def by_key(evidence: Iterable[Row]) -> dict[Key, list[Row]]:
    """The rows of each cell, oldest first, without those that were retracted."""
    listed = sorted(evidence, key=lambda row: (row["ts"], row["id"]))
    retracted = {row["retracts"] for row in listed if row["verdict"] == "retract"}
    rows: dict[Key, list[Row]] = defaultdict(list)
    for row in listed:
        if row["verdict"] != "retract" and row["id"] not in retracted:
            rows[key_of(row)].append(row)
    return rows


def key_of(row: Row) -> Key:
    """The key of the cell that a row tells of."""
    device = str(row["device"].get("name", ""))
    return (row["feature"], row["case"], row["provider"], device, row["mode"])


def unasked(feature: Feature, rows: Mapping[Key, Sequence[Row]]) -> list[Cell]:
    """Cells of the same case and another provider, device or mode that evidence tells of."""
    asked = {cell.key for cell in feature.cells}
    twins = {cell.key[:2]: cell for cell in feature.cells}
    return [
        Cell(*key, kind=twin.kind, golden=twin.golden, graded=twin.graded, command=twin.command)
        for key in sorted(rows)
        if key not in asked and (twin := twins.get(key[:2])) is not None
    ]


def lost(
    feature: Feature,
    cells: Iterable[Cell],
    rows: Mapping[Key, Sequence[Row]],
    refusals: Mapping[Key, str],
) -> tuple[CellStatus, ...]:
    """What was shown once and can't be any more, as its provider refuses it: a feature must not
    stay green by asking less of it. Not what is declared to be dropped."""
    found = []
    for cell in cells:
        reason = refusals.get(cell.key)
        shown = [r for r in rows[cell.key] if r["verdict"] == "pass" and not r["run"].get("dirty")]
        if reason and shown and (cell.feature, cell.provider) not in feature.dropped:
            words = f"{LOST}{reason}; it passed at {shown[-1]['ts']}"
            found.append(CellStatus(cell, "UNPROVEN", words, (words,), shown[-1]))
    return tuple(found)


def dropped_cases(feature: Feature, rows: Mapping[Key, Sequence[Row]]) -> tuple[CellStatus, ...]:
    """What was looked at once and is asked for no more: cases and selectors that are gone. One that
    failed last stays red, as leaving it out is no mend. Not what is declared to be dropped."""
    kinds = {cell.feature: cell.kind for cell in feature.cells if cell.kind in WHOLE_KINDS}
    asked = {cell.key[:2] for cell in (*feature.cells, *feature.watched)}
    found = []
    for key in sorted(rows):
        counting = [row for row in rows[key] if not row["run"].get("dirty")]
        if key[0] not in kinds or key[:2] in asked or key[:2] in feature.dropped or not counting:
            continue
        last = counting[-1]
        words = f"{LOST}nothing asks for it any more; it was {last['verdict']} at {last['ts']}"
        name = "RED" if last["verdict"] in BAD else "UNPROVEN"
        cell = Cell(*key, kind=kinds[key[0]])
        found.append(CellStatus(cell, name, words, (words,), last))
    return tuple(found)


def fold(
    feature: Feature, cells: Sequence[CellStatus], watched: Sequence[CellStatus] = ()
) -> tuple[str, str]:
    """(status, reason) of a feature: its worst cell, if it is built at all."""
    if not feature.ours:
        return "MISSING", f"not built; tier {feature.tier}"
    if feature.absent:
        return "MISSING", f"not there: {', '.join(feature.absent)}"
    if not cells:
        return "UNPROVEN", "no kind of evidence is asked for in parity/features.yaml"
    honest = [cell for cell in watched if cell.cell.mode == "honest"]
    if refused := [c.cell.feature for c in honest if c.status in ("RED", "SUSPECT")]:
        return "RED", f"honest alternates that are refused: {', '.join(refused)}"
    worst = max(cells, key=lambda cell: RANK[cell.status])
    if RANK[worst.status] < RANK["PARTIAL"] and feature.lacks:
        return "PARTIAL", "not built: " + "; ".join(feature.lacks)
    mutants = [cell for cell in watched if cell.cell.mode == "planted"]
    missed = [cell.cell.feature for cell in mutants if cell.status == "RED"]
    if RANK[worst.status] < RANK["YELLOW"] and missed:
        return "YELLOW", f"planted faults that nothing finds: {', '.join(missed)}"
    alike = sum(cell.status == worst.status for cell in cells)
    if worst.status == "GREEN":
        return "GREEN", f"{alike} of {len(cells)} cells shown"
    words = f"{alike} of {len(cells)} cells, first {worst.cell.name}: {worst.reason}"
    return worst.status, words


def judge(
    cell: Cell,
    goldens: Mapping[str, Golden],
    rows: Sequence[Row],
    closure: Mapping[str, str] | None,
    policy: Policy,
    age_limit: dt.timedelta,
    now: dt.datetime,
) -> CellStatus:
    """The status of one cell: the first rule that applies."""
    steps: list[str] = []

    def done(name: str, reason: str, row: Row | None = None) -> CellStatus:
        return CellStatus(cell, name, reason, (*steps, f"{name}: {reason}"), row)

    golden_sha, floor_sha = "", None
    if cell.golden:
        golden = goldens.get(cell.golden)
        if golden is None:
            return done("UNPROVEN", f"no golden {cell.golden}")
        if golden.problem:
            return done("RED", f"golden {cell.golden}: {golden.problem}")
        golden_sha = golden.sha
        floor_sha = golden.floor_sha if cell.graded else None
        steps.append(f"the golden {cell.golden} is whole, sha256 {golden_sha[:12]}")
    if closure is None:
        return done("UNPROVEN", "there is no code here whose closure could be compared")
    limits = policy.sha if cell.graded else None
    versions = policy.versions.get(cell.device, {})
    expected = Expected(closure, golden_sha, limits, floor_sha, versions, cell.libraries)
    current = [row for row in rows if not expected.cause(row)]
    steps.append(f"{len(rows)} rows of evidence, {len(current)} of them of what is here now")
    if cell.kind == "canary":
        # That it was found once says nothing of a comparison that lets it through today.
        current = current[-1:]
        steps.append("of a planted fault the newest decides, clean or not")

    bad = [row for row in current if row["verdict"] in BAD]
    bad = [row for row in bad if not superseded(row, current, closure)]
    if bad:
        # A device that is not known to repeat itself gets a second run before it is blamed.
        blamed = cell.device in policy.repeatable or len(bad) > 1
        name = "RED" if blamed else "SUSPECT"
        return done(name, why(bad[-1]), bad[-1])
    steps.append("none of them failed")

    passed = [row for row in current if row["verdict"] == "pass"]
    if not passed:
        return done(*_without_pass(rows, current, expected))
    clean = [row for row in passed if not row["run"].get("dirty", True)]
    if not clean:
        return done("UNPROVEN", "it passed on a tree with uncommitted changes only", passed[-1])
    steps.append(f"{len(clean)} clean runs passed")
    sound = [row for row in clean if not weakness(cell, row)]
    if not sound:
        return done("UNPROVEN", weakness(cell, clean[-1]), clean[-1])
    if cell.golden and not goldens[cell.golden].floor:
        return done("UNPROVEN", f"the noise of the oracle of {cell.golden} is not known", sound[-1])
    newest = sound[-1]
    age = now - when(newest)
    if age > age_limit:
        return done("STALE", f"last shown {age.days} days ago", newest)
    steps.append(f"the newest is {max(age.days, 0)} days old, the limit is {age_limit.days}")
    details = newest.get("details", {})
    if details.get("fallback"):
        return done("YELLOW", f"passed by a weaker comparison: {details['fallback']}", newest)
    if details.get("drift"):
        return done("DRIFT", f"passed, but drifts: {details['drift']}", newest)
    return done("GREEN", "shown", newest)


def _without_pass(
    rows: Sequence[Row], current: Sequence[Row], expected: Expected
) -> tuple[str, str, Row | None]:
    """(status, reason, row) of a cell that nothing has passed or failed as it is now."""
    if current:
        last = current[-1]
        name = "BLOCKED" if last["verdict"] == "skip" else "UNPROVEN"
        return name, why(last), last
    if rows:
        last = rows[-1]
        return "STALE", f"{expected.cause(last)} since {last['ts']} (was {last['verdict']})", last
    return "UNPROVEN", "no run has looked at it", None

# SPDX-License-Identifier: Apache-2.0
"""Cells of texts: tokenizers, detokenizers, chat templates and block hashes against goldens.

A golden (parity/goldens/text/KIND/CASE.json) has a spec of parity/text_cases.py and upstream's
answers; oracles/vllm_text.py says what they are. Each is one cell, and every answer must be equal.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from . import closure, evidence, golden
from .compare import Check
from .evidence import Row, make_row
from .golden import Golden, GoldenError
from .model_golden import weights_sha
from .model_table import MODELS
from .op_replay import sources
from .oracle_process import OracleBlocked
from .replay_schedule import first_difference
from .text_answers import KINDS, Answers
from .text_cases import Case, Spec, selected, specs

PROVIDER, DEVICE, MODE = "vllmx", "cpu", "replay"
LIBRARIES = ("tokenizers", "jinja2", "cbor2")
NO_SOURCE = "none"
"""`source_sha256` of a spec that needs no model."""


# ---- goldens


def golden_name(spec: Spec) -> str:
    """Path of a spec's golden under goldens/text."""
    return f"{spec['name']}.json"


def source_sha(spec: Spec) -> str:
    """sha256 of the file that a spec's tokenizer is read from; OracleBlocked without it."""
    return weights_sha(MODELS[spec["model"]]) if spec["model"] else NO_SOURCE


def pack(spec: Spec, answer: Answers, oracle: dict[str, Any]) -> bytes:
    """The golden of an oracle's `answer` to `spec`; GoldenError where it can't be one."""
    if not answer["repeat"]:
        raise GoldenError(f"{spec['name']}: a second pass gave another answer")
    asked = [case["id"] for case in spec["cases"]]
    missing = set(asked) ^ (set(answer["cases"]) - {"vocabulary"})
    if missing or not asked:
        raise GoldenError(f"{spec['name']}: not answered as asked: {sorted(missing)[:5]}")
    return golden.pack_json(
        {
            "schema": golden.SCHEMA,
            "kind": "text",
            "feature": f"text.{spec['kind']}",
            "case": spec["name"].partition("/")[2],
            "spec": spec,
            "answers": answer["cases"],
            "source_sha256": answer["source_sha256"] or NO_SOURCE,
            "oracle": {**oracle, "callable": answer["callable"]},
            "license": "generated",
        }
    )


def read(spec: Spec, folder: Path = golden.TEXT) -> Golden:
    """The golden of `spec`; GoldenError if it is missing, damaged or of something else."""
    name = golden_name(spec)
    index = golden.read_index(folder)
    found = golden.read(folder / name)
    if index.get(name) != found.sha256:
        raise GoldenError(f"{name} is not the file that the index knows")
    if difference := first_difference(spec, found.facts["spec"], "spec"):
        raise GoldenError(f"{name} was recorded for something else; record it again: {difference}")
    if not found.facts["answers"]:
        raise GoldenError(f"{name} has no answers")
    return found


def problem(name: str, folder: Path) -> str:
    """Why the golden `name` (KIND/CASE.json) can't be used; empty if it can."""
    spec = next((spec for spec in specs() if golden_name(spec) == name), None)
    if spec is None:
        return "no spec expects it"
    try:
        read(spec, folder)
    except GoldenError as error:
        return str(error)
    return ""


# ---- comparison


def differences(spec: Spec, want: Answers, got: Answers) -> list[str]:
    """What of upstream's answers `want` ours are not, one sentence a case."""
    cases = {case["id"]: case for case in spec["cases"]}
    found = [f"{name}: only in vllmx" for name in got.keys() - want.keys()]
    for name, expected in want.items():
        if name not in got:
            found.append(f"{name}: vllmx does not answer")
        elif "error" in expected:
            found += _refusal(name, expected, got[name], cases[name].get("own_words", False))
        elif difference := _difference(name, cases.get(name, {}), expected, got[name]):
            found.append(difference)
    return sorted(found)


def _difference(name: str, case: Case, want: Answers, got: Answers) -> str | None:
    """Where `got` leaves `want`; of a stream the text counts, and at which step it is shown."""
    if "deltas" not in want or first_difference(sorted(want), sorted(got)):
        return first_difference(want, got, name)
    if difference := first_difference(_whole(want), _whole(got), name):
        return difference
    # Upstream holds a token back whole until its last character is finished, vllmx what is
    # unfinished of it: it may be ahead while upstream shows nothing.
    theirs = ours = ""
    for step, (their, our) in enumerate(zip(want["deltas"], got["deltas"])):
        theirs, ours = theirs + their, ours + our
        late = not ours.startswith(theirs)
        if late or (their and ours != theirs and not case["params"]["stop"]):
            return f"{name}: by step {step} upstream has shown {theirs!r:.150}, vllmx {ours!r:.150}"
    return None


def _whole(answer: Answers) -> Answers:
    deltas = answer["deltas"]
    return {**answer, "deltas": "".join(deltas), "steps": len(deltas)}


def _refusal(name: str, want: Answers, got: Answers, own_words: bool) -> list[str]:
    """A refusal must be one here too, and have the template's message unless `own_words`."""
    ours = got.get("error")
    if ours is None:
        return [f"{name}: upstream refuses ({want['error']:.100}), vllmx does not"]
    if want["error"] and (own_words or want["error"] in ours):
        return []
    return [f"{name}: upstream says {want['error']!r:.150}, vllmx {ours!r:.150}"]


def teeth(spec: Spec, want: Answers) -> dict[str, bool]:
    """Whether copies of the answers would be refused in which one part of one case is wrong."""
    caught: dict[str, bool] = {}
    for name, answer in want.items():
        for key, value in answer.items():
            if key == "error":
                bent = {"text": value, "ids": []}
            else:
                bent = {**answer, key: _bend(value)}
            seen = bool(differences(spec, want, {**want, name: bent}))
            caught[key] = caught.get(key, True) and seen
        rest = {other: value for other, value in want.items() if other != name}
        caught["missing"] = caught.get("missing", True) and bool(differences(spec, want, rest))
    return caught


def _bend(value: Any) -> Any:
    """Another value, as near as can be."""
    if isinstance(value, list):
        return [*value[:-1], _bend(value[-1])] if value else ["0"]
    if isinstance(value, str):
        return value + " "
    return "0" if value is None else value + 1


# ---- cells


CODE = ("parity/text_replay.py:differences",)


@functools.cache
def _closure(kind: str) -> dict[str, str]:
    symbols = (f"parity/text_answers.py:{kind}", *CODE)
    return closure.closure(symbols, sources=sources())


def closure_of(kind: str) -> dict[str, str]:
    """The closure of what a cell of `kind` runs and is judged by."""
    return dict(_closure(kind))


class TextLane:
    """Replays specs against the goldens of one folder."""

    def __init__(self, folder: Path = golden.TEXT) -> None:
        self.folder = folder
        self.run = evidence.run_facts()
        self.index = golden.known(folder)

    def rows(self, chosen: Sequence[Spec]) -> Iterator[Row]:
        """A row for every spec, whatever comes of it."""
        for spec in chosen:
            yield self.row(spec)

    def row(self, spec: Spec) -> Row:
        """The evidence of one spec."""
        started = time.monotonic()
        try:
            facts = self._judged(spec)
        except OracleBlocked as error:
            facts = {"verdict": "skip", "reason": str(error)}
        except GoldenError as error:
            facts = {"verdict": "invalid", "reason": str(error)}
        except Exception as error:
            facts = {"verdict": "error", "reason": f"{type(error).__name__}: {error}"}
        return self._row(f"text.{spec['kind']}", spec, facts, time.monotonic() - started)

    def strays(self) -> list[Row]:
        """Rows of files that are no golden of any spec."""
        names = golden.strays(self.folder, {golden_name(spec) for spec in specs()})
        return [
            self._row("text.stray", None, {"verdict": "invalid", "reason": f"no spec: {name}"}, 0.0)
            for name in names
        ]

    def _judged(self, spec: Spec) -> dict[str, Any]:
        found = read(spec, self.folder)
        if source_sha(spec) != found.facts["source_sha256"]:
            raise GoldenError(f"{spec['name']}: the model here is not that of the golden")
        want = found.facts["answers"]
        got = dict(KINDS[spec["kind"]](copy.deepcopy(spec)))
        wrong = differences(spec, want, got)
        caught = teeth(spec, want)
        facts: dict[str, Any] = {
            "verdict": "fail" if wrong else "pass",
            "checks": {"cases": Check(float(len(wrong)), 0.0).as_dict()},
            "golden_sha": found.sha256,
            "oracle": {key: str(found.facts["oracle"][key]) for key in ("name", "version", "lane")},
            "teeth": caught,
            "details": {"cases": len(want)},
        }
        if wrong:
            facts["reason"] = f"{len(wrong)} of {len(want)} cases: " + "; ".join(wrong[:3])
        if not all(caught.values()):
            missed = ", ".join(sorted(key for key, seen in caught.items() if not seen))
            facts |= {"verdict": "error", "reason": f"it would let a wrong {missed} pass"}
        return facts

    def _row(self, feature: str, spec: Spec | None, facts: dict[str, Any], seconds: float) -> Row:
        row: dict[str, Any] = {
            "case": spec["name"].partition("/")[2] if spec else facts["reason"],
            "golden_sha": self.index.get(golden_name(spec), "") if spec else "",
            "closure": closure_of(spec["kind"]) if spec else {"fine": "", "coarse": ""},
            "oracle": {},
            "checks": {},
            **facts,
        }
        return make_row(
            **row,
            feature=feature,
            provider=PROVIDER,
            mode=MODE,
            device={"name": DEVICE},
            proof={"selected": PROVIDER, **{name: metadata.version(name) for name in LIBRARIES}},
            run=self.run,
            seconds=round(seconds, 3),
        )


def replay(select: str | None = None, folder: Path = golden.TEXT) -> list[Row]:
    """A row for every spec that `select` leaves, and for every file that none expects."""
    lane = TextLane(folder)
    rows = list(lane.rows(selected(select)))
    return rows + (lane.strays() if select is None else [])

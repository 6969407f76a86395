# SPDX-License-Identifier: Apache-2.0
"""What oracles said of whole models: asking them, and reading what is kept of their answers."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from . import golden, policy
from .checkpoints import oracle_folder, weights_file
from .dtypes import Array, array
from .golden import GoldenError
from .model_table import LANES, POSITIONS, ModelEntry
from .oracle_process import OracleBlocked, call

SECONDS = 3600


@dataclass(frozen=True)
class Scores:
    """One lane's answer for a model. P positions: every token of a sequence but its last.

    ids: int32 [P, K], most likely first; val: float64 [P, K], their log-probabilities; next:
    float64 [P], that of the token that follows; top: int32 [P], the most likely id; stream:
    float32 [layers, rows, 64], sketches after each layer. What is kept is float32; sums over it are
    not, or they would be further off than two oracles are from each other.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    ids: np.ndarray
    val: np.ndarray
    next: np.ndarray
    top: np.ndarray
    stream: np.ndarray
    facts: dict[str, Any]
    sha256: str
    base: Scores | None = None
    """Of a floor: the lane that its distance is measured from, where that is not the golden."""

    @cached_property
    def sequences(self) -> list[list[int]]:
        """The token ids of each sequence."""
        return [self.tokens[first:last].tolist() for first, last in pairwise(self.offsets)]

    @cached_property
    def places(self) -> np.ndarray:
        """[P], the place of each position within its sequence."""
        lengths = np.diff(self.offsets) - 1
        return np.concatenate([np.arange(length) for length in lengths])

    @cached_property
    def owners(self) -> np.ndarray:
        """[P], the sequence of each position."""
        lengths = np.diff(self.offsets) - 1
        return np.repeat(np.arange(len(lengths)), lengths)

    def first_position(self, sequence: int) -> int:
        """Place of a sequence's first position among all."""
        return int(self.offsets[sequence]) - sequence


Told = tuple[dict[str, np.ndarray], dict[str, Any]]
"""What an oracle answered: tensors, and what computed them."""


def ask(lane: str, job: dict[str, Any]) -> Told:
    """The answer of a lane's oracle; OracleBlocked where it can't run here."""
    (answer,) = ask_all(LANES[lane].oracle, [{**job, "dtype": LANES[lane].dtype}])
    if isinstance(answer, GoldenError):
        raise answer
    return answer


def ask_all(oracle: str, jobs: list[dict[str, Any]]) -> list[Told | GoldenError]:
    """The answer of `oracle` to each job, or why there is none; it is started once for all.

    OracleBlocked where it can't run here.
    """
    with tempfile.TemporaryDirectory() as work:
        files: list[Path] = []
        for i, job in enumerate(jobs):
            asked, out = Path(work) / f"{i}.json", Path(work) / f"{i}.safetensors"
            if "ids" in job:
                np.save(Path(work) / f"{i}.npy", job["ids"])
                job = {**job, "ids": str(Path(work) / f"{i}.npy")}
            asked.write_text(json.dumps(job))
            files += [asked, out]
        fault = GoldenError(f"{oracle} gave no answer")
        try:
            # One thread: the order of a sum must not depend on the machine.
            call(oracle, *files, seconds=SECONDS * len(jobs), OMP_NUM_THREADS="1")
        except OracleBlocked:
            raise
        except GoldenError as error:
            fault = error
        return [_read(out, fault) for out in files[1::2]]


def _read(out: Path, fault: GoldenError) -> Told | GoldenError:
    if not out.is_file():
        told = out.with_suffix(".error")
        return GoldenError(told.read_text()[-2000:]) if told.is_file() else fault
    with safe_open(str(out), "numpy") as file:
        told = json.loads(file.metadata()["oracle"])
        return {name: file.get_tensor(name) for name in file.keys()}, told  # noqa: SIM118


def weights_sha(entry: ModelEntry) -> str:
    """sha256 of the file that holds the model's weights here; OracleBlocked without one."""
    with weights_file(entry).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


Recorded = dict[str, bytes] | GoldenError
"""Lane -> bytes of its golden, or why there are none."""


def record(entries: list[ModelEntry]) -> Iterator[tuple[ModelEntry, Recorded]]:
    """The goldens of each model, in turn: all are asked of the first lane, then of the others."""
    answers: dict[str, Told | GoldenError] = {}
    for lane in LANES:
        of_lane = [entry for entry in entries if entry.lanes[0] == lane]
        answers |= _ask_models(lane, of_lane, {})
    firsts = {name: answer for name, answer in answers.items() if isinstance(answer, tuple)}
    others: dict[str, dict[str, Told | GoldenError]] = {}
    for lane in LANES:
        of_lane = [entry for entry in entries if entry.name in firsts and lane in entry.lanes[1:]]
        others[lane] = _ask_models(lane, of_lane, firsts)
    for entry in entries:
        try:
            lanes = {
                lane: others[lane][entry.name] for lane in entry.lanes[1:] if entry.name in firsts
            }
            yield entry, _goldens(entry, answers[entry.name], lanes)
        except GoldenError as error:
            yield entry, error


def _ask_models(
    lane: str, entries: list[ModelEntry], firsts: dict[str, Told]
) -> dict[str, Told | GoldenError]:
    """Name -> what a lane says of each model: what it is asked, or, where another lane has been,
    the sequences that came of that."""
    found: dict[str, Told | GoldenError] = {}
    jobs: dict[str, dict[str, Any]] = {}
    for entry in entries:
        try:
            job = entry.job(str(oracle_folder(entry))) | {"dtype": LANES[lane].dtype}
        except GoldenError as error:
            found[entry.name] = error
            continue
        if entry.name in firsts:
            first, _ = firsts[entry.name]
            sequences = [first["tokens"][a:b].tolist() for a, b in pairwise(first["offsets"])]
            job |= {"prompts": [], "forced": sequences, "ids": first["lp.ids"]}
        jobs[entry.name] = job
    if jobs:
        try:
            told = ask_all(LANES[lane].oracle, list(jobs.values()))
        except GoldenError as error:
            told = [error] * len(jobs)
        found |= dict(zip(jobs, told))
    return found


def _goldens(
    entry: ModelEntry, answer: Told | GoldenError, lanes: dict[str, Told | GoldenError]
) -> dict[str, bytes]:
    if isinstance(answer, GoldenError):
        raise answer
    first, told = answer
    _check(entry, first)
    found = {entry.lanes[0]: pack_answer(entry, entry.lanes[0], first, told)}
    for lane, other in lanes.items():
        if isinstance(other, GoldenError):
            raise other
        second, told = other
        if not np.array_equal(second["lp.ids"], first["lp.ids"]):
            raise GoldenError(f"{entry.name}: {lane} scored other ids than it was asked")
        kept = {name: second[name] for name in ("lp.val", "lp.next", "lp.top", "stream")}
        found[lane] = pack_answer(entry, lane, kept, told)
    _check_teeth(entry, found)
    return found


def _check(entry: ModelEntry, answer: dict[str, np.ndarray]) -> None:
    positions = len(answer["lp.next"])
    if positions < POSITIONS:
        raise GoldenError(f"{entry.name}: {positions} positions, at least {POSITIONS} are wanted")
    if not all(np.isfinite(answer[name]).all() for name in ("lp.val", "lp.next", "stream")):
        raise GoldenError(f"{entry.name}: the oracle's answer is not finite")
    if len(np.unique(answer["lp.top"])) < 8:
        raise GoldenError(f"{entry.name}: degenerate, nearly every position predicts the same")


def _check_teeth(entry: ModelEntry, recorded: dict[str, bytes]) -> None:
    """GoldenError where the gate lets a wrong copy of the golden pass, with these floors."""
    from .model_gate import BLOCK
    from .model_replay import teeth

    want, floor = _compared(entry, {lane: golden.unpack(recorded[lane]) for lane in entry.lanes})
    found = teeth(want, floor, policy.load().models["torch"], BLOCK)
    if missed := sorted(name for name, caught in found.items() if not caught):
        told = ", ".join(missed)
        raise GoldenError(f"{entry.name}: degenerate, the gate lets these copies pass: {told}")


def pack_answer(
    entry: ModelEntry, lane: str, answer: dict[str, np.ndarray], told: dict[str, Any]
) -> bytes:
    tensors: dict[str, Array] = {}
    for name, value in sorted(answer.items()):
        kind = "f32" if value.dtype == np.float32 else "i32"
        tensors[name] = array(value, kind)
    facts = {
        "schema": golden.SCHEMA,
        "kind": "model",
        "feature": entry.feature,
        "case": lane,
        "dtype": "f32",
        "class": "model",
        "args": {"weights_sha256": weights_sha(entry)},
        "tensors": {name: golden.describe(value, True) for name, value in tensors.items()},
        "oracle": told,
        "license": "generated",
    }
    return golden.pack(facts, tensors)


def load(entry: ModelEntry, folder: Path = golden.MODELS) -> tuple[Scores, Scores]:
    """(golden, floor lane) of a model; GoldenError if one is missing, does not fit, or is of other
    sequences than the model is asked now."""
    index = golden.read_index(folder)
    read: dict[str, golden.Golden] = {}
    for lane in entry.lanes:
        name = entry.golden(lane)
        read[lane] = golden.read(folder / name)
        if index.get(name) != read[lane].sha256:
            raise GoldenError(f"{name} is not the file that the index knows")
        facts = read[lane].facts
        if (facts["feature"], facts["case"]) != (entry.feature, lane):
            raise GoldenError(f"{name} is of {facts['feature']} {facts['case']}")
    want, floor = _compared(entry, read)
    prompts, forced = entry.prompts(), entry.forced()
    lengths = [len(prompt) + entry.max_tokens for prompt in prompts]
    sequences = want.sequences
    same = [s[: len(p)] == p for s, p in zip(sequences, prompts)]
    if (
        not all(same)
        or [len(s) for s in sequences[: len(prompts)]] != lengths
        or sequences[len(prompts) :] != forced
    ):
        raise GoldenError(f"{entry.name}: the golden is of other sequences; record it anew")
    return want, floor


def _compared(entry: ModelEntry, read: Mapping[str, golden.Golden]) -> tuple[Scores, Scores]:
    first, second, *third = (read[lane] for lane in entry.lanes)
    want, floor = _scores(first, {}), _scores(second, first.tensors)
    if third:
        floor = replace(floor, base=_scores(third[0], first.tensors))
    return want, floor


def _scores(found: golden.Golden, shared: dict[str, Array]) -> Scores:
    tensors = {**shared, **found.tensors}
    try:
        values = {name: tensors[name].data for name in tensors}
        return Scores(
            tokens=values["tokens"],
            offsets=values["offsets"],
            ids=values["lp.ids"],
            val=values["lp.val"].astype(np.float64),
            next=values["lp.next"].astype(np.float64),
            top=values["lp.top"],
            stream=values["stream"],
            facts=found.facts,
            sha256=found.sha256,
        )
    except KeyError as error:
        raise GoldenError(f"a golden of a model lacks {error}") from error

# SPDX-License-Identifier: Apache-2.0
"""What oracles said of whole models: asking them, and reading what is kept of their answers."""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from . import golden
from .checkpoints import gguf_file, oracle_folder, tiny_folder
from .dtypes import Array, array
from .golden import GoldenError
from .model_table import FLOOR_LANE, GOLDEN_LANE, LANES, POSITIONS, ModelEntry
from .oracle_process import call

SECONDS = 3600


@dataclass(frozen=True)
class Scores:
    """One lane's answer for a model. P positions: every token of a sequence but its last.

    ids: int32 [P, K], most likely first; val: float32 [P, K], their log-probabilities; next:
    float32 [P], that of the token that follows; top: int32 [P], the most likely id; stream:
    float32 [layers, rows, 64], sketches after each layer.
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


def ask(lane: str, job: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(tensors, what computed) of a lane's oracle; OracleBlocked where it can't run here."""
    with tempfile.TemporaryDirectory() as work:
        asked, out = Path(work) / "job.json", Path(work) / "out.safetensors"
        if "ids" in job:
            np.save(Path(work) / "ids.npy", job["ids"])
            job = {**job, "ids": str(Path(work) / "ids.npy")}
        asked.write_text(json.dumps(job))
        # One thread: the order of a sum must not depend on the machine.
        call(LANES[lane], asked, out, seconds=SECONDS, OMP_NUM_THREADS="1")
        with safe_open(str(out), "numpy") as file:
            told = json.loads(file.metadata()["oracle"])
            return {name: file.get_tensor(name) for name in file.keys()}, told  # noqa: SIM118


def weights_sha(entry: ModelEntry) -> str:
    """sha256 of the file that holds the model's weights here; OracleBlocked without one."""
    path = tiny_folder(entry) / "model.safetensors" if entry.tiny else gguf_file(entry)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def record(entry: ModelEntry, lanes: list[str]) -> dict[str, bytes]:
    """Lane -> bytes of its golden; GoldenError where an answer can't be one."""
    folder = str(oracle_folder(entry))
    found: dict[str, bytes] = {}
    first, told = ask(GOLDEN_LANE, entry.job(folder))
    _check(entry, first)
    found[GOLDEN_LANE] = pack_answer(entry, GOLDEN_LANE, first, told)
    for lane in lanes:
        if lane == GOLDEN_LANE:
            continue
        offsets, tokens = first["offsets"], first["tokens"]
        sequences = [tokens[a:b].tolist() for a, b in pairwise(offsets)]
        job = {**entry.job(folder), "prompts": [], "forced": sequences, "ids": first["lp.ids"]}
        answer, told = ask(lane, job)
        if not np.array_equal(answer["lp.ids"], first["lp.ids"]):
            raise GoldenError(f"{entry.name}: {lane} scored other ids than it was asked")
        kept = {name: answer[name] for name in ("lp.val", "lp.next", "lp.top", "stream")}
        found[lane] = pack_answer(entry, lane, kept, told)
    return found


def _check(entry: ModelEntry, answer: dict[str, np.ndarray]) -> None:
    positions = len(answer["lp.next"])
    if positions < POSITIONS:
        raise GoldenError(f"{entry.name}: {positions} positions, at least {POSITIONS} are wanted")
    if not all(np.isfinite(answer[name]).all() for name in ("lp.val", "lp.next", "stream")):
        raise GoldenError(f"{entry.name}: the oracle's answer is not finite")
    if len(np.unique(answer["lp.top"])) < 8:
        raise GoldenError(f"{entry.name}: degenerate, nearly every position predicts the same")


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
    """(golden, floor lane) of a model; GoldenError if one is missing or does not fit."""
    index = golden.read_index(folder)
    read: dict[str, golden.Golden] = {}
    for lane in (GOLDEN_LANE, FLOOR_LANE):
        name = entry.golden(lane)
        read[lane] = golden.read(folder / name)
        if index.get(name) != read[lane].sha256:
            raise GoldenError(f"{name} is not the file that the index knows")
        facts = read[lane].facts
        if (facts["feature"], facts["case"]) != (entry.feature, lane):
            raise GoldenError(f"{name} is of {facts['feature']} {facts['case']}")
    main = _scores(read[GOLDEN_LANE], {})
    return main, _scores(read[FLOOR_LANE], read[GOLDEN_LANE].tensors)


def _scores(found: golden.Golden, shared: dict[str, Array]) -> Scores:
    tensors = {**shared, **found.tensors}
    try:
        values = {name: tensors[name].data for name in tensors}
        return Scores(
            tokens=values["tokens"],
            offsets=values["offsets"],
            ids=values["lp.ids"],
            val=values["lp.val"],
            next=values["lp.next"],
            top=values["lp.top"],
            stream=values["stream"],
            facts=found.facts,
            sha256=found.sha256,
        )
    except KeyError as error:
        raise GoldenError(f"a golden of a model lacks {error}") from error

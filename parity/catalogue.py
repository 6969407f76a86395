# SPDX-License-Identifier: Apache-2.0
"""What of this checkout there is to be shown: cells, goldens and closures by kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from . import closure as closures
from . import golden as golden_files
from . import policy
from .digests import file_sha
from .features import CANARY
from .golden import GoldenError
from .mutant_detectors import Detectors
from .mutate import CATALOGUE, Mutant, catalogue, closure_of
from .status import Cell, Golden

if TYPE_CHECKING:
    from .model_table import ModelCell
    from .op_cells import OpCell

SCHEDULE_CODE = ("parity/replay_schedule.py:check", "oracles/schedule_driver.py:Player")
CANARY_CODE = "parity/canary.py"
TRACE = ".json.zz"
MODELS_GPU = "models_gpu"
GPU_LANES = ("ops_gpu", MODELS_GPU)
COMPARISON_FILE = "parity/compare.py"
"""The feature that has it answers for what the comparison refuses."""


class Listed:
    """The catalogue of a real checkout. Ops and models are listed on a CPU; what evidence tells of
    a GPU counts beside that, if it is bad."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "parity" / "goldens"

    # ---- cells

    def ops(self, name: str) -> Sequence[Cell]:
        """Every case, dtype and provider of an op that takes such calls."""
        from .op_cells import expected
        from .op_table import OPS

        if name not in OPS:
            return []
        select = f"{OPS[name].feature}/"
        cells = []
        for cell in expected("cpu", select):
            # One that is refused here may have run on another device.
            self._op_cells[cell.feature, cell.case_name, cell.provider] = cell
            if cell.refused:
                continue
            found = Cell(
                *(cell.feature, cell.case_name, cell.provider, cell.device, cell.mode),
                kind="op",
                golden=f"ops/{cell.golden}",
                graded=True,
                command=f"vllmx parity replay {select}",
            )
            cells.append(found)
        return cells

    def models(self, name: str) -> Sequence[Cell]:
        """Every mode of a model that has goldens, with each provider."""
        from .model_table import expected

        cells = []
        for cell in expected(f"model.{name}"):
            if cell.entry.name != name:
                continue
            found = Cell(
                *(cell.feature, "forced", cell.provider, cell.device, cell.mode),
                kind="model",
                golden=f"models/{cell.entry.golden(cell.entry.lanes[0])}",
                graded=True,
                command=f"vllmx parity replay {cell.feature}",
            )
            self._model_cells[found.key[:3]] = cell
            cells.append(found)
        return cells

    def text(self, name: str) -> Sequence[Cell]:
        """A cell for each spec of texts whose name starts with `name`."""
        from .text_cases import specs
        from .text_replay import DEVICE, MODE, PROVIDER, golden_name

        return [
            Cell(
                *(f"text.{spec['kind']}", spec["name"].partition("/")[2], PROVIDER, DEVICE, MODE),
                kind="text",
                golden=f"text/{golden_name(spec)}",
                command=f"vllmx parity replay text.{spec['name']}",
            )
            for spec in specs()
            if spec["name"].startswith(name)
        ]

    def schedule(self, kind: str) -> Sequence[Cell]:
        """A cell for each trace of `kind`; of all kinds for `*`."""
        return [
            Cell(
                *("schedule", name, "vllmx", "cpu", "replay"),
                kind="schedule",
                golden=f"schedule/{name}",
                command="vllmx parity collect sched",
            )
            for name in self._traces
            if kind in ("*", name.rpartition("-")[0])
        ]

    def canary(self) -> Sequence[Cell]:
        """The planted fault."""
        command = f"vllmx parity collect {CANARY}"
        return [Cell(CANARY, "planted", "torch", "cpu", "eager", "canary", command=command)]

    def mutants(self, files: Sequence[str]) -> Sequence[Cell]:
        """The faults of mutants.yaml that are planted in `files`. Honest alternates are of the
        comparison, wherever they are made: one that is refused is its fault."""
        return [
            Cell(
                *(f"mutant.{mutant.name}", mutant.by, "vllmx", "cpu"),
                "honest" if mutant.honest else "planted",
                kind="mutant",
                command=f"vllmx parity mutate {mutant.name}",
            )
            for mutant in self._mutants.values()
            if (COMPARISON_FILE if mutant.honest else mutant.file) in files
        ]

    # ---- goldens

    def goldens(self) -> Mapping[str, Golden]:
        """What lies in parity/goldens, by name; files that no case expects are problems."""
        found = dict(self._op_goldens("ops")) | dict(self._op_goldens("ops_gpu"))
        found |= dict(self._model_goldens()) | dict(self._gpu_lanes())
        found |= dict(self._text_goldens())
        for path in sorted((self.folder / "schedule").glob("*")):
            name = f"schedule/{path.name.removesuffix(TRACE)}"
            found[name] = Golden(file_sha(path), self._trace_problem(path))
        return found

    def _op_goldens(self, kind: str) -> Iterator[tuple[str, Golden]]:
        from .calibrate import Floors

        folder = self.folder / kind
        if not folder.is_dir():
            return
        try:
            index, floors = golden_files.read_index(folder), Floors(folder)
        except GoldenError as error:
            yield kind, Golden("", str(error))
            return
        for name in golden_files.files(folder):
            path = folder / name
            sha = file_sha(path)
            problem = _problem(path, sha, index.get(name))
            yield f"{kind}/{name}", Golden(sha, problem, floors.known(name, sha), floors.sha(name))
        for name in golden_files.strays(folder, self.expected_op_goldens()):
            yield f"{kind}/{name}", Golden("", "no case expects it")

    def _model_goldens(self) -> Iterator[tuple[str, Golden]]:
        from .model_table import MODELS

        folder = self.folder / "models"
        if not folder.is_dir():
            return
        try:
            index = golden_files.read_index(folder)
        except GoldenError as error:
            yield "models", Golden("", str(error))
            return
        wanted = {entry.golden(lane) for entry in MODELS.values() for lane in entry.lanes}
        floors = {entry.name: entry.lanes[1] for entry in MODELS.values()}
        for name in golden_files.files(folder):
            path = folder / name
            sha = file_sha(path)
            other = path.with_name(f"{floors.get(path.parent.name, '')}.safetensors")
            problem = _problem(path, sha, index.get(name))
            noise = file_sha(other) if other.is_file() else ""
            yield f"models/{name}", Golden(sha, problem, bool(noise), noise)
        for name in golden_files.strays(folder, wanted):
            yield f"models/{name}", Golden("", "no model expects this file")

    def _gpu_lanes(self) -> Iterator[tuple[str, Golden]]:
        """Models of upstream's GPU build, and what is missing of either lane from a GPU: no cell
        of the ledger asks for these files, so the index does."""
        for kind in GPU_LANES:
            folder = self.folder / kind
            if not folder.is_dir():
                continue
            try:
                index = golden_files.read_index(folder)
            except GoldenError as error:
                yield kind, Golden("", str(error))
                continue
            here = golden_files.files(folder)
            for name in sorted(set(index) - set(here)):
                yield f"{kind}/{name}", Golden("", "the index knows it and it is not there")
            for name in here if kind == MODELS_GPU else ():
                sha = file_sha(folder / name)
                yield f"{kind}/{name}", Golden(sha, _problem(folder / name, sha, index.get(name)))

    def _text_goldens(self) -> Iterator[tuple[str, Golden]]:
        from .text_replay import problem

        folder = self.folder / "text"
        known = {golden_files.INDEX}
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(folder).as_posix()
            if name not in known:
                yield f"text/{name}", Golden(file_sha(path), problem(name, folder))

    def expected_op_goldens(self) -> set[str]:
        """The goldens that the cases of the ops ask for, relative to goldens/ops."""
        from .op_table import OPS, golden_name

        return {
            golden_name(entry.name, case.name, dtype)
            for entry in OPS.values()
            for case in entry.cases
            for dtype in case.dtypes
        }

    def _trace_problem(self, path: Path) -> str:
        from oracles.schedule_driver import unpack

        if path.name.removesuffix(TRACE) not in self._traces:
            return "no trace has this name"
        try:
            unpack(path.read_bytes())
        except (ValueError, KeyError, TypeError) as error:
            return f"damaged: {error}"
        return ""

    # ---- code and limits

    def closure(self, cell: Cell) -> Mapping[str, str] | None:
        """The closure of the code that a cell runs."""
        if cell.kind in ("op", "probe"):
            return self._op_closure(cell)
        if cell.kind == "model":
            return self._model_closure(cell)
        if cell.kind == "text":
            from .text_replay import closure_of as text_closure

            return text_closure(cell.feature.removeprefix("text."))
        if cell.kind == "mutant":
            mutant = self._mutants[cell.feature.removeprefix("mutant.")]
            return closure_of(mutant, self.root, self._detectors)
        return self._closures.get(cell.kind)

    def refusal(self, cell: Cell) -> str:
        """Why a cell of an op that nothing asks for can't be run now; empty if it could.

        A library or a device that is missing here is no refusal: the cell can be run elsewhere.
        """
        from .op_cells import DEVICES

        if cell.kind != "op" or cell.device not in DEVICES:
            return ""
        found = self._refusals(cell.device, cell.feature)
        gone = f"there is no provider {cell.provider} any more"
        return found.get((cell.case, cell.provider), gone)

    def policy_sha(self) -> str:
        """sha256 of the limits."""
        return policy.load(self.root / "parity" / policy.POLICY.name).sha256

    def _op_closure(self, cell: Cell) -> Mapping[str, str] | None:
        from .op_replay import closure_of

        # Evidence of another device, and a probe of the case, run the same code.
        case = cell.case.partition(":")[2] or cell.case
        listed = self._op_cells.get((cell.feature, case, cell.provider))
        return None if listed is None else closure_of(listed)

    def _model_closure(self, cell: Cell) -> Mapping[str, str] | None:
        from .model_replay import closure_of

        listed = self._model_cells.get(cell.key[:3])
        return None if listed is None else closure_of(listed)

    def _refusals(self, device: str, feature: str) -> dict[tuple[str, str], str]:
        from .op_cells import expected

        if (device, feature) not in self._refused:
            self._refused[device, feature] = {
                (cell.case_name, cell.provider): cell.refused
                for cell in expected(device, f"{feature}/")
            }
        return self._refused[device, feature]

    @cached_property
    def _refused(self) -> dict[tuple[str, str], dict[tuple[str, str], str]]:
        return {}

    @cached_property
    def _model_cells(self) -> dict[tuple[str, ...], ModelCell]:
        return {}

    @cached_property
    def _op_cells(self) -> dict[tuple[str, ...], OpCell]:
        return {}

    @cached_property
    def _mutants(self) -> dict[str, Mutant]:
        path = self.root / "parity" / CATALOGUE.name
        found = catalogue(path) if path.is_file() else []
        return {mutant.name: mutant for mutant in found}

    @cached_property
    def _detectors(self) -> Detectors:
        return Detectors(self.root)

    @cached_property
    def _traces(self) -> list[str]:
        from .schedule_traces import specs

        return [spec["name"] for spec in specs()]

    @cached_property
    def _closures(self) -> dict[str, Mapping[str, str]]:
        found: dict[str, Mapping[str, str]] = {}
        if all((self.root / closures.path_of(symbol)).is_file() for symbol in SCHEDULE_CODE):
            found["schedule"] = closures.closure(SCHEDULE_CODE, root=self.root)
        if (self.root / CANARY_CODE).is_file():
            # Not what it calls: a change there must not hide that it is red.
            sha = file_sha(self.root / CANARY_CODE)
            found["canary"] = {"fine": sha, "coarse": sha}
        return found


def _problem(path: Path, sha: str, indexed: str | None) -> str:
    """Why a golden of an op can't be used; empty if it can."""
    try:
        golden_files.read(path)
    except GoldenError as error:
        return f"damaged: {error}"
    if indexed is None:
        return "the index does not know it"
    return "" if sha == indexed else "not the file that the index knows"

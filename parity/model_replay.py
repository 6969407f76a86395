# SPDX-License-Identifier: Apache-2.0
"""Cells of whole models: run ours in each mode, judge it against the golden, and say so in rows."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from vllmx.registry import own_architectures
from vllmx.tiny.configs import config_of

from . import closure, evidence, golden, policy
from .compare import Check
from .digests import canonical
from .evidence import Row, make_row
from .golden import GoldenError
from .model_gate import classes, farthest, judge, stream_errors, tie_of
from .model_golden import Scores, load, weights_sha
from .model_table import MODELS, ModelCell, ModelEntry
from .model_watch import unlike
from .op_replay import C_SOURCES, device_facts, sources
from .oracle_process import OracleBlocked

CODE = (
    "vllmx/worker/gpu_worker.py",
    "vllmx/worker/model_runner.py",
    "vllmx/core/scheduler.py",
    "vllmx/core/async_scheduler.py",
    "vllmx/attention/backends",
    "vllmx/kernels",
    "vllmx/ir",
    "vllmx/layers",
    "vllmx/quantization",
    "vllmx/model_loader/weights.py",
    "vllmx/model_loader/loader.py",
)
"""What runs a model, beside the model's own file, with all that it refers to."""
ALONE = (
    "parity/model_replay.py:ModelLane",
    "vllmx/engine/core.py",
    "vllmx/engine/executor.py",
    "vllmx/engine/llm_engine.py",
    "vllmx/engine/logprobs.py",
    "vllmx/engine/output_processor.py",
    "vllmx/engine/startup.py",
)
"""What stands around it, by its own text: what that refers to is mostly of other requests."""
LEFT_OUT = (
    "vllmx/entrypoints/",
    "vllmx/model_loader/gguf_tokenizer.py",
    "vllmx/model_loader/spm_merges.py",
    "vllmx/model_loader/tokenizer.py",
    "vllmx/reasoning/",
    "vllmx/structured_output/",
    "vllmx/tiny/",
)
"""What no cell runs, though types and engine refer to it: cells give token ids and get them, with
no grammar. What vllmx/tiny writes is checked against the golden."""
OF_REAL = {
    "smollm2-135m": "llama",
    "gemma3-270m": "gemma3",
    "qwen2.5-coder-0.5b": "qwen2",
    "qwen2.5-coder-1.5b": "qwen2",
    "iglm": "gpt2",
    "iglm-s": "gpt2",
}
"""Real model -> its file in vllmx/models."""
JUDGES = ("parity/model_gate.py:judge", "parity/model_engine.py")


def closure_of(cell: ModelCell) -> dict[str, str]:
    """The closure of a cell: the model, what runs it, its settings, and what judges it."""
    return dict(_closure(cell.entry.name))


@functools.cache
def _closure(name: str) -> dict[str, str]:
    found = sources()
    return closure.closure(_symbols(name), _beside(name), found.root, found, LEFT_OUT)


def _symbols(name: str) -> list[str]:
    """What the closure of a model follows."""
    root = sources().root
    files: list[str] = []
    for part in CODE:
        path = root / part
        listed = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        files += [p.relative_to(root).as_posix() for p in listed if p.name != "__init__.py"]
    return [_model(name, root), *files, *JUDGES]


def _beside(name: str) -> dict[str, str]:
    """What else decides on a model, by name: sums of it."""
    root = sources().root
    found = closure.beside([*C_SOURCES, *_composed(name, root)], root)
    found |= {symbol: sources().looked_at(symbol)[0] for symbol in ALONE}
    if MODELS[name].tiny:
        found["config.json"] = hashlib.sha256(canonical(config_of(name))).hexdigest()
    return found


def _model(name: str, root: Path) -> str:
    family = name.removeprefix("tiny-")
    path = f"vllmx/models/{OF_REAL.get(family, family)}.py"
    if (root / path).is_file():
        return path
    # Several families in one file, or a file that is called otherwise: the class and what it names.
    (architecture,) = config_of(name)["architectures"]
    return f"vllmx/models/{own_architectures()[architecture]}.py:{architecture}"


def _composed(name: str, root: Path) -> list[str]:
    """The files of conf/ that an engine of the model is composed from, this machine's own aside."""
    main = "conf/config.yaml"
    defaults = yaml.safe_load((root / main).read_text(encoding="utf-8"))["defaults"]
    chosen = {
        group: choice
        for entry in defaults
        if isinstance(entry, dict)
        for group, choice in entry.items()
    }
    if not MODELS[name].tiny:
        chosen["model"] = name
    files = [f"conf/{group}/{choice}.yaml" for group, choice in chosen.items() if choice]
    return [main, *(file for file in files if not file.startswith("conf/optional "))]


def limits_name(cell: ModelCell) -> str:
    """The limits in policy.yaml of a cell: what `auto` takes differs between the devices. A model
    in bfloat16 has those of 16-bit numbers with every provider: `torch` says what float32 does."""
    if cell.entry.dtype == "bfloat16":
        return "auto"
    return cell.provider if cell.device == "cpu" else f"{cell.provider}-{cell.device}"


class ModelLane:
    """Replays cells of models on one device."""

    def __init__(self, device: str = "cpu", folder: Path = golden.MODELS) -> None:
        self.device = device
        self.folder = folder
        self.policy = policy.load()
        self.run = evidence.run_facts()
        self.index = golden.known(folder)

    def rows(self, cells: Iterable[ModelCell]) -> Iterator[Row]:
        """A row for every cell, whatever comes of it; cells of one engine share it."""

        def engine(cell: ModelCell) -> tuple[str, str, bool, bool]:
            cut = cell.mode in ("chunked", "prefix")
            return cell.entry.name, cell.provider, cut, cell.mode == "eager"

        for (name, provider, *kind), group in groupby(sorted(cells, key=engine), engine):
            listed = list(group)
            try:
                yield from self._judged(MODELS[name], provider, *kind, listed)
            except OracleBlocked as error:
                yield from (self._row(cell, "skip", str(error)) for cell in listed)
            except GoldenError as error:
                yield from (self._row(cell, "invalid", str(error)) for cell in listed)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                yield from (self._row(cell, "error", reason) for cell in listed)

    def _judged(
        self, entry: ModelEntry, provider: str, chunked: bool, eager: bool, cells: list[ModelCell]
    ) -> Iterator[Row]:
        from .model_engine import build

        want, floor = load(entry, self.folder)
        if weights_sha(entry) != want.facts["args"]["weights_sha256"]:
            raise GoldenError(f"{entry.name}: the weights here are not those of the golden")
        llm = build(entry, provider, self.device, chunked, eager)
        try:
            for cell in cells:
                yield self._one(cell, llm, want, floor)
        finally:
            llm.shutdown()

    def _one(self, cell: ModelCell, llm: Any, want: Scores, floor: Scores) -> Row:
        from .model_engine import block_of, shown, sketches

        started = time.monotonic()
        limits = self.policy.models[limits_name(cell)]
        details: dict[str, Any] = {}
        checks: dict[str, Any] = {}
        parts, misses = shown(cell.mode, llm, want, cell.entry.prompts(), cell.entry.max_tokens)
        if cell.mode == "prefix":
            checks["cache_misses"] = Check(float(misses), 0.0)
        if cell.mode == "bs1":
            errors = stream_errors(want.stream, sketches(llm, want.sequences[-1]))
            floors = stream_errors((floor.base or want).stream, floor.stream)
            details["layers"] = [round(float(e), 9) for e in errors]
            details["floor_layers"] = [round(float(e), 9) for e in floors]
            over = [i for i, e in enumerate(errors) if e > max(2 * floors[i], limits.stream)]
            if over:
                details["drift"] = f"stream of layer {over[0]}"
        unlike_mode: list[str] = []
        for part, found in parts.items():
            ours = found.ours
            lacks = unlike(cell.mode, cell.device, found.asked, found.seen, found.decoding)
            unlike_mode += [f"{part}: {words}" for words in lacks]
            checks[f"{part}.length"] = Check(float(found.short), 0.0)
            checks[f"{part}.mode"] = Check(float(len(lacks)), 0.0)
            details[f"{part}.seen"] = found.seen.facts()
            checks |= {f"{part}.{k}": c for k, c in judge(want, floor, ours, limits).items()}
            details[f"{part}.positions"] = len(ours.where)
            details[f"{part}.tie"] = float(f"{tie_of(want, floor, ours, limits):.4g}")
            details.setdefault("worst", {})[part] = farthest(want, ours)
            of_class = classes(want, ours.where, ours.block)
            details |= {f"{part}.{name}.positions": len(rows) for name, rows in of_class.items()}
            if part == "prefill":
                empty = sum(not len(rows) for rows in of_class.values())
                checks["prefill.empty_classes"] = Check(float(empty), 0.0)
        failed = [name for name, check in checks.items() if not check.ok]
        reasons = [
            f"{name} {checks[name].measured:.3g}, {checks[name].limit:.3g} allowed"
            for name in failed
        ]
        reason = "; ".join([*reasons, *unlike_mode])
        return self._row(
            cell,
            "fail" if failed else "pass",
            reason,
            checks={name: check.as_dict() for name, check in checks.items()},
            oracle={
                **{k: str(want.facts["oracle"][k]) for k in ("name", "version", "lane")},
                "floor": floor.sha256,
            },
            golden_sha=want.sha256,
            teeth=teeth(want, floor, limits, block_of(llm)),
            proof=_proof(llm),
            seconds=round(time.monotonic() - started, 3),
            details=details,
        )

    def _row(self, cell: ModelCell, verdict: str, reason: str, **facts: Any) -> Row:
        row: dict[str, Any] = {
            "golden_sha": self.index.get(cell.entry.golden(cell.entry.lanes[0]), ""),
            "oracle": {
                "name": "",
                "version": "",
                "lane": cell.entry.lanes[0],
                "floor": self.index.get(cell.entry.golden(cell.entry.lanes[1]), ""),
            },
            "checks": {},
            "proof": {"selected": "", "calls": 0},
            **facts,
        }
        if reason:
            row["reason"] = reason
        return make_row(
            **row,
            feature=cell.feature,
            case="forced",
            provider=cell.provider,
            mode=cell.mode,
            verdict=verdict,
            closure=closure_of(cell),
            device=device_facts(self.device),
            policy_sha=self.policy.sha256,
            run=self.run,
        )


def _proof(llm: Any) -> dict[str, Any]:
    """Which provider served each op of the model."""
    from .model_engine import provider_of

    return {"selected": provider_of(llm)}


def teeth(want: Scores, floor: Scores, limits: Any, block: int) -> dict[str, bool]:
    """Whether the gate refuses plainly wrong copies of the golden: shifted, scaled, one in 200,
    and off by a little in one class of positions, which only the class's own rules can see."""
    import numpy as np

    from .model_gate import Ours

    every = np.arange(len(want.next))
    rare = want.val.astype(np.float64).copy()
    rare[:: len(every) // 5, 0] -= 2.0
    copies = {
        "shifted": Ours(every, np.roll(want.ids, 1, 0), np.roll(want.val, 1, 0), want.next),
        "scaled": Ours(every, want.ids, want.val * 1.1, want.next * 1.1),
        "rare": Ours(every, want.ids, rare, want.next),
    }
    for name, rows in classes(want, every, block).items():
        value, following = want.val.astype(np.float64).copy(), want.next.copy()
        value[rows] -= 2 * limits.mean_cap
        following[rows] -= 2 * limits.mean_cap
        copies[name] = Ours(every, want.ids, value, following, block=block)
    return {
        name: any(not check.ok for check in judge(want, floor, copy, limits).values())
        for name, copy in copies.items()
    }

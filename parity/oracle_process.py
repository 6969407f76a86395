# SPDX-License-Identifier: Apache-2.0
"""Runs an oracle as a process of its own, in its own environment; parity imports none of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from .dtypes import STORAGE, Array, from_bytes
from .golden import DTYPES, NAMES, GoldenError

ROOT = Path(__file__).resolve().parents[1]
OWN_ENVIRONMENT = (
    *("vllm_ops", "vllm_gdn", "gguf_dequant", "vllm_scheduler", "vllm_model", "vllm_text"),
    *("vllm_gpu_ops", "vllm_gpu_model"),
)
"""Oracles that need the environment of `nox -s oracle`; the others run in vllmx's own."""
SECONDS = 1200
ANYWHERE = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "COMPATIBLE",
    # What another run has compiled for wider registers is not to be found.
    "TORCHINDUCTOR_CACHE_DIR": str(Path.home() / ".cache" / "vllmx" / "inductor-avx2"),
}
"""The environment of every oracle: what any x86-64 of the last ten years computes alike. Wider
registers, or the code that MKL has for one maker's CPUs, sum in another order and would give other
bytes. Upstream's own library: oracles/vllm_pin.py."""
REGISTERS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
"""What of ANYWHERE an oracle goes without where upstream has no kernel for narrower registers."""


class OracleBlocked(GoldenError):
    """An oracle that can't run here."""


@dataclass(frozen=True)
class Question:
    """One case as an oracle is asked it."""

    id: str
    op: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What came back for a question: outputs, other lanes' outputs, and how it was computed."""

    id: str
    outputs: dict[str, Array]
    lanes: dict[str, dict[str, Array]]
    told: dict[str, Any]
    oracle: dict[str, Any]


def python_of(oracle: str) -> str:
    """The interpreter of an oracle; VLLMX_ORACLE_PYTHON overrides that of `nox -s oracle`."""
    if oracle not in OWN_ENVIRONMENT:
        return sys.executable
    return os.environ.get("VLLMX_ORACLE_PYTHON") or str(ROOT / ".venv-oracle" / "bin" / "python")


def search_path(oracle: str) -> str:
    """PYTHONPATH of an oracle: the checkout, and what this process has been given beside it where
    they share an environment."""
    shared = os.environ.get("PYTHONPATH") if oracle not in OWN_ENVIRONMENT else None
    return os.pathsep.join(filter(None, (str(ROOT), shared)))


def call(
    oracle: str,
    *arguments: Path,
    seconds: float = SECONDS,
    wide: bool = False,
    **environment: str,
) -> None:
    """Run an oracle; OracleBlocked where it can't run here, GoldenError where it fails. wide: with
    the registers of AVX-512."""
    if wide and not _has_avx512():
        raise OracleBlocked(f"{oracle}: upstream's kernel needs a CPU with AVX-512")
    common = {k: v for k, v in ANYWHERE.items() if not (wide and k in REGISTERS)}
    fixed = {**common, "PYTHONPATH": search_path(oracle), "PYTHONHASHSEED": "0"}
    environment = {**fixed, **environment}
    python = python_of(oracle)
    if not Path(python).is_file():
        raise OracleBlocked(f"{oracle}: there is no {python}; make it with `nox -s oracle`")
    try:
        done = subprocess.run(
            [python, "-m", f"oracles.{oracle}", *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise GoldenError(f"{oracle} gave no answer in {seconds:.0f} s") from error
    if done.returncode == 2:
        last = (done.stderr.strip().splitlines() or ["it can't run here"])[-1]
        raise OracleBlocked(f"{oracle}: {last}")
    if done.returncode:
        raise GoldenError(f"{oracle} ended with {done.returncode}: {done.stderr[-2000:]}")


def _has_avx512() -> bool:
    import torch

    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def ask(oracle: str, questions: Iterable[Question], wide: bool = False) -> list[Answer]:
    """Answers in the order of the questions; OracleBlocked where the oracle can't run here."""
    listed = list(questions)
    with tempfile.TemporaryDirectory() as folder:
        job, out = Path(folder) / "job.safetensors", Path(folder) / "out.safetensors"
        job.write_bytes(_job(listed))
        call(oracle, job, out, wide=wide)
        return _answers(listed, out)


def _job(questions: list[Question]) -> bytes:
    """A safetensors file with the questions and their tensors."""
    tensors: dict[str, Array] = {}
    cases = []
    for question in questions:
        arguments: dict[str, Any] = {}
        for name, value in question.arguments.items():
            if isinstance(value, Array):
                key = f"{question.id}/in.{name}"
                tensors[key] = value
                arguments[name] = {"tensor": key}
            else:
                arguments[name] = value
        cases.append({"id": question.id, "op": question.op, "args": arguments})
    return _safetensors(tensors, {"job": json.dumps(cases)})


def _safetensors(tensors: dict[str, Array], metadata: dict[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata}
    data, offset = [], 0
    # Wide elements first: readers want each tensor aligned to its element.
    for name in sorted(tensors, key=lambda n: (-STORAGE[tensors[n].dtype].itemsize, n)):
        raw = tensors[name].tobytes()
        entry = {"dtype": NAMES[tensors[name].dtype], "shape": list(tensors[name].shape)}
        header[name] = {**entry, "data_offsets": [offset, offset + len(raw)]}
        offset += len(raw)
        data.append(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(data)


def _answers(questions: list[Question], path: Path) -> list[Answer]:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    with safe_open(str(path), "numpy") as file:
        told = json.loads(file.metadata()["answer"])
    found: dict[str, Array] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            raw = data[8 + size + first : 8 + size + last]
            found[name] = from_bytes(DTYPES[entry["dtype"]], tuple(entry["shape"]), raw)
    answers = []
    for question in questions:
        mine = {k.removeprefix(f"{question.id}/"): v for k, v in found.items()}
        mine = {k: v for k, v in mine.items() if k.startswith(("out.", "lane."))}
        outputs = {k.removeprefix("out."): v for k, v in mine.items() if k.startswith("out.")}
        lanes: dict[str, dict[str, Array]] = {}
        for key, value in mine.items():
            if key.startswith("lane."):
                lane, _, name = key.removeprefix("lane.").rpartition(".")
                lanes.setdefault(lane, {})[name] = value
        case = told["cases"][question.id]
        answers.append(Answer(question.id, outputs, lanes, case, told["oracle"]))
    return answers

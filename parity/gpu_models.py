# SPDX-License-Identifier: Apache-2.0
"""`vllmx parity record oracle=vllm_gpu_model select=model.NAME`: upstream's models on a GPU.

A model's sequences are continued and scored by upstream's CUDA graphs, and the same sequences
scored by its eager steps, in bfloat16. How far the two are from each other is upstream's own noise,
by which `python -m parity.gpu_tokens --golden NAME` measures ours. They lie in goldens/models_gpu.
"""

from __future__ import annotations

import json
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from . import golden
from .checkpoints import oracle_folder
from .golden import GoldenError
from .model_golden import pack_answer
from .model_table import MODELS, ModelEntry, chosen
from .oracle_process import OracleBlocked, call

ORACLE = "vllm_gpu_model"
FOLDER = golden.GOLDENS / "models_gpu"
GRAPH, EAGER = "graph", "eager"
TOP_K = 10
"""Ids of a position that are kept; gpu_tokens.py compares fewer."""
SIDE_BY_SIDE = 6
"""Models that are asked at a time: an engine compiles on the CPU for most of its life, and takes
some 5 GB of the GPU."""
KEPT = ("lp.val", "lp.next", "lp.top")
"""What the eager lane adds: tokens and ids are those of the graphs."""


def record(select: str | None, check: bool, folder: Path = FOLDER) -> int:
    """Record the selected models, several at a time; returns the gravest exit code of any."""
    entries = chosen(select)
    if not entries:
        print(f"no model is called like {select}; they are {', '.join(MODELS)}")
        return 2
    codes, changed = [], 0
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        asked = {pool.submit(ask_both, entry): entry for entry in entries}
        for future in as_completed(asked):
            name = asked[future].name
            try:
                answers = future.result()
            except GoldenError as error:
                print(f"{name}: {error}", flush=True)
                codes.append(3 if isinstance(error, OracleBlocked) else 2)
                continue
            for way, data in answers.items():
                path = folder / name / f"{way}.safetensors"
                same = path.is_file() and path.read_bytes() == data
                changed += not same
                told = f"models_gpu/{name}/{path.name}: {'same' if same else 'new'}"
                print(f"{told}, {len(data)} bytes", flush=True)
                if not check and not same:
                    golden.write(path, data, golden.MODEL_MAX_BYTES)
    if changed and not check:
        golden.write_index(folder)
    codes.append(int(check and changed > 0))
    return next((code for code in (2, 3, 1) if code in codes), 0)


def ask_both(entry: ModelEntry) -> dict[str, bytes]:
    """The bytes of both lanes; GoldenError where the eager one scored other ids."""
    job = {**entry.job(str(oracle_folder(entry))), "top_k": TOP_K}
    first, told = _ask(job)
    found = {GRAPH: pack_answer(entry, told["lane"], first, told)}
    sequences = [first["tokens"][a:b].tolist() for a, b in pairwise(first["offsets"])]
    answer, told = _ask({**job, "prompts": [], "forced": sequences}, EAGER)
    places = _places(answer["lp.ids"], first["lp.ids"])
    answer["lp.val"] = np.where(
        places >= 0, np.take_along_axis(answer["lp.val"], places.clip(min=0), axis=1), np.nan
    ).astype(np.float32)
    kept = {name: answer[name] for name in KEPT}
    found[EAGER] = pack_answer(entry, told["lane"], kept, told)
    return found


def load(name: str, folder: Path = FOLDER) -> dict[str, golden.Golden]:
    """Both lanes of a model; GoldenError where one is missing or not what the index knows."""
    index = golden.read_index(folder)
    found = {}
    for way in (GRAPH, EAGER):
        path = f"{name}/{way}.safetensors"
        found[way] = golden.read(folder / path)
        if index.get(path) != found[way].sha256:
            raise GoldenError(f"{path} is not the file that the index knows")
    return found


def _places(listed: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """[P, K], where each of `wanted` stands in its row of `listed`; -1 where it doesn't."""
    same = wanted[:, :, None] == listed[:, None, :]
    return np.where(same.any(axis=2), same.argmax(axis=2), -1)


def _ask(job: dict[str, Any], way: str = GRAPH) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as work:
        asked, out = Path(work) / "job.json", Path(work) / "out.safetensors"
        asked.write_text(json.dumps(job))
        words = (asked, out) if way == GRAPH else (asked, out, Path("--eager"))
        call(ORACLE, *words)
        with safe_open(str(out), "numpy") as file:
            told = json.loads(file.metadata()["oracle"])
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    # Graphs can't be looked into, and bfloat16's streams are no floor of anything here.
    found.pop("stream", None)
    return found, told

# SPDX-License-Identifier: Apache-2.0
"""How an oracle of whole models is asked, and what it answers: a JSON file in, safetensors out.

JOB: {"folder", "prompts": [ids], "forced": [ids], "max_tokens", "top_k", "sketch_tokens", "dtype",
"longest"}. Each prompt is continued greedily by max_tokens; the sequences that come of it, and the
forced ones after them, are then scored in whole. A lane that is to judge the same sequences is
given them all as `forced`, and the ids to score as `ids` [positions, top_k].

OUT: `tokens` int32, all sequences one after another, `offsets` int32 [sequences + 1]; for each
position but a sequence's last, in that order, `lp.ids` int32 [positions, top_k], most likely
first, `lp.val` float32, their log-probabilities, `lp.next` float32, that of the token that follows,
`lp.top` int32, the most likely id; `stream` float32 [layers, rows, 64], sketches (sketch.py) of
hidden state plus residual after each layer, for the last `sketch_tokens` tokens of the last
sequence, or `stream.full` [layers + 1, tokens, hidden], with the embedding first, where the job
says `full`; where it names a `layer`, float64 `tap.f32.STEP` and `tap.f64.STEP` [tokens, width] of
what is computed within it (layer_taps.py; transformers only). Metadata `oracle`: JSON of what
computed, with the order of those `steps`.

Several pairs of JOB and OUT are answered in processes of their own, forked one after another from
one that has imported the oracle, which takes longer than a tiny model does. An OUT that failed is
not there; what went wrong is told in a file beside it with the suffix `.error`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file

from oracles.sketch import sketch


@dataclass
class Job:
    """What is asked; see the module."""

    folder: str
    prompts: list[list[int]]
    forced: list[list[int]]
    max_tokens: int
    top_k: int
    sketch_tokens: int
    dtype: str = "float32"
    longest: int = 1024
    ids: str | None = None
    full: bool = False
    layer: int | None = None


@dataclass
class Answer:
    """What an oracle found: scores by position, and the stream of the last sequence; `runner` is
    upstream's model runner that answered, where it is upstream's."""

    sequences: list[list[int]]
    ids: list[np.ndarray] = field(default_factory=list)
    val: list[np.ndarray] = field(default_factory=list)
    next: list[float] = field(default_factory=list)
    top: list[int] = field(default_factory=list)
    stream: list[np.ndarray] = field(default_factory=list)
    taps: dict[str, np.ndarray] = field(default_factory=dict)
    runner: str = ""

    def add(self, ids: np.ndarray, val: np.ndarray, following: float, top: int) -> None:
        """Take in one position."""
        self.ids.append(ids)
        self.val.append(val)
        self.next.append(following)
        self.top.append(top)

    def tensors(self, job: Job) -> dict[str, np.ndarray]:
        """The tensors of OUT."""
        lengths = [len(sequence) for sequence in self.sequences]
        found = {
            "tokens": np.array([*chain(*self.sequences)], dtype=np.int32),
            "offsets": np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
            "lp.ids": np.stack(self.ids).astype(np.int32),
            "lp.val": np.stack(self.val).astype(np.float32),
            "lp.next": np.array(self.next, dtype=np.float32),
            "lp.top": np.array(self.top, dtype=np.int32),
        }
        if job.full:
            found["stream.full"] = np.stack(self.stream).astype(np.float32)
        else:
            layers = self.stream[1:]
            if layers:  # graphs can't be looked into
                found["stream"] = np.stack([sketch(rows[-job.sketch_tokens :]) for rows in layers])
        taps = {f"tap.{name}": np.ascontiguousarray(rows) for name, rows in self.taps.items()}
        return {**found, **taps}


def stack_of(model: Any) -> Any:
    """The decoder layers of a model, whatever they are called: its longest list of modules."""
    lists = [m for m in model.modules() if type(m).__name__ == "ModuleList"]
    return max(lists, key=len)


def main(
    name: str,
    available: Callable[[], Literal[True] | str],
    describe: Callable[[Job], dict[str, Any]],
    compute: Callable[[Job], Answer],
    prepare: Callable[[], object] = object,
) -> int:
    """The command line of an oracle: 0 answered, 1 a job of several failed, 2 not available here
    (the reason on stderr). `prepare` imports what every job needs."""
    parser = argparse.ArgumentParser(description=f"Answers jobs of whole models as {name}.")
    parser.add_argument("--available", action="store_true", help="only say whether it can run")
    parser.add_argument("files", type=Path, nargs="*", metavar="JOB OUT")
    args, _ = parser.parse_known_args()  # an oracle may know words of its own
    ready = available()
    if ready is not True:
        print(ready, file=sys.stderr)
        return 2
    if args.available:
        print(name)
        return 0
    if not args.files or len(args.files) % 2:
        parser.error("give JOB and OUT")
    pairs = list(zip(args.files[::2], args.files[1::2]))

    def answer(asked: Path, out: Path) -> None:
        _answer(name, asked, out, describe, compute)

    if len(pairs) == 1:
        answer(*pairs[0])
        return 0
    prepare()
    return max(_forked(answer, *pair) for pair in pairs)


def _answer(
    name: str,
    asked: Path,
    out: Path,
    describe: Callable[[Job], dict[str, Any]],
    compute: Callable[[Job], Answer],
) -> None:
    job = Job(**json.loads(asked.read_text()))
    answer = compute(job)
    told = {**describe(job), "numpy": np.__version__, "command": f"python -m oracles.{name}"}
    if answer.runner:
        told["runner"] = answer.runner
    if answer.taps:
        told["steps"] = [n.removeprefix("f64.") for n in answer.taps if n.startswith("f64.")]
    save_file(answer.tensors(job), str(out), {"oracle": json.dumps(told, sort_keys=True)})


def _forked(answer: Callable[[Path, Path], None], asked: Path, out: Path) -> int:
    """Answer one job in a child process; 0, or 1 where it failed."""
    child = os.fork()
    if not child:
        code = 1
        try:
            answer(asked, out)
            code = 0
        except Exception:
            out.with_suffix(".error").write_text(traceback.format_exc())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return int(status != 0)

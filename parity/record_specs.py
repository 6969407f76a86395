# SPDX-License-Identifier: Apache-2.0
"""Recording of behaviour: texts and scheduler traces, whose oracles are given specs in JSON."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import golden
from .checkpoints import gguf_file
from .golden import GoldenError
from .model_table import MODELS
from .oracle_process import OracleBlocked, call

SCHEDULE = golden.GOLDENS / "schedule"
SUFFIX = ".json.zz"


def record_text(select: str | None, check: bool, folder: Path = golden.TEXT) -> int:
    """Record the selected specs of texts; returns the exit code of the verb."""
    from .text_cases import selected
    from .text_replay import golden_name, pack

    chosen = selected(select)

    def answers() -> Iterator[tuple[str, bytes]]:
        names = {spec["model"] for spec in chosen if spec["model"]}
        files = {name: str(gguf_file(MODELS[name])) for name in sorted(names)}
        with asked({"specs": chosen, "files": files}) as (job, out):
            call("vllm_text", job, out)
            told = json.loads(out.read_text())
        for spec in chosen:
            yield golden_name(spec), pack(spec, told["answers"][spec["name"]], told["oracle"])

    code = _record("text", chosen, answers, folder, check, golden.write)
    if not check and chosen and code == 0:
        golden.write_index(folder)
    return code


def record_schedule(select: str | None, check: bool, folder: Path = SCHEDULE) -> int:
    """Record the selected scheduler traces; returns the exit code of the verb."""
    from .schedule_traces import specs

    words = select.split(",") if select else [""]
    chosen = [s for s in specs() if any(f"schedule.{s['name']}".startswith(w) for w in words)]

    def answers() -> Iterator[tuple[str, bytes]]:
        with asked(chosen) as (job, out):
            call("vllm_scheduler", job, out)
            for spec in chosen:
                name = f"{spec['name']}{SUFFIX}"
                yield name, (out / name).read_bytes()

    return _record("schedule", chosen, answers, folder, check, Path.write_bytes)


@contextmanager
def asked(job: Any) -> Iterator[tuple[Path, Path]]:
    """(file of `job`, where the answer goes), for as long as they are needed."""
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "job.json"
        path.write_text(json.dumps(job))
        yield path, Path(work) / "out"


def _record(
    kind: str,
    chosen: Sequence[Any],
    answers: Callable[[], Iterator[tuple[str, bytes]]],
    folder: Path,
    check: bool,
    write: Callable[[Path, bytes], Any],
) -> int:
    """Compare what the oracle says with what lies in `folder`; write it there unless `check`."""
    if not chosen:
        print(f"{kind}: nothing is selected")
        return 2
    same = changed = 0
    try:
        found = list(answers())
    except GoldenError as error:
        print(error)
        return 3 if isinstance(error, OracleBlocked) else 2
    for name, data in found:
        path = folder / name
        if path.is_file() and path.read_bytes() == data:
            same += 1
            continue
        changed += 1
        print(f"{kind}/{name}: {'differs' if path.is_file() else 'new'}, {len(data)} bytes")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, data)
    print(f"{kind}: {same + changed} goldens, {changed} changed")
    return 1 if check and changed else 0

# SPDX-License-Identifier: Apache-2.0
"""Decision replay: vllmx's scheduler in the traces that upstream's was recorded in.

`python -m parity.replay_schedule` replays every golden and compares integer by integer: scheduled
tokens, block ids and their order, preemptions, finish reasons, cached tokens, free blocks, block
hashes. A golden that is missing, damaged or of another spec is invalid, never passed. The exit
code is 0 only if every trace of `parity/schedule_traces.py` passed.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from oracles.schedule_driver import Player, Side, request_maker, unpack
from parity.schedule_traces import MAMBA_ALIGN, specs
from vllmx.config import VllmConfig
from vllmx.core import block_hash
from vllmx.core.async_scheduler import AsyncScheduler
from vllmx.core.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllmx.core.output import ModelRunnerOutput
from vllmx.core.scheduler import Scheduler
from vllmx.request import Request, RequestStatus
from vllmx.sampling_params import SamplingParams

GOLDENS = Path(__file__).parent / "goldens" / "schedule"
SUFFIX = ".json.zz"
ORACLE = {"oracle": "vllm 0.25.0", "runner": "v2", "hash_function": "sha256_cbor"}


@dataclass(frozen=True)
class Verdict:
    """What came of one trace; `detail` is empty if it passed."""

    name: str
    status: Literal["passed", "differs", "invalid"]
    detail: str = ""


def make_config(config: dict[str, Any]) -> VllmConfig:
    """A VllmConfig with the limits of a spec."""
    result = VllmConfig()
    result.model_config.max_model_len = config["max_model_len"]
    for key in (
        *["max_num_seqs", "max_num_batched_tokens", "max_num_scheduled_tokens", "policy"],
        *["long_prefill_token_threshold", "enable_chunked_prefill", "watermark"],
        *["scheduler_reserve_full_isl", "async_scheduling"],
    ):
        setattr(result.scheduler_config, key, config[key])
    result.cache_config.block_size = config["block_size"]
    result.cache_config.enable_prefix_caching = config["enable_prefix_caching"]
    result.cache_config.num_gpu_blocks = config["num_blocks"]
    if MAMBA_ALIGN in config["groups"]:
        result.cache_config.mamba_cache_mode = "align"
    return result


def make_scheduler(config: dict[str, Any]) -> Scheduler:
    """The scheduler of a spec's `config`, with the same KV groups as the oracle's."""
    groups = []
    for number, window in enumerate(config["groups"]):
        shape = {"block_size": config["block_size"], "num_kv_heads": 1, "head_size": 1}
        spec: KVCacheSpec
        if window is None:
            spec = FullAttentionSpec(**shape, dtype="float32")
        elif window == MAMBA_ALIGN:
            spec = MambaSpec(
                block_size=config["block_size"],
                shapes=((2 * config["block_size"],),),
                dtypes=("float32",),
                mamba_cache_mode="align",
            )
        else:
            spec = SlidingWindowSpec(**shape, dtype="float32", sliding_window=window)
        groups.append(KVCacheGroupSpec([f"layer{number}"], spec))
    return (AsyncScheduler if config["async_scheduling"] else Scheduler)(
        make_config(config),
        KVCacheConfig(config["num_blocks"], [], groups),
        None,
        config["block_size"],
        log_stats=True,
        count_common_prefix=True,
    )


def make_side(spec: dict[str, Any]) -> Side:
    """What the driver needs for `spec`; call it within `hash_seed`."""
    hasher = block_hash.get_request_block_hasher(
        spec["config"]["block_size"], block_hash.sha256_cbor
    )

    make_request = request_maker(Request, SamplingParams, hasher)

    def make_output(names: list[str], sampled: list[list[int]]) -> ModelRunnerOutput:
        index = {name: number for number, name in enumerate(names)}
        return ModelRunnerOutput(names, index, sampled)

    scheduler = make_scheduler(spec["config"])
    return Side(scheduler, make_request, make_output, RequestStatus.FINISHED_ABORTED)


@contextmanager
def hash_seed(seed: str) -> Iterator[None]:
    """Block hashes as in a process with PYTHONHASHSEED=`seed`."""
    before = os.environ.get("PYTHONHASHSEED")
    none_hash = getattr(block_hash, "NONE_HASH", None)
    os.environ["PYTHONHASHSEED"] = seed
    try:
        block_hash.init_none_hash(block_hash.sha256_cbor)
        yield
    finally:
        if before is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = before
        if none_hash is not None:
            block_hash.NONE_HASH = none_hash


def first_difference(want: Any, got: Any, path: str = "") -> str | None:
    """Where `got` leaves `want`, both JSON values; None if they are equal, type by type."""
    if type(want) is not type(got):
        return f"{path}: upstream {want!r:.200}, vllmx {got!r:.200}"
    if isinstance(want, dict):
        keys = [*want, *(key for key in got if key not in want)]
        for key in keys:
            if key not in want or key not in got:
                return f"{path}.{key}: only in {'upstream' if key in want else 'vllmx'}"
            if found := first_difference(want[key], got[key], f"{path}.{key}"):
                return found
        return None
    if isinstance(want, list):
        for number, (a, b) in enumerate(zip(want, got)):
            if found := first_difference(a, b, f"{path}[{number}]"):
                return found
        if len(want) != len(got):
            return f"{path}: upstream has {len(want)} entries, vllmx {len(got)}"
        return None
    return None if want == got else f"{path}: upstream {want!r:.200}, vllmx {got!r:.200}"


def replay(golden: dict[str, Any]) -> str | None:
    """Where vllmx leaves the golden's stream, None if nowhere."""
    with hash_seed(golden["PYTHONHASHSEED"]):
        try:
            stream = Player(golden["spec"], make_side(golden["spec"])).run()
        except Exception as error:
            return f"vllmx raised {type(error).__name__}: {error}"
    if json.dumps(stream, sort_keys=True) == json.dumps(golden["stream"], sort_keys=True):
        return None
    found = first_difference(golden["stream"], stream)
    assert found is not None
    if not found.startswith(".events["):
        return found
    index = int(found[len(".events[") : found.index("]")])
    events = golden["stream"]["events"]
    step = events[min(index, len(events) - 1)]["step"]
    return f"step {step}, {found[1:]}"


def read(spec: dict[str, Any], folder: Path = GOLDENS) -> dict[str, Any]:
    """The golden of `spec`; ValueError if it is missing, damaged or made for something else."""
    path = folder / f"{spec['name']}{SUFFIX}"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"no golden: {error.strerror}; record it with `nox -s record`") from error
    golden = unpack(data)
    for key, value in {**ORACLE, "spec": spec}.items():
        if found := first_difference(value, golden.get(key), key):
            raise ValueError(f"recorded for something else: {found}")
    if not golden["stream"]["events"]:
        raise ValueError("it records nothing")
    return golden


def check(spec: dict[str, Any], folder: Path = GOLDENS) -> Verdict:
    """Replay the golden of `spec`."""
    try:
        golden = read(spec, folder)
    except (ValueError, KeyError, TypeError) as error:
        return Verdict(spec["name"], "invalid", str(error))
    difference = replay(golden)
    if difference is not None:
        return Verdict(spec["name"], "differs", difference)
    return Verdict(spec["name"], "passed")


def strays(folder: Path = GOLDENS) -> list[str]:
    """Files that are no golden of any spec."""
    known = {f"{spec['name']}{SUFFIX}" for spec in specs()}
    return sorted(path.name for path in folder.iterdir() if path.name not in known)


def main(folder: Path = GOLDENS) -> int:
    """Print every trace that did not pass, and the counts."""
    verdicts = [check(spec, folder) for spec in specs()]
    verdicts += [Verdict(name, "invalid", "no spec has this name") for name in strays(folder)]
    for verdict in verdicts:
        if verdict.status != "passed":
            print(f"{verdict.name}: {verdict.status}: {verdict.detail}")
    counts = Counter(verdict.status for verdict in verdicts)
    print(
        f"{len(verdicts)} traces: {counts['passed']} passed, {counts['differs']} differ, "
        f"{counts['invalid']} invalid"
    )
    return 0 if counts["passed"] == len(verdicts) and verdicts else 1


if __name__ == "__main__":
    sys.exit(main())

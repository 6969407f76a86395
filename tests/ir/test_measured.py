# SPDX-License-Identifier: Apache-2.0
"""`kernel=auto` goes by measured times, where there are any for this device and these sources."""

import json
import logging
from pathlib import Path

import pytest
import torch

from vllmx import platform
from vllmx.cli import main
from vllmx.config import KernelConfig
from vllmx.ir import measured
from vllmx.ir.measured import Measured, in_order, path_of, shape_class
from vllmx.ir.select import OpTable
from vllmx.tasks import bench_kernels
from vllmx.tasks.bench_kernels import Trial, providers, seconds_of, trials

NORM = {"hidden_size": 1000}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(platform, "KERNEL_CACHE", str(tmp_path))
    measured._warn_once.cache_clear()
    return tmp_path


def write(**seconds: float) -> Path:
    key = Measured.key("rms_norm", torch.float32, NORM)
    return Measured({key: {k: {"1 rows": v, "64 rows": v} for k, v in seconds.items()}}).save(
        "cpu", Path(platform.KERNEL_CACHE)
    )


def table(**kernel: object) -> OpTable:
    return OpTable(KernelConfig(**kernel), "cpu", torch.float32)


def test_the_fastest_is_chosen_for_its_class_of_shapes_and_says_why(folder: Path) -> None:
    write(cpu=2e-6, native=9e-6, torch=5e-6)
    ops = table()
    assert ops.choose("rms_norm", hidden_size=513).provider == "cpu"
    choice = ops.choices["rms_norm"]
    assert choice.because == (
        "measured for hidden_size <= 1024: cpu 2.0 us, torch 5.0 us, native 9.0 us"
    )
    assert choice.refused["native"] == "not first in the priority list"
    assert ops.choose("rms_norm", hidden_size=1025).provider == "native"  # none was measured
    assert ops.choose("silu_and_mul").provider == "native"
    assert "the list for cpu" in ops.choices["silu_and_mul"].because


def test_the_folder_is_that_of_the_config_and_no_variable_decides(
    folder: Path, tmp_path_factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(cpu=2e-6, native=9e-6)
    other = tmp_path_factory.mktemp("other")
    monkeypatch.setenv("VLLMX_KERNEL_CACHE", str(other))
    assert table().choose("rms_norm", **NORM).provider == "cpu"
    assert table(cache_dir=str(other)).choose("rms_norm", **NORM).provider == "native"
    monkeypatch.setenv("HOME", str(other))
    assert platform.kernel_cache_dir("~/times") == other / "times"


def test_what_is_nearly_as_fast_is_left_as_it_is(folder: Path) -> None:
    write(cpu=0.95e-6, native=1e-6)
    assert table().choose("rms_norm", **NORM).provider == "native"
    assert in_order(["a", "b", "c"], {"a": 1.0, "b": 0.95, "c": 0.8}) == ["c", "a", "b"]
    assert in_order(["a", "b", "c"], {"b": 1.0}) == ["b", "a", "c"]
    assert in_order(["a"], {"a": 1.0, "new": 0.5}) == ["new", "a"]


def test_a_config_that_names_providers_wins(folder: Path) -> None:
    write(cpu=1e-6, native=9e-6, torch=5e-6)
    assert table(default_priority=["torch"]).choose("rms_norm", **NORM).provider == "torch"
    named = table(ir_op_priority={"rms_norm": ["native"]})
    assert named.choose("rms_norm", **NORM).provider == "native"
    assert named.choices["rms_norm"].because == "kernel.ir_op_priority.rms_norm"
    assert table(batch_invariant=True).choose("rms_norm", **NORM).provider == "native"


def test_a_fast_provider_that_refuses_is_passed_over(folder: Path) -> None:
    write(triton=1e-9, native=9e-6)
    ops = table()
    assert ops.choose("rms_norm", **NORM).provider == "native"
    assert "runs on a GPU" in ops.choices["rms_norm"].refused["triton"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "[]",
        "{}",
        '{"format": 1}',
        '{"format": 0, "identity": {}, "times": {}}',
        '{"format": 1, "identity": {"device": "another"}, "times": {}}',
        '{"format": 1, "identity": "own", "times": {"k": {"cpu": {"1 rows": 0}}}}',
        '{"format": 1, "identity": "own", "times": {"k": {"cpu": {"1 rows": "soon"}}}}',
        '{"format": 1, "identity": "own", "times": {"k": {"cpu": {}}}}',
        '{"format": 1, "identity": "own", "times": {"k": 3}}',
        '{"format": 1, "identity": "own", "times": 3}',
    ],
)
def test_a_file_that_is_not_right_is_ignored_with_one_warning(
    folder: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    own = json.dumps(measured.identity("cpu"))
    path_of("cpu", folder).write_text(text.replace('"own"', own))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert table().choose("rms_norm", **NORM).provider == "native"
    (record,) = caplog.records
    assert str(path_of("cpu", folder)) in record.getMessage()
    assert "`vllmx bench kernels` writes them anew" in record.getMessage()


def test_nothing_measured_is_nothing_to_warn_of(folder, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        assert table().choose("rms_norm", **NORM).provider == "native"
    assert not caplog.records


def test_another_device_version_or_source_has_another_file(folder, monkeypatch) -> None:
    write(cpu=1e-6, native=9e-6)
    for change in ({"device": "H300"}, {"torch": "9.9"}, {"kernels": "0"}):
        told = {**measured.identity("cpu"), **change}
        with monkeypatch.context() as patch:
            patch.setattr(measured, "identity", lambda device, told=told: told)
            assert table().choose("rms_norm", **NORM).provider == "native"
    assert table().choose("rms_norm", **NORM).provider == "cpu"


def test_only_what_all_were_tried_with_is_compared() -> None:
    key = Measured.key("rms_norm", torch.float32, NORM)
    times = {"a": {"1 rows": 1.0, "64 rows": 4.0}, "b": {"64 rows": 3.0}}
    assert Measured({key: times}).scores("rms_norm", torch.float32, NORM) == pytest.approx(
        {"a": 4.0, "b": 3.0}
    )
    assert Measured().scores("rms_norm", torch.float32, NORM) == {}


def test_classes_of_shapes() -> None:
    assert shape_class({}) == "any shape"
    assert shape_class({"hidden_size": 1024}) == "hidden_size <= 1024"
    facts = {"head_size": 96, "sliding_window": 512, "soft_cap": None}
    assert shape_class(facts) == "head_size <= 128, sliding_window"
    assert shape_class({**facts, "kv_cache_dtype": torch.float8_e4m3fn}).endswith("one-byte cache")
    assert shape_class({**facts, "kv_cache_dtype": torch.float32}) == shape_class(facts)


def test_every_trial_has_several_providers_and_every_one_runs() -> None:
    seen = set()
    for trial in trials("cpu", torch.float32):
        if (trial.op, shape_class(trial.facts)) in seen or trial.op == "paged_attention":
            continue
        seen.add((trial.op, shape_class(trial.facts)))
        assert len(providers(trial, "cpu", torch.float32)) >= 2
        for impl in providers(trial, "cpu", torch.float32):
            bench_kernels.call_of(impl, trial)()
    assert {op for op, _ in seen} >= {"rms_norm", "silu_and_mul", "rotary_embedding"}


def test_slow_calls_run_once() -> None:
    calls = []
    bench_seconds = bench_kernels.SLOW_SECONDS
    try:
        bench_kernels.SLOW_SECONDS = 0.0
        assert seconds_of(lambda: calls.append(1), "cpu", 5) > 0
    finally:
        bench_kernels.SLOW_SECONDS = bench_seconds
    assert calls == [1]


def test_the_command_writes_what_auto_and_info_read(folder, monkeypatch, capsys) -> None:
    few: list[Trial] = []
    for trial in trials("cpu", torch.float32):
        if trial.op in ("rms_norm", "paged_attention") and len(few) < 40:
            small = trial.facts.get("hidden_size") == 1024 or (
                trial.facts.get("head_size") == 64 and trial.name.startswith("1 x 1 of")
            )
            few += [trial] if small else []
    monkeypatch.setattr(bench_kernels, "trials", lambda device, dtype: iter(few))
    told = json.dumps({"rms_norm | bfloat16 | any shape": {"cpu": {"1 rows": 1.0}}})
    earlier = Measured(json.loads(told))
    earlier.save("cpu", folder)
    assert main(["bench", "kernels", "device=cpu", "bench.num_iters=1"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert Path(shown["path"]) == path_of("cpu", folder)
    found = measured.load("cpu", folder)
    assert set(found.times) == set(shown["times"]) | set(earlier.times)
    key = Measured.key("rms_norm", torch.float32, {"hidden_size": 1024})
    assert set(shown["times"][key]) == {"cpu", "native", "torch"}
    assert set(shown["times"][key]["native"]) == {"1 rows", "64 rows"}
    attention = Measured.key("paged_attention", torch.float32, {"head_size": 64})
    assert set(shown["times"][attention]) == {"native", "sdpa", "torch"}
    assert main(["info", "device=cpu"]) == 0
    out = capsys.readouterr().out
    assert "    by the list for cpu; `vllmx bench kernels` measures" in out


def test_a_provider_that_fails_is_told_and_not_chosen(folder, monkeypatch, capsys) -> None:
    trial = next(t for t in trials("cpu", torch.float32) if t.op == "rms_norm")
    monkeypatch.setattr(bench_kernels, "trials", lambda device, dtype: iter([trial]))
    call_of = bench_kernels.call_of

    def broken(impl, trial):
        if impl.provider == "native":
            raise RuntimeError("no such luck")
        return call_of(impl, trial)

    monkeypatch.setattr(bench_kernels, "call_of", broken)
    assert main(["bench", "kernels", "device=cpu", "bench.num_iters=1"]) == 0
    assert "not native: no such luck" in capsys.readouterr().err
    assert table().choose("rms_norm", hidden_size=64).provider != "native"

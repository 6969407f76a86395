# SPDX-License-Identifier: Apache-2.0
"""Each verb of `vllmx parity` is a module of parity/, its keys stand alone, and a box is a box."""

import ast
import re
import shlex
import sys
import time
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

import parity
from parity import flags, model_table, nightly, replay
from parity.nightly import MEANING, STEPS, Outcome, Step, gravest, run_all, run_step
from vllmx.cli import compose_runs, main, parse
from vllmx.config import PARITY_VERBS, ParityConfig, RunConfig
from vllmx.exceptions import UserError


def options(*words):
    """ParityConfig of a command line."""
    ((_, run),) = compose_runs(parse(["parity", *words]))
    return run.parity


@pytest.mark.parametrize("verb", PARITY_VERBS)
def test_a_verb_is_a_module_with_run_or_refused_by_name(verb):
    name = f"parity.{verb.replace('-', '_')}"
    if find_spec(name) is not None:
        assert callable(import_module(name).run)
        return
    config = RunConfig()
    config.parity.verb = verb
    with pytest.raises(UserError, match=f"vllmx parity {verb}: this checkout has no"):
        parity.run(config)


def test_keys_may_be_written_without_their_node():
    found = options("census", "from=0.25.0", "to=0.26.0", "--json")
    assert (found.verb, found.from_version, found.to_version) == ("census", "0.25.0", "0.26.0")
    assert found.json and not found.check
    assert options("replay", "select=op.rms_norm", "provider=cpu").provider == "cpu"
    assert options("replay", "parity.select=x").select == "x"
    assert options("ledger", "--check", "--tier", "T1").check
    assert options("explain", "kv.specs").select == "kv.specs"
    assert options("upstream-tests", "--select", "v1/core,v1/engine").select == "v1/core,v1/engine"


def read_of(verb):
    """The keys of ParityConfig that the module of a verb reads."""
    tree = ast.parse(Path(find_spec(f"parity.{verb.replace('-', '_')}").origin).read_text())
    names = {field.name for field in fields(ParityConfig)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            of = node.value
            whole = isinstance(of, ast.Name) and of.id in ("options", "parity")
            if whole or (isinstance(of, ast.Attribute) and of.attr == "parity"):
                found.add(node.attr)
    return found


@pytest.mark.parametrize("verb", PARITY_VERBS)
def test_a_verb_reads_what_it_is_said_to_and_refuses_every_other_key(verb):
    assert read_of(verb) == flags.READS[verb]
    default = ParityConfig()
    other = {"tier": "T0", "minutes": 7.0, "check": True, "json": True}
    for field in fields(ParityConfig):
        assert field.name == "verb" or any(field.name in keys for keys in flags.READS.values())
        if field.name in flags.READS[verb] | {"verb"}:
            continue
        given = ParityConfig(**{"verb": verb, field.name: other.get(field.name, "x")})
        assert getattr(given, field.name) != getattr(default, field.name)
        with pytest.raises(UserError, match=f"parity {verb} does not read --") as told:
            flags.check(given)
        having = str(told.value).rpartition(": ")[2].rstrip(".").split(", ")
        assert having == [name for name in flags.READS if field.name in flags.READS[name]]


def test_steps_of_the_nightly_run_set_only_what_their_verbs_read():
    for step in (*STEPS, *nightly.ALWAYS):
        boxed = ("minutes=1.50",) if step.arguments[0] in nightly.BOXED else ()
        ((_, run),) = compose_runs(parse(["parity", *step.arguments, *boxed]))
        flags.check(run.parity)
    assert {verb for verb in flags.READS if "minutes" in flags.READS[verb]} == {*nightly.BOXED}


@pytest.mark.parametrize("page", ["parity.md", "goldens.md"])
def test_commands_of_the_docs_are_understood(page):
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    commands = re.findall(r"^    vllmx (parity [^#\n]+)", text, re.MULTILINE)
    assert len(commands) > 3
    for command in commands:
        for _, run in compose_runs(parse(shlex.split(command))):
            assert run.parity.verb in PARITY_VERBS, command
            flags.check(run.parity)


def test_sweeps_run_every_combination():
    runs = list(compose_runs(parse(["parity", "replay", "-m", "provider=torch,cpu", "select=a,b"])))
    assert [(run.parity.provider, run.parity.select) for _, run in runs] == [
        ("torch", "a"),
        ("torch", "b"),
        ("cpu", "a"),
        ("cpu", "b"),
    ]


def test_device_and_cache_keep_their_groups():
    ((_, run),) = compose_runs(parse(["parity", "replay", "device=cpu", nightly.MEMORY]))
    assert run.device.device == "cpu" and run.cache.gpu_memory_utilization == 0.4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ledgr"], "Did you mean ledger?"),
        (["ledger", "tier=T9"], "T9"),
        (["ledger", "--tier", "T9"], "not one of T0, T1, T2, T3"),
        (["ledger", "selekt=x"], "selekt"),
        (["plan", "minutes=0"], "greater than 0"),
        (["probe", "--check"], "probe does not read --check; the verbs that do: census, record"),
        (["explain", "kv.specs", "--json"], "explain does not read --json; the verbs that do: "),
        (["budget", "minutes=5"], "budget does not read --minutes; the verbs that do: record"),
        (["upstream-tests", "from=0.25.0"], "upstream-tests does not read --from"),
        (["ledger", "kv.", "--check"], "ledger --check does not read --select"),
        (["census", "--json"], "census reads --json only with --to"),
        (["record", "minutes=5"], "record reads --minutes only with --check"),
        ([], "needs a verb: one of census"),
        (["replay", "ops.rms_norm"], "begins with 'ops.rms_norm'. Did you mean op"),
        (["replay", "op.rms_norm/zzz"], "select=op.rms_norm/zzz: no case is called so"),
        (["replay", "model.tiny-llama/x"], "select=model.tiny-llama/x: no case is called so"),
        (["replay", "op.rms_norm/plain,op.rms_norm/zzz"], "select=op.rms_norm/zzz: no case"),
        (["replay", "text.chat/zzz,op.embedding"], "select=text.chat/zzz: no case"),
        (["replay", "model.smollm2-135m,x.y"], "begins with 'x.y'."),
        (["replay", "rms_norm", "provider=nativ"], "Did you mean native?"),
        (["replay", "rms_norm", "provider=vllmx"], "nothing of what is selected has it"),
        (["record", "op.rms_nrm"], "begins with 'op.rms_nrm'. Did you mean op.rms_norm?"),
        (["record", "schedule.fcfz"], "begins with 'schedule.fcfz'."),
        (["record", "oracle=vllm_op"], "Did you mean vllm_ops?"),
        (["record", "oracle=vllm_gpu_model", "model.tiny-lama"], "Did you mean model.tiny-llama?"),
        (["record", "oracle=vllm_gpu_ops", "model.tiny-llama"], "begins with 'model.tiny-llama'"),
        (["calibrate", "text.chat"], "begins with 'text.chat'."),
        (["calibrate", "oracle=vllm_gpu_ops"], "asked of it; the oracles are gguf_dequant"),
        (["probe", "op.nothing"], "begins with 'op.nothing'."),
        (["probe", "rms_norm", "provider=nativ"], "Did you mean native?"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(words, message, capsys):
    assert main(["parity", *words]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1 and message in told[0]


def test_replay_of_what_cannot_run_here_says_why(capsys):
    assert main(["parity", "replay", "rms_norm", "provider=triton", "device=cpu"]) == 3
    assert "cells of triton: Triton kernels run on a GPU" in capsys.readouterr().out


def test_a_replay_out_of_time_keeps_what_it_has_shown_and_is_not_success(
    monkeypatch, tmp_path, capsys
):
    clock = iter([0.0, 1.0, 2.0, 3.0, 4.0])
    box = replay.TimeBox(2.5)
    monkeypatch.setattr(replay, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert [*box.take([[1], [2, 3], [4], [5, 6]])] == [[1], [2, 3], [4]] and box.left == 2
    monkeypatch.undo()
    words = ["replay", "op.embedding/one_row", "provider=torch", "--output-dir", str(tmp_path)]
    assert main(["parity", *words, "minutes=0.00001"]) == 2
    told = capsys.readouterr().out
    assert "3 cells are missing: time ran out after 1e-05 minutes" in told
    assert "evidence: none" in told and not [*tmp_path.iterdir()]


def test_what_evidence_goldens_and_limits_complain_of_is_the_users(monkeypatch):
    from parity.evidence import EvidenceError

    config = RunConfig()
    config.parity.verb = "ledger"

    def broken(config):
        raise EvidenceError("x.jsonl:3: changed")

    monkeypatch.setattr("parity.ledger.run", broken)
    with pytest.raises(UserError, match=r"parity ledger: x\.jsonl:3: changed"):
        parity.run(config)
    config.parity.verb = "nothing"
    with pytest.raises(UserError, match="has no parity/nothing"):
        parity.run(config)


def test_a_bisect_without_its_oracle_is_blocked(monkeypatch, capsys):
    from parity.oracle_process import OracleBlocked

    def absent(entry, provider):
        raise OracleBlocked("hf_model: transformers is not installed here")

    monkeypatch.setattr("parity.bisect.bisect", absent)
    config = RunConfig()
    config.parity.verb, config.parity.select = "bisect", "tiny-llama"
    assert parity.run(config) == 3
    assert "blocked: hf_model: transformers" in capsys.readouterr().out


# ---------------------------------------------------------------------- the nightly run


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([0, 3], 3),
        ([3, 2], 2),
        ([0, None], 2),
        ([2, 1], 1),
        ([0, -9], 1),
    ],
)
def test_the_gravest_outcome_counts(codes, code):
    assert gravest([Outcome("x", c, 0.0) for c in codes]) == code


def test_steps_are_verbs_and_the_canary_is_the_first():
    assert STEPS[0].name == "canary"
    assert {step.arguments[0] for step in STEPS} <= set(PARITY_VERBS)
    assert set(MEANING) == {0, 1, 2, 3, None}


def fake(monkeypatch, codes):
    """Replace the steps' processes; returns what was asked for."""
    asked = []

    def run_one(step, seconds):
        asked.append((step.name, seconds))
        return Outcome(step.name, codes.get(step.name, 0), 0.0)

    monkeypatch.setattr(nightly, "run_step", run_one)
    return asked


def test_a_failure_does_not_stop_the_run_but_a_lost_canary_does(monkeypatch):
    asked = fake(monkeypatch, {"replay": 1})
    run_all(STEPS, 3600.0)
    assert [name for name, _ in asked] == [s.name for s in STEPS] + ["ledger", "report"]
    asked = fake(monkeypatch, {"canary": 2})
    assert gravest(run_all(STEPS, 3600.0)) == 2
    assert [name for name, _ in asked] == ["canary", "ledger", "report"]


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
@pytest.mark.parametrize("there", [True, False])
def test_what_the_ledger_asks_of_a_cpu_is_run_there_whatever_else_is_there(
    monkeypatch, tmp_path, there, device
):
    """Cells of ops and models are of a CPU: what only a GPU shows lets them grow stale."""
    monkeypatch.setattr(nightly, "has_gpu", lambda device: there and device != "cpu")
    told, script = tmp_path / "words", tmp_path / "script"
    script.write_text(f'#!/bin/sh\necho "$@" >> {told}\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    assert nightly.main(["--device", device]) == 0
    lines = told.read_text().splitlines()
    for verb in ("replay", "probe"):
        on = {word for line in lines if f"parity {verb} " in line for word in line.split()}
        assert "device.device=cpu" in on
        gpu = device == "cuda" or (there and device == "auto")
        assert ("device.device=cuda" in on) == gpu


def test_no_step_gets_more_than_its_share_or_the_time_kept_for_the_report(monkeypatch):
    asked = fake(monkeypatch, {})
    run_all(STEPS, 1000.0)
    for step, (_, seconds) in zip(STEPS, asked):
        assert seconds <= min(1000.0 * step.share, 1000.0 - nightly.LAST_SECONDS) + 1e-6
    assert all(seconds >= nightly.LAST_SECONDS for _, seconds in asked[len(STEPS) :])


def test_a_step_without_time_or_module_does_not_pass(monkeypatch):
    assert run_step(Step("x", ("ledger",)), 0.0).code is None
    assert run_step(Step("x", ("unheard-of",)), 9.0).code == 3
    monkeypatch.setattr(sys, "executable", "/bin/sleep")
    assert run_step(Step("x", ("ledger",)), 5.0).code not in (0, None)


def test_long_steps_end_by_themselves_before_they_are_ended(monkeypatch, tmp_path):
    """What is killed has written nothing down."""
    told, script = tmp_path / "words", tmp_path / "script"
    script.write_text(f'#!/bin/sh\necho "$@" > {told}\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    for step in STEPS:
        assert run_step(step, 150.0).code == 0
        assert ("minutes=1.50" in told.read_text()) == (step.arguments[0] in nightly.BOXED)


def test_goldens_of_every_kind_are_recorded_again_and_compared():
    """One that upstream does not give any more must not stay unseen."""
    selected = [s.arguments[2:] for s in STEPS if s.arguments[:2] == ("record", "--check")]
    assert selected == [(), ("model.",)]
    assert model_table.chosen("model.") == model_table.chosen(None) != []


def test_nothing_of_a_step_outlives_its_box(monkeypatch, tmp_path):
    """The children of a step, pytest or an engine, end with it."""
    told, slow = tmp_path / "child", tmp_path / "slow"
    slow.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {told}\nwait\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    assert run_step(Step("x", ("ledger",)), 1.0).code is None
    child = Path("/proc") / told.read_text().strip() / "stat"
    for _ in range(50):
        try:
            state = child.read_text().split()[2]
        except OSError:
            return
        if state == "Z":  # it has ended, and its parent has not noticed yet
            return
        time.sleep(0.1)
    pytest.fail("a child of the step still runs")


def test_unknown_steps_are_refused(capsys):
    with pytest.raises(SystemExit):
        nightly.main(["--only", "nothing"])
    assert "no step nothing" in capsys.readouterr().err

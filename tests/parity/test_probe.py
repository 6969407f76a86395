# SPDX-License-Identifier: Apache-2.0
"""The laws hold for every provider on this machine, and a fault of each kind breaks one."""

import dataclasses

import numpy as np
import pytest
import torch

from parity import probe
from parity.dtypes import array
from parity.op_cells import expected, implementation
from parity.probe import PROBES, judge, rows_of
from vllmx.cli import main
from vllmx.config import RunConfig

FACTS = {"git": "", "dirty": True}


def cells(op, provider="torch"):
    """The cells of an op in float32."""
    listed = expected("cpu", f"op.{op}/", provider)
    return [cell for cell in listed if cell.dtype == "f32" and not cell.refused]


def verdicts(op, provider="torch"):
    """Probe -> verdicts over the cases of an op."""
    found: dict[str, set[str]] = {}
    for cell in cells(op, provider):
        for row in rows_of(cell, "cpu", FACTS):
            found.setdefault(row["case"].split(":")[0], set()).add(row["verdict"])
    return found


@pytest.mark.parametrize("op", ["rms_norm", "silu_and_mul", "embedding", "linear"])
def test_laws_of_an_op_hold(op):
    found = verdicts(op)
    assert found and all(seen == {"pass"} for seen in found.values())


@pytest.mark.parametrize("provider", ["torch", "sdpa"])
def test_laws_of_attention_hold(provider):
    assert verdicts("paged_attention", provider) == {
        name: {"pass"} for name in ("double", "blocks", "poison", "constant")
    }


def broken(monkeypatch, op, change):
    """Replace the torch definition of an op by one that `change` makes of it."""
    cell = cells(op)[0]
    impl = implementation(cell)
    fn = impl.fn
    monkeypatch.setattr(
        probe, "implementation", lambda cell: dataclasses.replace(impl, fn=change(fn))
    )
    return {name for name, seen in verdicts(op).items() if seen != {"pass"}}


def test_a_row_that_sees_its_neighbour_is_found(monkeypatch):
    def leaky(fn):
        def run(x, **rest):
            out = fn(x, **rest).clone()
            out[0] += 1e-3 * out[-1]
            return out

        return run

    assert broken(monkeypatch, "silu_and_mul", leaky) == {"rows"}


@pytest.mark.parametrize(
    ("change", "probes"),
    [
        (lambda out, given: out + 1e-3, {"double", "constant"}),
        (lambda out, given: out * 1.01, {"constant"}),
        (lambda out, given: out + 1e-3 * given["key_cache"].nansum(), {"double", "poison"}),
        (lambda out, given: out + given["value_cache"][1].nan_to_num(0).sum(), {"blocks"}),
    ],
)
def test_faults_of_attention_are_found(monkeypatch, change, probes):
    def bent(fn):
        def run(**given):
            return change(fn(**given), given)

        return run

    found = broken(monkeypatch, "paged_attention", bent)
    assert found & probes


def test_a_control_that_passes_makes_a_probe_invalid():
    (law,) = [p for p in PROBES if p.name == "rows"]
    out = {"out": array(np.arange(6.0).reshape(2, 3), "f32")}
    back = {"out": array(np.arange(6.0).reshape(2, 3)[::-1].copy(), "f32")}
    assert judge(law, out, back) == ("pass", "")
    assert judge(law, out, out)[0] == "fail"
    blind = dataclasses.replace(law, holds=lambda first, second: True)
    assert judge(blind, out, back)[0] == "invalid"


def test_subnormals_may_round_when_doubled_and_nothing_else():
    tiny = array(np.array([3 * 2.0**-24]), "f16")
    assert probe._is_twice(tiny, array(np.array([7 * 2.0**-24]), "f16"))
    assert not probe._is_twice(tiny, array(np.array([9 * 2.0**-24]), "f16"))
    one = array(np.array([1.0]), "f16")
    assert not probe._is_twice(one, array(np.array([2.0 + 2.0**-9]), "f16"))


def test_the_verb_says_how_many_hold(tmp_path, capsys):
    config = RunConfig()
    config.parity.select, config.parity.output_dir = "op.embedding", str(tmp_path)
    assert probe.run(config) == 0
    assert "probes hold" in capsys.readouterr().out and list(tmp_path.glob("*.jsonl"))
    config.parity.select = "op.embedding/zzz"
    assert probe.run(config) == 2
    assert "no law is about select=op.embedding/zzz" in capsys.readouterr().out


@pytest.mark.parametrize("there", [True, False])
def test_a_gpu_that_is_there_is_probed_and_one_that_is_not_blocks(monkeypatch, there):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    asked = []
    monkeypatch.setattr(probe, "expected", lambda device, *words: asked.append(device) or [])
    config = RunConfig()
    probe.run(config)
    config.device.device = "cuda"
    assert probe.run(config) == (2 if there else 3)
    assert asked == (["cuda", "cuda"] if there else ["cpu"])


def test_a_probe_out_of_time_is_not_success(tmp_path, capsys):
    words = ["parity", "probe", "op.embedding/", "provider=torch", "device=cpu"]
    assert main([*words, "--output-dir", str(tmp_path), "minutes=0.000000001"]) == 2
    assert "cells are missing: time ran out after 1e-09 minutes" in capsys.readouterr().out
    assert not [*tmp_path.iterdir()]

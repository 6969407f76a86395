# SPDX-License-Identifier: Apache-2.0
"""Replay of ops: everything is green as it is, every fault is red, nothing missing passes."""

import dataclasses
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from op_faults import FAULTS, rms

from parity import golden, op_cells, op_replay, replay, truths
from parity import sampler_calls as calls
from parity.digests import canonical
from parity.dtypes import Array
from parity.op_cells import OpCell, expected
from parity.op_replay import Lane
from parity.op_table import LAYOUTS, OPS, OWN
from vllmx.config import RunConfig
from vllmx.exceptions import UserError
from vllmx.ir.select import load_ops


@pytest.fixture(scope="module")
def whole():
    """(rows, cells that are not asked) of a replay of everything."""
    return replay.replay_ops("cpu")


def test_every_op_of_the_op_table_passes_in_every_case_dtype_and_provider(whole):
    rows, refused = whole
    assert [(r["feature"], r["case"], r["reason"]) for r in rows if r["verdict"] != "pass"] == []
    assert replay.exit_code(rows) == 0
    assert len(rows) + len(refused) == len(expected("cpu"))
    shown = {(row["feature"], row["provider"]) for row in rows}
    for name, op in load_ops().items():
        for provider in op.impls:
            if (provider, "cpu") not in op_cells.OUTSIDE:
                assert (f"op.{name}", provider) in shown, f"{name}[{provider}] is never replayed"
    assert {f"sample.{name}" for name in OPS if OPS[name].sampler} <= {f for f, _ in shown}


def test_float_ops_are_shown_in_three_dtypes_and_in_several_regimes(whole):
    rows, _ = whole
    for name in load_ops():
        dtypes = {r["case"].split("/")[1] for r in rows if r["feature"] == f"op.{name}"}
        assert dtypes == {"f32", "bf16", "f16"}, name
        by_case = {c.name: len(c.dtypes) for c in OPS[name].cases}
        assert set(by_case.values()) == {3}, (name, by_case)
        assert len(OPS[name].cases) >= 2


def test_goldens_of_state_name_its_layout_and_have_as_many_axes():
    seen = set()
    for entry in OPS.values():
        for path in sorted((golden.OPS / entry.name).glob("*.safetensors")):
            facts = golden.read(path).facts
            told = facts.get("layout", {})
            assert told == {name: LAYOUTS[name] for name in entry.mutates}, path.name
            for name, axes in told.items():
                assert len(facts["tensors"][f"out.{name}"]["shape"]) == axes.count(",") + 1, path
            seen |= told.keys()
    assert seen == LAYOUTS.keys()


def test_rows_say_how_close_and_that_wrong_copies_are_refused(whole):
    rows, _ = whole
    for row in rows:
        assert row["teeth"] and all(row["teeth"].values()), (row["feature"], row["case"])
        assert row["checks"]["repeat"] == {"measured": 0.0, "limit": 0.0, "headroom": 1e6}
        assert row["proof"]["selected"] == row["provider"] and row["proof"]["calls"] == 2
        assert row["golden_sha"] and row["closure"]["fine"] and row["policy_sha"]
        assert row["oracle"]["version"]
    graded = [row for row in rows if "rmse" in "".join(row["checks"])]
    assert len(graded) > 250


def test_no_op_is_without_cases():
    assert op_cells.ops_without_cases() == []


# --------------------------------------------------------------------------- planted faults


def test_every_op_has_a_planted_fault():
    assert {op for op, _ in FAULTS.values()} == set(load_ops())
    assert {op for op in OPS if op not in load_ops()} == set(SAMPLER_FAULTS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_turns_its_op_red(name, monkeypatch):
    op, fault = FAULTS[name]
    monkeypatch.setattr(load_ops()[op].impls["torch"], "fn", fault)
    monkeypatch.setattr(op_replay, "closure_of", lambda cell: {"fine": "", "coarse": ""})
    monkeypatch.setattr(op_replay, "_symbol", lambda cell: "")
    cells = [c for c in expected("cpu", f"op.{op}/", "torch") if c.dtype == "f32"]
    lane = Lane()
    verdicts = Counter(lane.row(cell)["verdict"] for cell in cells)
    assert verdicts["fail"] >= 1, verdicts


SAMPLER_FAULTS = {
    "temperature": lambda logits, temperature: logits / temperature.clamp(min=0.02).unsqueeze(1),
    "penalties": lambda **a: calls.penalties(**{**a, "frequency": a["frequency"] * 0}),
    "bad_words": lambda logits, words, output_tokens: logits,
    "logit_bias": lambda **a: calls.logit_bias(**{**a, "min_tokens": {}}),
    "min_p": lambda logits, min_p: calls.min_p(logits, min_p * 1.2),
    "top_k_top_p": lambda logits, top_k, top_p: calls.top_k_top_p(logits, top_k, None),
    "logprobs": lambda **a: calls.logprobs(**{**a, "logits": a["logits"] * 1.0001}),
    "gumbel_noise": lambda seeds, positions, count: calls.gumbel_noise(seeds, positions + 1, count),
    "seeded_token": lambda **a: calls.seeded_token(**{**a, "temperature": a["temperature"] * 0}),
    "rope_table": lambda **a: calls.rope_table(**{**a, "rows": (a["rows"] - 1).clamp(min=0)}),
}


@pytest.mark.parametrize("op", SAMPLER_FAULTS)
def test_a_planted_fault_in_the_sampler_turns_its_step_red(op, monkeypatch):
    monkeypatch.setitem(calls.CALLS, op, SAMPLER_FAULTS[op])
    lane = Lane()
    cells = [c for c in expected("cpu") if c.op == op]
    assert any(lane.row(cell)["verdict"] == "fail" for cell in cells)


CELL = OpCell("rms_norm", "plain", "f32", "torch", "cpu")


def _with(monkeypatch, fn) -> dict:
    monkeypatch.setattr(load_ops()["rms_norm"].impls["torch"], "fn", fn)
    monkeypatch.setattr(op_replay, "closure_of", lambda cell: {"fine": "", "coarse": ""})
    monkeypatch.setattr(op_replay, "_symbol", lambda cell: "")
    return Lane().row(CELL)


def test_a_provider_that_raises_or_writes_its_input_is_an_error(monkeypatch):
    row = _with(monkeypatch, lambda **a: 1 / 0)
    assert row["verdict"] == "error" and "ZeroDivisionError" in row["reason"]

    def writes(x, weight, epsilon, variance_size=None):
        out = rms(x, weight, epsilon, variance_size)
        x.zero_()
        return out

    row = _with(monkeypatch, writes)
    assert row["verdict"] == "error" and "changed its argument x" in row["reason"]


def test_a_provider_that_does_not_repeat_itself_fails(monkeypatch):
    count = iter(range(100))

    def unsteady(x, weight, epsilon, variance_size=None):
        return rms(x, weight, epsilon, variance_size) + 1e-9 * next(count)

    row = _with(monkeypatch, unsteady)
    assert row["verdict"] == "fail" and "repeat 1" in row["reason"]


def test_a_row_says_where_it_is_farthest_off(monkeypatch):
    def off(x, weight, epsilon, variance_size=None):
        out = rms(x, weight, epsilon, variance_size)
        out[3, 17] += 0.5
        return out

    row = _with(monkeypatch, off)
    place = row["details"]["worst"]["out"]
    assert row["verdict"] == "fail" and place["at"] == [3, 17]
    assert abs(float(place["ours"]) - float(place["truth"]) - 0.5) < 1e-5
    assert abs(float(place["golden"]) - float(place["truth"])) < 1e-5

    def odd(**args):
        out = rms(**args)
        out[2, 5] = float("inf")
        return out

    assert _with(monkeypatch, odd)["details"]["worst"]["out"]["at"] == [2, 5]


def test_another_dtype_or_a_missing_output_fails(monkeypatch):
    row = _with(monkeypatch, lambda **a: rms(**a).double())
    assert row["verdict"] == "fail" and "finite" in row["reason"]


# ------------------------------------------------------------------- what must not pass


@pytest.fixture
def folder(tmp_path):
    """A copy of the goldens of one op, indexed."""
    shutil.copytree(golden.OPS / "rms_norm", tmp_path / "rms_norm")
    shutil.copy(golden.OPS / "floors.json", tmp_path)
    golden.write_index(tmp_path)
    return tmp_path


def _damaged(folder, what):
    path = folder / CELL.golden
    other = folder / "rms_norm" / "tinyvar.f32.safetensors"
    if what == "missing":
        path.unlink()
    elif what == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    elif what == "another golden":
        shutil.copy(other, path)
        golden.write_index(folder)
    elif what == "not indexed":
        index = golden.read_index(folder) | {CELL.golden: "0" * 64}
        (folder / golden.INDEX).write_text(canonical({"goldens": index}).decode())
    elif what == "no index":
        (folder / golden.INDEX).unlink()
    elif what == "floors damaged":
        (folder / "floors.json").write_text("{")


@pytest.mark.parametrize(
    "what", ["missing", "cut", "another golden", "not indexed", "no index", "floors damaged"]
)
def test_a_golden_that_is_not_sound_is_invalid(what, folder):
    assert Lane(folder=folder).row(CELL)["verdict"] == "pass"
    _damaged(folder, what)
    row = Lane(folder=folder).row(CELL)
    assert row["verdict"] == "invalid" and row["reason"], what
    assert replay.exit_code([row]) == 2


def test_inputs_that_are_drawn_otherwise_make_the_golden_invalid(monkeypatch):
    case = OPS["rms_norm"].table.cases["rms_norm", "plain"]
    other = dataclasses.replace(case, build=lambda m: case.build(m) | {"epsilon": 1e-5})
    monkeypatch.setitem(OPS["rms_norm"].table.cases, ("rms_norm", "plain"), other)
    row = Lane().row(CELL)
    assert row["verdict"] == "invalid" and "other inputs" in row["reason"]


def test_a_file_too_many_is_invalid(tmp_path):
    row = Lane(folder=tmp_path).stray("rms_norm/old.f32.safetensors")
    assert row["verdict"] == "invalid" and replay.exit_code([row]) == 2


def test_exit_codes_name_the_worst(monkeypatch):
    def rows(*verdicts):
        return [{"verdict": verdict} for verdict in verdicts]

    assert replay.exit_code(rows("pass", "pass")) == 0
    assert replay.exit_code(rows("pass", "skip")) == 3
    assert replay.exit_code(rows("pass", "skip", "invalid")) == 2
    assert replay.exit_code(rows("skip", "invalid", "error")) == 1
    assert replay.exit_code(rows("pass", "fail", "skip")) == 1
    assert replay.exit_code([]) == 2


def test_all_cells_run_after_a_failure(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(load_ops()["embedding"].impls["torch"], "fn", lambda **a: 1 / 0)
    monkeypatch.setattr(op_replay, "closure_of", lambda cell: {"fine": "", "coarse": ""})
    monkeypatch.setattr(op_replay, "_symbol", lambda cell: "")
    config = RunConfig()
    config.parity.select, config.parity.output_dir = "op.embedding,op.linear/plain", str(tmp_path)
    assert replay.run(config) == 1
    said = capsys.readouterr().out
    assert "6 error" in said and "10 cells of 2 ops" in said and "4 pass" in said
    assert len(next(tmp_path.glob("*.jsonl")).read_text().splitlines()) == 10


def test_nothing_selected_is_not_success(tmp_path):
    config = RunConfig()
    config.parity.select, config.parity.output_dir = "op.no_such", str(tmp_path)
    with pytest.raises(UserError, match=r"no golden's name begins with 'op\.no_such'"):
        replay.run(config)
    assert list(tmp_path.iterdir()) == []


def test_a_provider_without_its_library_is_blocked(monkeypatch):
    impl = load_ops()["linear"].impls["fbgemm"]
    monkeypatch.setattr(impl, "supported", "this build of torch has no fbgemm")
    cells = [c for c in expected("cpu", "op.linear/plain", "fbgemm") if not c.refused]
    assert [c.blocked for c in cells if c.dtype == "f32"] == ["this build of torch has no fbgemm"]
    rows = [Lane().row(cell) for cell in cells]
    assert {row["verdict"] for row in rows} == {"skip"} and replay.exit_code(rows) == 3


def test_a_cell_of_a_gpu_has_the_same_golden():
    on_cpu = {c.golden for c in expected("cpu", "op.rms_norm/")}
    on_gpu = expected("cuda", "op.rms_norm/", "triton")
    assert on_gpu and {c.golden for c in on_gpu if not c.refused} == on_cpu


# -------------------------------------------------------------------------------- the truth


def _truth(op, **arguments):
    return truths.truth_of(op, arguments)


def _float(values):
    return Array("f64", np.asarray(values, np.float64))


def test_the_truth_is_what_torch_computes_in_double():
    """An independent second implementation: the truth itself could be wrong."""
    rng = np.random.default_rng(11)
    x, w = rng.normal(size=(5, 16)), rng.normal(size=16)
    t = torch.from_numpy

    def same(got, want):
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-12, atol=1e-14)

    args = {"weight": _float(w), "epsilon": 1e-3, "variance_size": None}
    want = F.rms_norm(t(x), (16,), t(w), 1e-3)
    same(_truth("rms_norm", x=_float(x), **args)["out"], want)
    total = F.rms_norm(t(2 * x), (16,), t(w), 1e-3)
    same(_truth("fused_add_rms_norm", x=_float(x), x_residual=_float(x), **args)["out"], total)
    a, u = t(x).chunk(2, -1)
    same(_truth("silu_and_mul", x=_float(x))["out"], F.silu(a) * u)
    for how in ("none", "tanh"):
        got = _truth("gelu_and_mul", x=_float(x), approximate=how)["out"]
        same(got, F.gelu(a, approximate=how) * u)
    got = _truth("linear", x=_float(x), weight=_float(x), bias=_float(w[:5]))["out"]
    same(got, F.linear(t(x), t(x), t(w[:5])))
    q, k, v = (t(rng.normal(size=(6, 2, 8))) for _ in "qkv")
    causal = F.scaled_dot_product_attention(
        *(z.transpose(0, 1) for z in (q, k, v)), is_causal=True, scale=0.3
    )
    paged = {"block_table": Array("i32", np.array([[1, 0]], np.int32)), "scale": 0.3}
    cache = {
        name: _float(np.stack([np.pad(z.numpy()[4:], ((0, 2), (0, 0), (0, 0))), z.numpy()[:4]]))
        for name, z in (("key_cache", k), ("value_cache", v))
    }
    lengths = {
        "query_start_loc": Array("i32", np.array([0, 6], np.int32)),
        "seq_lens": Array("i32", np.array([6], np.int32)),
    }
    found = _truth(
        "paged_attention",
        query=_float(q.numpy()),
        **cache,
        **paged,
        **lengths,
        sliding_window=None,
        soft_cap=None,
    )
    same(found["out"], causal.transpose(0, 1))


def test_the_truth_of_joined_ops_is_that_of_their_parts_in_double():
    """The definitions in double, which the truth shares no line with."""
    rng = np.random.default_rng(12)
    x, w, more = (rng.normal(size=shape) for shape in ((5, 16), (6, 16), (5, 6)))
    t, norm = torch.from_numpy, rng.normal(size=16)
    found = _truth("linear_add", x=_float(x), residual=_float(more), weight=_float(w))
    total = torch.addmm(t(more), t(x), t(w).T)
    np.testing.assert_allclose(found["out"], total, rtol=1e-12)
    np.testing.assert_allclose(found["squares"][:, 0], total.norm(dim=1) ** 2, rtol=1e-12)
    parts = np.square(x).reshape(5, 4, 4).sum(axis=2)
    args = {"x": _float(x), "squares": _float(parts), "norm_weight": _float(norm)}
    args |= {"epsilon": 1e-3, "weight": _float(w)}
    want = F.linear(F.rms_norm(t(x), (16,), t(norm), 1e-3), t(w))
    np.testing.assert_allclose(_truth("rms_norm_linear", **args)["out"], want, rtol=1e-12)
    a, u = want.chunk(2, -1)
    got = _truth("rms_norm_gated_linear", **args)["out"]
    np.testing.assert_allclose(got, F.silu(a) * u, rtol=1e-12)


def test_no_case_is_without_truth_unless_it_is_exact():
    for entry in OPS.values():
        for output in entry.outputs:
            if entry.kind_of(output) != "exact":
                arguments = entry.cases[0].arguments(entry.cases[0].dtypes[0])
                assert truths.truth_of(entry.name, arguments) is not None, entry.name
    assert OWN == "vllmx"


def test_the_source_in_c_is_part_of_the_closure_of_what_it_becomes(monkeypatch, tmp_path):
    def fines() -> dict[str, str]:
        op_replay._closure.cache_clear()
        return {name: op_replay._closure("rms_norm", name)["fine"] for name in ("native", "torch")}

    before = fines()
    assert before == fines()
    (tmp_path / "native.c").write_text("int changed;\n")
    monkeypatch.setattr(op_replay, "C_SOURCES", (str(tmp_path / "native.c"),))
    after = fines()
    op_replay._closure.cache_clear()
    assert after["native"] != before["native"] and after["torch"] == before["torch"]

# SPDX-License-Identifier: Apache-2.0
"""Whole models against oracles: the gate's rules, the goldens, and who is blamed for a fault."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from oracles import sketch
from parity import golden, model_golden, model_replay, policy
from parity.golden import GoldenError
from parity.model_engine import build, decoded, model_of, scored
from parity.model_gate import LEAST_KL, Ours, binomial_bound, judge
from parity.model_replay import ModelLane, closure_of
from parity.model_table import MODELS, POSITIONS, expected

TINY = MODELS["tiny-llama"]
BLOCK = 16
LIMITS = policy.load().models["torch"]


@pytest.fixture(scope="module")
def goldens():
    return model_golden.load(TINY)


def perfect(want) -> Ours:
    return Ours(np.arange(len(want.next)), want.ids, want.val.astype(np.float64), want.next)


def failed(want, floor, got: Ours) -> set[str]:
    return {name for name, check in judge(want, floor, got, LIMITS).items() if not check.ok}


def test_a_copy_of_the_golden_passes_every_rule(goldens) -> None:
    assert failed(*goldens, perfect(goldens[0])) == set()


def test_each_rule_of_the_gate_refuses_what_it_is_for(goldens) -> None:
    want, floor = goldens
    good = perfect(want)
    scaled = dataclasses.replace(good, val=good.val * 1.001)
    assert "mean" in failed(want, floor, scaled)
    rare = good.val.copy()
    rare[:: len(rare) // 4, 0] -= 2.0
    assert "exceedance" in failed(want, floor, dataclasses.replace(good, val=rare))
    tail = good.val.copy()
    tail[: len(tail) // 50 + 1, 0] -= 0.002
    assert "p99" in failed(want, floor, dataclasses.replace(good, val=tail))
    elsewhere = dataclasses.replace(good, ids=np.full_like(good.ids, 7) + np.arange(32))
    assert "missing" in failed(want, floor, elsewhere)
    broken = good.val.copy()
    broken[5, 0] = math.nan
    assert "finite" in failed(want, floor, dataclasses.replace(good, val=broken))
    assert "next" in failed(want, floor, dataclasses.replace(good, next=good.next - 0.01))


def test_no_floor_excuses_more_than_the_caps(goldens) -> None:
    """Two oracles that are a whole unit apart would else allow a model half of that more."""
    want, floor = goldens
    good = perfect(want)
    apart = dataclasses.replace(floor, val=want.val - 1.0)
    off = dataclasses.replace(good, val=good.val - 0.07, next=good.next - 0.07)
    assert {"mean", "next"} <= failed(want, apart, off)
    assert {"mean", "next"}.isdisjoint(
        failed(want, apart, dataclasses.replace(good, val=good.val - 0.05, next=good.next - 0.05))
    )
    top = good.val.copy()
    top[: len(top) // 50 + 1, 0] -= 0.21
    assert "p99" in failed(want, apart, dataclasses.replace(good, val=top))


def test_mass_that_left_the_oracles_ids_is_seen(goldens) -> None:
    want, floor = goldens
    assert (np.exp(want.val).sum(axis=1) >= 0.6).any()
    thin = want.val.astype(np.float64) - 1.0
    assert "coverage" in failed(want, floor, dataclasses.replace(perfect(want), val=thin))


def test_a_flip_is_excused_only_where_one_side_was_not_sure(goldens) -> None:
    want, floor = goldens
    margins = want.val[:, 0] - want.val[:, 1]
    sure, unsure = int(margins.argmax()), int(margins.argmin())

    def flipped(row: int, margin: float) -> Ours:
        ids, val = want.ids.copy(), want.val.astype(np.float64).copy()
        ids[row, :2] = ids[row, 1::-1]
        val[row, 0] = val[row, 1] + margin
        return Ours(np.arange(len(ids)), ids, val, want.next)

    assert "flips" in failed(want, floor, flipped(sure, 1.0))
    assert "flips" not in failed(want, floor, flipped(sure, 1e-5))
    assert margins[unsure] > 0


def test_the_bound_of_a_count_is_that_of_the_binomial() -> None:
    assert binomial_bound(816, 0.0) == 0
    assert binomial_bound(816, 1 / 816) == 5
    assert binomial_bound(10, 1.0) == 10


@pytest.mark.parametrize("name", MODELS)
def test_goldens_have_enough_positions_and_their_two_lanes_agree(name: str) -> None:
    want, floor = model_golden.load(MODELS[name])
    assert len(want.next) >= POSITIONS
    base = floor.base or want
    half = MODELS[name].dtype == "bfloat16"
    assert half == (floor.base is not None)
    assert np.abs(floor.val - base.val).mean() < (0.04 if half else 1e-4)
    assert (floor.top != base.top).mean() < (0.05 if half else 0.005)
    assert want.facts["oracle"]["version"] == "0.25.0"


@pytest.mark.parametrize("name", [n for n, e in MODELS.items() if e.dtype == "float32"])
def test_sums_over_a_golden_are_not_those_of_float32(name: str) -> None:
    """What two oracles differ by, as a divergence, is a thousandth of what float32 makes of sums of
    probabilities: a gate that summed so called its own rounding a fault."""
    want, floor = model_golden.load(MODELS[name])
    everywhere = np.arange(len(want.next))
    ours = Ours(everywhere, want.ids, floor.val, floor.next)
    found = judge(want, floor, ours, LIMITS)
    assert found["kl"].measured < 1e-12 and found["kl"].limit < 1.2 * LEAST_KL
    for scores in (want, floor):
        assert scores.val.dtype == scores.next.dtype == np.float64


def test_a_golden_of_other_sequences_is_refused() -> None:
    for changed in ({"max_tokens": 63}, {"prompt_lengths": (2,)}, {"forced_lengths": (15, 17)}):
        with pytest.raises(GoldenError, match="of other sequences; record it anew"):
            model_golden.load(dataclasses.replace(TINY, **changed))


def test_sequences_are_those_that_the_table_asks_for(goldens) -> None:
    want, _ = goldens
    for sequence, prompt in zip(want.sequences, TINY.prompts()):
        assert sequence[: len(prompt)] == prompt
        assert len(sequence) == len(prompt) + TINY.max_tokens
    assert want.sequences[len(TINY.prompts()) :] == TINY.forced()


def test_a_name_with_a_slash_is_that_of_one_model() -> None:
    assert {cell.entry.name for cell in expected("model.tiny-qwen3/")} == {"tiny-qwen3"}
    assert len({cell.entry.name for cell in expected("model.tiny-qwen3")}) > 1


def test_a_damaged_or_missing_golden_is_invalid(tmp_path: Path) -> None:
    (cell, *_) = expected("model.tiny-llama/", "torch")
    (row,) = ModelLane(folder=tmp_path).rows([cell])
    assert row["verdict"] == "invalid" and "index" in row["reason"]
    with pytest.raises(GoldenError):
        model_golden.load(TINY, tmp_path)


def test_replay_is_green_in_every_mode_and_red_with_a_layer_off_by_a_hundredth() -> None:
    cells = list(expected("model.tiny-llama/", "torch"))
    rows = list(ModelLane().rows(cells))
    assert [row["verdict"] for row in rows] == ["pass"] * 4, [row.get("reason") for row in rows]
    assert {row["mode"] for row in rows} == {"bs1", "batch", "chunked", "prefix"}
    assert all(all(row["teeth"].values()) for row in rows)
    assert rows[0]["proof"]["selected"]["rms_norm"] == "torch"

    llm = build(TINY, "torch", "cpu", chunked=False)
    want, floor = model_golden.load(TINY)
    try:
        holder = model_of(llm).model.layers[2].mlp.down_proj
        original = holder.forward
        holder.forward = lambda x: original(x) * 1.01
        assert failed(want, floor, scored(llm, want, one_by_one=False).ours)
        assert failed(want, floor, decoded(llm, want, TINY.prompts(), TINY.max_tokens).ours)
    finally:
        llm.shutdown()


@pytest.mark.parametrize("name", MODELS)
def test_prompts_of_the_prefix_mode_fill_a_block(name: str) -> None:
    """Shorter ones are never cached, and the mode would show what `batch` shows."""
    entry = MODELS[name]
    shortest = min(len(prompt) for prompt in entry.prompts()) + entry.max_tokens // 2
    assert shortest > BLOCK


def test_a_cache_that_is_never_hit_fails_the_prefix_mode(goldens) -> None:
    want, floor = goldens
    (cell,) = [c for c in expected("tiny-llama/", "torch") if c.mode == "prefix"]
    lane = ModelLane()
    for cached, verdict in ((True, "pass"), (False, "fail")):
        llm = build(TINY, "torch", "cpu", chunked=cached)
        row = lane._one(cell, llm, want, floor)
        llm.shutdown()
        assert row["verdict"] == verdict, row.get("reason")
        assert row["checks"]["cache_misses"]["measured"] == (0 if cached else 8)


def answers():
    """What both oracles once said of the tiny Llama: tensors, and what computed them, by lane."""
    told = {}
    for lane in TINY.lanes:
        found = golden.read(golden.MODELS / TINY.golden(lane))
        kept = {name: value.data.copy() for name, value in found.tensors.items()}
        told[lane] = (kept, found.facts["oracle"])
    first, second = (told[lane] for lane in TINY.lanes)
    second[0]["lp.ids"] = first[0]["lp.ids"]
    return first, {TINY.lanes[1]: second}


def test_the_same_answers_are_the_same_bytes():
    recorded = model_golden._goldens(TINY, *answers())
    for lane, data in recorded.items():
        assert data == (golden.MODELS / TINY.golden(lane)).read_bytes()


def test_an_answer_by_which_wrong_copies_would_pass_is_no_golden(monkeypatch) -> None:
    judge = model_replay.judge

    def percentile(*arguments) -> dict:
        """A gate that looks at the 99th percentile alone, which five positions do not move."""
        return {"p99": judge(*arguments)["p99"]}

    monkeypatch.setattr(model_replay, "judge", percentile)
    with pytest.raises(GoldenError, match=r"the gate lets these copies pass: .*rare"):
        model_golden._goldens(TINY, *answers())


def test_sketches_keep_distances() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 2048, generator=generator).numpy()
    rows[:, :3] *= 60
    other = rows + 1e-3 * torch.randn(64, 2048, generator=generator).numpy()
    true = np.linalg.norm(other - rows)
    estimate = np.linalg.norm(sketch.sketch(other) - sketch.sketch(rows))
    assert abs(estimate / true - 1) < 0.1


def test_a_change_of_the_model_changes_its_closure_and_not_that_of_another_family() -> None:
    cells = {
        cell.entry.name: cell
        for cell in expected("model.tiny", "torch")
        if cell.entry.dtype == "float32"  # the others are of the same architectures
    }
    shas = {name: closure_of(cell)["fine"] for name, cell in cells.items()}
    assert len(set(shas.values())) == len(shas) == len(cells)

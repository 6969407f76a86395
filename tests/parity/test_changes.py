# SPDX-License-Identifier: Apache-2.0
"""A golden deleted, a sign edited, a tolerance widened, another provider replayed: each changes the
status of a real op in the way it should, by the same code that the ledger runs."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from parity import calibrate, closure, evidence, golden, op_replay, policy
from parity.catalogue import Listed
from parity.cells import spell_out
from parity.features import Declared
from parity.op_cells import expected
from parity.op_replay import Lane
from parity.status import Policy, by_key, status, unasked, when
from vllmx.ir.select import load_ops

ROOT = Path(__file__).parents[2]
OP = "silu_and_mul"
SOURCE = "vllmx/ir/ops/activation.py"
DECLARED = Declared("layers.x", "T0", "", "", (SOURCE,), (), {"ops": (OP,)})
CELLS = [cell for cell in expected("cpu", f"op.{OP}/") if not cell.refused]


@pytest.fixture
def root(tmp_path):
    """The goldens of the op and the limits, to be changed."""
    ops = tmp_path / "parity" / "goldens" / "ops"
    shutil.copytree(golden.OPS / OP, ops / OP)
    shutil.copy(golden.OPS / "floors.json", ops)
    golden.write_index(ops)
    shutil.copy(policy.POLICY, tmp_path / "parity")
    return tmp_path


def replayed(root, cells=CELLS, **changes) -> list[dict]:
    """What a replay of a clean tree with the goldens and limits of `root` shows."""
    lane = Lane(folder=root / "parity" / "goldens" / "ops")
    lane.policy = policy.load(root / "parity" / policy.POLICY.name)
    lane.run = {**lane.run, "dirty": False}
    return [again(lane.row(cell), **changes) for cell in cells]


def again(row: dict, **changes) -> dict:
    return evidence.make_row(**{**{k: v for k, v in row.items() if k != "id"}, **changes})


def told(root, rows) -> tuple[str, str]:
    """(status, reason) of the feature as things are in `root`."""
    listed = Listed(root)
    feature = spell_out(DECLARED, listed, ROOT)
    here = tuple(cell for cell in feature.cells if cell.device == "cpu")
    feature = dataclasses.replace(feature, cells=here)
    assert len(feature.cells) == len(CELLS) >= 12
    cells = [*feature.cells, *unasked(feature, by_key(rows))]
    closures = {cell.key: found for cell in cells if (found := listed.closure(cell))}
    limits = Policy(sha=listed.policy_sha())
    (found,) = status([feature], listed.goldens(), rows, closures, limits, when(rows[0]))
    return found.status, found.reason


def test_a_replay_of_the_whole_op_is_green_and_of_a_part_is_not(root):
    rows = replayed(root)
    assert told(root, rows) == ("GREEN", f"{len(CELLS)} of {len(CELLS)} cells shown")
    assert told(root, rows[1:])[0] == "UNPROVEN"


def test_a_deleted_golden_leaves_its_cells_unproven_and_a_replay_invalid(root):
    rows = replayed(root)
    folder = root / "parity" / "goldens" / "ops"
    (folder / CELLS[0].golden).unlink()
    golden.write_index(folder)
    found, reason = told(root, rows)
    assert found == "UNPROVEN" and f"no golden ops/{CELLS[0].golden}" in reason
    verdicts = {row["verdict"] for row in replayed(root, CELLS[:1])}
    assert verdicts == {"invalid"}


@pytest.mark.parametrize("kind", ["ops_gpu", "models_gpu"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.unlink(), "the index knows it and it is not there"),
        (lambda path: path.write_bytes(path.read_bytes()[:1000]), "damaged"),
        (lambda path: path.write_bytes(path.read_bytes() + b" "), ""),
    ],
    ids=["deleted", "cut", "longer"],
)
def test_what_happens_to_a_golden_of_a_gpu_is_seen_though_no_cell_here_asks_for_it(
    tmp_path, kind, change, words
):
    source = ROOT / "parity" / "goldens" / kind
    name = golden.files(source)[0]
    here = tmp_path / "parity" / "goldens" / kind
    for part in (name, golden.INDEX, "floors.json"):
        if (source / part).is_file():
            (here / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / part, here / part)
    index = json.loads((here / golden.INDEX).read_text())
    index["goldens"] = {name: index["goldens"][name]}
    (here / golden.INDEX).write_text(json.dumps(index))
    listed = Listed(tmp_path)
    assert not listed.goldens()[f"{kind}/{name}"].problem
    change(here / name)
    problem = listed.goldens()[f"{kind}/{name}"].problem
    assert problem and words in problem


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """A copy of the sources in which the op has another sign; closures are taken of it."""
    copy = tmp_path / "sources"
    skip = shutil.ignore_patterns("goldens", "evidence", "__pycache__")
    for name in closure.PACKAGES:
        shutil.copytree(ROOT / name, copy / name, ignore=skip)
    text = (copy / SOURCE).read_text()
    right = "return F.silu(x[..., :half]) * x[..., half:]"
    assert text.count(right) == 1
    (copy / SOURCE).write_text(text.replace(right, right.replace("F.silu", "-F.silu")))
    sources = closure.Sources(copy)

    def take() -> None:
        monkeypatch.setattr(op_replay, "sources", lambda: sources)
        op_replay._closure.cache_clear()

    yield take
    op_replay._closure.cache_clear()


def test_an_edited_sign_makes_the_op_stale_and_its_replay_red(root, edited, monkeypatch):
    rows = replayed(root)
    edited()
    found, reason = told(root, rows)
    assert found == "STALE" and "the code has changed" in reason
    here = [cell for cell in CELLS if cell.provider == "torch"]
    impl = load_ops()[OP].impls["torch"]
    right = impl.fn
    assert {row["verdict"] for row in replayed(root, here)} == {"pass"}
    op_replay._symbols(OP, "torch")  # named before what it names is replaced
    monkeypatch.setattr(impl, "fn", lambda x: -right(x))
    wrong = replayed(root, here)
    assert {row["verdict"] for row in wrong} == {"fail"}
    others = replayed(root, [cell for cell in CELLS if cell.provider != "torch"])
    found, reason = told(root, wrong + others)
    assert found == "RED" and f"{len(here)} of {len(CELLS)} cells" in reason


def test_a_widened_tolerance_makes_the_op_stale_until_it_is_replayed(root):
    rows = replayed(root)
    path = root / "parity" / policy.POLICY.name
    text = path.read_text()
    assert text.count("pointwise: {rmse: 2") == 1
    path.write_text(text.replace("pointwise: {rmse: 2", "pointwise: {rmse: 3"))
    found, reason = told(root, rows)
    assert found == "STALE" and "the limits have changed" in reason
    assert told(root, rows + replayed(root))[0] == "GREEN"


def test_a_widened_floor_makes_the_op_stale_until_it_is_replayed(root):
    rows = replayed(root)
    assert told(root, rows)[0] in ("GREEN", "DRIFT")
    folder = root / "parity" / "goldens" / "ops"
    entries = calibrate.Floors(folder).entries
    name = CELLS[0].golden
    small = {"wide": {"out": {"rmse": 1e-9, "row": 1e-9, "worst": 1e-9, "gain": 1e-9}}}
    calibrate.write({name: {**entries[name], "lanes": small}}, folder)
    status, reason = told(root, rows)
    assert status == "STALE" and "noise" in reason
    assert told(root, [*rows, *replayed(root)])[0] in ("GREEN", "DRIFT")
    # And one that no oracle's noise comes to is none: not at all, however the replay ends.
    wide = {"wide": {"out": {"rmse": 0.5, "row": 0.5, "worst": 0.5, "gain": 0.5}}}
    calibrate.write({name: {**entries[name], "lanes": wide}}, folder)
    again = [row for row in replayed(root) if row["golden_sha"] == rows[0]["golden_sha"]]
    assert {row["verdict"] for row in again} == {"error"}
    assert "at most 8 are believed; `vllmx parity calibrate`" in again[0]["reason"]
    assert told(root, [*rows, *again])[0] in ("RED", "SUSPECT")


def test_a_floor_of_the_golden_before_is_none(root):
    rows = replayed(root)
    path = root / "parity" / "goldens" / "ops" / "floors.json"
    sha = rows[0]["golden_sha"]
    path.write_text(path.read_text().replace(sha, "0" * 64))
    name, reason = told(root, rows)
    assert name == "UNPROVEN" and "noise of the oracle" in reason


def test_another_provider_proves_nothing_of_the_one_asked_for(root):
    rows = replayed(root)
    torch_rows = [row for row in rows if row["provider"] == "torch"]
    others = [row for row in rows if row["provider"] != "torch"]
    assert torch_rows and others
    found, reason = told(root, others)
    assert found == "UNPROVEN" and "torch" in reason and "no run has looked at it" in reason
    fell_back = [again(row, proof={"selected": "native", "calls": 2}) for row in torch_rows]
    found, reason = told(root, others + fell_back)
    assert found == "UNPROVEN" and "asked for provider torch, native ran" in reason


def test_a_failure_of_a_provider_that_nobody_asked_for_counts(root):
    rows = replayed(root)
    device = {"name": "cuda"}
    fine = op_replay.closure_of(dataclasses.replace(CELLS[0], provider="triton"))
    passed = again(rows[0], provider="triton", device=device, closure=fine)
    failed = again(passed, verdict="fail", reason="rmse 3, 2 allowed")
    assert told(root, [*rows, passed])[0] == "GREEN"
    assert told(root, [*rows, failed])[0] == "SUSPECT"
    later = again(failed, seconds=9.0)
    assert told(root, [*rows, failed, later])[0] == "RED"

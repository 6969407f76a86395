# SPDX-License-Identifier: Apache-2.0
"""Results of tests become evidence, and results that show nothing don't pass."""

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from xml.sax.saxutils import quoteattr

import pytest
from toy_checkout import FACTS, build, forget, write

from parity import collect, evidence, features, tree_stamp
from parity.behaviour import Closures
from parity.cells import ours
from parity.checkout import ROOT, Checkout
from parity.collect import exit_code, run_tests, upstream_rows
from parity.model_table import MODELS
from parity.mutate import catalogue
from parity.op_table import OPS
from parity.results import (
    Result,
    matches,
    read_jsonl,
    read_junit,
    read_upstream,
    stamp_in,
    summarise,
)
from parity.schedule_traces import KINDS
from parity.text_cases import specs
from parity.upstream_ratchet import read_passing
from parity.upstream_tests import PASSING, Row, write_tsv
from vllmx.config import RunConfig
from vllmx.exceptions import UserError


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The checkout in small without any evidence."""
    build(tmp_path, monkeypatch)
    forget(tmp_path)
    return tmp_path


def call(**options):
    """The exit code of collect."""
    config = RunConfig()
    for name, value in options.items():
        setattr(config.parity, name, value)
    return collect.run(config)


def rows(root):
    """The evidence by feature."""
    return {row["feature"]: row for row in evidence.load(root / "parity" / "evidence")}


@pytest.mark.parametrize(
    ("selector", "test_id", "expected"),
    [
        ("tests/a/test_x.py", "tests/a/test_x.py::test_one", True),
        ("tests/a/test_x.py", "tests/a/test_xy.py::test_one", False),
        ("tests/a", "tests/a/test_x.py::test_one", True),
        ("tests/a", "tests/ab/test_x.py::test_one", False),
        ("t.py::test_one", "t.py::test_one[a-b]", True),
        ("t.py::test_one", "t.py::test_one_more", False),
        ("t.py::*one*", "t.py::test_one_more[x]", True),
        ("t.py::test_one[a]", "t.py::test_one[a]", True),
        ("t.py::test_one[a]", "t.py::test_onea", False),
        ("t.py::TestA", "t.py::TestA::test_one", True),
    ],
)
def test_a_selector_takes_whole_names(selector, test_id, expected):
    assert matches(selector, test_id) is expected


def test_an_id_that_is_gone_keeps_no_other_from_being_looked_at(root):
    found = run_tests(root, ["tests/test_toy.py::gone", "tests/test_toy.py::test_one"], 300.0)
    assert summarise("tests/test_toy.py::test_one", found).verdict == "pass"
    assert summarise("tests/test_toy.py::gone", found).verdict == "invalid"


def results(*outcomes, **facts):
    return [Result(f"t.py::test_{n}", outcome, **facts) for n, outcome in enumerate(outcomes)]


@pytest.mark.parametrize(
    ("found", "verdict", "words"),
    [
        (results("passed", "passed"), "pass", ""),
        (results("passed", "failed", "skipped"), "fail", "2 of 3 do not fail; first t.py::test_1"),
        (results("passed", "skipped", reason="no gpu"), "skip", "t.py::test_1: no gpu"),
        (results("passed", "missing", reason="time"), "skip", "1 of 2 did not run"),
        (results("passed", "not applicable"), "pass", ""),
        (results("passed", "missing symbol"), "fail", "missing symbol"),
        (results("passed", "not collected"), "fail", "not collected"),
        (results("not applicable"), "invalid", "no test of it applies"),
        (results("passed", "failed", expected=False), "invalid", "no test matches"),
        ([], "invalid", "no test matches"),
        ([Result("other.py::test_1", "passed")], "invalid", "no test matches"),
    ],
)
def test_what_tests_come_to(found, verdict, words):
    summary = summarise("t.py", found)
    assert summary.verdict == verdict
    assert words in summary.reason and bool(summary.reason) == (verdict != "pass")


def test_a_failure_of_what_upstream_fails_too_is_none_of_ours():
    found = [Result("t.py::a", "passed"), Result("t.py::b", "failed", expected=False)]
    assert summarise("t.py", found).verdict == "pass"


def test_another_set_of_tests_is_told_apart():
    few, more = summarise("t.py", results("passed")), summarise("t.py", results("passed", "passed"))
    assert few.details["ids"] != more.details["ids"]


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        (["pass"], 0),
        (["pass", "skip"], 3),
        (["invalid", "skip"], 2),
        (["fail", "invalid"], 1),
        ([], 2),
    ],
)
def test_exit_codes(verdicts, code):
    assert exit_code(verdicts) == code


def test_named_tests_are_run_and_told_of(root):
    assert call(select="engine") == 0
    row = rows(root)["engine.toy"]
    assert row["verdict"] == "pass" and row["details"]["passed"] == 2
    assert row["case"] == "tests/test_toy.py" and not row["run"]["dirty"]
    assert Checkout(root).statuses(Checkout(root).as_of())[1].status == "GREEN"


def test_tests_that_do_not_pass(root):
    texts = {
        "false": "def test_one():\n    assert 1 == 2\n",
        "import": "import nothing_of_this_name\n",
        "skip": "import pytest\ndef test_one():\n    pytest.skip('why')\n",
        "empty": "X = 1\n",
    }
    for name, text in texts.items():
        write(root, f"tests/test_{name}.py", text)
    found = run_tests(root, [f"tests/test_{name}.py" for name in texts], 300.0)
    for name, verdict, words in (
        ("false", "fail", "assert 1 == 2"),
        ("import", "fail", "nothing_of_this_name"),
        ("skip", "skip", "1 of 1 did not run; first tests/test_skip.py::test_one: Skipped: why"),
        ("empty", "invalid", "no test matches"),
        ("toy", "invalid", "no test matches"),
    ):
        summary = summarise(f"tests/test_{name}.py", found)
        assert (summary.verdict, words in summary.reason) == (verdict, True), summary


def test_tests_that_want_the_cores_for_themselves_are_told_of_as_all_others_are(root):
    text = (
        "import pytest\ndef beside(request):\n    return hasattr(request.config, 'workerinput')\n"
    )
    text += "@pytest.mark.alone\ndef test_one(request):\n    assert not beside(request)\n"
    text += "def test_two(request):\n    assert beside(request)\n"
    text += "def test_three():\n    assert 1 == 2\n"
    write(root, "tests/test_alone.py", text)
    found = run_tests(root, ["tests/test_alone.py"], 300.0)
    assert sorted((r.id.partition("::")[2], r.outcome) for r in found) == [
        *(("test_one", "passed"), ("test_three", "failed"), ("test_two", "passed")),
    ]


def test_a_process_of_tests_that_dies_is_a_failure(root):
    write(root, "tests/test_dies.py", "import os\ndef test_one():\n    os._exit(3)\n")
    (told,) = run_tests(root, ["tests/test_dies.py"], 300.0)
    assert (told.outcome, "crashed" in told.reason) == ("failed", True)


def test_a_test_file_that_is_gone_is_invalid(root):
    (root / "tests" / "test_toy.py").unlink()
    assert call(select="engine") == 2
    assert rows(root)["engine.toy"]["verdict"] == "invalid"


def test_what_a_stopped_run_had_shown_is_kept_and_the_rest_is_missing(root, monkeypatch):
    def stopped(command, env, timeout, **rest):
        with open(env["VLLMX_TEST_RESULTS"], "w") as file:
            for name, outcome in (("one", "missing"), ("two", "missing"), ("one", "passed")):
                line = {"id": f"tests/test_toy.py::test_{name}", "outcome": outcome}
                file.write(json.dumps(line) + "\n")
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", stopped)
    found = run_tests(root, ["tests/test_toy.py"], 8.0)
    assert {r.id[-3:]: r.outcome for r in found} == {"one": "passed", "two": "missing"}
    assert summarise("tests/test_toy.py", found).verdict == "skip"


def test_the_canary_fails_and_that_is_as_it_should_be(root, monkeypatch):
    assert call(select="suite.canary") == 0
    assert rows(root)["suite.canary"]["verdict"] == "fail"
    monkeypatch.setattr("parity.canary.look", lambda: ("pass", ""))
    assert call(select="suite.canary") == 2


def test_nothing_to_run_is_an_error(root):
    with pytest.raises(UserError, match="no tests"):
        call(select="model.later")
    with pytest.raises(UserError, match="no feature"):
        call(select="nothing")


# ---------------------------------------------------------------------- files of results

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.test_toy" name="test_one" time="0.5"/>
<testcase classname="tests.test_toy" name="test_two" time="0.1"><failure
 message="AssertionError: no"/></testcase>
<testcase classname="tests.test_toy.TestIn" name="test_three[a.b]" file="tests/test_toy.py"><skipped
 message="why"/></testcase>
</testsuite></testsuites>"""


def stamped(root, junit=JUNIT, **facts):
    """`junit` as a run on the tree at `root` writes it, with `facts` of the run changed."""
    told = json.loads(tree_stamp.of(root))
    text = quoteattr(json.dumps({**told, "run": {**told["run"], **facts}}))
    line = (
        f"<properties><property name={quoteattr(tree_stamp.PROPERTY)} value={text}/></properties>"
    )
    return junit.replace("<testsuite>", f"<testsuite>{line}")


def test_junit_is_read_in_both_families(tmp_path):
    path = tmp_path / "r.xml"
    path.write_text(JUNIT)
    assert read_junit(path) == [
        Result("tests/test_toy.py::test_one", "passed", "", 0.5),
        Result("tests/test_toy.py::test_two", "failed", "AssertionError: no", 0.1),
        Result("tests/test_toy.py::TestIn::test_three[a.b]", "skipped", "why", 0.0),
    ]
    path.write_text("<testsuites")
    with pytest.raises(UserError, match="no JUnit file"):
        read_junit(path)


def test_the_worst_phase_of_a_test_counts(tmp_path):
    path = tmp_path / "r.jsonl"
    lines = [{"id": "a", "outcome": "passed"}, {"id": "a", "outcome": "failed", "reason": "late"}]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    assert read_jsonl(path) == [Result("a", "failed", "late")]


def test_upstreams_table_is_read(tmp_path):
    path = tmp_path / "upstream_tests.tsv"
    path.write_text(
        "id\tstatus\tupstream\tsymbol\treason\n"
        "tests/v1/t.py::a\tpassed\tpasses\t\t\ntests/v1/t.py::b\tfailed\t\t\tray\n"
    )
    assert read_upstream(path) == [
        Result("v1/t.py::a", "passed"),
        Result("v1/t.py::b", "failed", "ray", expected=False),
    ]
    path.write_text("nothing\n")
    with pytest.raises(UserError, match="not a table"):
        read_upstream(path)


def test_results_of_a_file_become_rows_unless_the_code_is_newer(root):
    path = root / "r.xml"
    path.write_text(stamped(root))
    assert call(from_version=str(path)) == 1
    assert rows(root)["engine.toy"]["verdict"] == "fail"
    late = time.time() + 5
    os.utime(root / "vllmx" / "engine.py", (late, late))
    with pytest.raises(UserError, match=r"older than vllmx/engine\.py.*run the tests again"):
        call(from_version=str(path))
    for text in ("<testsuites/>", JUNIT.replace('name="test_one"', 'name="test_other"')):
        path.write_text(text)
        with pytest.raises(UserError, match="tells of nothing"):  # wholly
            call(from_version=str(path))
    with pytest.raises(UserError, match="no file"):
        call(from_version=str(root / "gone.xml"))


def test_results_of_another_tree_or_of_none_are_refused_whatever_their_time(root):
    path = root / "r.xml"
    path.write_text(JUNIT)
    with pytest.raises(UserError, match=r"what tree it was made from; run the tests again"):
        call(from_version=str(path))
    table = root / "copy.tsv"
    write(
        root,
        "parity/features.yaml",
        "engine.toy: {ours: [vllmx/engine.py], upstream: [v1/core/test_output.py]}\n",
    )
    names = [name for name in read_passing(PASSING).upstream if "/test_output.py" in name]
    lines = ["id\tstatus\tupstream\tsymbol\treason", *(f"{n}\tpassed\tpasses\t\t" for n in names)]
    table.write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match="what tree it was made from"):
        call(from_version=str(table))
    rows = [Row(name, "passed") for name in names]
    write_tsv(rows, set(names), table, tree_stamp.of(root))
    assert call(from_version=str(table)) == 0
    code = root / "vllmx" / "engine.py"
    write(root, "vllmx/engine.py", "def step():\n    return 2\n")
    early = table.stat().st_mtime - 60
    os.utime(code, (early, early))
    with pytest.raises(
        UserError, match=r"made from another vllmx/engine\.py .*run the tests again"
    ):
        call(from_version=str(table))


def test_results_of_a_file_are_of_the_run_that_wrote_it(root):
    path = root / "r.xml"
    path.write_text(stamped(root, git="1" * 40, dirty=True))
    call(from_version=str(path))
    told = rows(root)["engine.toy"]["run"]
    assert (told["git"], told["dirty"]) == ("1" * 40, True)
    path.write_text(stamped(root).replace("sources", "sauces"))
    with pytest.raises(UserError, match="is damaged"):
        call(from_version=str(path))


@pytest.mark.parametrize("workers", [[], ["-n1"]], ids=["alone", "xdist"])
def test_pytests_file_of_results_names_its_tree(tmp_path, workers):
    path = tmp_path / "r.xml"
    test = tmp_path / "test_nothing.py"
    test.write_text("def test_nothing():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    command += [f"--confcutdir={ROOT}", "-c", str(ROOT / "pyproject.toml"), *workers]
    command += ["-p", "conftest", f"--junitxml={path}", str(test)]
    search = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": search})
    told = json.loads(stamp_in(path))
    assert told == json.loads(tree_stamp.of(ROOT))
    assert {"parity/collect.py", "tests/conftest.py", "vllmx/config.py"} <= set(told["sources"])


def test_a_part_of_upstreams_tests_does_not_stand_for_the_whole(root):
    write(
        root,
        "parity/features.yaml",
        "engine.toy: {ours: [vllmx/engine.py], upstream: [v1/core/test_output.py, v1/core]}\n",
    )
    names = [name for name in read_passing(PASSING).upstream if "/test_output.py" in name]
    path = root / "upstream_tests.tsv"
    lines = [f"{name}\tpassed\tpasses\t\t" for name in names]
    path.write_text("\n".join(["id\tstatus\tupstream\tsymbol\treason", *lines]) + "\n")
    told = upstream_rows(Checkout(root), path, dict(FACTS))
    assert [(row["case"], row["verdict"]) for row in told] == [("v1/core/test_output.py", "pass")]
    path.write_text(path.read_text().replace(lines[0] + "\n", ""))
    assert upstream_rows(Checkout(root), path, dict(FACTS)) == []


def test_the_code_is_looked_at_before_tests_are_run(root, monkeypatch):
    before = Checkout(root)
    (cell,) = before.features[1].cells
    expected = before.closure(cell)["fine"]

    def edited(command, env, **rest):
        write(root, "vllmx/engine.py", "def step():\n    return 2\n")
        with open(env["VLLMX_TEST_RESULTS"], "w") as file:
            file.write(json.dumps({"id": "tests/test_toy.py::test_one", "outcome": "passed"}))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", edited)
    assert call(select="engine") == 0
    assert rows(root)["engine.toy"]["closure"]["fine"] == expected
    assert Checkout(root).statuses(Checkout(root).as_of())[1].status == "STALE"


# ---------------------------------------------------------------------- closures and declarations


def test_fine_covers_test_helpers_and_files_of_ours_and_coarse_what_they_import(tmp_path):
    write(tmp_path, "tests/a/test_x.py", "import helper\nfrom near import y\n")
    write(tmp_path, "tests/helper.py", "import vllmx.far\n")
    write(tmp_path, "tests/a/near.py", "y = 1\n")
    write(tmp_path, "tests/a/conftest.py", "z = 1\n")
    write(tmp_path, "vllmx/far.py", "def f():\n    from vllmx import farther\n")
    write(tmp_path, "vllmx/farther.py", "w = 1\n")
    write(tmp_path, "vllmx/mine.py", "v = 1\n")
    files = ["tests/a/test_x.py", "vllmx/mine.py"]
    before = Closures(tmp_path).closure(files)
    assert Closures(tmp_path).closure(files) == before
    for name, fine in (
        ("tests/a/test_x.py", True),
        ("tests/helper.py", True),
        ("tests/a/near.py", True),
        ("tests/a/conftest.py", True),
        ("vllmx/mine.py", True),
        ("vllmx/far.py", False),
        ("vllmx/farther.py", False),
    ):
        text = (tmp_path / name).read_text()
        write(tmp_path, name, "# a word\n" + text)
        assert Closures(tmp_path).closure(files) == before, name
        write(tmp_path, name, text + "more = 2\n")
        after = Closures(tmp_path).closure(files)
        assert (after["fine"] != before["fine"]) == fine, name
        assert after["coarse"] != before["coarse"], name
        write(tmp_path, name, text)
    assert Closures(tmp_path).closure([*files, "vllmx/gone.py"]) is None
    assert Closures(tmp_path).closure([]) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no.such: {ours: [vllmx/a.py]}", "not in inventory.tsv: no.such"),
        ("op.toy: {ours: [vllmx/a.py], status: [GREEN]}", "no key status"),
        ("op.toy: {ours: vllmx/a.py}", "needs a list of strings"),
        ("op.toy: {tests: [tests/a.py]}", "names no file of ours"),
    ],
)
def test_a_slip_in_features_yaml_is_named(root, text, words):
    write(root, "parity/features.yaml", text)
    with pytest.raises(UserError, match=words):
        Checkout(root).declared  # noqa: B018


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("id\ttier\tfeature\tupstream\na\tT9\tx\ty\n", "needs id, tier"),
        ("id\ttier\tfeature\tupstream\na\tT0\tx\n", "needs id, tier"),
        ("id\ttier\tfeature\tupstream\na\tT0\tx\ty\na\tT0\tx\ty\n", "a more than once"),
        ("id\ttier\tfeature\tupstream\n", "no rows"),
    ],
)
def test_a_torn_inventory_is_named(root, text, words):
    write(root, "parity/inventory.tsv", text)
    with pytest.raises(UserError, match=words):
        Checkout(root).declared  # noqa: B018


DECLARED = [feature for feature in features.load() if feature.ours]
FILES = {feature.id: ours(feature, ROOT)[0] for feature in DECLARED}


@pytest.mark.parametrize(
    ("asked", "row"),
    [("op.silu_and_mul/", "ops.providers"), ("model.tiny-qwen3_next", "model.qwen3_next")],
)
def test_an_op_or_model_is_no_row_but_the_rows_that_need_it_are_named(asked, row):
    with pytest.raises(UserError, match=rf"is no row, but these rows need it: .*{row}.*Name one"):
        features.named(features.load(), asked)
    assert features.named(features.load(), "sample.penalties").id == "sample.pipeline"


def test_no_feature_changes_its_tier_unseen():
    """The sum of ids and tiers as they were given."""
    told = "\n".join(f"{row.id} {row.tier}" for row in features.load())
    assert hashlib.sha256(told.encode()).hexdigest()[:16] == "91b12f6846349322"


def test_every_row_of_the_inventory_comes_once_and_the_canary_last():
    listed = features.load()
    assert len(listed) == len({feature.id for feature in listed}) == 157
    assert listed[-1].id == features.CANARY


def test_every_file_of_vllmx_and_of_conf_is_named_by_a_feature():
    """Else a change there would leave the evidence of all features as fresh as before."""
    code = {path for files in FILES.values() for path in files}
    paths = [*(ROOT / "vllmx").rglob("*.py"), *(ROOT / "vllmx").rglob("*.c")]
    paths += [path for path in (ROOT / "conf").rglob("*.yaml") if path.parent.name != "local"]
    found = [path.relative_to(ROOT).as_posix() for path in paths if statements(path)]
    assert sorted(set(found) - code) == []
    assert not [path for path in code if path.startswith("conf/local/")], "this machine's own"


def statements(path):
    """Whether a file has more than words on what it is."""
    if path.suffix != ".py":
        return True
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return any(not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)) for s in body)


@pytest.mark.parametrize("package", ["core", "engine", "worker"])
def test_every_test_of_the_engine_is_named_by_a_feature(package):
    tests = {s.partition("::")[0] for feature in DECLARED for s in feature.needs.get("tests", ())}
    for path in (ROOT / "tests" / package).glob("test_*.py"):
        assert str(path.relative_to(ROOT)) in tests, path


def test_every_test_of_the_harness_is_evidence_of_a_feature():
    asked = {s for feature in DECLARED for s in feature.needs.get("tests", ())}
    for path in (ROOT / "tests" / "parity").glob("test_*.py"):
        assert str(path.relative_to(ROOT)) in asked, path


def test_every_model_that_has_goldens_is_asked_for_by_a_feature():
    """Else nothing turns red with it."""
    asked = {name for feature in DECLARED for name in feature.needs.get("models", ())}
    assert asked == set(MODELS)


def asks(feature, by):
    """Whether a feature needs the evidence that finds a fault; by: as in mutants.yaml."""
    kind, _, rest = by.partition(" ")
    if kind == "replay":
        wanted = {OPS[name].feature for name in feature.needs.get("ops", ())}
        wanted |= {f"model.{name}" for name in feature.needs.get("models", ())}
        return rest.split()[0] in wanted
    if kind == "schedule":
        return "schedule" in feature.needs
    return any(matches(selector, by) for selector in feature.needs.get("tests", ()))


@pytest.mark.parametrize("mutant", [m for m in catalogue() if not m.honest], ids=lambda m: m.name)
def test_every_planted_fault_counts_for_a_feature_that_needs_what_finds_it(mutant):
    """Else the fault may live, or its detector go, and no row tells."""
    owners = [feature for feature in DECLARED if mutant.file in FILES[feature.id]]
    assert owners, f"no feature has {mutant.file}"
    told = ", ".join(feature.id for feature in owners)
    asking = [feature.id for feature in DECLARED if asks(feature, mutant.by)]
    assert any(asks(feature, mutant.by) for feature in owners), (
        f"{mutant.file} is of {told}; {mutant.by} is asked for by {asking or 'none'}"
    )


def test_every_test_of_a_gpu_counts_for_a_feature():
    """Else a kernel may fail on the device, and no row tells."""
    asked = {s.partition("::")[0] for feature in DECLARED for s in feature.needs.get("gpu", ())}
    there = {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")}
    assert there and there == asked


@pytest.mark.parametrize("feature", DECLARED, ids=lambda feature: feature.id)
def test_declared_files_tests_ops_and_traces_exist(feature):
    assert ours(feature, ROOT)[1] == ()
    assert feature.needs or feature.id == features.CANARY
    for selector in feature.needs.get("tests", ()):
        file, _, name = selector.partition("::")
        assert (ROOT / file).exists(), selector
        if name:
            text = (ROOT / file).read_text(encoding="utf-8")
            names = re.findall(r"^(?:async )?def (test_\w+)", text, re.MULTILINE)
            assert any(matches(f"{file}::{name}", f"{file}::{found}") for found in names), selector
    assert set(feature.needs.get("schedule", ())) <= {*KINDS, "*"}
    assert set(feature.needs.get("ops", ())) <= set(OPS)
    for prefix in feature.needs.get("text", ()):
        assert any(spec["name"].startswith(prefix) for spec in specs()), prefix

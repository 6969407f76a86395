# SPDX-License-Identifier: Apache-2.0
"""The pages of the report: one file, nothing loaded, every section there, no data never 0 %."""

import json
import re
from collections import Counter
from html.parser import HTMLParser

import pytest
from toy_checkout import build, show, write

from parity import (
    evidence,
    explain,
    ledger,
    mutate,
    report,
    report_data,
    report_html,
    report_md,
    svg,
)
from parity.checkout import Checkout
from parity.golden import GOLDENS
from parity.report_html import COLOURS, SECTIONS
from parity.report_lanes import lanes, trend_text
from parity.status import STATUSES, Cell, CellStatus
from vllmx.config import RunConfig

EMPTY = {"meta", "br"}


class Page(HTMLParser):
    """Checks that tags are closed, and collects text, ids, links and what would be loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.words = ""
        self.tags: dict[str, int] = {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        facts = dict(attrs)
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.ids += [facts["id"]] if "id" in facts else []
        self.links += [facts["href"]] if "href" in facts else []
        self.loaded += [facts["src"]] if "src" in facts else []
        if tag in ("script", "link", "iframe", "img"):
            self.loaded.append(tag)
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags[tag] = self.tags.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The checkout in small, all green."""
    return build(tmp_path, monkeypatch)


def pages(root):
    """(parsed page, its text, Markdown)."""
    texts, _ = report.render(Checkout(root))
    return Page(texts["parity.html"]), texts["parity.html"], texts["parity.md"]


def test_the_page_stands_alone_and_fits_a_phone(root):
    page, text, _ = pages(root)
    assert page.loaded == [] and "http" not in re.sub(r'xmlns="[^"]*"', "", text)
    assert '<meta name="viewport" content="width=device-width' in text
    assert set(page.links) == {f"#{name}" for name, _ in SECTIONS}
    assert set(page.links) == {f"#{name}" for name in page.ids}
    assert text.count('<div class="wide"><table>') == text.count("<table>")
    assert len(text) < 400_000


def test_every_section_is_there_and_says_no_data_where_there_is_none(root):
    page, _, markdown = pages(root)
    for words in ("Models", "Planted faults", "Providers", "Goldens", "Upstream", "Environments"):
        assert f"## {words}" in markdown and words in page.words
    assert "no data" in markdown and "0 %" not in markdown and "0 %" not in page.words
    assert markdown.count("\n") <= 200


def test_red_cells_come_with_what_broke_and_the_command(root):
    show(
        root,
        verdict="fail",
        reason="row 9, 4 allowed",
        checks={"row": {"measured": 9.0, "limit": 4.0, "headroom": 0.44}},
    )
    page, _, markdown = pages(root)
    for words in ("row 9, 4 allowed", "row 9 > 4", "vllmx parity replay op.toy/"):
        assert words in markdown and words in page.words


def test_red_and_tight_cells_say_where_they_are_worst(root):
    place = {"at": [3, 17], "ours": "1.5", "golden": "1.25", "truth": "1.26"}
    show(
        root,
        verdict="fail",
        reason="row 9, 4 allowed",
        checks={"row": {"measured": 9.0, "limit": 4.0, "headroom": 0.44}},
        details={"worst": {"out": place}},
    )
    page, _, markdown = pages(root)
    words = "out[3, 17] is 1.5, golden 1.25, truth 1.26"
    assert markdown.count(words) >= 2 and page.words.count(words) >= 2
    far = {"prefill": {"sequence": 2, "place": 48, "token": 7, "off": "-0.3"}}
    show(root, details={"worst": far}, checks={"mean": {"measured": 1, "limit": 2, "headroom": 2}})
    assert report_data.worst(Checkout(root).statuses(Checkout(root).as_of())[0].cells[0])


def test_the_trend_has_the_reports_of_earlier_evidence_and_is_the_same_written_twice(root):
    config = RunConfig()
    folder = root / "reports"
    assert report.run(config) == 0
    first = (folder / "trend.jsonl").read_text()
    assert len(first.splitlines()) == 1 and "## So far\nno data" in (
        (folder / "parity.md").read_text()
    )
    assert report.run(config) == 0 and (folder / "trend.jsonl").read_text() == first
    config.parity.check = True
    assert report.run(config) == 0
    show(root, ts="2099-01-01T00:00:00Z")
    assert report.run(config) == 1, "there is newer evidence"
    config.parity.check = False
    assert report.run(config) == 0
    points = [json.loads(line) for line in (folder / "trend.jsonl").read_text().splitlines()]
    assert [point["as_of"] for point in points][1:] == ["2099-01-01T00:00:00Z"]
    assert points[0] == json.loads(first) and points[1]["features"] == {"GREEN": 2, "MISSING": 1}
    page = (folder / "parity.md").read_text()
    assert "3 = 2 GREEN + 1 MISSING" in page.split("## So far")[1].split("## Upstream")[0]
    # What a merge leaves, lines of both sides in any order, is the same.
    (folder / "trend.jsonl").write_text(trend_text(points[::-1]) + first)
    assert report.run(config) == 0
    assert [*map(json.loads, (folder / "trend.jsonl").read_text().splitlines())] == points


def test_oracles_are_compared_with_each_other():
    found = {(entry["of"], entry["lane"]): entry for entry in lanes(GOLDENS)}
    linear = found["linear f32", "onednn"]
    assert linear["cases"] >= 3 and 0 < linear["rmse"] < 1e-5 <= 1 > linear["worst"] > 0
    model = found["model.tiny-llama", "hf-cpu-f32"]
    assert 0 < model["mean"] <= model["p99"] <= model["max"] < 1e-3 and model["flips"] == 0
    assert 0 < model["stream"] < 1e-4 and model["cases"] > 800
    assert "rmse" in report_md.lane_figures(linear) and "of" not in report_md.lane_figures(linear)


def test_a_damaged_floor_does_not_blank_the_other_sections(root):
    (root / "parity" / "goldens" / "ops" / "floors.json").write_text("{")
    assert lanes(root / "parity" / "goldens") == []


def test_stale_cells_come_with_the_cause_and_the_command(root):
    write(root, "vllmx/toy.py", "def double(x):\n    return x * 3\n")
    page, _, markdown = pages(root)
    for words in ("the code has changed", "vllmx parity replay op.toy/"):
        assert words in markdown and words in page.words


def test_words_of_evidence_can_not_become_markup(root):
    show(root, verdict="fail", reason="<script>alert(1)</script> | x\ny")
    page, text, markdown = pages(root)
    assert "<script" not in text and "<script>alert(1)</script> | x" in page.words
    assert "\\| x y" in markdown


def elsewhere(root, provider="triton", device="cuda", **changes):
    """A row of op.toy for each case by a provider, or on a device, that nothing asks for."""
    folder = root / "parity" / "evidence"
    made = []
    for row in evidence.load(folder):
        if row["feature"] == "op.toy":
            facts = {k: v for k, v in row.items() if k not in ("id", "reason")}
            facts |= {"provider": provider, "device": {"name": device}}
            facts |= {"proof": {"selected": provider}, **changes}
            made.append(evidence.make_row(**facts))
    evidence.append(made, folder)


def test_what_ran_elsewhere_is_shown_beside_and_decides_nothing(root):
    before = Checkout(root).statuses(Checkout(root).as_of())
    elsewhere(root)
    page, text, markdown = pages(root)
    assert "| op.toy | 2/2 | 2/2 |" in markdown and '<span class="tag GREEN">2/2</span>' in text
    for words in ("torch on cpu", "triton on cuda", "triton on cuda 2/2"):
        assert words in markdown and words in page.words
    after = Checkout(root).statuses(Checkout(root).as_of())
    for old, new in zip(before, after, strict=True):
        assert (old.status, old.reason, old.counts) == (new.status, new.reason, new.counts)
    told = ledger.as_json(after[0])
    assert told["beside"] == {"triton on cuda": {"cells": 2, "passed": 2, "statuses": {"GREEN": 2}}}
    assert "| 2/2 | triton on cuda 2/2 |" in ledger.markdown(after, Checkout(root).as_of())
    assert "beside" not in told["devices"] and told["devices"] == ["cpu"]


def test_what_ran_elsewhere_and_has_become_stale_says_so(root):
    elsewhere(root)
    write(root, "vllmx/toy.py", "def double(x):\n    return x * 2\n")
    page, text, markdown = pages(root)
    assert "triton on cuda 2/2, STALE" in markdown and "triton on cuda 2/2, STALE" in page.words
    assert '<span class="tag STALE">2/2, STALE</span>' in text


def test_a_failure_elsewhere_counts_and_is_not_beside(root):
    elsewhere(root, verdict="fail", reason="rmse 3, 2 allowed", device="cpu")
    row = Checkout(root).statuses(Checkout(root).as_of())[0]
    assert row.status == "RED" and row.beside == () and len(row.cells) == 4
    assert "| op.toy | 2/2 | 0/2, RED |" in pages(root)[2]


FAULTS = {"M0": "sign", "M1": "sign", "M2": "sign", "M3": "mask", "H1": "honest"}


def planted(root, verdicts, **changes):
    """Faults of toy.py in the catalogue, and a row of evidence for each of `verdicts`."""
    entry = "{{class: {}, file: vllmx/toy.py, find: x + x, replace: x - x, by: schedule}}"
    lines = [f"  {name}: {entry.format(kind)}" for name, kind in FAULTS.items()]
    write(root, "parity/mutants.yaml", "\n".join(["mutants:", *lines[:-1], "honest:", lines[-1]]))
    template = evidence.load(root / "parity" / "evidence")[0]
    plain = {k: v for k, v in template.items() if k not in ("id", "reason")}
    made = []
    for mutant in mutate.catalogue(root / "parity" / "mutants.yaml"):
        if mutant.name in verdicts:
            facts = {**plain, "feature": f"mutant.{mutant.name}", "case": mutant.by}
            facts |= {"provider": "vllmx", "mode": "honest" if mutant.honest else "planted"}
            facts |= {"verdict": verdicts[mutant.name], "golden_sha": "", "device": {"name": "cpu"}}
            facts |= {"closure": mutate.closure_of(mutant, root), **changes}
            facts |= {"reason": "got past"} if facts["verdict"] != "pass" else {}
            made.append(evidence.make_row(**facts))
    evidence.append(made, root / "parity" / "evidence")


def test_explain_tells_how_many_planted_faults_were_found(root, capsys):
    planted(root, {"M0": "pass", "M1": "fail"})
    config = RunConfig()
    config.parity.select = "op.toy"
    explain.run(config)
    assert "planted faults found: 1 of 4\n" in capsys.readouterr().out


CHECKS = {
    "prefill.mean": {"measured": 0.004, "limit": 0.02, "headroom": 5.0},
    "prefill.ties": {"measured": 3.0, "limit": 5.0, "headroom": 1.667},
    "decode.mean": {"measured": 0.006, "limit": 0.02, "headroom": 3.333},
}


def ran(name="tiny", provider="auto", mode="bs1", status="GREEN", device="cpu", **details):
    """A cell of a model and what a run of it came to."""
    cell = Cell(f"model.{name}", "forced", provider, device, mode, "model", f"models/{name}")
    row = {"verdict": "pass", "ts": "2026-11-30T00:00:00Z", "checks": CHECKS, "details": details}
    return CellStatus(cell, status, "shown", (), row)


def with_models(root, asked, beside=()):
    """(parsed page, its text, Markdown) of a report with these cells of models."""
    data = report_data.build(Checkout(root), Checkout(root).as_of())
    data["models"] = report_data.models(asked, beside)
    text = report_html.page(data)
    return Page(text), text, report_md.page(data)


def test_models_show_their_error_by_layer(root):
    layers = {"layers": [1e-5, 1e-4, 1e-3], "floor_layers": [1e-6, 1e-5, 1e-5]}
    asked = [ran(**layers), ran(provider="torch", drift="stream of layer 2", **layers)]
    page, _, markdown = with_models(root, [*asked, ran(mode="batch")])
    assert page.tags["polyline"] == 3 and "the oracle's other lane" in page.words
    assert "auto bs1 cpu" in page.words and "by layer: no data" not in page.words
    for words in (page.words, markdown):
        assert "stream of layer 2 (torch bs1 cpu)" in words
    page, _, markdown = with_models(root, [ran(**layers)])
    assert "| prefill.ties (auto bs1 cpu) | none |" in markdown, "measured, and in line"
    page, _, markdown = with_models(root, [ran()])
    assert "| prefill.ties (auto bs1 cpu) | no data |" in markdown


def test_a_model_is_one_line_with_its_nearest_limit_the_worst_first(root):
    asked = [ran("a"), ran("a", mode="batch"), ran("b"), ran("b", mode="batch", status="STALE")]
    _, text, markdown = with_models(root, asked, [ran("a", mode="eager", device="cuda")])
    lines = [line for line in markdown.splitlines() if line.startswith("| model.")]
    assert [line.split(" | ")[:4] for line in lines] == [
        ["| model.b", "STALE", "auto on cpu 2/2, STALE", "1.67"],
        ["| model.a", "GREEN", "auto on cpu 2/2; auto on cuda 1/1", "1.67"],
    ]
    table = text.split('id="models"')[1].split("</table>")[0]
    assert table.count("<tr>") == 3 and table.index("model.b") < table.index("model.a")
    entry = report_data.models(asked, [])["model.a"]
    assert [run["run"] for run in entry["runs"]] == ["auto batch cpu", "auto bs1 cpu"]
    assert entry["runs"][0]["figures"] == {"mean": 0.006, "ties": 3.0}
    assert "eager" not in json.dumps(entry["runs"]), "a cell of a GPU is counted, not spelt out"


def test_models_that_nothing_asks_for_are_left_out(root):
    template = evidence.load(root / "parity" / "evidence")[0]
    facts = {k: v for k, v in template.items() if k not in ("id", "reason")}
    made = [
        evidence.make_row(**{**facts, "feature": f"model.{n}", "mode": mode, "device": {"name": d}})
        for n, mode, d in (("old", "bs1", "cpu"), ("later", "pytest", "cpu"), ("x", "bs1", "cuda"))
    ]
    evidence.append(made, root / "parity" / "evidence")
    data = report_data.build(Checkout(root), Checkout(root).as_of())
    assert data["models"] == {}
    assert "model.old" not in json.dumps(data) + report_html.page(data)


def test_the_report_stays_small_however_many_models_there_are(root):
    layers = {"layers": [1.23456e-5] * 40, "floor_layers": [2.34567e-6] * 40}
    asked = [
        ran(f"tiny-of-some-family-{n}", provider, mode, **layers if mode == "bs1" else {})
        for n in range(110)
        for provider in ("auto", "torch")
        for mode in ("bs1", "batch", "chunked", "prefix")
    ]
    page, text, markdown = with_models(root, asked)
    assert len(text) < 600_000 and page.tags["tr"] < 1_200
    assert text.count('<div class="wide"><table>') == text.count("<table>")
    table = text.split('id="models"')[1].split("</table>")[0]
    assert table.count("<tr>") == 111 and "<details" not in table
    assert "more, none of them worse" in markdown and markdown.count("\n") <= 200
    assert len(json.dumps(report_data.models(asked, []))) < 600_000


def test_the_data_has_a_line_an_entry_and_nothing_is_lost(root):
    data = report_data.build(Checkout(root), Checkout(root).as_of())
    text = report.json_text(data)
    assert json.loads(text) == json.loads(json.dumps(data))
    assert sum(line.startswith(' {"') for line in text.splitlines()) >= len(data["rows"]) == 4
    assert json.loads(report.json_text({"a": [], "b": {}, "c": 1})) == {"a": [], "b": {}, "c": 1}


def test_a_list_that_is_cut_says_so(root):
    data = report_data.build(Checkout(root), Checkout(root).as_of())
    place = {"torch on cpu": {"cells": 1, "passed": 1, "statuses": {"GREEN": 1}}}
    lane = {"of": "model.x", "lane": "other", "cases": 1, "p99": 1e-7}
    red = {"cell": "c", "reason": "r", "broken": None, "worst": "", "command": "x"}
    data |= {"providers": {f"op.x{n}": place for n in range(400)}, "lanes": [lane] * 99}
    data |= {"red": [{**red, "status": "RED"}] * 30, "more_red": 7}
    data["mutation"] |= {"missed": ["m"] * 99}
    page = report_md.page(data)
    for head, every in (("| op.x", 400), ("| model.x", 99), ("| c |", 37), ("- not found", 99)):
        shown = sum(line.startswith(head) for line in page.splitlines())
        assert 0 < shown < every and f"and {every - shown} more" in page
    assert "and 7 more" in report_html.page(data)


def test_commands_are_never_cut(root):
    names = ",".join(f"some.feature_{n}" for n in range(90))
    command = f"vllmx parity collect --select {names}"
    data = report_data.build(Checkout(root), Checkout(root).as_of())
    late = {"status": "STALE", "cells": 90, "cause": "c", "commands": [command]}
    late["of"] = {f"some.feature_{n}": n + 1 for n in range(90)}
    data |= {"stale": [late], "commands": [command]}
    red = {"cell": "c", "reason": "r", "broken": None, "worst": "", "status": "RED"}
    data["red"] = [{**red, "command": command + "x"}]
    page = report_md.page(data)
    assert f"```\n{command}\n```" in page and f"`{command}x`" in page
    assert "some.feature_0, some.feature_1 (2)," in page and "and 82 more" in page
    assert command in Page(report_html.page(data)).words


def test_texts_are_cut_between_words(root):
    show(root, verdict="fail", reason="off by " + "0.123456 " * 60)
    page, _, markdown = pages(root)
    for text in (page.words, markdown, ledger.markdown(*everything(root))):
        numbers = re.findall(r"\b0\.1\d*", text)
        assert len(numbers) > 10 and set(numbers) == {"0.123456"} and "…" in text


def everything(root):
    """(rows, time) that a ledger is rendered of."""
    here = Checkout(root)
    return here.statuses(here.as_of()), here.as_of()


def test_environments_tell_of_the_gpu_and_its_libraries(root):
    gpu = {"name": "cuda", "model": "NVIDIA H200", "sm": "90", "cuda": "13.0"}
    run = {"dirty": False, "machine": "big", "torch": "2.11.0", "triton": "3.6.0"}
    elsewhere(root)
    before = len(report_data.environment(Checkout(root).evidence))
    show(root, device=gpu, run=run)
    found = report_data.environment(Checkout(root).evidence)
    assert len(found) == before + 1
    page, _, markdown = pages(root)
    for words in ("NVIDIA H200", "| cuda | NVIDIA H200 | 90 | 13.0 |  | big |", "3.6.0", "triton"):
        assert words in markdown
        assert words.startswith("|") or words in page.words


def test_planted_faults_show_their_score(root):
    planted(root, {"M0": "pass", "M1": "pass", "M2": "pass", "M3": "fail", "H1": "pass"})
    page, _, markdown = pages(root)
    words = "3 of 4 planted faults found (75.0 %), 4 of 4 looked at."
    for text in (page.words, markdown):
        assert words in text and "M3: got past" in text
        assert "Honest alternates: 1 = 1 accepted" in text
    assert "By category: sign 3 = 3 found; mask 1 = 1 missed." in markdown


def test_the_score_is_of_all_faults_and_of_runs_that_count(root):
    planted(root, {"M0": "pass", "M3": "invalid"})
    page, _, markdown = pages(root)
    words = "1 of 4 planted faults found (25.0 %), 1 of 4 looked at."
    assert words in markdown and words in page.words and "M3: got past" in page.words
    write(root, "vllmx/toy.py", "def double(x):\n    return 2 * x + x + x\n")
    assert "no data: 0 of 4 planted faults looked at" in pages(root)[2]


@pytest.mark.parametrize(
    ("found", "looked", "total", "told", "missed"),
    [
        (0, 0, 0, "no data", False),
        (0, 0, 4, "no data: 0 of 4 planted faults looked at", True),
        (4, 4, 201, "4 of 201 planted faults found (1.9 %), 4 of 201 looked at", True),
        (94, 94, 100, "(94.0 %), 94 of 100 looked at", True),
        (1899, 2000, 2000, "(94.9 %), 2000 of 2000 looked at", True),
        (95, 100, 100, "(95.0 %), 100 of 100 looked at", False),
        (100, 100, 100, "(100.0 %), 100 of 100 looked at", False),
    ],
)
def test_a_share_below_what_is_wanted_is_a_missed_target(root, found, looked, total, told, missed):
    """Those that nobody looked at count as not found, and no rounding reaches the target."""
    words = Counter({"found": found, "missed": looked - found, "stale": total - looked})
    data = report_data.build(Checkout(root), Checkout(root).as_of())
    data["mutation"] |= report_data.score(words)
    markdown, html = report_md.page(data), Page(report_html.page(data)).words
    sentence = f"Missed target: 95 % of the planted faults have to be found, {found} are."
    for page in (markdown, html):
        assert told in page and page.count(sentence) == 2 * missed
        assert ("Missed target" in page.split("Planted faults")[0]) == missed, "said at the top"


def test_a_missed_target_makes_nothing_invalid_or_stale(root, capsys):
    planted(root, {"M0": "fail"})
    config = RunConfig()
    assert report.run(config) == 0
    config.parity.check = True
    assert report.run(config) == 0
    assert "Missed target" in (root / "reports" / "parity.md").read_text()
    assert "Missed target" in (root / "reports" / "parity.html").read_text()
    assert "INVALID" not in capsys.readouterr().out


def test_faults_found_in_a_dirty_tree_are_not_found(root):
    planted(root, dict.fromkeys(FAULTS, "pass"), run={"dirty": True})
    page, _, markdown = pages(root)
    words = "no data: 0 of 4 planted faults looked at"
    assert words in markdown and words in page.words


def test_markdown_has_the_areas_and_stays_short_however_much_is_wrong(root):
    data = report_data.build(Checkout(root), Checkout(root).as_of())
    assert "By area: engine 1 = 1 GREEN; model 1 = 1 MISSING; op 1 = 1 GREEN." in report_md.page(
        data
    )
    red = {"cell": "c", "reason": "r", "broken": None, "worst": "", "command": "x"}
    late = {"status": "STALE", "cells": 1, "cause": "c", "of": {"f": 1}, "commands": []}
    model = {"status": "RED", "places": {}, "tightest": None, "layer": "", "layers": {}, "runs": []}
    place = {"torch on cpu": {"cells": 1, "passed": 1, "statuses": {"GREEN": 1}}}
    data |= {"red": [red] * 99, "stale": [late] * 99, "commands": ["x"] * 99}
    data |= {"models": {f"m{n}": model for n in range(99)}}
    data |= {"providers": {f"op{n}": place for n in range(40)}}
    data["mutation"] |= {"missed": ["m"] * 99, "looked": 9, "total": 9}
    data["mutation"]["categories"] = {f"c{n}": {"missed": 1} for n in range(14)}
    data["environment"] = [data["environment"][0]] * 99
    lane = {"of": "x f32", "lane": "other", "cases": 1, "rmse": 1e-7}
    point = {"as_of": "2026", "features": {}, "cells": {}, "mutants": [0, 0], "goldens": 0}
    data |= {"lanes": [lane] * 99, "trend": [{**point, "headroom": None}] * 99}
    page = report_md.page(data)
    assert page.count("\n") <= 200 and page.count("more") >= 4


def test_a_chart_draws_every_count_once():
    bars = svg.stacked_bars([("T0", {"GREEN": 3, "RED": 1}), ("T1", {"GREEN": 2})], STATUSES)
    assert bars.count("<rect") == 3 and "T0: 3 GREEN" in bars and "T0: 1 RED" in bars
    shown = svg.histogram([0.5, 1.0, 1.1, 7.0], (0.0, 1.0, 2.0, 10.0), 1.0)
    assert [int(n) for n in re.findall(r": (\d+)</title>", shown)] == [1, 2, 1]
    assert shown.count('class="s-RED"') == 1
    assert svg.curves({"a": []}, []) == ""
    assert svg.curves({"a": [1e-3, 1e-2], "b": [0.0, 1.0]}, ["x", "y"]).count("<polyline") == 2


def test_every_status_has_a_colour():
    assert set(COLOURS) == set(STATUSES)


def test_a_table_without_rows_is_no_data():
    assert report_md.table(["a"], []) == ["no data"]

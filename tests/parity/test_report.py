# SPDX-License-Identifier: Apache-2.0
"""The pages of the report: one file, nothing loaded, every section there, no data never 0 %."""

import re
from html.parser import HTMLParser

import pytest
from toy_checkout import build, show, write

from parity import evidence, report, report_md, svg
from parity.checkout import Checkout
from parity.report_html import COLOURS, SECTIONS
from parity.status import STATUSES

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


def test_models_show_their_error_by_layer_and_mutants_their_score(root):
    details = {"layers": [1e-5, 1e-4, 1e-3], "floor_layers": [1e-6, 1e-5, 1e-5]}
    rows = [("model.tiny", "bs1", details, "pass")]
    rows += [(f"mutant.M{n}", "planted", {"category": "sign"}, "pass") for n in range(3)]
    rows += [("mutant.M9", "planted", {"category": "mask"}, "fail")]
    rows += [("mutant.H1", "honest", {"category": "honest"}, "pass")]
    template = evidence.load(root / "parity" / "evidence")[0]
    plain = {k: v for k, v in template.items() if k not in ("id", "reason")}
    made = []
    for name, mode, told, verdict in rows:
        facts = {**plain, "feature": name, "mode": mode, "details": told, "verdict": verdict}
        facts |= {"reason": "got past"} if verdict == "fail" else {}
        made.append(evidence.make_row(**facts))
    evidence.append(made, root / "parity" / "evidence")
    page, _, markdown = pages(root)
    assert "3 of 4 found (75.0 %)" in markdown and "M9: got past" in markdown
    assert "Honest alternates: 1 = 1 accepted" in markdown
    assert page.tags["polyline"] == 2 and "the oracle's other lane" in page.words
    assert "model.tiny torch bs1 cpu" in page.words and "3 layers" in markdown


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

# SPDX-License-Identifier: Apache-2.0
"""The conformance harness from end to end, on a small archive made for the purpose."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllmx.exceptions import UserError
from vllmx.tasks.parity import load_parity

ROOT = Path(__file__).resolve().parents[2]
ENGINE_TEST = """
import asyncio
import random
import time

import pytest
from transformers import AutoTokenizer

from tests.utils import create_new_process_for_each_test, multi_gpu_test
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

if not current_platform.is_cuda():
    pytest.skip(reason="for CUDA", allow_module_level=True)

NAME = "hmellor/tiny-random-LlamaForCausalLM"


@create_new_process_for_each_test()
def test_stand_in_generates():
    assert len(AutoTokenizer.from_pretrained(NAME)("I am Gyoubu Masataka Oniwa").input_ids) == 12
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    (output,) = LLM(NAME, enforce_eager=True).generate("Hello", params)
    assert len(output.outputs[0].token_ids) == 5


def test_special_tokens_of_llama_3():
    tokenizer = AutoTokenizer.from_pretrained("meta-llama/Llama-3.2-1B")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (128000, 128001)
    assert tokenizer.decode([128009]) == "<|eot_id|>"
    text = "My name is caf\\u00e9"
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    assert EngineArgs("meta-llama/Llama-3.2-1B").create_engine_config().model_config.max_model_len


def test_model_without_a_stand_in():
    LLM("nobody/no-model")


def test_argument_that_asks_for_something():
    LLM(NAME, no_such_argument=3)


@multi_gpu_test(num_gpus=2)
def test_two_gpus():
    assert False


def test_chance_is_the_same_in_every_run():
    assert random.random() == 0.8444218515250481


@pytest.mark.asyncio
async def test_coroutine(vllm_runner, example_prompts):
    started = time.monotonic()
    await asyncio.sleep(0.1)
    time.sleep(0.1)
    assert time.monotonic() - started >= 0.6
    assert vllm_runner.__name__ == "VllmRunner"
    assert [p.strip() for p in example_prompts] == ["one", "two"]
"""
CORE_TEST = """
from vllm.v1.request import RequestStatus


def test_holds():
    assert RequestStatus.WAITING < RequestStatus.RUNNING


def test_fails():
    assert False


def test_differs():
    assert False
"""
MAP = """
archive: {requirement: vllm==9.9, sha256: SHA}
suites: [v1/core]
as_cuda: [tests/v1/engine/test_engine.py]
patience: {tests/v1/engine/test_engine.py: 3}
modules:
  vllm: vllmx
  vllm.v1.request: vllmx.request
  tests.utils: {replaced: by the shim}
symbols:
  vllm.LLM: {adapter: LLM}
  vllm.engine.arg_utils.EngineArgs: {adapter: EngineArgs}
  vllm.platforms.current_platform: {adapter: current_platform}
  tests.utils.create_new_process_for_each_test: {adapter: create_new_process_for_each_test}
  tests.utils.multi_gpu_test: {adapter: multi_gpu_test}
tests:
  "tests/v1/core/test_core.py::test_differs": {replaced: by a toy}
"""
PASSING = """\
# a comment
uv tests/v1/core/test_core.py::test_holds
u- tests/v1/core/test_core.py::test_differs
"""


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    """parity/upstream_tests.py, loaded as `vllmx parity` loads it."""
    load_parity(ROOT)
    return import_module("vllmx._parity.upstream_tests")


@pytest.fixture(scope="module")
def ratchet(harness: ModuleType) -> ModuleType:
    """parity/upstream_ratchet.py."""
    return sys.modules["vllmx._parity.upstream_ratchet"]


def make_archive(path: Path, tests: dict[str, str]) -> str:
    """An archive in the shape of upstream's with `tests`; its SHA-256."""
    files = {f"vllm-9.9/tests/{name}": text for name, text in tests.items()}
    files |= {f"vllm-9.9/tests/{part}__init__.py": "" for part in ("", "v1/")}
    files |= {f"{name.rpartition('/')[0]}/__init__.py": "" for name in list(files)}
    files["vllm-9.9/vllm/__init__.py"] = "raise AssertionError('upstream itself was imported')"
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Place:
    """A cache, a map, a list of passing tests and an index of one archive."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.index = folder / "index" / "vllm"
        self.index.mkdir(parents=True)
        self.archive = self.index / "vllm-9.9.tar.gz"
        self.url = url
        tests = {
            "v1/core/test_core.py": CORE_TEST,
            "v1/engine/test_engine.py": ENGINE_TEST,
            "prompts/example.txt": "one\ntwo\n",
        }
        sha = make_archive(self.archive, tests)
        (self.index / "index.html").write_text('<a href="vllm-9.9.tar.gz#sha256=x">x</a>')
        self.map = folder / "map.yaml"
        self.map.write_text(MAP.replace("SHA", sha))
        self.passing = folder / "passing.txt"
        self.passing.write_text(PASSING)
        self.cached = folder / "home" / ".cache" / "vllmx" / "upstream" / "vllm-9.9.tar.gz"
        self.reports = folder / "reports"


@pytest.fixture
def place(harness: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Everything that the harness touches, in a folder of the test."""
    (tmp_path / "index").mkdir()
    handler: Any = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "index"))
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *args: None)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        made = Place(tmp_path, f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setenv("PIP_INDEX_URL", made.url)
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(harness, "MAP", made.map)
        monkeypatch.setattr(harness, "PASSING", made.passing)
        monkeypatch.setattr(harness, "REPORTS", made.reports)
        yield made
        server.shutdown()


@pytest.fixture
def outcomes(harness: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the tests of v1/core come to, without running them; may be changed."""
    found = {"test_holds": "passed", "test_fails": "failed", "test_differs": "not applicable"}

    def run_file(source: Path, file: str, *args: object) -> list[Any]:
        return [
            harness.Row(f"{file}::{name}", status, f"it is {status}")
            for name, status in found.items()
        ]

    monkeypatch.setattr(harness, "run_file", run_file)
    return found


def statuses(folder: Path) -> dict[str, str]:
    """Test name -> status, from the table in `folder`."""
    lines = (folder / "upstream_tests.tsv").read_text().splitlines()[1:-1]
    return {line.split("\t")[0].rpartition("::")[2]: line.split("\t")[1] for line in lines}


def test_empty_cache_fetches_and_checks_and_the_report_is_written(
    harness: ModuleType, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert harness.run_selected(None, str(place.reports)) == 0
    assert place.cached.is_file()
    found = {"test_holds": "passed", "test_fails": "failed", "test_differs": "not applicable"}
    assert statuses(place.reports) == found
    out = capsys.readouterr().out
    assert "v1/core: 1 passed of 2 that upstream passes (50.0%); 0 deselected, 1 not" in out
    assert "unexplained: " not in out
    page = (place.reports / "upstream_tests.md").read_text()
    assert "- unexplained: 0\n- passed before and no longer: 0\n" in page
    assert "| v1/core/test_core.py | 2 | 1 |" in page


def test_a_test_that_passed_and_no_longer_does_fails_the_run_by_name(
    harness: ModuleType,
    place: Place,
    outcomes: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    lost = "tests/v1/core/test_core.py::"
    place.passing.write_text(f"-v {lost}test_fails\nuv {lost}test_differs\nu- {lost}test_gone\n")
    assert harness.run_selected("v1/core", str(place.folder / "out")) == 1
    out = capsys.readouterr().out
    assert f"no longer passes: {lost}test_fails: failed: it is failed" in out
    assert f"no longer passes: {lost}test_differs: not applicable: it is not" in out
    assert f"unexplained: {lost}test_gone: not collected: the id does not come up" in out
    page = (place.folder / "out" / "upstream_tests.md").read_text()
    assert "passed before and no longer: 2; `v1/core/test_core.py::test_fails`;" in page
    # Only a run into reports/ marks what passes.
    assert "test_holds" not in place.passing.read_text()


def test_a_run_into_reports_marks_what_passes_and_takes_no_mark_away(
    harness: ModuleType, ratchet: ModuleType, place: Place, outcomes: dict[str, str]
) -> None:
    ids = [f"tests/v1/core/test_core.py::{name}" for name in ("test_holds", "test_fails")]
    place.passing.write_text(f"u- {ids[0]}\n-v {ids[1]}\n")
    assert harness.run_selected("v1/core", str(place.reports)) == 1
    read = ratchet.read_passing(place.passing)
    assert (read.upstream, read.here) == (frozenset(ids[:1]), frozenset(ids))


def test_engines_are_vllmxs_own_with_a_stand_in_for_the_model(
    harness: ModuleType, place: Place
) -> None:
    out = place.folder / "out"
    assert harness.run_selected("v1/engine", str(out)) == 0
    assert statuses(out) == {
        "test_stand_in_generates": "passed",
        "test_special_tokens_of_llama_3": "passed",
        "test_model_without_a_stand_in": "missing symbol",
        "test_argument_that_asks_for_something": "missing symbol",
        "test_two_gpus": "skipped",
        "test_chance_is_the_same_in_every_run": "passed",
        "test_coroutine": "passed",
    }
    table = (out / "upstream_tests.tsv").read_text()
    assert "\tmodels.yaml:nobody/no-model\t" in table
    assert "\tvllm.engine.arg_utils.EngineArgs.no_such_argument\t" in table


def test_a_process_that_a_test_starts_finds_the_map_as_well(
    harness: ModuleType, place: Place
) -> None:
    code = "from vllm.v1.request import RequestStatus as R; print(R.__module__, end='')"
    text = (
        "import subprocess, sys\n\n\ndef test_child():\n"
        f"    code = {json.dumps(code)}\n"
        "    assert subprocess.check_output([sys.executable, '-c', code]) == b'vllmx.request'\n"
    )
    sha = make_archive(place.archive, {"v1/core/test_child.py": text})
    place.map.write_text(MAP.replace("SHA", sha))
    assert harness.run_selected("v1/core/test_child.py", str(place.folder / "out")) == 0
    assert statuses(place.folder / "out") == {"test_child": "passed"}


def test_an_archive_with_another_hash_is_refused(harness: ModuleType, place: Place) -> None:
    place.map.write_text(MAP.replace("SHA", "f" * 64))
    with pytest.raises(UserError, match=r"vllm-9.9.tar.gz: the index gives SHA-256 \w+, the map f"):
        harness.run_selected(None, None)
    assert list(place.cached.parent.iterdir()) == []


def test_a_damaged_archive_in_the_cache_is_fetched_anew(harness: ModuleType, place: Place) -> None:
    place.cached.parent.mkdir(parents=True)
    place.cached.write_bytes(b"half of it")
    assert harness.fetch(harness.load_map(place.map)).read_bytes() == place.archive.read_bytes()


def test_without_a_network_the_error_says_where_the_archive_goes(
    harness: ModuleType, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"refused.*; or put the archive at .*vllm-9.9.tar.gz\."):
        harness.run_selected(None, None)
    place.cached.parent.mkdir(parents=True, exist_ok=True)
    place.cached.write_bytes(place.archive.read_bytes())
    assert harness.fetch(harness.load_map(place.map)) == place.cached


def test_an_index_without_the_archive_is_named(harness: ModuleType, place: Place) -> None:
    (place.index / "index.html").write_text("<a href='vllm-9.8.tar.gz'>x</a>")
    with pytest.raises(UserError, match=r"/vllm/ has no vllm-9.9.tar.gz"):
        harness.run_selected(None, None)


def test_what_cannot_be_run_is_a_user_error(
    harness: ModuleType, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="upstream has no tests/v1/nowhere"):
        harness.run_selected("v1/nowhere", None)
    place.passing.write_text("xy tests/a\n")
    with pytest.raises(UserError, match=r"passing.txt:1: 'xy tests/a' is not one of uv, u-, -v"):
        harness.run_selected(None, None)
    place.passing.write_text("")
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pytest and pytest_timeout: `pip install -e '.\[test\]'`"):
        harness.run_selected(None, None)
    place.map.write_text("modules: 3\n")
    with pytest.raises(UserError, match="modules: not a mapping"):
        harness.run_selected(None, None)


def test_a_file_that_kills_its_process_is_a_row(harness: ModuleType, place: Place) -> None:
    text = "import os\n\n\ndef test_dies():\n    os._exit(3)\n"
    sha = make_archive(place.archive, {"v1/core/test_dies.py": text})
    place.map.write_text(MAP.replace("SHA", sha))
    place.passing.write_text("u- tests/v1/core/test_dies.py::test_dies\n")
    assert harness.run_selected("v1/core", str(place.folder / "out")) == 1
    table = (place.folder / "out" / "upstream_tests.tsv").read_text()
    assert "tests/v1/core/test_dies.py\tfailed\t\t\tpytest ended with 3" in table
    assert "test_dies.py::test_dies\tnot collected\tpasses\t\tpytest ended with 3" in table


def test_a_selection_takes_whole_names(ratchet: ModuleType) -> None:
    under = ratchet.under
    assert under("tests/v1/core/test_a.py::test_b[x]", "v1/core")
    assert under("tests/v1/core/test_a.py::test_b[x]", "v1/core/test_a.py::test_b")
    assert not under("tests/v1/core/test_ab.py::test_b", "v1/core/test_a")

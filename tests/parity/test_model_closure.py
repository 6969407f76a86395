# SPDX-License-Identifier: Apache-2.0
"""Evidence of a model is stale after a change of what a cell runs, and after no other change."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from parity import closure, model_replay
from parity.model_replay import closure_of
from parity.model_table import MODELS, expected

MORE = ("from __future__ import annotations\n", "from __future__ import annotations\n\nmore = 2\n")
DECIDES = {
    # file -> what is in it, and what could be there
    "conf/config.yaml": ("  - kernel: auto", "  - kernel: torch"),
    "conf/kernel/auto.yaml": ("cache_dir: null", "cache_dir: here"),
    "parity/model_engine.py": ("temperature=0.0, max_tokens=1, prompt", "max_tokens=1, prompt"),
    "parity/model_gate.py": ("COVERAGE = 0.60", "COVERAGE = 0.06"),
    "parity/model_replay.py": ("float(found.short)", "float(not found)"),
    "parity/model_watch.py": ("CHUNK = 48", "CHUNK = 480"),
    "vllmx/attention/backends/torch_sdpa.py": MORE,
    "vllmx/core/kv_cache_manager.py": ("request.num_tokens - 1", "request.num_tokens"),
    "vllmx/core/scheduler.py": ("self.scheduler_config.max_num_seqs", "1"),
    "vllmx/core/utils.py": (">= request.max_tokens", "> request.max_tokens"),
    "vllmx/engine/core.py": MORE,
    "vllmx/engine/logprobs.py": MORE,
    "vllmx/ir/ops/attention.py": ("* v_scale", "/ v_scale"),
    "vllmx/kernels/cpu_ops.py": ("F.silu(gate)", "F.gelu(gate)"),
    "vllmx/kernels/native.c": ("0.044715f", "0.04f"),
    "vllmx/layers/logits_processor.py": ("return ", "return not "),
    "vllmx/model_loader/loader.py": ("return ", "return not "),
    "vllmx/models/utils.py": ('".gate_up_proj.", "0"', '".gate_up_proj.", "1"'),
    "vllmx/quantization/gguf.py": ("return ", "return -"),
    "vllmx/sample/sampler.py": ("return ", "return not "),
    "vllmx/worker/model_runner.py": ("total_len[rows] += 1", "total_len[rows] += 2"),
}
LEFT_OUT = ("entrypoints", "reasoning", "structured_output", "tasks", "tiny")
"""Packages of vllmx whose changes are of no model."""
OTHERS = (
    "vllmx/engine/detokenizer.py",
    "vllmx/engine/input_processor.py",
    "vllmx/engine/mp_client.py",
    "vllmx/engine/token_pieces.py",
    "vllmx/model_loader/gguf_tokenizer.py",
    "vllmx/model_loader/tokenizer.py",
)

COMPARED = ("smollm2-135m", "gemma3-270m", "tiny-llama")


class Tree:
    """A copy of the sources, of which closures are taken."""

    def __init__(self, folder) -> None:
        skip = shutil.ignore_patterns("goldens", "evidence", "__pycache__", "local")
        for name in (*closure.PACKAGES, "conf"):
            shutil.copytree(closure.ROOT / name, folder / name, ignore=skip)
        self.sources = closure.Sources(folder)
        self.untouched: dict[str, str] = {}

    def fine(self, name: str) -> str:
        model_replay._closure.cache_clear()
        return model_replay._closure(name)["fine"]

    @contextmanager
    def edited(self, file: str, old: str, new: str) -> Iterator[None]:
        """`old` is `new` in `file` for a while."""
        text = (self.sources.root / file).read_text()
        assert old in text
        self._write(file, text.replace(old, new))
        try:
            yield
        finally:
            self._write(file, text)

    def _write(self, file: str, text: str) -> None:
        (self.sources.root / file).write_text(text)
        self.sources.modules.pop(file, None)
        for known in (self.sources.known, self.sources.codes, self.sources.imports):
            for key in [key for key in known if closure.path_of(key) == file]:
                del known[key]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    found = Tree(tmp_path_factory.mktemp("sources"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_replay, "sources", lambda: found.sources)
        found.untouched = {name: found.fine(name) for name in COMPARED}
        yield found
    model_replay._closure.cache_clear()


def test_the_closures_of_an_untouched_copy_are_those_of_the_tree(tree) -> None:
    cell = next(expected("tiny-llama/", "auto"))
    model_replay._closure.cache_clear()
    copied = closure_of(cell)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_replay, "sources", lambda: closure.Sources(closure.ROOT))
        model_replay._closure.cache_clear()
        assert closure_of(cell) == copied


@pytest.mark.parametrize("file", DECIDES)
def test_a_change_of_what_a_cell_runs_makes_every_model_stale(tree, file: str) -> None:
    with tree.edited(file, *DECIDES[file]):
        same = [name for name, before in tree.untouched.items() if tree.fine(name) == before]
    assert not same


@pytest.mark.parametrize("name", MODELS)
def test_parsers_front_ends_and_tokenizers_make_no_model_stale(tree, name: str) -> None:
    followed = closure.items(
        model_replay._symbols(name), tree.sources.root, tree.sources, model_replay.LEFT_OUT
    )
    files = {closure.path_of(symbol) for symbol in (*followed, *model_replay._beside(name))}
    assert not files & set(OTHERS)
    assert not {file for file in files if file.startswith(tuple(f"vllmx/{x}/" for x in LEFT_OUT))}


def test_the_named_model_is_read_from_its_own_file_of_conf(tree) -> None:
    with tree.edited("conf/model/smollm2-135m.yaml", "Q4_1.gguf", "Q8_0.gguf"):
        same = [name for name, before in tree.untouched.items() if tree.fine(name) == before]
    assert same == ["gemma3-270m", "tiny-llama"]

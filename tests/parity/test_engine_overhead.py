# SPDX-License-Identifier: Apache-2.0
"""The comparison of host costs: what our side times, and what the report makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from front_helpers import byte_level_tokenizer

from parity.engine_overhead import NUM_RUNNING, WANTED_MS, as_markdown, growth

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}


def test_our_side_times_steps_with_and_without_text(tmp_path: Path) -> None:
    byte_level_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    done = subprocess.run(
        [sys.executable, "-m", "parity.engine_overhead_child", str(tmp_path)],
        input="4 3 0\n2 5 1\n",
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    ready, *seconds = done.stdout.split()
    assert ready == "ready"
    assert len(seconds) == 2 and all(0 < float(value) < 1 for value in seconds)


def result_of(ours: float, theirs: float) -> dict:
    """A result whose steps cost these microseconds a request."""
    sides = {"vllmx": ours, "vllm": theirs}
    median = {
        side: {output: {str(n): n * us / 1e3 for n in NUM_RUNNING} for output in WANTED_MS}
        for side, us in sides.items()
    }
    facts = {"machine": "m", "commit": "c", "python": "p", "rounds": 3}
    return {**facts, "median": median, "growth": dict.fromkeys(WANTED_MS, 1.0)}


def test_report_shows_both_sides_and_what_is_wanted() -> None:
    text = as_markdown(result_of(4.0, 24.0))
    assert "| 256 | tokens | 1.024 | 4.0 | 6.144 | 24.0 | 6.0 | <= 1.5 ms |" in text
    assert "| 256 | text | 1.024 | 4.0 | 6.144 | 24.0 | 6.0 | <= 2.2 ms |" in text
    assert text.count("\n| ") == 1 + len(WANTED_MS) * len(NUM_RUNNING)


def test_growth_is_that_of_the_dearest_request() -> None:
    assert growth({1: 1.0, 16: 1.6, 64: 6.4, 256: 51.2, 1024: 102.4}) == 2.0
    assert growth({1: 9.0, 16: 1.6, 64: 3.2}) == 1.0

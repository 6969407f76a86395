# SPDX-License-Identifier: Apache-2.0
"""vllmx against oracles/transformers_twin.py, which runs in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from checkpoints import save_tiny

from vllmx import SamplingParams
from vllmx.entrypoints.llm import LLM

ORACLE = Path(__file__).parents[2] / "oracles" / "transformers_twin.py"
PROMPTS = [[5], [17, 3, 99, 42], list(range(3, 40))]
NUM_TOKENS = 8


def ask(folder: Path, out: Path) -> subprocess.CompletedProcess:
    """Let the oracle answer PROMPTS with the checkpoint in `folder`."""
    prompts = out.with_suffix(".json")
    prompts.write_text(json.dumps(PROMPTS))
    command = [sys.executable, str(ORACLE), str(folder), str(prompts), str(out)]
    command += ["--max-tokens", str(NUM_TOKENS)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=out.parent)


def test_greedy_answers_and_their_logprobs_equal_the_oracles(
    tiny: tuple[Path, torch.nn.Module], tiny_engine: LLM, tmp_path: Path
) -> None:
    result = ask(tiny[0], tmp_path / "twin.npz")
    assert result.returncode == 0, result.stderr[-2000:]
    twin = np.load(tmp_path / "twin.npz")
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=5)
    inputs = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    for number, output in enumerate(tiny_engine.generate(inputs, params, use_tqdm=False)):
        prompt, answer = output.prompt_token_ids, output.outputs[0]
        assert twin[f"tokens_{number}"].tolist() == [*prompt, *answer.token_ids]
        want = torch.tensor(twin[f"logits_{number}"]).log_softmax(-1)
        for position, entries in enumerate(answer.logprobs, len(prompt) - 1):
            for token, entry in entries.items():
                # Weights packed to fp16 are rounded once.
                assert abs(entry.logprob - float(want[position, token])) < 5e-3


def test_oracle_refuses_weights_that_do_not_fit_the_config(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    result = ask(tmp_path, tmp_path / "twin.npz")
    assert result.returncode != 0 and "do not fit" in result.stderr
    assert not (tmp_path / "twin.npz").exists()

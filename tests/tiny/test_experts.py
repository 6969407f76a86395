# SPDX-License-Identifier: Apache-2.0
"""`vllmx checkpoint moe`: a dense model cut into experts says what it said before."""

import json
from pathlib import Path

import pytest
import torch
from checkpoints import build_engine, save_as_safetensors, save_tiny
from hybrid_driver import HybridDriver

from vllmx import SamplingParams
from vllmx.cli import main
from vllmx.tiny.experts import GROUPS


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    save_tiny("llama", folder)
    return folder


def cut(folder: Path, capsys, *argv: str, code: int = 0) -> str:
    target = folder.parent / "cut"
    words = ["checkpoint", "moe", f"model={folder}", f"output_dir={target}", *argv]
    assert main(words) == code
    shown = "".join(capsys.readouterr())
    assert code or shown.endswith(f"{target}\n")
    return shown


def test_a_tiny_llama_cut_into_experts_has_its_logits(llama: Path, capsys) -> None:
    cut(llama, capsys, "model.skip_tokenizer_init=true")
    tokens = [5 + 3 * i % 190 for i in range(60)]
    want = HybridDriver(llama).step({0: tokens})[0]
    driver = HybridDriver(llama.parent / "cut")
    chosen = []
    for layer in driver.model.model.layers:
        experts = layer.mlp.experts
        experts._route = lambda logits, route=experts._route: (
            chosen.append(route(logits)) or chosen[-1]
        )
    got = driver.step({0: tokens})[0]
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)
    for weights, ids in chosen:
        assert torch.allclose(weights, torch.full_like(weights, 1 / GROUPS))
        replicas = ids // GROUPS
        assert (replicas == replicas[:, :1]).all(), "a token's experts are of one replica"
        assert 0 < replicas[:, 0].sum() < len(tokens), "tokens go to both replicas"


def test_what_is_no_plain_llama_is_refused_by_name(tmp_path: Path, capsys) -> None:
    for name, reason in (
        ("qwen3", "model_type is 'qwen3'"),
        ("llama_untied_biased", "bias is True"),
    ):
        save_tiny(name, tmp_path / name)
        assert reason in cut(tmp_path / name, capsys, code=2)
    save_tiny("llama", tmp_path / "odd")
    config = tmp_path / "odd" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 98}))
    assert "intermediate_size is 98" in cut(tmp_path / "odd", capsys, code=2)
    assert not (tmp_path / "cut").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_cut_into_experts_agrees_with_itself(tmp_path: Path, capsys) -> None:
    dense = tmp_path / "dense"
    dense.mkdir()
    save_as_safetensors("smollm2-135m", dense, torch.float32)
    assert main(["checkpoint", "moe", "smollm2-135m", f"output_dir={tmp_path / 'moe'}"]) == 0
    capsys.readouterr()
    prompt = [504, 3575, 282, 4649, 314]
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=5, prompt_logprobs=5)
    answers = []
    for folder in (dense, tmp_path / "moe"):
        engine = build_engine(folder, default_priority=["torch"], skip_tokenizer_init=True)
        (answer,) = engine.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        answers.append(answer)
        del engine
    want, got = answers
    assert got.outputs[0].token_ids == want.outputs[0].token_ids
    rows = zip(
        [*want.prompt_logprobs[1:], *want.outputs[0].logprobs],
        [*got.prompt_logprobs[1:], *got.outputs[0].logprobs],
        strict=True,
    )
    for a, b in rows:
        shared = a.keys() & b.keys()
        assert len(shared) >= 5
        assert max(abs(a[token].logprob - b[token].logprob) for token in shared) < 2e-4
    engine = build_engine(tmp_path / "moe", skip_tokenizer_init=False)
    (answer,) = engine.generate(["The capital of France is"], params, use_tqdm=False)
    assert answer.prompt_token_ids == prompt

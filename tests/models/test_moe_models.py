# SPDX-License-Identifier: Apache-2.0
"""Models with experts against transformers in float32."""

import json
import random
from pathlib import Path

import pytest
import torch
from checkpoints import MOE, VOCAB, build_engine, save_tiny
from hybrid_driver import HybridDriver
from safetensors.torch import load_file, save_file

from vllmx import SamplingParams
from vllmx.exceptions import CheckpointError


def sequence(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def logits_of(twin: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return twin(torch.tensor([tokens])).logits[0].float()


@pytest.fixture(scope="module", params=sorted(MOE))
def sparse(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("moe") / request.param
    return folder, save_tiny(request.param, folder)


@pytest.mark.parametrize("length", [1, 2, 33, 70])
def test_a_prompt_equals_transformers(sparse: tuple, length: int) -> None:
    folder, twin = sparse
    tokens = sequence(length)
    got = HybridDriver(folder).step({0: tokens})[0]
    torch.testing.assert_close(got, logits_of(twin, tokens), atol=5e-5, rtol=1e-4)


def test_pieces_and_decodes_in_one_batch_equal_transformers(sparse: tuple) -> None:
    folder, twin = sparse
    driver, a, b = HybridDriver(folder), sequence(40, 1), sequence(9, 2)
    first, second = driver.step({0: a[:30]})[0], driver.step({0: a[30:31], 1: b})
    third = driver.step({0: a[31:]})[0]
    whole = torch.cat((first, second[0], third))
    torch.testing.assert_close(whole, logits_of(twin, a), atol=5e-5, rtol=1e-4)
    torch.testing.assert_close(second[1], logits_of(twin, b), atol=5e-5, rtol=1e-4)


def test_greedy_tokens_of_an_engine_equal_transformers(sparse: tuple) -> None:
    folder, twin = sparse
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    asked = [sequence(n, n) for n in (3, 20, 41)]
    inputs = [{"prompt_token_ids": prompt} for prompt in asked]
    engine = build_engine(folder, default_priority=["torch"])
    for prompt, output in zip(asked, engine.generate(inputs, params, use_tqdm=False)):
        tokens = list(output.outputs[0].token_ids)
        logits = logits_of(twin, prompt + tokens)[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens


def test_random_weights_stand_in_for_a_checkpoints(sparse: tuple) -> None:
    engine = build_engine(sparse[0], load_format="dummy", default_priority=["torch"])
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=1)
    (answer,) = engine.generate({"prompt_token_ids": sequence(5)}, params, use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 2


# ------------------------------------------------------------------------------ bad checkpoints


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GLM-4 MoE, a Granite MoE, a Mixtral and an OLMoE in folders of those names."""
    folder: Path = tmp_path_factory.mktemp("moe")
    for name in ("glm4moe", "granitemoe", "mixtral", "olmoe"):
        save_tiny(name, folder / name)
    return folder


def changed(source: Path, target: Path, lose: str = "", gain: dict | None = None, **config) -> Path:
    """The checkpoint `source` less a tensor, with others, with other values in its config."""
    target.mkdir(exist_ok=True)
    values = json.loads((source / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(values))
    tensors = load_file(source / "model.safetensors")
    tensors.pop(lose, None)
    save_file(tensors | (gain or {}), target / "model.safetensors")
    return target


def test_layers_for_drafting_are_left_out(saved: Path, tmp_path: Path) -> None:
    tokens = sequence(12)
    more = {"model.layers.3.eh_proj.weight": torch.ones(2, 3)}
    folder = changed(saved / "glm4moe", tmp_path, gain=more, num_nextn_predict_layers=1)
    want, got = (HybridDriver(f).step({0: tokens})[0] for f in (saved / "glm4moe", folder))
    assert torch.equal(got, want)
    with pytest.raises(CheckpointError, match=r"layers\.3\.eh_proj\.weight has no place"):
        HybridDriver(changed(folder, tmp_path, num_nextn_predict_layers=0))


@pytest.mark.parametrize(
    ("model", "tensor"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.gate.weight"),
        ("glm4moe", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("granitemoe", "model.layers.1.block_sparse_moe.input_linear.weight"),
        ("granitemoe", "model.layers.1.block_sparse_moe.router.layer.weight"),
        ("olmoe", "model.layers.2.mlp.experts.0.up_proj.weight"),
    ],
)
def test_a_missing_tensor_is_named_as_the_checkpoint_does(
    saved: Path, tmp_path: Path, model: str, tensor: str
) -> None:
    with pytest.raises(CheckpointError, match=f"lacks {tensor}"):
        HybridDriver(changed(saved / model, tmp_path, lose=tensor))


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, of 8 experts"),
        ("mixtral", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("glm4moe", {"n_group": 3}, "n_group is 3"),
        ("glm4moe", {"topk_group": 5}, "topk_group is 5"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is set"),
    ],
    ids=str,
)
def test_a_config_that_changes_the_maths_is_refused(
    saved: Path, tmp_path: Path, model: str, config: dict, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        HybridDriver(changed(saved / model, tmp_path, **config))

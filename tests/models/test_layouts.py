# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose tensors, keys or architecture have other names than those of the tiny ones, and
generations of a family that no tiny one is of: they compute the same, or what transformers does."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hybrid_driver import HybridDriver
from safetensors.torch import load_file, save_file
from tiny_folders import changed, in_folder
from torch import Tensor

from vllmx.exceptions import CheckpointError
from vllmx.models.hf_config import HFConfig
from vllmx.registry import own_architectures
from vllmx.tiny.configs import FAMILIES, config_of

IDS = [3 + 37 * i % 1000 for i in range(50)]
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name -> the folder of a tiny checkpoint, written when it is asked for."""
    return in_folder(tmp_path_factory.mktemp("layouts"))


def rewritten(
    source: Path, target: Path, config: dict[str, object], rename: Callable[[str], str] = str
) -> Path:
    """A copy with these tensor names; `config` is the whole of its config.json."""
    target.mkdir()
    tensors = {rename(n): t for n, t in load_file(source / "model.safetensors").items()}
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config))
    return target


def said_by(folder: Path) -> dict[str, object]:
    return json.loads((folder / "config.json").read_text())


def prompt_and_answer(folder: Path) -> Tensor:
    """Logits [T, V] of a prompt and of tokens after it, one by one."""
    driver = HybridDriver(folder)
    steps = [IDS[:44], *([token] for token in IDS[44:])]
    return torch.cat([driver.step({0: step})[0] for step in steps])


HEADLESS = {
    "tiny-bloom": "transformer.",
    "tiny-gpt2": "transformer.",
    "tiny-gpt_bigcode": "transformer.",
    "tiny-opt": "model.",
}
"""What names begin with, but in checkpoints that were saved without a head."""


@pytest.mark.parametrize("name", HEADLESS)
def test_names_of_a_model_without_its_head_are_taken(folders, tmp_path, name) -> None:
    source, prefix = folders(name), HEADLESS[name]
    folder = rewritten(source, tmp_path / "bare", said_by(source), lambda n: n.removeprefix(prefix))
    assert not any(n.startswith(prefix) for n in load_file(folder / "model.safetensors"))
    assert torch.equal(prompt_and_answer(folder), prompt_and_answer(source))


@pytest.mark.parametrize("name", HEADLESS)
def test_what_such_a_checkpoint_lacks_is_named_as_it_has_it(folders, tmp_path, name) -> None:
    source, prefix = folders(name), HEADLESS[name]
    whole = load_file(source / "model.safetensors")
    bare = {n.removeprefix(prefix): tensor for n, tensor in whole.items()}
    for gone in (
        next(n for n in bare if "embed" in n or "wte" in n),
        max(n for n in bare if ".1." in n),
    ):
        folder = changed(source, tmp_path / gone)
        save_file({n: t for n, t in bare.items() if n != gone}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"lacks {gone}"):
            HybridDriver(folder)


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_the_masks_of_gpt2_are_left_out(folders, tmp_path, prefix) -> None:
    source = folders("tiny-gpt2")
    masks = {
        f"{prefix}h.{layer}.attn.{mask}": torch.ones(1, 1, 8, 8)
        for layer in range(4)
        for mask in ("bias", "masked_bias")
    }
    tensors = load_file(source / "model.safetensors")
    bare = {n.replace("transformer.", prefix, 1): tensor for n, tensor in tensors.items()}
    folder = changed(source, tmp_path / "masks")
    save_file(bare | masks, folder / "model.safetensors")
    HybridDriver(folder)


# ---------------------------------------------------------------------- generations of Falcon

FALCONS = {
    "7b": {"multi_query": True, "parallel_attn": True},
    "7b, the number of heads told": {"multi_query": True, "num_kv_heads": 4},
    "all key heads": {"multi_query": False, "parallel_attn": True},
    "one after the other": {"multi_query": True, "parallel_attn": False, "bias": True},
    "rw": {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True},
}


def older_falcon(source: Path, target: Path, **said: object) -> Path:
    """A Falcon of before the second generation, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = {"new_decoder_architecture": False, "num_kv_heads": None, **said}
    folder = changed(source, target, **keys)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    tensors = {
        name: torch.randn_like(weight) * (0.05 if weight.dim() == 2 else 0.3)
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("generation", FALCONS)
def test_every_falcon_is_what_transformers_computes(folders, tmp_path, generation) -> None:
    """With its fused attention: the other adds slopes twice, to the mask and to the scores."""
    from transformers import AutoModelForCausalLM

    folder = older_falcon(folders("tiny-falcon"), tmp_path / "older", **FALCONS[generation])
    twin = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    with torch.inference_mode():
        want = twin.eval()(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(prompt_and_answer(folder), want, atol=2e-5, rtol=1e-4)


REFINED_WEB = {
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "num_kv_heads": "n_head_kv",
}
"""transformers' keys of Falcon -> those of the first checkpoints."""


@pytest.mark.parametrize("model_type", ["RefinedWeb", "RefinedWebModel"])
@pytest.mark.parametrize("generation", [*FALCONS, "40b"])
def test_the_first_falcons_compute_the_same(folders, tmp_path, generation, model_type) -> None:
    source = folders("tiny-falcon")
    if generation != "40b":
        source = older_falcon(source, tmp_path / "later", **FALCONS[generation])
    left_out = ("ffn_hidden_size", "activation", "max_position_embeddings", "rope_parameters")
    config = {
        REFINED_WEB.get(key, key): value
        for key, value in said_by(source).items()
        if key not in left_out
    }
    config |= {"architectures": ["RWForCausalLM"], "model_type": model_type}
    folder = rewritten(source, tmp_path / "first", config)
    assert torch.equal(prompt_and_answer(folder), prompt_and_answer(source))


def test_a_refined_web_as_wide_as_the_40b_is_of_the_second_generation() -> None:
    said = {"n_head": 128, "n_layer": 60, "n_head_kv": 8, "hidden_size": 8192}
    for model_type in ("RefinedWeb", "RefinedWebModel"):
        config = HFConfig({"model_type": model_type} | said)
        assert config.new_decoder_architecture
        assert config.num_key_value_heads == 8


# ------------------------------------------------------------------- architectures' other names

OTHER_NAMES: dict[str, tuple[str, str, dict[str, str | None], dict[str, object]]] = {
    "ChatGLMForConditionalGeneration": (
        "tiny-chatglm",
        "chatglm",
        {"multi_query_attention": None, "rmsnorm": None, "tie_word_embeddings": None},
        {"rope_ratio": 1, "post_layer_norm": True, "apply_query_key_layer_scaling": True},
    ),
    "LLaMAForCausalLM": (
        "tiny-llama",
        "llama",
        {"rope_parameters": None, "tie_word_embeddings": None, "max_position_embeddings": None},
        {"max_sequence_length": 2048, "pad_token_id": -1},
    ),
    "MPTForCausalLM": (
        "tiny-mpt",
        "mpt",
        {"tie_word_embeddings": None},
        {"expansion_ratio": 4, "no_bias": True, "norm_type": "low_precision_layernorm"},
    ),
    "StableLMEpochForCausalLM": (
        "tiny-stablelm",
        "stablelm_epoch",
        {
            "layer_norm_eps": "norm_eps",
            "rope_parameters": None,
            "head_dim": None,
            "use_parallel_residual": None,
        },
        {"rope_pct": 0.25, "rope_theta": 10000, "num_heads": 4, "rotary_scaling_factor": 1.0},
    ),
    "TeleChatForCausalLM": (
        "tiny-telechat2",
        "telechat",
        {
            "num_hidden_layers": None,
            "num_attention_heads": None,
            "num_key_value_heads": None,
            "intermediate_size": None,
            "rms_norm_eps": None,
            "max_position_embeddings": None,
            "rope_parameters": None,
            "hidden_act": None,
        },
        {"training_seqlen": 8192, "embed_layernorm": False, "n_inner": None},
    ),
    "TeleChat3ForCausalLM": (
        "tiny-llama",
        "telechat3",
        {"rope_parameters": None},
        {"rope_theta": 10000.0, "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
    ),
}
"""Architecture -> the tiny checkpoint of its sibling, the model_type that its own have, the keys of
the sibling that they call otherwise or leave out (None), and keys that they have besides."""


@pytest.mark.parametrize("architecture", OTHER_NAMES)
def test_an_architecture_of_another_name_computes_the_same(folders, tmp_path, architecture) -> None:
    name, model_type, keys, more = OTHER_NAMES[architecture]
    config = {
        keys.get(key) or key: value
        for key, value in said_by(folders(name)).items()
        if keys.get(key, key) is not None
    }
    config |= {"architectures": [architecture], "model_type": model_type, **more}
    folder = rewritten(folders(name), tmp_path / "other", config)
    assert torch.equal(prompt_and_answer(folder), prompt_and_answer(folders(name)))


TEXT_ONLY = {
    "Qwen3_5ForCausalLM": ("tiny-qwen3_5", "tiny-qwen3_5-bf16"),
    "Qwen3_5MoeForCausalLM": ("tiny-qwen3_5_moe", "tiny-qwen3_5_moe-bf16"),
}
"""Architecture -> tiny checkpoints of the same model with eyes."""


@pytest.mark.parametrize(
    ("architecture", "name"), [(a, name) for a, names in TEXT_ONLY.items() for name in names]
)
def test_a_text_only_qwen_computes_the_same(folders, tmp_path, architecture, name) -> None:
    """Its config is the inner one, and no name has the inner model's part."""
    outer = said_by(folders(name))
    config = outer["text_config"] | {"architectures": [architecture]}
    folder = rewritten(
        folders(name),
        tmp_path / "text",
        config,
        lambda n: n.replace("model.language_model.", "model.", 1),
    )
    assert type(HybridDriver(folder).model).__name__ == architecture
    assert torch.equal(prompt_and_answer(folder), prompt_and_answer(folders(name)))


def test_every_architecture_has_a_tiny_checkpoint_or_is_one_by_another_name() -> None:
    tiny = {name for family in FAMILIES for name in config_of(family)["architectures"]}
    assert own_architectures().keys() - tiny == {"RWForCausalLM", *OTHER_NAMES, *TEXT_ONLY}


def test_hunyuan_without_norms_of_heads_is_llama(folders, tmp_path) -> None:
    source = folders("tiny-hunyuan_v1_dense")
    said = said_by(source) | {"use_qk_norm": False}
    llama = said | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    tensors = load_file(source / "model.safetensors")
    bare = {
        name: tensor
        for name, tensor in tensors.items()
        if "_layernorm" not in name or "input" in name or "post" in name
    }
    assert len(tensors) - len(bare) == 2 * said["num_hidden_layers"]
    answers = []
    for name, config in (("hunyuan", said), ("llama", llama)):
        folder = tmp_path / name
        folder.mkdir()
        save_file(bare, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        answers.append(prompt_and_answer(folder))
    assert torch.equal(*answers)
    assert not torch.equal(answers[0], prompt_and_answer(source))

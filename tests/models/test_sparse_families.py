# SPDX-License-Identifier: Apache-2.0
"""Families with experts, and those that transformers has no class for but a twin: that they are
what transformers computes, what a config may leave out, and what is refused."""

import pytest
import torch
from checkpoints import build_engine
from hybrid_driver import HybridDriver
from safetensors.torch import load_file, save_file
from tiny_folders import changed, in_folder

from oracles.transformers_twin import load as load_twin
from vllmx.config import RunConfig, finalize
from vllmx.exceptions import CheckpointError
from vllmx.models.hf_config import DEFAULTS, HFConfig
from vllmx.models.llama4 import is_tuned
from vllmx.tiny.sparse_configs import MORE_SPARSE
from vllmx.tiny.twins import TWIN_FAMILIES

FAMILIES = sorted({family["model_type"] for family in MORE_SPARSE.values()})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name -> the folder of a tiny checkpoint, written when it is asked for."""
    return in_folder(tmp_path_factory.mktemp("sparse"))


@pytest.mark.parametrize("name", sorted(MORE_SPARSE | TWIN_FAMILIES))
def test_pieces_of_a_prompt_equal_transformers(folders, name) -> None:
    ids = [3 + 37 * i % 1000 for i in range(70)]
    with torch.inference_mode():
        want = load_twin(folders(name))(torch.tensor([ids])).logits[0].float()
    driver = HybridDriver(folders(name))
    got = torch.cat([driver.step({0: ids[a:b]})[0] for a, b in ((0, 41), (41, 42), (42, 70))])
    torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_values_left_out_are_those_of_transformers(family) -> None:
    from transformers import AutoConfig

    theirs, ours = AutoConfig.for_model(family), HFConfig({"model_type": family})
    rope = getattr(theirs, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    mine = ours.rope_parameters.get("full_attention", ours.rope_parameters)
    for key in DEFAULTS[family]:
        if key in ("rope_theta", "partial_rotary_factor"):
            want, got = rope.get(key), mine.get(key)
        elif key == "rope_parameters":
            want, got = {name: rope.get(name) for name in mine}, mine
        else:
            want, got = getattr(theirs, key, None), ours.to_dict()[key]
        assert want is None or want == got, f"{key}: {want} there, {got} here"


@pytest.mark.parametrize("family", ["afmoe", "exaone_moe", "gpt_oss", "llama4_text"])
def test_layer_types_left_out_are_those_of_transformers(family) -> None:
    from transformers import AutoConfig

    said = {"num_hidden_layers": 9, "num_attention_heads": 8, "num_key_value_heads": 8}
    said |= {"hidden_size": 64}
    theirs = AutoConfig.for_model(family, **said)
    assert HFConfig({"model_type": family, **said}).layer_types == list(theirs.layer_types)


@pytest.mark.parametrize(
    ("told", "longest", "tuned"),
    [(None, 32768, False), (None, 32769, True), (True, 64, True), (False, 65536, False)],
)
def test_late_queries_of_llama4_grow_where_upstreams_do(told, longest, tuned) -> None:
    config = HFConfig({"model_type": "llama4_text"})
    run = finalize(RunConfig())
    run.model_config.max_model_len = longest
    said = {} if told is None else {"attn_temperature_tuning": told}
    run.model_config.generation_config_dict = said
    assert is_tuned(config, run) == tuned


def test_a_bias_of_phis_head_is_added(folders, tmp_path) -> None:
    """Upstream leaves it out, so no golden can show it."""
    folder = changed(folders("tiny-phimoe"), tmp_path / "biased", lm_head_bias=True)
    tensors = load_file(folder / "model.safetensors")
    bias = {"lm_head.bias": torch.linspace(-1, 1, 1024)}
    save_file(tensors | bias, folder / "model.safetensors", {"format": "pt"})
    with torch.inference_mode():
        want = load_twin(folder)(torch.tensor([[5, 6, 7]])).logits[0].float()
    got = HybridDriver(folder).step({0: [5, 6, 7]})[0]
    torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)


def test_layers_for_drafting_are_left_out(folders, tmp_path) -> None:
    """Those of EXAONE MoE, MiMo and Qwen3-Next, under their own names."""
    of = {"tiny-exaone_moe": "mtp.norm", "tiny-mimo": "model.mtp_layers.0.norm"}
    for name, extra in (of | {"tiny-qwen3_next": "mtp.layers.0.norm"}).items():
        folder = changed(folders(name), tmp_path / name)
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {f"{extra}.weight": torch.ones(3)}, folder / "model.safetensors")
        HybridDriver(folder)


REFUSED = [
    ("tiny-gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0; gpt-oss is served with 7.0"),
    ("tiny-gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0"),
    ("tiny-gpt_oss", {"attention_bias": False}, "attention_bias is False"),
    ("tiny-afmoe", {"score_func": "relu"}, "scoring function is 'relu'; .*softmax"),
    ("tiny-minimax_m2", {"scoring_func": "relu"}, "scoring function is 'relu'"),
    ("tiny-olmoe", {"num_local_experts": 9}, "num_experts is 8 and num_local_experts 9, which are"),
    ("tiny-chatglm", {"multi_query_attention": False}, "multi_query_attention=False is not"),
    (
        "tiny-gpt_oss",
        {"quantization_config": {"quant_method": "mxfp4"}},
        "quantization method 'mxfp4' is not supported",
    ),
    ("tiny-gpt_oss", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, of 8 experts"),
    ("tiny-phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok is 3; 2 is served only"),
    ("tiny-phimoe", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1; 0.01 is served"),
    ("tiny-exaone_moe", {"n_group": 3}, "n_group is 3"),
    ("tiny-deepseek", {"kv_lora_rank": 16}, "kv_lora_rank is set, which is not supported"),
    ("tiny-chatglm", {"rmsnorm": False}, "rmsnorm=False is not supported"),
    ("tiny-minicpm", {"num_experts": 8}, "num_experts is set, which is not supported"),
    ("tiny-llama4", {"num_experts_per_tok": 2}, "served with one expert a token"),
    ("tiny-llama4", {"layer_types": ["sliding_attention"] * 4}, r"layer_types\[0\] is 'sliding_at"),
]


@pytest.mark.parametrize(("name", "config", "words"), REFUSED, ids=lambda v: str(v)[:40])
def test_what_is_not_built_stops_the_load(folders, tmp_path, name, config, words) -> None:
    with pytest.raises(CheckpointError, match=words):
        build_engine(changed(folders(name), tmp_path / "other", **config), max_model_len=64)


LACKING = [
    ("tiny-gpt_oss", "model.layers.1.self_attn.sinks"),
    ("tiny-gpt_oss", "model.layers.2.mlp.experts.gate_up_proj_bias"),
    ("tiny-llama4", "model.layers.1.feed_forward.experts.down_proj"),
    ("tiny-afmoe", "model.layers.2.mlp.expert_bias"),
    ("tiny-ernie4_5_moe", "model.layers.1.mlp.moe_statics.e_score_correction_bias"),
    ("tiny-granitemoeshared", "model.layers.1.shared_mlp.output_linear.weight"),
    ("tiny-internlm2", "model.layers.3.feed_forward.w3.weight"),
    ("tiny-chatglm", "transformer.encoder.layers.0.self_attention.dense.weight"),
]


@pytest.mark.parametrize(("name", "tensor"), LACKING)
def test_a_missing_tensor_is_named_as_the_checkpoint_has_it(
    folders, tmp_path, name, tensor
) -> None:
    folder = changed(folders(name), tmp_path / "less")
    tensors = load_file(folder / "model.safetensors")
    del tensors[tensor]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"lacks {tensor}"):
        build_engine(folder, max_model_len=64)

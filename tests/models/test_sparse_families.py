# SPDX-License-Identifier: Apache-2.0
"""Families with experts, and those that transformers has no class for but a twin: that they are
what transformers computes, what a config may leave out, and what is refused."""

import json

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
from vllmx.tiny.latent import LATENT_FAMILIES
from vllmx.tiny.sparse_configs import MORE_SPARSE
from vllmx.tiny.twins import TWIN_FAMILIES

FAMILIES = sorted({f["model_type"] for f in (MORE_SPARSE | LATENT_FAMILIES).values()})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name -> the folder of a tiny checkpoint, written when it is asked for."""
    return in_folder(tmp_path_factory.mktemp("sparse"))


@pytest.mark.parametrize("name", sorted(MORE_SPARSE | LATENT_FAMILIES | TWIN_FAMILIES))
def test_pieces_of_a_prompt_equal_transformers(folders, name) -> None:
    ids = [3 + 37 * i % 1000 for i in range(70)]
    with torch.inference_mode():
        want = load_twin(folders(name))(torch.tensor([ids])).logits[0].float()
    driver = HybridDriver(folders(name))
    got = torch.cat([driver.step({0: ids[a:b]})[0] for a, b in ((0, 41), (41, 42), (42, 70))])
    torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)


OWN_TYPES = {
    "tiny-bailing_moe": "bailing_moe",
    "tiny-bailing_moe_v2": "bailing_moe_v2",
    "tiny-decilm": "nemotron-nas",
    "tiny-deepseek": "deepseek",
    "tiny-internlm2": "internlm2",
    "tiny-mimo": "mimo",
    "tiny-minicpm": "minicpm",
    "tiny-orion": "orion",
    "tiny-pangu_embedded": "PanguEmbedded",
    "tiny-param2moe": "param2moe",
    "tiny-plamo3": "plamo3",
    "tiny-telechat2": "telechat",
    "tiny-teleflm": "TeleFLM",
}
"""What real checkpoints have for model_type where the tiny one says what transformers knows."""
TWINS_KEYS = (
    *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    *("use_qkv_bias", "use_parallel_residual", "query_pre_attn_scalar"),
)


@pytest.mark.parametrize("name", OWN_TYPES)
def test_a_family_says_the_same_under_its_own_name(folders, tmp_path, name) -> None:
    """Without the keys that only the twin's family has, and with its own defaults."""
    config = json.loads((folders(name) / "config.json").read_text())
    keys = {key: None for key in TWINS_KEYS if key in config and config[key] is not True}
    own = changed(folders(name), tmp_path / "own", model_type=OWN_TYPES[name], **keys)
    config = json.loads((own / "config.json").read_text())
    for key in keys:
        del config[key]
    (own / "config.json").write_text(json.dumps(config))
    ids = [3 + 37 * i % 1000 for i in range(50)]
    want, got = (HybridDriver(folder).step({0: ids})[0] for folder in (folders(name), own))
    assert torch.equal(want, got)


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


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("afmoe", {}),
        ("exaone_moe", {}),
        ("gpt_oss", {}),
        ("llama4_text", {}),
        ("cohere2_moe", {}),
        ("cohere2_moe", {"first_k_dense_replace": 3, "prefix_dense_sliding_window_pattern": 2}),
    ],
)
def test_layer_types_left_out_are_those_of_transformers(family, more) -> None:
    from transformers import AutoConfig

    said = {"num_hidden_layers": 9, "num_attention_heads": 8, "num_key_value_heads": 8}
    said |= {"hidden_size": 64, **more}
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


@pytest.mark.parametrize(
    "config",
    [
        {"rms_norm_eps": None, "layer_norm_eps": 1e-5},
        {"expert_selection_fn": "softmax", "shared_expert_combination_strategy": "sum"},
        {"prefix_dense_sliding_window_pattern": 2, "norm_topk_prob": False},
    ],
    ids=lambda config: next(iter(config)),
)
def test_other_models_of_coheres_are_those_of_transformers(folders, tmp_path, config) -> None:
    """Norms, routers and rotations that the tiny one has not."""
    folder = changed(folders("tiny-cohere2_moe"), tmp_path / "other", **config)
    ids = [3 + 37 * i % 1000 for i in range(60)]
    with torch.inference_mode():
        want = load_twin(folder)(torch.tensor([ids])).logits[0].float()
    got = HybridDriver(folder).step({0: ids})[0]
    torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)


def test_a_gate_of_each_element_is_one_of_its_head_where_it_repeats_it(folders, tmp_path) -> None:
    """Laguna's other gate, which no tiny checkpoint has; and none at all."""
    ids = [3 + 37 * i % 1000 for i in range(40)]
    want = HybridDriver(folders("tiny-laguna")).step({0: ids})[0]
    tensors = load_file(folders("tiny-laguna") / "model.safetensors")
    for gating in ("per-element", False):
        folder = changed(folders("tiny-laguna"), tmp_path / f"{gating}", gating=gating)
        gated = {
            name: tensor.repeat_interleave(64, 0) if "g_proj" in name else tensor
            for name, tensor in tensors.items()
            if gating or "g_proj" not in name
        }
        save_file(gated, folder / "model.safetensors")
        got = HybridDriver(folder).step({0: ids})[0]
        assert torch.allclose(got, want, atol=1e-4) == bool(gating)


def test_windows_of_plamo_are_told_layer_by_layer() -> None:
    said = {"model_type": "plamo3", "hidden_size": 64, "num_attention_heads": 2}
    said |= {"num_hidden_layers": 3, "rope_theta": 5000.0}
    config = HFConfig(said | {"sliding_window": [16, 16, None]})
    assert config.layer_types == ["sliding_attention"] * 2 + ["full_attention"]
    assert config.sliding_window == 16
    bases = {kind: rope["rope_theta"] for kind, rope in config.rope_parameters.items()}
    assert bases == {"full_attention": 5000.0, "sliding_attention": 10000.0}
    with pytest.raises(CheckpointError, match="windows of several widths"):
        HFConfig(said | {"interleaved_sliding_window": [16, 8, None]})


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
    """Of some families under their own names; others' behind the last layer."""
    for name, extra in (
        ("tiny-ernie4_5_moe", "model.mtp_emb_norm.0"),
        ("tiny-mellum", "mtp.layers.0.norm"),
        ("tiny-minimax_m2", "model.layers.4.norm"),
        ("tiny-exaone_moe", "mtp.norm"),
        ("tiny-mimo", "model.mtp_layers.0.norm"),
        ("tiny-qwen3_next", "mtp.layers.0.norm"),
        ("tiny-hy_v3", "model.layers.4.norm"),
        ("tiny-bailing_moe_v2", "model.layers.4.norm"),
        ("tiny-deepseek_v3", "model.layers.4.norm"),
    ):
        key = "num_mtp_modules" if name == "tiny-minimax_m2" else "num_nextn_predict_layers"
        folder = changed(folders(name), tmp_path / name, **{key: 1})
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
    (
        "tiny-dbrx",
        {"ffn_config": {"moe_normalize_expert_weights": None}},
        "moe_normalize_expert_weights is None; 1.0 is served only",
    ),
    (
        "tiny-cohere2_moe",
        {"expert_selection_fn": "tanh"},
        "expert_selection_fn is 'tanh'; sigmoid and softmax are known",
    ),
    (
        "tiny-cohere2_moe",
        {"mlp_layer_types": ["sparse", "dense"] * 2},
        "'dense' behind other layers",
    ),
    ("tiny-hy_v3", {"moe_router_use_sigmoid": False}, "moe_router_use_sigmoid=False is not"),
    (
        "tiny-bailing_moe_v2",
        {"score_function": "softmax"},
        "softmax without and sigmoid with a bias are served only",
    ),
    ("tiny-bailing_moe_v2", {"use_rmsnorm": False}, "use_rmsnorm=False is not supported"),
    ("tiny-bailing_moe", {"norm_head": True}, "norm_head=True is not supported"),
    ("tiny-param2moe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; 1.0 is"),
    ("tiny-pangu_embedded", {"param_sink_number": 16}, "param_sink_number is set, which is not"),
    ("tiny-pangu_embedded", {"is_causal": False}, "is_causal=False is not supported"),
    ("tiny-deepseek_v3", {"rope_interleave": False}, "rope_interleave=False is not supported"),
    ("tiny-deepseek_v3", {"index_topk": 64}, "index_topk is set, which is not supported"),
    ("tiny-deepseek_v3", {"attention_bias": True}, "attention_bias=True is not supported"),
    ("tiny-glm4_moe_lite", {"v_head_dim": 160}, "v_head_dim is 160; values longer than keys"),
    ("tiny-decilm", {"block_configs": [{}]}, "block_configs has 1 entries for 4 layers"),
    (
        "tiny-decilm",
        {"block_configs": [{"attention": {"window_length": 8}, "ffn": {}}] * 4},
        r"block_configs\[0\].attention.window_length is set",
    ),
    ("tiny-decilm", {"position_embedding_type": "rope_llama4"}, "'rope_llama4' is not supported"),
    ("tiny-laguna", {"gating": "per-row"}, "gating is 'per-row'; per-head and per-element"),
    ("tiny-laguna", {"swa_attention_sink_enabled": True}, "swa_attention_sink_enabled is set"),
    ("tiny-rnj1", {"layer_types": ["chunked_attention"] * 4}, r"layer_types\[0\] is 'chunked_att"),
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
    ("tiny-dbrx", "transformer.blocks.1.ffn.experts.mlp.v1"),
    ("tiny-hy_v3", "model.layers.1.mlp.expert_bias"),
    ("tiny-sarvam_moe", "model.layers.2.mlp.gate.expert_bias"),
    ("tiny-bailing_moe", "model.layers.3.attention.dense.weight"),
    ("tiny-deepseek_v2", "model.layers.1.self_attn.kv_a_layernorm.weight"),
    ("tiny-axk1", "model.layers.2.post_mlp_layernorm.weight"),
    ("tiny-decilm", "model.layers.3.mlp.down_proj.weight"),
    ("tiny-laguna", "model.layers.1.mlp.experts.e_score_correction_bias"),
    ("tiny-plamo3", "model.layers.layers.2.post_mixer_norm.weight"),
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

# SPDX-License-Identifier: Apache-2.0
"""Dense families beside Llama: how they load and what they refuse; what they compute is held by
goldens, and by transformers for those that have a row each."""

import json
from copy import copy

import pytest
import torch
from checkpoints import build_engine
from safetensors.torch import load_file, save_file
from tiny_folders import changed, in_folder

from oracles.transformers_twin import load as load_twin
from vllmx import SamplingParams
from vllmx.exceptions import CheckpointError
from vllmx.ir.ggml import GGMLType
from vllmx.layers.attention import attention_layers
from vllmx.model_loader.gguf_loader import GGUFTensor
from vllmx.models.hf_config import DEFAULTS, NEVER_NULL, HFConfig
from vllmx.models.hf_dense import DENSE_DEFAULTS
from vllmx.models.utils import LLAMA_MAPPER, by_head, warn_of_own_head
from vllmx.tiny.configs import config_of
from vllmx.tiny.dense_configs import DENSE_FAMILIES

ROWS = ("tiny-gemma2", "tiny-mistral", "tiny-phi3", "tiny-qwen2", "tiny-apertus", "tiny-olmo3")
ROWS += ("tiny-bloom", "tiny-mpt")
"""Those whose feature has a row, two that upstream answers only if it is told something, and two
without positions."""
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5, detokenize=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name -> the folder of a tiny checkpoint, written when it is asked for."""
    return in_folder(tmp_path_factory.mktemp("dense"))


def model_of(llm):
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner.model


@pytest.mark.parametrize("name", ROWS)
def test_log_probabilities_equal_transformers(folders, name) -> None:
    ids = [3 + 37 * i % 1000 for i in range(70)]
    with torch.inference_mode():
        want = load_twin(folders(name))(torch.tensor([ids])).logits[0].log_softmax(-1)
    llm = build_engine(folders(name), max_model_len=128, default_priority=["torch"])
    (answer,) = llm.generate([{"prompt_token_ids": ids}], SCORED, use_tqdm=False)
    for row, entries in zip(want, answer.prompt_logprobs[1:]):
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(float(row[token]), abs=2e-4)
    llm.shutdown()


@pytest.mark.parametrize("name", sorted(DENSE_FAMILIES))
def test_every_family_runs_with_dummy_weights(folders, name) -> None:
    llm = build_engine(folders(name), max_model_len=64, load_format="dummy")
    params = SamplingParams(temperature=0, max_tokens=2, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 2
    llm.shutdown()


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-falcon", "tiny-glm4", "tiny-phi3", "tiny-opt"])
def test_a_missing_tensor_is_named_as_the_checkpoint_has_it(folders, tmp_path, name) -> None:
    folder = changed(folders(name), tmp_path / "less")
    tensors = load_file(folder / "model.safetensors")
    parts = sorted(key for key in tensors if ".1." in key)
    gone = next(key for key in parts if "norm" in key or ".ln" in key)
    del tensors[gone]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"lacks {gone}"):
        build_engine(folder, max_model_len=64)


def test_a_stacked_matrix_of_another_height_is_refused(folders, tmp_path) -> None:
    folder = changed(folders("tiny-phi3"), tmp_path / "tall")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.qkv_proj.weight"
    tensors[name] = torch.cat((tensors[name], tensors[name][:1]))
    save_file(tensors, folder / "model.safetensors")
    rows = len(tensors[name])
    told = f"{name} has {rows} rows, the config wants {rows - 1}"
    with pytest.raises(CheckpointError, match=told):
        build_engine(folder, max_model_len=64)


def test_a_tensor_that_does_not_fit_is_named_with_its_shard(folders, tmp_path) -> None:
    folder = changed(folders("tiny-mistral"), tmp_path / "shards")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    name = "model.layers.2.mlp.down_proj.weight"
    tensors[name] = tensors[name].to(torch.int32)
    save_file({name: tensors.pop(name)}, folder / "b.safetensors")
    save_file(tensors, folder / "a.safetensors")
    with pytest.raises(CheckpointError, match=rf"b\.safetensors: weight {name} is of torch\.int32"):
        build_engine(folder, max_model_len=64)
    weight_map = dict.fromkeys(tensors, "a.safetensors") | {name: "b.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=rf"b\.safetensors: weight {name} is of torch\.int32"):
        build_engine(folder, max_model_len=64)


@pytest.mark.parametrize("name", ["tiny-gemma2", "tiny-gpt2"])
def test_a_tied_model_warns_of_a_head_that_is_not_its_embedding(
    folders, tmp_path, caplog, name
) -> None:
    tensors = load_file(folders(name) / "model.safetensors")
    embedding = next(key for key in tensors if "embed_tokens" in key or "wte" in key)
    for factor in (1, 2):
        caplog.clear()
        folder = changed(folders(name), tmp_path / f"head{factor}")
        head = {"lm_head.weight": tensors[embedding] * factor}
        save_file(tensors | head, folder / "model.safetensors")
        build_engine(folder, max_model_len=64).shutdown()
        assert ("lm_head.weight is not the embedding" in caplog.text) == (factor == 2)


STORED = {
    "dense": torch.arange(4, dtype=torch.uint8).view(2, 2).float(),
    "other": torch.ones(2, 2),
    "Q8_0": GGUFTensor("a", GGMLType.Q8_0, (2, 32), torch.zeros(2, 34, dtype=torch.uint8)),
    "Q8_0 other": GGUFTensor("b", GGMLType.Q8_0, (2, 32), torch.ones(2, 34, dtype=torch.uint8)),
    "Q4_0": GGUFTensor("c", GGMLType.Q4_0, (2, 32), torch.zeros(2, 18, dtype=torch.uint8)),
}


@pytest.mark.parametrize("head", STORED)
@pytest.mark.parametrize("embedding", STORED)
def test_a_head_that_is_left_out_is_told_however_it_is_stored(caplog, head, embedding) -> None:
    weights = [
        ("model.embed_tokens.weight", STORED[embedding]),
        ("lm_head.weight", copy(STORED[head])),
    ]
    assert list(warn_of_own_head(weights, LLAMA_MAPPER, "config.json")) == weights
    assert ("lm_head.weight is not the embedding" in caplog.text) == (head != embedding)


@pytest.mark.parametrize("count", [1, 3, 25])
def test_all_weights_that_do_not_fit_are_named_at_once(folders, tmp_path, count) -> None:
    """Those that lack, those without a place and those of another shape, up to a number of each."""
    folder = changed(folders("tiny-llama"), tmp_path / "many", num_hidden_layers=30)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(30):
        for name in [name for name in tensors if name.startswith("model.layers.0.")]:
            tensors[name.replace(".0.", f".{layer}.")] = tensors[name].clone()
    layers = [f"model.layers.{layer}" for layer in sorted(range(count), key=str)]
    for layer in layers:
        del tensors[f"{layer}.self_attn.q_proj.weight"]
        tensors[f"{layer}.mlp.up_proj.weight"] = tensors[f"{layer}.mlp.up_proj.weight"][1:].clone()
        tensors[f"{layer}.swirl.weight"] = torch.ones(3)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        build_engine(folder, max_model_len=64)
    said = str(error.value)
    assert said.startswith(f"{folder / 'model.safetensors'}: weight ")
    refused = sum(
        f"weight {layer}.{part}.weight" in said
        for layer in layers
        for part in ("mlp.up_proj", "swirl")
    )
    assert refused == min(2 * count, 20)
    assert (f"{2 * count - 20} more do not fit." in said) == (2 * count > 20)
    lacking = said.partition("the checkpoint lacks ")[2].removesuffix(".")
    names, _, more = lacking.partition(" and ")
    assert (
        names.split(", ")
        == [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(count)][:20]
    )
    assert more == ("5 more" if count == 25 else "")


@pytest.mark.parametrize("name", ["tiny-phi", "tiny-gptj", "tiny-phimoe"])
def test_a_tied_head_with_a_bias_is_refused(folders, tmp_path, name) -> None:
    """Its bias has no place in the embedding; upstream refuses it too, but for Phi's MoE."""
    more = {"lm_head_bias": True} if name == "tiny-phimoe" else {}
    folder = changed(folders(name), tmp_path / "tied", tie_word_embeddings=True, **more)
    with pytest.raises(CheckpointError, match=r"config\.json: tie_word_embeddings is true, which"):
        build_engine(folder, max_model_len=64)


def test_a_head_of_another_name_is_left_out_of_a_tied_model_with_a_warning(
    folders, tmp_path, caplog
) -> None:
    folder = changed(folders("tiny-internlm2"), tmp_path / "tied", tie_word_embeddings=True)
    build_engine(folder, max_model_len=64).shutdown()
    told = f"{folder / 'config.json'}: output.weight is not the embedding and is left out"
    assert told in caplog.text


REFUSED = [
    (
        "tiny-bloom",
        {"apply_residual_connection_post_layernorm": True},
        "apply_residual_connection_post_layernorm=True is not supported",
    ),
    ("tiny-mpt", {"no_bias": False}, "no_bias is False; True is served only"),
    (
        "tiny-mpt",
        {"attn_config": {"qk_ln": True}},
        r"attn_config\.qk_ln is True; False is served only",
    ),
    ("tiny-mpt", {"attn_config": {"alibi": False}}, r"attn_config\.alibi is False"),
    ("tiny-falcon", {"rotary": False}, "rotary=false is not supported"),
    ("tiny-falcon", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn is 3"),
    ("tiny-falcon", {"num_kv_heads": 4}, r"query_key_value.weight has shape \[256, 128\], which"),
    ("tiny-gemma", {"hidden_act": "silu"}, "hidden_act is 'silu' and hidden_activation 'gelu_py"),
    ("tiny-jais2", {"interleaved_sliding_window": 8}, "interleaved_sliding_window is set"),
    (
        "tiny-gpt2",
        {"hidden_act": "relu"},
        "hidden_act is 'relu' and activation_function 'gelu_new'",
    ),
    ("tiny-opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False"),
    ("tiny-opt", {"word_embed_proj_dim": 64}, "word_embed_proj_dim must be 128"),
    ("tiny-phi", {"qk_layernorm": True}, "qk_layernorm is not supported in Phi"),
    ("tiny-stablelm", {"use_parallel_residual": True}, "use_parallel_residual is not supported"),
    ("tiny-gpt2", {"activation_function": "swoosh"}, "hidden_act 'swoosh' is not supported"),
    ("tiny-qwen2", {"hidden_act": "relu2"}, "not supported in a gated MLP"),
    ("tiny-phi3", {"rope_parameters": {"rope_type": "spiral"}}, "rope_type 'spiral'"),
    (
        "tiny-mistral",
        {"layer_types": ["full_attention"] * 3 + ["chunked_attention"]},
        r"layer_types\[3\] is 'chunked_attention'; full_attention and sliding_attention are known",
    ),
    ("tiny-mistral", {"attention_chunk_size": 16}, "attention_chunk_size=16 is not supported"),
    ("tiny-gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False is not supported"),
    (
        "tiny-gpt2",
        {"scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx=True is not supported",
    ),
    ("tiny-gpt2", {"add_cross_attention": True}, "add_cross_attention=True is not supported"),
    (
        "tiny-qwen2",
        {"dual_chunk_attention_config": {"chunk_size": 32}},
        "dual_chunk_attention_config={'chunk_size': 32} is not supported",
    ),
    (
        "tiny-gemma2",
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention=True is not supported",
    ),
]


@pytest.mark.parametrize(("name", "config", "words"), REFUSED, ids=lambda v: str(v)[:40])
def test_a_key_that_changes_the_maths_and_is_not_built_stops_the_load(
    folders, tmp_path, name, config, words
) -> None:
    with pytest.raises(CheckpointError, match=words):
        build_engine(changed(folders(name), tmp_path / "other", **config), max_model_len=64)


WINDOWS = {
    "tiny-mistral": [24, 24, 24, 24],
    "tiny-gemma2": [24, None, 24, None],
    "tiny-cohere2": [24, 24, 24, None],
    "tiny-qwen2": [None] * 4,
}


@pytest.mark.parametrize("name", WINDOWS)
def test_each_layer_has_the_window_that_the_config_gives_it(folders, name) -> None:
    llm = build_engine(folders(name), max_model_len=64)
    found = [layer.sliding_window for layer in attention_layers(model_of(llm)).values()]
    assert found == WINDOWS[name]
    llm.shutdown()


def test_the_older_word_for_scaled_positions_counts() -> None:
    """Also where the family has a default for the newer one."""
    said = {"type": "linear", "factor": 3.0}
    config = HFConfig({"model_type": "apertus", "rope_scaling": said})
    assert config.rope_parameters == {
        "rope_type": "linear",
        "factor": 3.0,
        "rope_theta": 12000000.0,
    }
    beside = {"rope_scaling": said, "rope_parameters": {"rope_type": "default"}}
    assert HFConfig({"model_type": "llama"} | beside).rope_parameters["rope_type"] == "linear"


@pytest.mark.parametrize("family", ["llama", "apertus", "cwm"])
def test_the_length_a_model_was_trained_with_is_that_of_transformers(family) -> None:
    """Or, as in upstream, what stands beside the rope parameters."""
    from transformers import AutoConfig

    said = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}
    said |= {"max_position_embeddings": 384}
    theirs = AutoConfig.for_model(family, **json.loads(json.dumps(said))).rope_parameters
    key = "original_max_position_embeddings"
    assert HFConfig({"model_type": family} | said).rope_parameters[key] == theirs[key] == 384
    assert HFConfig({"model_type": family, key: 96} | said).rope_parameters[key] == 96


@pytest.mark.parametrize("key", NEVER_NULL)
def test_a_key_without_a_value_is_named(key) -> None:
    with pytest.raises(CheckpointError, match=f"{key}.* is None, not of type"):
        HFConfig({"model_type": "llama", key: None})


def test_a_key_of_another_name_without_a_value_is_named() -> None:
    with pytest.raises(CheckpointError, match="'layer_norm_epsilon' is None, not of type float"):
        HFConfig({"model_type": "gpt2", "layer_norm_epsilon": None})


def test_the_first_gemmas_exact_gelu_was_a_slip(folders, tmp_path) -> None:
    """Upstream and transformers take the approximation where the config has the older word."""
    source = folders("tiny-gemma")
    folder = changed(source, tmp_path / "older", hidden_activation=None, hidden_act="gelu")
    llm = build_engine(folder, max_model_len=64)
    assert model_of(llm).model.layers[0].mlp.hidden_act == "gelu_pytorch_tanh"
    llm.shutdown()


@pytest.mark.parametrize(
    ("family", "period", "full"),
    [("cohere2", 2, [1, 3]), ("exaone4", "LG", [1, 3])],
)
def test_layer_types_follow_from_the_family_where_the_config_has_none(family, period, full) -> None:
    said = {"model_type": family, "sliding_window": 8, "num_hidden_layers": 4}
    said |= {"num_attention_heads": 2, "hidden_size": 16}
    if period is not None:
        said["sliding_window_pattern"] = period
    types = HFConfig(said).layer_types
    assert [i for i, kind in enumerate(types) if kind == "full_attention"] == full


@pytest.mark.parametrize("family", [*sorted(DENSE_DEFAULTS), "ministral3", "mistral", "qwen2"])
def test_values_left_out_are_those_of_transformers(family) -> None:
    """A config that says nothing but its shape means what it means there."""
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(family)
    ours = HFConfig({"model_type": family})
    rope = getattr(theirs, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    for key in DEFAULTS[family]:
        if key in ("rope_theta", "partial_rotary_factor"):
            want, got = rope.get(key), ours.rope_parameters.get(key)
        elif key == "rope_parameters":
            want = {name: rope.get(name) for name in ours.rope_parameters}
            got = ours.rope_parameters
        else:
            want, got = getattr(theirs, key, None), ours.to_dict()[key]
        assert want is None or want == got, f"{key}: {want} there, {got} here"


@pytest.mark.parametrize("family", ["cohere2", "cwm", "exaone4", "gemma2", "olmo3", "qwen2"])
def test_layer_types_left_out_are_those_of_transformers(family) -> None:
    from transformers import AutoConfig

    said = {"num_hidden_layers": 9, "num_attention_heads": 4, "hidden_size": 64}
    said |= {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3}
    theirs = AutoConfig.for_model(family, **said)
    assert HFConfig({"model_type": family, **said}).layer_types == list(theirs.layer_types)


def test_rows_that_come_head_by_head_are_sorted_by_kind() -> None:
    rows = torch.arange(2 * (3 + 2) * 4).view(-1, 1)  # two key heads of three queries, heads of 4
    out = by_head(rows, 3, 4).flatten().tolist()
    queries, keys, values = [*range(12), *range(20, 32)], (12, 32), (16, 36)
    rest = [first + i for kind in (keys, values) for first in kind for i in range(4)]
    assert out == queries + rest


def test_ministral_scales_late_queries(folders, tmp_path) -> None:
    rope = config_of("tiny-mistral")["rope_parameters"] | {
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 4,
    }
    folder = changed(
        folders("tiny-mistral"),
        tmp_path / "ministral",
        architectures=["Ministral3ForCausalLM"],
        model_type="ministral3",
        sliding_window=None,
        rope_parameters=rope,
    )
    llm = build_engine(folder, max_model_len=64)
    layer = next(m for m in model_of(llm).modules() if type(m).__name__ == "Ministral3Attention")
    qk = torch.ones(2, layer.q_size + layer.kv_size)
    q, k = layer.prepare(torch.tensor([0, 8]), qk)
    plain, same = type(layer).__mro__[1].prepare(layer, torch.tensor([0, 8]), qk)
    torch.testing.assert_close(q[1], plain[1] * (1 + 0.1 * torch.log(torch.tensor(3.0))))
    torch.testing.assert_close(q[0], plain[0])
    torch.testing.assert_close(k, same)
    llm.shutdown()

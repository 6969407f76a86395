# SPDX-License-Identifier: Apache-2.0
"""HFConfig fills in what transformers would, and refuses what is missing or of another type."""

import copy

import pytest
import transformers

from vllmx.exceptions import CheckpointError
from vllmx.models.hf_config import DEFAULTS, HFConfig, read_json

SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_missing_values_are_derived() -> None:
    config = HFConfig(SIZES)
    assert (config.head_dim, config.num_key_value_heads) == (16, 4)
    assert config.layer_types == ["full_attention"] * 8
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert config.text_config is config
    assert config.raw == SIZES


@pytest.mark.parametrize(
    ("model_type", "cls"),
    [
        ("llama", transformers.LlamaConfig),
        ("mistral", transformers.MistralConfig),
        ("qwen2", transformers.Qwen2Config),
        ("qwen3", transformers.Qwen3Config),
        ("gemma3_text", transformers.Gemma3TextConfig),
    ],
)
def test_defaults_equal_transformers(model_type, cls) -> None:
    theirs = cls()
    moved = {"rope_theta", "rope_local_base_freq", "sliding_window_pattern", "mlp_bias"}
    for key, value in DEFAULTS[model_type].items():
        if key in moved or not hasattr(theirs, key) or key == "tie_word_embeddings":
            continue
        if key in ("sliding_window", "attention_bias") and model_type.startswith("qwen"):
            continue  # transformers hides the window unless use_sliding_window
        assert getattr(theirs, key) == value, key


@pytest.mark.parametrize(
    "given",
    [
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 5e5},
        {"rope_scaling": {"type": "llama3", **LLAMA3}, "rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ],
)
def test_every_spelling_of_rope_settings_means_the_same(given) -> None:
    config = HFConfig(SIZES | given)
    assert config.rope_parameters == {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}


def test_rope_null_and_unknown_types_are_kept_apart() -> None:
    plain = HFConfig(SIZES | {"rope_scaling": None, "rope_theta": 5})
    assert plain.rope_parameters == {"rope_type": "default", "rope_theta": 5.0}
    odd = HFConfig(SIZES | {"rope_scaling": {"type": "spiral", "factor": 2.0}})
    assert odd.rope_parameters["rope_type"] == "spiral"  # refused by name by the rope factory
    assert HFConfig(SIZES | {"rope_scaling": {"type": "su"}}).rope_parameters["rope_type"] == (
        "longrope"
    )


def test_gemma3_has_a_rope_and_a_layer_type_for_each_kind_of_layer() -> None:
    given = {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    config = HFConfig(SIZES | given | {"head_dim": 16})
    assert config.rope_parameters == {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    assert [t == "full_attention" for t in config.layer_types] == [i % 6 == 5 for i in range(8)]
    nested = {kind: {"rope_type": "default", "rope_theta": 7.0} for kind in config.rope_parameters}
    again = HFConfig(SIZES | {"model_type": "gemma3_text", "rope_parameters": nested})
    assert again.rope_parameters == nested


@pytest.mark.parametrize(
    ("given", "sliding"),
    [
        ({"model_type": "mistral", "sliding_window": 16}, 8),
        ({"model_type": "mistral", "sliding_window": None}, 0),
        ({"model_type": "qwen2", "sliding_window": 16}, 0),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 16,
                "use_sliding_window": True,
                "max_window_layers": 6,
            },
            2,
        ),
    ],
)
def test_layers_with_a_sliding_window(given, sliding) -> None:
    assert HFConfig(SIZES | given).layer_types.count("sliding_attention") == sliding


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("window", [{}, {"sliding_window": None}, {"sliding_window": 16}])
@pytest.mark.parametrize("use", [{}, {"use_sliding_window": False}, {"use_sliding_window": True}])
def test_windows_of_the_qwens_are_those_of_transformers(family, window, use) -> None:
    """One that is left out is not one that is null."""
    said = SIZES | {"model_type": family, "max_window_layers": 3} | window | use
    theirs = transformers.AutoConfig.for_model(**said)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 8
    want = [theirs.sliding_window or None if "sliding" in kind else None for kind in kinds]
    ours = HFConfig(said)
    assert [ours.sliding_window if "sliding" in k else None for k in ours.layer_types] == want


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gemma3_text"])
def test_a_window_of_nothing_is_none(family) -> None:
    assert HFConfig(SIZES | {"model_type": family, "sliding_window": 0}).sliding_window is None


@pytest.mark.parametrize("beside", [{}, {"rope_local_base_freq": 5e3}, {"rope_theta": 2e6}])
@pytest.mark.parametrize("full", ["absent", None, {"rope_type": "linear", "factor": 8.0}])
@pytest.mark.parametrize("sliding", ["absent", None, {}, {"rope_theta": 7e3}])
def test_a_kind_of_layer_without_a_base_has_its_own(beside, full, sliding) -> None:
    told = {"full_attention": full, "sliding_attention": sliding}
    told = {kind: rope for kind, rope in told.items() if rope != "absent"}
    said = SIZES | {"model_type": "gemma3_text", "rope_parameters": told or None} | beside
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(said)).rope_parameters
    assert HFConfig(said).rope_parameters == theirs


def test_rope_parameters_of_a_kind_that_are_no_object_are_named() -> None:
    with pytest.raises(CheckpointError, match="of 'sliding_attention' are 7, not a JSON object"):
        HFConfig(SIZES | {"rope_parameters": {"sliding_attention": 7}})


@pytest.mark.parametrize("family", sorted(name for name in DEFAULTS if name.endswith("_text")))
@pytest.mark.parametrize("said", [{}, {"model_type": None}, {"model_type": ""}])
def test_a_text_config_without_model_type_is_of_the_family_that_the_outer_one_tells(
    family, said
) -> None:
    outer = {"architectures": ["X"], "model_type": family.removesuffix("_text")}
    sizes = {k: v for k, v in SIZES.items() if k != "model_type"} | {"num_key_value_heads": 4}
    want = HFConfig(outer | {"text_config": sizes | {"model_type": family}})
    assert HFConfig(outer | {"text_config": sizes | said}).to_dict() == want.to_dict()


def test_nested_text_config_inherits_the_outer_keys() -> None:
    inner = {k: v for k, v in SIZES.items() if k != "architectures"}
    outer = {
        "architectures": ["SomethingForConditionalGeneration"],
        "text_config": inner,
        "tie_word_embeddings": True,
    }
    config = HFConfig(outer, "dir/config.json")
    assert config.text_config.hidden_size == 64
    assert config.text_config.tie_word_embeddings is True
    assert config.text_config.architectures == config.architectures
    with pytest.raises(AttributeError, match=r"dir/config\.json has no 'hidden_size'"):
        _ = config.hidden_size


def test_read_is_strict() -> None:
    config = HFConfig(SIZES | {"a": "x", "b": True, "c": None}, "dir/config.json")
    assert config.read("hidden_size", int) == 64
    assert type(config.read("hidden_size", float)) is float
    assert config.read("absent", int, None) is None
    with pytest.raises(CheckpointError, match=r"dir/config.json: 'absent' is missing"):
        config.read("absent", int)
    for key in ("a", "b", "c"):
        with pytest.raises(CheckpointError, match=f"'{key}' is .* not of type int"):
            config.read(key, int)


@pytest.mark.parametrize(
    "given",
    [
        {"num_attention_heads": "4"},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"layer_types": ["full_attention"]},
        {"rope_scaling": 7},
        {"architectures": "LlamaForCausalLM"},
    ],
)
def test_contradictions_are_checkpoint_errors(given) -> None:
    with pytest.raises(CheckpointError):
        HFConfig(SIZES | given)


def test_missing_key_is_an_attribute_error_and_one_line_for_the_user() -> None:
    config = HFConfig(SIZES, "dir/config.json")
    assert getattr(config, "absent", 7) == 7
    assert not hasattr(config, "absent")
    with pytest.raises(CheckpointError, match="has no 'absent'"):
        _ = config.absent


def test_copying_keeps_the_values() -> None:
    assert copy.deepcopy(HFConfig(SIZES)).hidden_size == 64


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"'])
def test_broken_json_is_a_checkpoint_error(tmp_path, text) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_json(path)

# SPDX-License-Identifier: Apache-2.0
"""GGUF metadata becomes the config.json of the same model."""

import numpy as np
import pytest

from vllmx.exceptions import CheckpointError
from vllmx.model_loader.gguf_config import generation_config_from_gguf, hf_config_from_gguf
from vllmx.model_loader.gguf_reader import GGUFReader

EMBED = {"token_embd.weight": np.zeros((10, 32), np.float32)}


@pytest.fixture
def config_of(write_gguf, sizes):
    def read(arch="llama", tensors=None, **metadata):
        values = sizes | {k.replace("__", "."): v for k, v in metadata.items()}
        path = write_gguf(EMBED | (tensors or {}), values, arch)
        return hf_config_from_gguf(GGUFReader(path))

    return read


def test_llama_keys_are_translated(config_of) -> None:
    config = config_of()
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (32, 64, 10)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 2, 4)
    assert config.max_position_embeddings == 128
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert config.tie_word_embeddings is True
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


def test_output_tensor_means_untied_embeddings(config_of) -> None:
    config = config_of(tensors={"output.weight": np.zeros((10, 32), np.float32)})
    assert config.tie_word_embeddings is False


@pytest.mark.parametrize(
    ("arch", "name"), [("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")]
)
def test_qwen_is_translated(config_of, arch, name) -> None:
    assert config_of(arch).architectures == [name]


def test_gemma3_has_what_llama_cpp_hard_codes(config_of) -> None:
    config = config_of(
        "gemma3",
        __attention__key_length=16,
        __attention__sliding_window=8,
        __block_count=7,
        tensors={},
    )
    assert config.architectures == ["Gemma3ForCausalLM"]
    assert (config.head_dim, config.query_pre_attn_scalar) == (16, 16)
    assert config.sliding_window == 8
    assert config.layer_types.index("full_attention") == 5
    assert config.layer_types.count("full_attention") == 1
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 10000.0
    assert config.hidden_activation == "gelu_pytorch_tanh"
    assert config.final_logit_softcapping is None


def test_rope_scaling_is_translated(config_of) -> None:
    config = config_of(
        __rope__scaling__type="yarn",
        __rope__scaling__factor=4.0,
        __rope__scaling__original_context_length=64,
    )
    assert config.rope_parameters == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    }


def test_rope_freqs_tensor_becomes_freq_factors(config_of) -> None:
    config = config_of(tensors={"rope_freqs.weight": np.array([1, 8], np.float32)})
    assert config.rope_parameters["freq_factors"] == [1.0, 8.0]
    with pytest.raises(CheckpointError, match="not positive"):
        config_of(tensors={"rope_freqs.weight": np.array([1, np.nan], np.float32)})


def test_equal_values_of_all_layers_pass_for_one(config_of) -> None:
    config = config_of(__attention__head_count=[8, 8])
    assert config.num_attention_heads == 8
    with pytest.raises(CheckpointError, match="differs from layer to layer"):
        config_of(__attention__head_count=[8, 4])


@pytest.mark.parametrize(
    ("arch", "metadata", "problem"),
    [
        ("mamba", {}, "architecture 'mamba' is not supported; supported: llama"),
        ("llama", {"__expert_count": 8}, "mixture-of-experts"),
        ("llama", {"__attention__head_count": "8"}, "not of type int"),
        ("llama", {"__attention__head_count": 0}, "head_count is 0"),
    ],
)
def test_what_cannot_be_translated_is_refused(config_of, arch, metadata, problem) -> None:
    with pytest.raises(CheckpointError, match=problem):
        config_of(arch, **metadata)


def test_missing_key_and_missing_embedding_are_named(write_gguf, sizes) -> None:
    del sizes[".block_count"]
    with pytest.raises(CheckpointError, match=r"'llama.block_count' is missing"):
        hf_config_from_gguf(GGUFReader(write_gguf(EMBED, sizes)))
    with pytest.raises(CheckpointError, match=r"'token_embd.weight' is missing"):
        hf_config_from_gguf(GGUFReader(write_gguf({}, sizes)))


def test_eos_eot_and_eom_end_a_text(write_gguf, sizes) -> None:
    ids = {f"tokenizer.ggml.{k}_token_id": v for k, v in (("eos", 3), ("eot", 5), ("eom", 3))}
    assert generation_config_from_gguf(GGUFReader(write_gguf(EMBED, sizes | ids))) == {
        "eos_token_id": [3, 5]
    }
    assert generation_config_from_gguf(GGUFReader(write_gguf(EMBED, sizes))) == {}

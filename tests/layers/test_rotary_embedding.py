# SPDX-License-Identifier: Apache-2.0
"""Angle tables against transformers, and refusal of what has no formula."""

import pytest
import torch

from vllmx.config import KernelConfig
from vllmx.exceptions import CheckpointError
from vllmx.ir.select import OpTable
from vllmx.layers.rotary_embedding import compute_inv_freq, get_rope
from vllmx.models.hf_config import HFConfig

ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 2048},
    "yarn_tuned": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
}


@pytest.mark.parametrize("name", sorted(ROPES))
def test_inverse_frequencies_equal_transformers(name: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": name, "rope_theta": 500000.0, **ROPES[name]}
    config = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=8192,
        rope_parameters=dict(parameters),
    )
    inv_freq, factor = compute_inv_freq(128, 8192, parameters)
    twin = LlamaRotaryEmbedding(config)
    torch.testing.assert_close(inv_freq, twin.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(twin.attention_scaling)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_both_spellings_of_the_type_work(key: str) -> None:
    config = HFConfig(
        {
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "hidden_size": 64,
            "rope_theta": 10000.0,
            "rope_scaling": {key: "llama3", **ROPES["llama3"]},
        }
    )
    scaled, _ = compute_inv_freq(32, 8192, config.rope_parameters)
    plain, _ = compute_inv_freq(32, 8192, {"rope_type": "default", "rope_theta": 10000.0})
    assert not torch.allclose(scaled, plain)


def test_an_unknown_type_is_refused_not_taken_for_plain() -> None:
    with pytest.raises(CheckpointError, match="rope_type 'spiral' is not supported; default"):
        compute_inv_freq(64, 128, {"rope_type": "spiral", "rope_theta": 1e4})


def test_frequency_factors_of_a_gguf_divide_the_frequencies() -> None:
    parameters = {"rope_type": "llama3", "rope_theta": 500000.0, **ROPES["llama3"]}
    want, _ = compute_inv_freq(128, 8192, parameters)
    plain, _ = compute_inv_freq(128, 8192, {"rope_type": "default", "rope_theta": 500000.0})
    from_gguf = {
        "rope_type": "default",
        "rope_theta": 500000.0,
        "freq_factors": (plain / want).tolist(),
    }
    got, _ = compute_inv_freq(128, 8192, from_gguf)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def test_layers_that_agree_share_one_table() -> None:
    ops = OpTable(KernelConfig(), "cpu", torch.float32)
    parameters = {"rope_type": "default", "rope_theta": 10000.0}
    first = get_rope(64, 128, parameters, ops)
    assert get_rope(64, 128, dict(parameters), ops) is first
    assert get_rope(64, 256, parameters, ops) is not first

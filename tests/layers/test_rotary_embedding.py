# SPDX-License-Identifier: Apache-2.0
"""Angle tables against transformers, and refusal of what has no formula."""

import math

import pytest
import torch

from vllmx.config import KernelConfig
from vllmx.exceptions import CheckpointError
from vllmx.ir.select import OpTable
from vllmx.layers.rotary_embedding import SCALINGS, MRotaryEmbedding, compute_inv_freq, get_rope
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
    first = get_rope(64, 128, parameters, ops, max_model_len=None)
    assert get_rope(64, 128, dict(parameters), ops, max_model_len=128) is first
    assert get_rope(64, 256, parameters, ops, max_model_len=None) is not first
    assert get_rope(64, 128, parameters, ops, max_model_len=129) is not first


LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 128,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
}


@pytest.mark.parametrize(("longest", "factor"), [(None, 2.0), (129, 2.0), (128, 1.0)])
def test_longrope_goes_by_what_the_engine_takes_and_not_by_the_prompt(longest, factor) -> None:
    """A sequence that passes the original context keeps the keys that it has cached."""
    ops = OpTable(
        KernelConfig(ir_op_priority={"rotary_embedding": ["torch"]}), "cpu", torch.float32
    )
    rope = get_rope(32, 512, LONG, ops, max_model_len=longest)
    scale = (1 + math.log(4) / math.log(128)) ** 0.5
    assert float(rope.cos_sin_cache[7, 0]) == pytest.approx(scale * math.cos(7 / factor), abs=1e-6)


@pytest.mark.parametrize("rope_type", SCALINGS)
@pytest.mark.parametrize(("longest", "rows"), [(None, 512), (100, 512), (1300, 1300)])
def test_the_table_has_a_row_for_each_position_that_the_engine_takes(
    rope_type, longest, rows
) -> None:
    """With the same angles, whatever its length: formulas go by the config's length."""
    ops = OpTable(
        KernelConfig(ir_op_priority={"rotary_embedding": ["torch"]}), "cpu", torch.float32
    )
    told = {"rope_type": rope_type, "rope_theta": 1e4, **SAID[rope_type]}
    if rope_type == "longrope":
        told["short_factor"] = told["long_factor"]
    table = get_rope(32, 512, told, ops, max_model_len=longest).cos_sin_cache
    assert len(table) == rows
    torch.testing.assert_close(
        table[:512], get_rope(32, 512, told, ops, max_model_len=None).cos_sin_cache
    )


def test_rope_parameters_of_no_type_are_refused() -> None:
    ops = OpTable(KernelConfig(), "cpu", torch.float32)
    other = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(CheckpointError, match=r"no 'rope_type'.*full_attention"):
        get_rope(32, 512, other, ops, max_model_len=None)


def test_longrope_wants_a_factor_for_each_frequency() -> None:
    with pytest.raises(CheckpointError, match="long_factor has 15 numbers, not 16"):
        compute_inv_freq(32, 512, {**LONG, "long_factor": [1.0] * 15})


def test_dynamic_needs_alpha_or_factor() -> None:
    with pytest.raises(CheckpointError, match="needs 'alpha' or 'factor'"):
        compute_inv_freq(32, 512, {"rope_type": "dynamic", "rope_theta": 1e4})


SAID: dict[str, dict] = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0},
    "longrope": {key: LONG[key] for key in LONG if key not in ("rope_type", "rope_theta")},
    "ntk": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
}


@pytest.mark.parametrize("rope_type", SCALINGS)
def test_a_number_that_a_type_needs_is_there_and_is_one(rope_type) -> None:
    whole = {"rope_type": rope_type, "rope_theta": 1e4, **SAID[rope_type]}
    compute_inv_freq(32, 512, whole)
    for key in whole.keys() - {"rope_type"}:
        for bad in ("8", None, [True], -1.0):
            with pytest.raises(CheckpointError, match=key):
                compute_inv_freq(32, 512, whole | {key: bad})
        if key != "rope_theta":
            with pytest.raises(CheckpointError, match=key):
                compute_inv_freq(32, 512, {k: whole[k] for k in whole if k != key})


@pytest.mark.parametrize(
    "said", [{"rope_dim": 66}, {"partial_rotary_factor": 0.0}, {"rope_dim": 3}]
)
def test_a_head_is_not_rotated_beyond_itself_nor_by_halves_of_a_pair(said) -> None:
    with pytest.raises(CheckpointError, match="of 64 elements of a head"):
        compute_inv_freq(64, 512, {"rope_type": "default", "rope_theta": 1e4, **said})


SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}


@pytest.mark.parametrize("interleaved", [False, True])
def test_sections_of_mrope_turn_text_as_plain_rotation_does(interleaved) -> None:
    """Whether a token of text has one position or three that are the same."""
    ops = OpTable(KernelConfig(), "cpu", torch.float32)
    plain = get_rope(64, 512, {"rope_type": "default", "rope_theta": 1e6}, ops, max_model_len=None)
    parts = get_rope(
        64, 512, {**SECTIONS, "mrope_interleaved": interleaved}, ops, max_model_len=None
    )
    assert isinstance(parts, MRotaryEmbedding)
    positions, heads = torch.tensor([0, 7, 500]), torch.randn(3, 128)
    want = plain(positions, heads, heads[:, :64])
    for given in (positions, positions.expand(3, 3)):
        for got, right in zip(parts(given, heads, heads[:, :64]), want):
            torch.testing.assert_close(got, right, atol=1e-6, rtol=1e-6)
    moved = torch.stack((positions, positions + 1, positions))
    assert not torch.allclose(parts(moved, heads)[0], want[0], atol=1e-3)


@pytest.mark.parametrize("section", [[16, 16], [8, 12, 11]])
def test_sections_of_mrope_are_three_and_have_all_angles(section) -> None:
    ops = OpTable(KernelConfig(), "cpu", torch.float32)
    with pytest.raises(CheckpointError, match=r"mrope_section is .*add up to 32"):
        get_rope(64, 512, {**SECTIONS, "mrope_section": section}, ops, max_model_len=None)

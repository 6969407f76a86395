# SPDX-License-Identifier: Apache-2.0
"""Families whose rotation differs from Llama's in its parameters: what each makes of its config."""

import json

import pytest
import torch

from vllmx.config import finalize
from vllmx.engine.arg_utils import engine_args_to_config
from vllmx.ir.select import OpTable
from vllmx.layers.rotary_embedding import compute_inv_freq, table_of
from vllmx.model_loader.resolve import resolve_model
from vllmx.registry import get_model_cls
from vllmx.tiny.configs import config_of

PLAIN = {"rope_type": "default", "rope_theta": 500.0}
DOUBLED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
PART = {"rope_parameters": PLAIN, "rotary_dim": 8}
GLM = {"rope_type": "default", "rope_theta": 30000.0, "partial_rotary_factor": 0.5}
CASES = [
    ("tiny-gptj", PART, 0, PLAIN | {"rope_dim": 8}, False),
    ("tiny-minimax_m2", PART, 0, PLAIN | {"rope_dim": 8}, True),
    ("tiny-bailing_moe", PART, 0, PLAIN | {"rope_dim": 8}, True),
    ("tiny-bailing_moe_v2", PART, 0, PLAIN | {"rope_dim": 8}, True),
    ("tiny-olmo2", {"rope_parameters": DOUBLED}, 0, DOUBLED, True),
    ("tiny-olmo3", {"rope_parameters": DOUBLED}, 0, PLAIN, True),
    ("tiny-olmo3", {"rope_parameters": DOUBLED}, 3, DOUBLED, True),
    ("tiny-chatglm", {"rope_ratio": 3.0}, 0, GLM, False),
    ("tiny-chatglm", {"rope_ratio": 3.0, "original_rope": False}, 0, GLM, True),
]
"""Model, what its config says else, layer, the parameters of its rotation, whether by halves."""


@pytest.mark.parametrize("max_model_len", [48, None])
@pytest.mark.parametrize(("name", "said", "layer", "parameters", "by_halves"), CASES)
def test_a_layer_is_rotated_by_its_familys_parameters(
    tmp_path, name, said, layer, parameters, by_halves, max_model_len
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(name) | said))
    run = engine_args_to_config(
        model=str(tmp_path), max_model_len=max_model_len, skip_tokenizer_init=True
    )
    run.kernel.default_priority = ["torch"]
    config = finalize(run)
    resolve_model(config)
    build = get_model_cls(config.model_config.hf_config)
    model = build(vllm_config=config, ops=OpTable(config.kernel_config, "cpu", torch.float32))
    rope = model.model.layers[layer].self_attn.rotary_emb
    text = config.model_config.hf_text_config
    inv_freq, factor = compute_inv_freq(text.head_dim, text.max_position_embeddings, parameters)
    rows = max(text.max_position_embeddings, config.model_config.max_model_len)
    assert torch.equal(rope.cos_sin_cache, table_of(inv_freq, rows, factor))
    assert rope.is_neox_style is by_halves

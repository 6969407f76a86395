# SPDX-License-Identifier: Apache-2.0
"""Families with experts whose tiny checkpoints are written in letters: that they are what
transformers computes, what a config may leave out, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import build_engine
from hybrid_driver import HybridDriver
from safetensors.torch import load_file, save_file

from oracles.transformers_twin import load as load_twin
from vllmx.config import RunConfig, finalize
from vllmx.exceptions import CheckpointError
from vllmx.models.hf_config import DEFAULTS, HFConfig
from vllmx.models.llama4 import is_tuned
from vllmx.tiny.checkpoint import save
from vllmx.tiny.sparse_configs import MORE_SPARSE

FAMILIES = sorted({family["model_type"] for family in MORE_SPARSE.values()})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name -> the folder of a tiny checkpoint, written when it is asked for."""
    root = tmp_path_factory.mktemp("sparse")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            save(name, root / name)
        return root / name

    return folder


def changed(source: Path, target: Path, **config: object) -> Path:
    """A copy whose config says something else."""
    shutil.copytree(source, target)
    said = json.loads((source / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(said))
    return target


@pytest.mark.parametrize("name", sorted(MORE_SPARSE))
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
    for key in DEFAULTS[family]:
        if key in ("rope_theta", "partial_rotary_factor"):
            want, got = rope.get(key), ours.rope_parameters.get(key)
        elif key == "rope_parameters":
            want = {name: rope.get(name) for name in ours.rope_parameters}
            got = ours.rope_parameters
        else:
            want, got = getattr(theirs, key, None), ours.to_dict()[key]
        assert want is None or want == got, f"{key}: {want} there, {got} here"


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text"])
def test_layer_types_left_out_are_those_of_transformers(family) -> None:
    from transformers import AutoConfig

    said = {"num_hidden_layers": 9, "num_attention_heads": 8, "hidden_size": 64}
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


REFUSED = [
    ("tiny-gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0; experts are served with 7.0"),
    ("tiny-gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0"),
    (
        "tiny-gpt_oss",
        {"quantization_config": {"quant_method": "mxfp4"}},
        "quantization method 'mxfp4' is not supported",
    ),
    ("tiny-gpt_oss", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, of 8 experts"),
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

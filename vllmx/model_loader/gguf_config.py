# SPDX-License-Identifier: Apache-2.0
"""Translates GGUF metadata into the keys of config.json and generation_config.json."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllmx.exceptions import CheckpointError
from vllmx.ir.ggml import GGMLType
from vllmx.model_loader.gguf_reader import GGUFReader
from vllmx.models.hf_config import REQUIRED, HFConfig

ARCHITECTURES: dict[str, tuple[str, str]] = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
"""general.architecture -> (architecture, model_type) of config.json."""

ROPE_FREQS = "rope_freqs.weight"
FILE_TYPE_DTYPES = {0: "float32", 1: "float16"}
GEMMA3_27B_LAYERS = 62


class Metadata:
    """Typed reads of the keys under one architecture's prefix."""

    def __init__(self, reader: GGUFReader) -> None:
        self.reader = reader
        self.arch = self.read("general.architecture", str)

    def read(self, key: str, kind: type, default: Any = REQUIRED) -> Any:
        """Value of `key` (a leading dot stands for the architecture), of type `kind`.

        An array of equal numbers passes for one number. CheckpointError otherwise.
        """
        full = self.arch + key if key.startswith(".") else key
        value = self.reader.metadata.get(full, default)
        if value is REQUIRED:
            raise CheckpointError(f"{self.reader.path}: metadata key {full!r} is missing.")
        if value is default:
            return value
        if isinstance(value, np.ndarray):
            if len(set(value.tolist())) != 1:
                raise CheckpointError(
                    f"{self.reader.path}: {full!r} differs from layer to layer; vllmx needs one "
                    "value for all."
                )
            value = value[0].item()
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise CheckpointError(
                f"{self.reader.path}: {full!r} is {value!r}, not of type {kind.__name__}."
            )
        return value


def hf_config_from_gguf(reader: GGUFReader) -> HFConfig:
    """The config.json that `reader`'s metadata stands for.

    Raises CheckpointError for an architecture without a translation, or a missing key.
    """
    meta = Metadata(reader)
    if meta.arch not in ARCHITECTURES:
        raise CheckpointError(
            f"{reader.path}: GGUF architecture {meta.arch!r} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}."
        )
    architecture, model_type = ARCHITECTURES[meta.arch]
    if meta.read(".expert_count", int, 0):
        raise CheckpointError(
            f"{reader.path}: a mixture-of-experts model of GGUF architecture {meta.arch!r} is not "
            "supported."
        )
    values = {"architectures": [architecture], "model_type": model_type} | _sizes(meta)
    values |= _rope(meta, values)
    if meta.arch == "gemma3":
        values |= _gemma3(meta, values)
    for key in ("bos", "eos"):
        values[f"{key}_token_id"] = meta.read(f"tokenizer.ggml.{key}_token_id", int, None)
    return HFConfig(values, str(reader.path))


def generation_config_from_gguf(reader: GGUFReader) -> dict[str, Any]:
    """The generation_config.json of `reader`: its ids that begin and end a text."""
    meta = Metadata(reader)
    ids = [meta.read(f"tokenizer.ggml.{k}_token_id", int, None) for k in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(token for token in ids if token is not None))
    return {"eos_token_id": ends} if ends else {}


def _sizes(meta: Metadata) -> dict[str, Any]:
    hidden = meta.read(".embedding_length", int)
    heads = meta.read(".attention.head_count", int)
    tensors = meta.reader.tensors
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{meta.reader.path}: tensor 'token_embd.weight' is missing.")
    if heads < 1:
        raise CheckpointError(f"{meta.reader.path}: attention.head_count is {heads}.")
    return {
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": meta.read(".feed_forward_length", int),
        "num_hidden_layers": meta.read(".block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.read(".attention.head_count_kv", int, heads),
        "head_dim": meta.read(".attention.key_length", int, hidden // heads),
        "max_position_embeddings": meta.read(".context_length", int),
        "rms_norm_eps": meta.read(".attention.layer_norm_rms_epsilon", float),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "sliding_window": meta.read(".attention.sliding_window", int, None),
        "dtype": FILE_TYPE_DTYPES.get(meta.read("general.file_type", int, -1), "bfloat16"),
    }


def _rope(meta: Metadata, values: dict[str, Any]) -> dict[str, Any]:
    base = 1_000_000.0 if meta.arch == "gemma3" else 10000.0
    rope: dict[str, Any] = {"rope_theta": meta.read(".rope.freq_base", float, base)}
    kind = meta.read(".rope.scaling.type", str, "none")
    factor = meta.read(".rope.scaling.factor", float, None)
    if factor is None:
        factor = meta.read(".rope.scale_linear", float, None)
        kind = "linear" if factor not in (None, 0.0, 1.0) else kind
    if kind != "none" and factor not in (None, 0.0):
        rope |= {"rope_type": kind, "factor": factor}
        original = meta.read(".rope.scaling.original_context_length", int, None)
        if original is not None:
            rope["original_max_position_embeddings"] = original
    rotary = meta.read(".rope.dimension_count", int, values["head_dim"])
    if rotary != values["head_dim"]:
        rope["partial_rotary_factor"] = rotary / values["head_dim"]
    if ROPE_FREQS in meta.reader.tensors:
        rope["freq_factors"] = _freq_factors(meta.reader)
    return {"rope_scaling": rope, "rope_theta": rope["rope_theta"]}


def _freq_factors(reader: GGUFReader) -> list[float]:
    """The divisors of the inverse frequencies that llama.cpp stores as a tensor."""
    info = reader.tensors[ROPE_FREQS]
    if info.qtype != GGMLType.F32 or len(info.shape) != 1:
        raise CheckpointError(f"{reader.path}: {ROPE_FREQS!r} must be an F32 vector.")
    factors = reader.data(ROPE_FREQS).view("<f4").ravel()
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise CheckpointError(f"{reader.path}: {ROPE_FREQS!r} holds values that are not positive.")
    return factors.tolist()


def _gemma3(meta: Metadata, values: dict[str, Any]) -> dict[str, Any]:
    scalar = values["head_dim"]
    if values["num_hidden_layers"] == GEMMA3_27B_LAYERS:  # the one size that scales otherwise
        scalar = values["hidden_size"] // values["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "rope_local_base_freq": meta.read(".rope.freq_base_swa", float, 10000.0),
        "sliding_window_pattern": meta.read(".attention.sliding_window_pattern", int, 6),
        "final_logit_softcapping": meta.read(".final_logit_softcapping", float, None),
    }

# SPDX-License-Identifier: Apache-2.0
"""A GGUF file as a float32 checkpoint that upstream and transformers load, by package `gguf`.

`python -m oracles.gguf_checkpoint FILE FOLDER`. Two things are undone on the way: `llama` files
have the rows of q and k permuted for rotation in pairs, `gemma3` files have one added to their
norms. Nothing of vllmx has a part in it, so that its own reader can be judged by the result.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file

TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}
NORMS = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "qwen2": {"ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
PLAIN = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
"""Architectures that their sizes tell all of."""
OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
GEMMA_PATTERN = 6
"""Every sixth layer of Gemma 3 sees all tokens."""


def config_of(reader: GGUFReader) -> dict[str, Any]:
    """config.json of the file; ValueError for an architecture that is not known here."""

    def read(key: str, default: Any = None) -> Any:
        found = reader.fields.get(key.replace("ARCH", arch))
        return default if found is None else found.contents()

    arch = "general"
    arch = read("general.architecture")
    if arch not in NORMS:
        raise ValueError(f"GGUF architecture {arch!r}: only {', '.join(NORMS)} are known here")
    names = {tensor.name for tensor in reader.tensors}
    hidden, heads = read("ARCH.embedding_length"), read("ARCH.attention.head_count")
    config = {
        "hidden_size": hidden,
        "intermediate_size": read("ARCH.feed_forward_length"),
        "num_hidden_layers": read("ARCH.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read("ARCH.attention.head_count_kv"),
        "head_dim": read("ARCH.attention.key_length", hidden // heads),
        "max_position_embeddings": read("ARCH.context_length"),
        "rms_norm_eps": read("ARCH.attention.layer_norm_rms_epsilon"),
        "vocab_size": next(
            int(t.shape[1]) for t in reader.tensors if t.name == "token_embd.weight"
        ),
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": read("tokenizer.ggml.bos_token_id"),
        "eos_token_id": read("tokenizer.ggml.eos_token_id"),
        "dtype": "float32",
    }
    theta = read("ARCH.rope.freq_base", 10000.0)
    if arch in PLAIN:
        return config | {
            "architectures": [PLAIN[arch]],
            "model_type": arch,
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        }
    return config | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["head_dim"],
        "sliding_window": read("ARCH.attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if (i + 1) % GEMMA_PATTERN else "full_attention"
            for i in range(config["num_hidden_layers"])
        ],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k, [heads * size, hidden], back from pairs to halves of a head."""
    out, hidden = rows.shape
    pairs = rows.reshape(heads, out // heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(out, hidden)


def save(path: Path, folder: Path) -> None:
    """Write the checkpoint of the GGUF file `path` into `folder`."""
    reader = GGUFReader(path)
    config = config_of(reader)
    arch = reader.fields["general.architecture"].contents()
    inner = TENSORS | NORMS[arch]
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    tensors: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name in OUTER:
            name = OUTER[tensor.name]
        else:
            _, layer, part, kind = tensor.name.split(".")
            name = f"model.layers.{layer}.{inner[part]}.{kind}"
            if arch == "llama" and part in heads:
                values = unpermute(values, heads[part])
        if arch == "gemma3" and "norm" in name:
            values = values - np.float32(1.0)
        tensors[name] = np.ascontiguousarray(values)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    save(args.file, args.folder)


if __name__ == "__main__":
    main()

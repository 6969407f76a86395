# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints with weights drawn from counter bits: the same bytes on every machine.

A folder in the layout of the model hub that vllmx, upstream and transformers all load: config.json,
model.safetensors and a tokenizer. Weights are larger than a trained model's, so that attention is
peaked and positions matter. numpy and safetensors only.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from vllmx.tiny.configs import SIZES, config_of
from vllmx.tiny.margins import SUFFIX, decided
from vllmx.tiny.sparse import TYPES as SPARSE_TYPES
from vllmx.tiny.sparse_configs import GENERATION_CONFIGS
from vllmx.tiny.tensors import shapes
from vllmx.tiny.tokenizer import tokenizer_files
from vllmx.tiny.twin import Twin
from vllmx.tiny.twins import TWINS

NUMBERS = {"beta": 0.5, "eps": -1e-6}
"""Numbers that a checkpoint holds beside its weights."""
DRAWS = {"tiny-gpt_oss": "tiny-gpt_oss again"}
"""What weights are keyed by where those of the first draw had scores of two experts so near each
other that CPUs with and without AVX-512 send tokens of the golden to different ones."""


def weight(name: str, tensor: str, shape: tuple[int, ...], less_one: bool) -> np.ndarray:
    """float32, near normal (a sum of twelve uniforms), from a counter keyed by both names.

    less_one: norms are stored less one, as Gemma's are.
    """
    drawn = f"{DRAWS.get(name, name)}/{tensor}"
    key = np.frombuffer(hashlib.sha256(drawn.encode()).digest()[:16], "<u8")
    count = int(np.prod(shape))
    words = np.random.Philox(key=key).random_raw(3 * count).astype("<u8").view("<u2")
    normal = (words.reshape(count, 12).sum(axis=1, dtype=np.int64) - 6 * 65535) / 65536.0
    if tensor.endswith("A_log"):
        normal = normal - 2.0  # memories of a few tokens, and of some dozens
    elif not shape:
        normal = np.full(1, NUMBERS[tensor.rpartition(".")[2]])
    elif tensor.endswith(".bias"):
        normal = normal * 0.1
    elif len(shape) == 1 or tensor.endswith("norm.weight"):
        stored = less_one and not tensor.endswith(("linear_attn.norm.weight", "dt_bias"))
        normal = normal * 0.1 + (0.0 if stored else 1.0)
    else:
        normal = normal * (2.0 / np.sqrt(shape[-1]))
    return normal.reshape(shape).astype(np.float32)


def as_bfloat16(x: np.ndarray) -> np.ndarray:
    """x rounded to what bfloat16 holds, ties to even, still float32."""
    bits = np.atleast_1d(x).view(np.uint32)
    even = (bits >> 16) & 1
    return ((bits + 0x7FFF + even) & np.uint32(0xFFFF0000)).view(np.float32).reshape(x.shape)


def save(name: str, folder: Path) -> None:
    """Write the checkpoint `name` into `folder`."""
    config = config_of(name)
    text = config.get("text_config", config)
    sparse = text["model_type"] in SPARSE_TYPES
    norms = ("gemma", "nemotron", "qwen3_")
    less_one = config["model_type"].startswith(norms) and not sparse
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    base = name.removesuffix(SUFFIX)
    if base in GENERATION_CONFIGS:
        said = json.dumps(GENERATION_CONFIGS[base], indent=2)
        (folder / "generation_config.json").write_text(said + "\n")
    tensors = {key: weight(name, key, shape, less_one) for key, shape in shapes(config).items()}
    # A provider that rounds weights to half precision must send tokens to the same experts, and a
    # model is judged by what it computes, not by what its weights lose.
    tensors = {key: as_bfloat16(tensor) for key, tensor in tensors.items()}
    if name.endswith(SUFFIX):
        tensors = decided(tensors, text, lambda key, shape: weight(name, key, shape, False))
        tensors = {key: as_bfloat16(tensor) for key, tensor in tensors.items()}
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    vocab_size = text.get("padded_vocab_size") or text["vocab_size"]
    for file, content in tokenizer_files(vocab_size).items():
        (folder / file).write_text(json.dumps(content, indent=1) + "\n")
    if base in TWINS:
        _save_twin(TWINS[base], folder / "twin", tensors, config)


def _save_twin(
    twin: Twin, folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]
) -> None:
    """The same weights in the layout of a family that transformers has a class for."""
    folder.mkdir(exist_ok=True)
    said = {**SIZES, **twin.config}
    (folder / "config.json").write_text(json.dumps(said, indent=2) + "\n")
    save_file(twin.tensors(tensors, config), str(folder / "model.safetensors"), {"format": "pt"})

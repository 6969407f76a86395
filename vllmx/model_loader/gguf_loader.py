# SPDX-License-Identifier: Apache-2.0
"""Iterates the weights of a GGUF file under the names and in the layout of the HF checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch

from vllmx.exceptions import CheckpointError
from vllmx.ir.ggml import GGMLType
from vllmx.ir.gguf_dequant import PLAIN_DTYPES, check_supported, dequantize
from vllmx.model_loader.gguf_config import ARCHITECTURES, ROPE_FREQS, Metadata
from vllmx.model_loader.gguf_reader import GGUFReader
from vllmx.models.hf_config import HFConfig

GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA3_NAMES = LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TENSOR = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


class GGUFTensor:
    """A quantised weight, its blocks as stored.

    shape: [out, in], torch's order. data: uint8 [out, bytes per row], mapped from the file.
    expand: the chosen provider of the op `dequantize_gguf`.
    """

    def __init__(
        self, name: str, qtype: GGMLType, shape: tuple[int, ...], data: torch.Tensor
    ) -> None:
        self.name = name
        self.qtype = qtype
        self.shape = shape
        self.data = data
        self.expand: Callable[..., torch.Tensor] = dequantize

    def dequantize(
        self, dtype: torch.dtype = torch.float32, rows: slice | torch.Tensor | None = None
    ) -> torch.Tensor:
        """Expand all rows, or those that `rows` selects, to [rows, in] of `dtype`."""
        data = self.data if rows is None else self.data[rows]
        values = self.expand(data, self.qtype, dtype)
        return values.view(self.shape) if rows is None else values

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return self.data.nbytes

    def to(self, device: str | torch.device) -> GGUFTensor:
        """A copy of the blocks in the memory of `device`, independent of the file."""
        copy = GGUFTensor(self.name, self.qtype, self.shape, self.data.to(device, copy=True))
        copy.expand = self.expand
        return copy

    def __repr__(self) -> str:
        return f"GGUFTensor({self.name!r}, {self.qtype.name}, {list(self.shape)})"


def hf_name(arch: str, name: str) -> str | None:
    """HF name of GGUF tensor `name` of architecture `arch`; None where it has none."""
    match = _TENSOR.fullmatch(name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    if layer is None:
        return f"{GLOBAL_NAMES[part]}.{kind}" if part in GLOBAL_NAMES else None
    names = GEMMA3_NAMES if arch == "gemma3" else LAYER_NAMES
    return f"model.layers.{layer}.{names[part]}.{kind}" if part in names else None


def iterate_gguf(
    reader: GGUFReader, hf_config: HFConfig
) -> Iterator[tuple[str, torch.Tensor | GGUFTensor]]:
    """Yield (HF name, weight) for every tensor of `reader`, in file order.

    F32, F16 and BF16 come as torch tensors mapped from the file, quantised types as GGUFTensor.
    What llama.cpp's converter changed is undone: rows of q and k in interleaved rope order
    (llama), norm weights with one added (gemma3). Raises CheckpointError for a tensor without a
    place in the architecture or of a type that cannot be expanded.
    """
    arch = Metadata(reader).arch
    for info in reader.tensors.values():
        if info.name == ROPE_FREQS:  # part of the config: rope_parameters["freq_factors"]
            continue
        name = hf_name(arch, info.name)
        if name is None:
            raise CheckpointError(
                f"{reader.path}: tensor {info.name!r} has no place in {ARCHITECTURES[arch][0]}."
            )
        check_supported(info.qtype, info.name)
        data = torch.from_numpy(reader.data(info.name))
        if arch == "llama" and ".self_attn." in name:
            data = _unpermute(data, name, info.shape, hf_config, reader)
        if info.qtype not in PLAIN_DTYPES:
            yield name, GGUFTensor(name, info.qtype, info.shape, data)
            continue
        weight = data.view(PLAIN_DTYPES[info.qtype]).view(info.shape)
        if arch == "gemma3" and name.endswith("norm.weight"):
            weight = weight.to(torch.float32) - 1
        yield name, weight


def _unpermute(
    data: torch.Tensor,
    name: str,
    shape: tuple[int, ...],
    hf_config: HFConfig,
    reader: GGUFReader,
) -> torch.Tensor:
    """Put the rows of a q or k projection back into HF's order: halves, not pairs, per head."""
    if ".q_proj." in name:
        heads = hf_config.num_attention_heads
    elif ".k_proj." in name:
        heads = hf_config.num_key_value_heads
    else:
        return data
    rows = shape[0]
    if rows % (2 * heads):
        raise CheckpointError(
            f"{reader.path}: {name} has {rows} outputs, which {heads} heads cannot share."
        )
    order = torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)
    if len(shape) == 1:  # a bias is stored as one row of bytes
        return data.view(rows, -1)[order].view(1, -1)
    return data[order]

# SPDX-License-Identifier: Apache-2.0
"""A model of recurrent and attention layers whose answers anybody can work out in whole numbers.

Every token it says depends on all tokens before it through each layer's state, so a state that is
stale, missing, shared or half copied shows as another token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import build_engine
from torch import Tensor, nn

from vllmx import LLM
from vllmx.forward_context import get_forward_context
from vllmx.layers.attention import Attention
from vllmx.layers.mamba_base import MambaBase
from vllmx.models.utils import LLAMA_MAPPER

VOCAB = 200
MODULUS = 1009
"""States are whole numbers below it, which float16 holds too."""
WIDTH = 19
"""A state is held WIDTH * WIDTH times, so that a part of it that is wrong shows."""
HEAD = 32


class Recurrence(MambaBase):
    """s <- (5 s + x[t] + 3 x[t-1] + 7 x[t-2]) mod MODULUS, and says s."""

    graphs = True

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return ((1, 2), (1, WIDTH, WIDTH))

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.float16, torch.float32)

    @property
    def mamba_type(self) -> str:
        return "gdn_attention"

    @property
    def supports_cudagraph(self) -> bool:
        return self.graphs

    def forward(self, x: Tensor) -> Tensor:
        """x: float32 [T] -> float32 [T]."""
        metadata = get_forward_context().attn_metadata[self.layer_name]
        conv, state = self.kv_cache
        blocks = metadata.state_indices
        if metadata.fresh_decode_indices is not None:
            conv[metadata.fresh_decode_indices] = 0
            state[metadata.fresh_decode_indices] = 0
        out = torch.empty_like(x)
        decodes = metadata.num_decodes
        if decodes:
            out[:decodes] = self._step(blocks[:decodes], x[:decodes])
        for i in range(decodes, decodes + metadata.num_prefills):
            block = blocks[i : i + 1]
            if not metadata.has_initial_state[i]:
                conv[block] = 0
                state[block] = 0
            first, end = metadata.query_start_loc[i : i + 2].tolist()
            for t in range(first, end):
                out[t] = self._step(block, x[t : t + 1])
        return out

    def _step(self, blocks: Tensor, x: Tensor) -> Tensor:
        conv, state = self.kv_cache
        before = conv.index_select(0, blocks).float()
        old = state.index_select(0, blocks)
        new = x + 3 * before[:, 0, 1] + 7 * before[:, 0, 0]
        new = (5 * old + new[:, None, None, None]) % MODULUS
        state.index_copy_(0, blocks.long(), new)
        latest = torch.stack((before[:, 0, 1], x), dim=1)[:, None]
        conv.index_copy_(0, blocks.long(), latest.to(conv.dtype))
        first, last = new[:, 0, 0, 0], new[:, 0, -1, -1]
        return torch.where(first == last, first, first + 1)


class Total(nn.Module):
    """The sum of all values so far, mod MODULUS, by attention that looks at all alike."""

    def __init__(self, *, vllm_config: Any, ops: Any, prefix: str) -> None:
        super().__init__()
        self.attn = Attention(1, HEAD, 1.0, 1, vllm_config=vllm_config, ops=ops, prefix=prefix)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        value = x[:, None].expand(-1, HEAD).contiguous()
        nothing = torch.zeros_like(value)
        mean = self.attn(nothing, nothing.clone(), value)
        return (mean[:, 0] * (positions + 1)).round() % MODULUS


class HybridForCausalLM(nn.Module):
    """`pattern` of the config: S is a Recurrence, A a Total."""

    hf_to_vllm_mapper = LLAMA_MAPPER

    def __init__(self, *, vllm_config: Any, ops: Any, prefix: str = "") -> None:
        super().__init__()
        pattern = vllm_config.model_config.hf_text_config.read("pattern", str)
        self.layers = nn.ModuleList(
            Recurrence(f"layers.{i}")
            if kind == "S"
            else Total(vllm_config=vllm_config, ops=ops, prefix=f"layers.{i}")
            for i, kind in enumerate(pattern)
        )

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = input_ids.float()
        for layer in self.layers:
            x = layer(x) if isinstance(layer, Recurrence) else layer(x, positions)
        return x[:, None]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        token = 3 + hidden_states % (VOCAB - 3)
        return -(torch.arange(VOCAB, device=token.device) - token).abs()

    def load_weights(self, weights: Any) -> None:
        """It has none."""


def expected(pattern: str, prompt: list[int], count: int) -> list[int]:
    """The answer of `count` tokens to `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        values = tokens
        for kind in pattern:
            values = _recurrence(values) if kind == "S" else _totals(values)
        tokens.append(3 + values[-1] % (VOCAB - 3))
    return tokens[len(prompt) :]


def _recurrence(values: list[int]) -> list[int]:
    out, state, one, two = [], 0, 0, 0
    for x in values:
        state = (5 * state + x + 3 * one + 7 * two) % MODULUS
        one, two = x, one
        out.append(state)
    return out


def _totals(values: list[int]) -> list[int]:
    out, total = [], 0
    for x in values:
        total += x
        out.append(total % MODULUS)
    return out


@contextmanager
def registered() -> Iterator[None]:
    """Let checkpoints of this model be loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllmx.model_loader.loader.get_model_cls", lambda config: HybridForCausalLM)
        yield


def save_hybrid(folder: Path, pattern: str) -> Path:
    """A checkpoint of the model in `folder`; it has no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "pattern": pattern,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def hybrid_engine(folder: Path, **settings: Any) -> LLM:
    """An engine of the model; blocks of attention have to grow to hold a state."""
    settings.setdefault("block_size", 4)
    settings.setdefault("num_gpu_blocks_override", 200)
    return build_engine(folder, load_format="dummy", **settings)

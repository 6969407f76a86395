# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/opt.py @ v0.25.0
"""OPT: learned positions from the third row on, an embedding that may be narrower."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vllmx.config import VllmConfig
from vllmx.exceptions import CheckpointError
from vllmx.ir.select import OpTable
from vllmx.layers.layernorm import LayerNorm
from vllmx.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllmx.models.dense import LayerNormDecoderLayer
from vllmx.models.gpt2 import GPT2Attention
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaForCausalLM, LlamaModel
from vllmx.models.utils import PLAIN_STACKED, WeightsMapper, headless_starts

FIRST_POSITION = 2
"""Rows of the table of positions that are nobody's."""


class OPTDecoderLayer(LayerNormDecoderLayer):
    """Llama's order; what no model but the smallest has is refused."""

    attention_cls = GPT2Attention

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        wanted = {
            "do_layer_norm_before": True,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "_remove_final_layer_norm": False,
        }
        for key, value in wanted.items():
            if config.read(key, bool, value) is not value:
                raise CheckpointError(f"{config.origin}: {key}={not value} is not supported.")
        if config.read("word_embed_proj_dim", int, config.hidden_size) != config.hidden_size:
            raise CheckpointError(
                f"{config.origin}: word_embed_proj_dim must be {config.hidden_size}."
            )
        super().__init__(config, **shared)

    @staticmethod
    def make_norm(config: HFConfig, ops: OpTable) -> Any:
        """With an epsilon that the config does not say."""
        return LayerNorm(config.hidden_size, 1e-5, ops)


class OPTModel(LlamaModel):
    """Embeddings of tokens and places, layers, final norm."""

    layer_cls = OPTDecoderLayer

    def __init__(self, *, vllm_config: VllmConfig, ops: OpTable, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, ops=ops, prefix=prefix)
        rows = self.config.max_position_embeddings + FIRST_POSITION
        self.embed_positions = VocabParallelEmbedding(rows, self.config.hidden_size, ops)

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """The sum of both."""
        return self.embed_tokens(input_ids) + self.embed_positions(positions + FIRST_POSITION)


class OPTForCausalLM(LlamaForCausalLM):
    """OPT with its (tied) output head."""

    hf_to_vllm_mapper = WeightsMapper(
        stacked=PLAIN_STACKED,
        starts=headless_starts("model.", "decoder."),
        renamed={
            "model.decoder.final_layer_norm.": "model.norm.",
            "model.decoder.": "model.",
            ".self_attn_layer_norm.": ".input_layernorm.",
            ".final_layer_norm.": ".post_attention_layernorm.",
            ".self_attn.out_proj.": ".self_attn.o_proj.",
            ".fc1.": ".mlp.up_proj.",
            ".fc2.": ".mlp.down_proj.",
        },
    )
    model_cls = OPTModel

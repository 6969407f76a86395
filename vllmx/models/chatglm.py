# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/chatglm.py @ v0.25.0
"""ChatGLM: GLM's attention, rotated in pairs over half a head, under names of its own."""

from __future__ import annotations

from typing import Any

from vllmx.exceptions import CheckpointError
from vllmx.ir.select import OpTable
from vllmx.layers.rotary_embedding import RotaryEmbedding
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel
from vllmx.models.utils import WeightsMapper

SERVED = {
    "apply_residual_connection_post_layernorm": False,
    "fp32_residual_connection": False,
    "multi_query_attention": True,
    "post_layer_norm": True,
    "rmsnorm": True,
}


class ChatGLMAttention(LlamaAttention):
    """Llama's, half of each head rotated."""

    def biases(self, config: HFConfig) -> tuple[bool, bool]:
        """Of queries, keys and values by add_qkv_bias, of all by add_bias_linear."""
        every = config.read("add_bias_linear", bool, False)
        return every or config.read("add_qkv_bias", bool, False), every

    def rope_of(
        self, config: HFConfig, layer: int, max_model_len: int | None, ops: OpTable
    ) -> RotaryEmbedding | None:
        """In pairs unless original_rope is false."""
        self.is_neox_style = not config.read("original_rope", bool, True)
        return super().rope_of(config, layer, max_model_len, ops)

    def rope_parameters_of(self, config: HFConfig, layer: int) -> dict[str, Any]:
        """Half of each head; the base is a multiple of 10000."""
        if (told := config.rope_parameters["rope_type"]) != "default":
            raise CheckpointError(
                f"{config.origin}: rope_type {told!r} is not supported in ChatGLM, which scales by "
                "rope_ratio."
            )
        return {
            "rope_type": "default",
            "rope_theta": 10000.0 * config.read("rope_ratio", float, 1.0),
            "partial_rotary_factor": 0.5,
        }


class ChatGLMDecoderLayer(LlamaDecoderLayer):
    """Llama's layer; what other models of the family have is refused."""

    attention_cls = ChatGLMAttention

    def __init__(self, config: HFConfig, **shared: object) -> None:
        for key, served in SERVED.items():
            if config.read(key, bool, served) is not served:
                raise CheckpointError(f"{config.origin}: {key}={not served} is not supported.")
        super().__init__(config, **shared)  # type: ignore[arg-type]


class _Model(LlamaModel):
    layer_cls = ChatGLMDecoderLayer


class ChatGLMForConditionalGeneration(LlamaForCausalLM):
    """ChatGLM with its output head."""

    hf_to_vllm_mapper = WeightsMapper(
        renamed={
            "transformer.embedding.word_embeddings.": "model.embed_tokens.",
            "transformer.encoder.final_layernorm.": "model.norm.",
            "transformer.encoder.layers.": "model.layers.",
            "transformer.output_layer.": "lm_head.",
            ".self_attention.query_key_value.": ".self_attn.qkv_proj.",
            ".self_attention.dense.": ".self_attn.o_proj.",
            ".dense_h_to_4h.": ".gate_up_proj.",
            ".dense_4h_to_h.": ".down_proj.",
        },
    )
    model_cls = _Model


class ChatGLMModel(ChatGLMForConditionalGeneration):
    """The name that most checkpoints have."""

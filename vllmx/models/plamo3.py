# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/plamo3.py @ v0.25.0
"""PLaMo 3: norms on both sides, stored less what each begins with; a rotation for each kind of
layer."""

from __future__ import annotations

from typing import Any

from vllmx.ir.select import OpTable
from vllmx.layers.layernorm import RMSNorm
from vllmx.models.dense import SandwichDecoderLayer
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaForCausalLM, LlamaModel
from vllmx.models.qwen3 import Qwen3Attention
from vllmx.models.utils import LLAMA_MAPPER, WeightsMapper

AFTER_ATTENTION = 1.0 / 5
AFTER_MLP = 1.0 / 5**1.5


class Plamo3Norm(RMSNorm):
    """RMSNorm whose factor is the weight and `offset`."""

    def __init__(self, hidden_size: int, eps: float, ops: OpTable, offset: float = 1.0) -> None:
        super().__init__(hidden_size, eps, ops)
        self.offset = offset

    def finish_loading(self) -> None:
        """Keep the sum, in the activation dtype."""
        self.set_weight((self.take_float("weight") + self.offset).to(self.ops.dtype))


class Plamo3Attention(Qwen3Attention):
    """Normed queries and keys."""

    @staticmethod
    def head_norm(config: HFConfig, ops: OpTable) -> RMSNorm:
        """Its weight is stored less one."""
        return Plamo3Norm(config.head_dim, config.rms_norm_eps, ops)


class Plamo3DecoderLayer(SandwichDecoderLayer):
    """Attention and MLP, each normed before and after."""

    attention_cls = Plamo3Attention

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        super().__init__(config, **shared)
        sizes = (config.hidden_size, config.rms_norm_eps, shared["ops"])
        self.post_attention_layernorm = Plamo3Norm(*sizes, AFTER_ATTENTION)
        self.post_feedforward_layernorm = Plamo3Norm(*sizes, AFTER_MLP)

    @staticmethod
    def make_norm(config: HFConfig, ops: OpTable) -> Any:
        """Its weight is stored less one."""
        return Plamo3Norm(config.hidden_size, config.rms_norm_eps, ops)


class Plamo3Model(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = Plamo3DecoderLayer


class Plamo3ForCausalLM(LlamaForCausalLM):
    """PLaMo 3 with its output head."""

    hf_to_vllm_mapper = WeightsMapper(
        LLAMA_MAPPER.stacked,
        renamed={
            "model.layers.layers.": "model.layers.",
            ".mixer.": ".self_attn.",
            ".pre_mixer_norm.": ".input_layernorm.",
            ".post_mixer_norm.": ".post_attention_layernorm.",
            ".pre_mlp_norm.": ".pre_feedforward_layernorm.",
            ".post_mlp_norm.": ".post_feedforward_layernorm.",
        },
    )
    model_cls = Plamo3Model

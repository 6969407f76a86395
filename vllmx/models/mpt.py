# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/mpt.py @ v0.25.0
"""MPT: slopes of the scores instead of positions, norms without bias, and no bias elsewhere."""

from __future__ import annotations

from typing import Any

from vllmx.exceptions import CheckpointError
from vllmx.ir.select import OpTable
from vllmx.layers.alibi import alibi_slopes
from vllmx.layers.layernorm import LayerNorm
from vllmx.layers.rotary_embedding import RotaryEmbedding
from vllmx.models.dense import LayerNormDecoderLayer
from vllmx.models.falcon import FalconMLP
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaForCausalLM, LlamaModel
from vllmx.models.olmo import OlmoAttention
from vllmx.models.utils import PLAIN_STACKED, WeightsMapper

SERVED: dict[str, Any] = {
    "embedding_fraction": 1.0,
    "expansion_ratio": 4,
    "logit_scale": None,
    "no_bias": True,
    "norm_type": "low_precision_layernorm",
}
IN_ATTENTION: dict[str, Any] = {
    "alibi": True,
    "attn_type": "multihead_attention",
    "prefix_lm": False,
    "qk_ln": False,
    "softmax_scale": None,
}
"""The same of the config's attn_config. Where a key is left out, this is what it means."""


def refuse_others(config: HFConfig) -> None:
    """CheckpointError, with the key and its value, where the config wants what isn't served."""
    attention = config.read("attn_config", (dict, type(None)), None) or {}
    for name, told, served in (
        ("", config.to_dict(), SERVED),
        ("attn_config.", attention, IN_ATTENTION),
    ):
        for key, value in served.items():
            if (found := told.get(key, value)) != value:
                raise CheckpointError(
                    f"{config.origin}: {name}{key} is {found!r}; {value!r} is served only."
                )


class MptAttention(OlmoAttention):
    """Clipped queries, keys and values; the further a key, the lower its score."""

    def reach_of(self, config: HFConfig, layer: int) -> dict[str, Any]:
        """All before a token, by their distance."""
        largest = config.read("alibi_bias_max", float)
        return {"alibi_slopes": alibi_slopes(config.num_attention_heads, largest)}

    def rope_of(
        self, config: HFConfig, layer: int, max_model_len: int | None, ops: OpTable
    ) -> RotaryEmbedding | None:
        """None: there are no positions."""
        return None


class MptBlock(LayerNormDecoderLayer):
    """Llama's order."""

    attention_cls = MptAttention
    mlp_cls = FalconMLP

    @staticmethod
    def make_norm(config: HFConfig, ops: OpTable) -> Any:
        """By mean and variance, with a weight; upstream's epsilon, whatever the config says."""
        return LayerNorm(config.hidden_size, 1e-5, ops, has_bias=False)


class MptModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = MptBlock


class MptForCausalLM(LlamaForCausalLM):
    """MPT with its (tied) output head."""

    hf_to_vllm_mapper = WeightsMapper(
        stacked=PLAIN_STACKED,
        renamed={
            "transformer.wte.": "model.embed_tokens.",
            "transformer.norm_f.": "model.norm.",
            "transformer.blocks.": "model.layers.",
            ".norm_1.": ".input_layernorm.",
            ".norm_2.": ".post_attention_layernorm.",
            ".attn.Wqkv.": ".self_attn.qkv_proj.",
            ".attn.out_proj.": ".self_attn.o_proj.",
            ".ffn.": ".mlp.",
        },
    )
    model_cls = MptModel

    def __init__(self, **shared: Any) -> None:
        refuse_others(shared["vllm_config"].model_config.hf_text_config)
        super().__init__(**shared)


class MPTForCausalLM(MptForCausalLM):
    """The name that the first checkpoints have."""

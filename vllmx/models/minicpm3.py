# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/minicpm3.py @ v0.25.0
"""MiniCPM 3: MiniCPM with keys and values that come of latents."""

from __future__ import annotations

from vllmx.models.latent import LATENT_MAPPER, LatentAttention
from vllmx.models.minicpm import MiniCPMDecoderLayer, MiniCPMForCausalLM, MiniCPMModel


class MiniCPM3Attention(LatentAttention):
    """Halves of the rotated part are turned, not neighbours."""

    is_neox_style = True


class MiniCPM3DecoderLayer(MiniCPMDecoderLayer):
    """MiniCPM's layer around attention of its own."""

    attention_cls = MiniCPM3Attention  # type: ignore[assignment]


class MiniCPM3Model(MiniCPMModel):
    """Multiplied embedding, layers, final norm."""

    layer_cls = MiniCPM3DecoderLayer


class MiniCPM3ForCausalLM(MiniCPMForCausalLM):
    """MiniCPM 3 with its output head."""

    hf_to_vllm_mapper = LATENT_MAPPER
    model_cls = MiniCPM3Model

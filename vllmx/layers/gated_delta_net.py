# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py @ v0.25.0
"""Gated delta net: attention whose memory is one matrix a head, however long the context.

Shapes: T tokens of the whole batch, H hidden size, HV value heads, C channels of the convolution
(queries, keys and values of all heads).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vllmx.attention.backends.gdn_attn import GDNAttentionMetadata
from vllmx.config import VllmConfig
from vllmx.exceptions import CheckpointError
from vllmx.forward_context import get_forward_context
from vllmx.ir.ops.gated_delta_rule import prefills_in_chunks
from vllmx.ir.select import OpTable
from vllmx.layers.layernorm import RMSNormGated
from vllmx.layers.linear import LinearBase, MergedColumnParallelLinear, RowParallelLinear
from vllmx.layers.mamba_base import MambaBase
from vllmx.layers.parameter import WeightHolder
from vllmx.models.hf_config import HFConfig

OUTPUT_GATES = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}


class InterleavedLinear(LinearBase):
    """One matrix of a checkpoint whose rows lie group by group: [group][part][row of the part].

    They are stacked part by part, so that the layer's output splits into parts. `part_sizes` are
    the rows of each part over all groups.
    """

    def __init__(
        self,
        input_size: int,
        part_sizes: list[int],
        groups: int,
        *,
        vllm_config: VllmConfig,
        ops: OpTable,
        prefix: str,
    ) -> None:
        super().__init__(input_size, {None: sum(part_sizes)}, False, vllm_config, ops, prefix)
        self.part_sizes = part_sizes
        self.groups = groups

    def finish_loading(self) -> None:
        """Put the rows in order, then pack them."""
        assert self.loaded is not None
        weight = self.loaded[("weight", None)]
        if not isinstance(weight, Tensor):
            raise CheckpointError(
                f"weight {self.prefix}.weight: its rows must be reordered, which a quantised "
                "tensor does not allow; use a checkpoint in float."
            )
        by_group = weight.unflatten(0, (self.groups, -1))
        parts = by_group.split([size // self.groups for size in self.part_sizes], dim=1)
        self.loaded[("weight", None)] = torch.cat([part.flatten(0, 1) for part in parts])
        super().finish_loading()


class ShortConvolution(WeightHolder, nn.Module):
    """The weights of a causal convolution of each channel by itself, [C, 1, width]."""

    def __init__(self, channels: int, width: int, ops: OpTable) -> None:
        super().__init__()
        self.shape = (channels, 1, width)
        self.ops = ops
        self.weight: Tensor

    def expected_weights(self) -> dict[tuple[str, str | None], tuple[int, ...]]:
        """The one weight."""
        return {("weight", None): self.shape}

    def finish_loading(self) -> None:
        """Keep it as [C, width] in the activation dtype."""
        weight = self.take_float("weight").squeeze(1)
        self.weight = weight.to(self.ops.device, self.ops.dtype)


class QwenGatedDeltaNetAttention(WeightHolder, MambaBase):
    """The gated delta net of Qwen3-Next and Qwen3.5.

    gqa_interleaved_layout: the input projections of the checkpoint are one matrix each, rows by
    key head (Qwen3-Next), not one matrix a part (Qwen3.5).
    """

    def __init__(
        self,
        config: HFConfig,
        *,
        vllm_config: VllmConfig,
        ops: OpTable,
        prefix: str,
        gqa_interleaved_layout: bool = False,
    ) -> None:
        super().__init__(prefix)
        self.ops = ops
        self.num_k_heads = config.read("linear_num_key_heads", int)
        self.num_v_heads = config.read("linear_num_value_heads", int)
        self.head_k_dim = config.read("linear_key_head_dim", int)
        self.head_v_dim = config.read("linear_value_head_dim", int)
        self.conv_kernel_size = config.read("linear_conv_kernel_dim", int)
        self._check(config)
        self.key_dim = self.num_k_heads * self.head_k_dim
        self.value_dim = self.num_v_heads * self.head_v_dim
        self.conv_dim = 2 * self.key_dim + self.value_dim
        shared: dict[str, Any] = {"vllm_config": vllm_config, "ops": ops}
        self._make_projections(config.hidden_size, gqa_interleaved_layout, shared)
        self.conv1d = ShortConvolution(self.conv_dim, self.conv_kernel_size, ops)
        gate = config.read("output_gate_type", str, "silu")
        self.norm = RMSNormGated(self.head_v_dim, config.rms_norm_eps, ops, OUTPUT_GATES[gate])
        self.out_proj = RowParallelLinear(
            self.value_dim, config.hidden_size, prefix=f"{prefix}.out_proj", **shared
        )
        self._state_dtypes = _state_dtypes(config, vllm_config, ops.dtype)
        self._bind_ops()

    def _check(self, config: HFConfig) -> None:
        if self.num_k_heads < 1 or self.num_v_heads % self.num_k_heads:
            raise CheckpointError(
                f"{config.origin}: {self.num_v_heads} linear value heads cannot share "
                f"{self.num_k_heads} key heads."
            )
        if config.hidden_act not in ("silu", "swish"):
            raise CheckpointError(
                f"{config.origin}: hidden_act is {config.hidden_act!r}; the convolution of a "
                "gated delta net is served with silu only."
            )
        gate = config.read("output_gate_type", str, "silu")
        if gate not in OUTPUT_GATES:
            raise CheckpointError(
                f"{config.origin}: output_gate_type is {gate!r}; {', '.join(OUTPUT_GATES)} are "
                "supported."
            )

    def _make_projections(self, hidden: int, interleaved: bool, shared: dict[str, Any]) -> None:
        qkvz = [self.key_dim, self.key_dim, self.value_dim, self.value_dim]
        ba = [self.num_v_heads, self.num_v_heads]
        names = {"qkvz": f"{self.layer_name}.in_proj_qkvz", "ba": f"{self.layer_name}.in_proj_ba"}
        self.in_proj_qkvz: LinearBase
        self.in_proj_ba: LinearBase
        if interleaved:
            groups = self.num_k_heads
            self.in_proj_qkvz = InterleavedLinear(
                hidden, qkvz, groups, prefix=names["qkvz"], **shared
            )
            self.in_proj_ba = InterleavedLinear(hidden, ba, groups, prefix=names["ba"], **shared)
            return
        parts = [self.conv_dim, self.value_dim]
        self.in_proj_qkvz = MergedColumnParallelLinear(
            hidden, parts, prefix=names["qkvz"], **shared
        )
        self.in_proj_ba = MergedColumnParallelLinear(hidden, ba, prefix=names["ba"], **shared)

    def _bind_ops(self) -> None:
        bind = self.ops.bind
        self._conv = bind("causal_conv1d_fn")
        self._conv_update = bind("causal_conv1d_update")
        sizes = {"head_k_dim": self.head_k_dim, "head_v_dim": self.head_v_dim}
        self._prep = bind("fused_post_conv_prep", **sizes)
        chunked = prefills_in_chunks(self.ops.dtype)
        rule = "chunk_gated_delta_rule" if chunked else "recurrent_gated_delta_rule"
        self._prefill = bind(rule, **sizes)
        self._decode = bind("fused_recurrent_gated_delta_rule_packed_decode", **sizes)

    def expected_weights(self) -> dict[tuple[str, str | None], tuple[int, ...]]:
        """A_log and dt_bias, [HV] each; the rest belongs to layers below."""
        return {("A_log", None): (self.num_v_heads,), ("dt_bias", None): (self.num_v_heads,)}

    def finish_loading(self) -> None:
        """A_log stays in float32, dt_bias takes the activation dtype."""
        self.A_log = self.take_float("A_log").to(self.ops.device)
        self.dt_bias = self.take_float("dt_bias").to(self.ops.device, self.ops.dtype)

    @property
    def mamba_type(self) -> str:
        """Upstream's name."""
        return "gdn_attention"

    @property
    def supports_cudagraph(self) -> bool:
        """A batch of decodes takes nothing from the host, and its ops leave state 0 alone."""
        return True

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """The last inputs of the convolution, and the heads' matrices."""
        return (
            (self.conv_dim, self.conv_kernel_size - 1),
            (self.num_v_heads, self.head_v_dim, self.head_k_dim),
        )

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """cache.mamba_cache_dtype and cache.mamba_ssm_cache_dtype; auto: as the model says."""
        return self._state_dtypes

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states: [T, H] -> [T, H]; reads and writes the states of the batch's requests."""
        mixed_qkv, z = self.in_proj_qkvz(hidden_states).split(
            (self.conv_dim, self.value_dim), dim=-1
        )
        b, a = self.in_proj_ba(hidden_states).chunk(2, dim=-1)
        metadata = get_forward_context().attn_metadata[self.layer_name]
        out = self._core(mixed_qkv, a, b, metadata)
        out = self.norm(out, z.unflatten(-1, (-1, self.head_v_dim)))
        return self.out_proj(out.flatten(-2))

    def _core(
        self, mixed_qkv: Tensor, a: Tensor, b: Tensor, metadata: GDNAttentionMetadata
    ) -> Tensor:
        """Convolution and rule: mixed_qkv [T, C], a, b [T, HV] -> [T, HV, head_v_dim]."""
        if metadata.fresh_decode_indices is not None:
            blocks = metadata.fresh_decode_indices.long()
            for state in self.kv_cache:
                state[blocks] = 0
        decodes = metadata.num_decode_tokens
        if not metadata.num_prefills:
            return self._decode_tokens(mixed_qkv, a, b, metadata.state_indices)
        prefilled = self._prefill_tokens(mixed_qkv[decodes:], a[decodes:], b[decodes:], metadata)
        if not decodes:
            return prefilled
        indices = metadata.state_indices[: metadata.num_decodes]
        decoded = self._decode_tokens(mixed_qkv[:decodes], a[:decodes], b[:decodes], indices)
        return torch.cat((decoded, prefilled))

    def _decode_tokens(self, mixed_qkv: Tensor, a: Tensor, b: Tensor, indices: Tensor) -> Tensor:
        conv_state, ssm_state = self.kv_cache
        mixed_qkv = self._conv_update(mixed_qkv, conv_state, self.conv1d.weight, None, indices)
        scale = self.head_k_dim**-0.5
        return self._decode(mixed_qkv, a, b, self.A_log, self.dt_bias, scale, ssm_state, indices)

    def _prefill_tokens(
        self, mixed_qkv: Tensor, a: Tensor, b: Tensor, metadata: GDNAttentionMetadata
    ) -> Tensor:
        conv_state, ssm_state = self.kv_cache
        starts = metadata.prefill_query_start_loc
        indices = metadata.state_indices[metadata.num_decodes :]
        known = metadata.has_initial_state[metadata.num_decodes :]
        mixed_qkv = self._conv(
            mixed_qkv, self.conv1d.weight, None, conv_state, starts, indices, known
        )
        sizes = (self.num_k_heads, self.head_k_dim, self.head_v_dim)
        prepared = self._prep(mixed_qkv, a, b, self.A_log, self.dt_bias, *sizes)
        scale = self.head_k_dim**-0.5
        return self._prefill(*prepared, ssm_state, indices, known, starts, scale)


def _state_dtypes(
    config: HFConfig, vllm_config: VllmConfig, dtype: torch.dtype
) -> tuple[torch.dtype, torch.dtype]:
    cache = vllm_config.cache_config
    conv = dtype if cache.mamba_cache_dtype == "auto" else getattr(torch, cache.mamba_cache_dtype)
    wanted = cache.mamba_ssm_cache_dtype
    if wanted == "auto":
        wanted = config.read("mamba_ssm_dtype", str, "float32")
    if wanted not in ("float32", "float16", "bfloat16"):
        raise CheckpointError(
            f"{config.origin}: mamba_ssm_dtype is {wanted!r}; float32, float16 and bfloat16 are "
            "supported."
        )
    return conv, getattr(torch, wanted)

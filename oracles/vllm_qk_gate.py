# SPDX-License-Identifier: Apache-2.0
"""Lanes of `vllm_gdn`: norm, rotation and gate of Qwen3-Next's attention, by the kernel that it has
for a GPU and by the layers that it calls one after another elsewhere.

Registers with the oracle of oracles/vllm_gdn.py, in whose process such kernels can be interpreted.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from oracles import triton_interpreter, vllm_gdn, vllm_ops
from oracles.op_job import Tensors
from oracles.vllm_gdn import ORACLE

MODEL = "vllm.model_executor.models.qwen3_next"
LAYERS = "vllm.model_executor.layers"
WHOLE = f"{MODEL}.Qwen3NextAttention._project_qkv_gate"
KERNEL = f"{LAYERS}.fused_qk_norm_rope.fused_qk_rmsnorm_rope_gate"


def _project(
    fused: bool, q_gate: Tensor, k: Tensor, positions: Tensor, head_dim: int, **parts: Any
) -> Tensors:
    """What the model's own code makes of a projection; it has values too, which it leaves alone."""
    told = SimpleNamespace(
        use_fused_qk_norm_rope_gate=fused,
        attn_output_gate=True,
        q_size=q_gate.shape[1] // 2,
        kv_size=k.shape[1],
        num_heads=q_gate.shape[1] // (2 * head_dim),
        num_kv_heads=k.shape[1] // head_dim,
        head_dim=head_dim,
        **parts,
    )
    project = vllm_gdn._module(MODEL).Qwen3NextAttention._project_qkv_gate
    q, k, _, gate = project(told, torch.cat((q_gate, k, k), dim=1), positions)
    return {"q": q, "k": k, "gate": gate}


def _kernel(
    q_weight: Tensor, k_weight: Tensor, cos_sin_cache: Tensor, epsilon: float, **args: Tensor
) -> Tensors:
    """With the kernel of a GPU, to which the model adds 1 to the weights that it keeps."""
    norms = [
        SimpleNamespace(weight=weight - 1.0, variance_epsilon=epsilon)
        for weight in (q_weight, k_weight)
    ]
    rotation = SimpleNamespace(cos_sin_cache=cos_sin_cache, rotary_dim=cos_sin_cache.shape[1])
    parts = {"q_norm": norms[0], "k_norm": norms[1], "rotary_emb": rotation}
    vllm_gdn._module(MODEL)
    with triton_interpreter.rounding():
        return _project(True, head_dim=len(q_weight), **parts, **args)


def _layers(
    q_weight: Tensor, k_weight: Tensor, cos_sin_cache: Tensor, epsilon: float, **args: Tensor
) -> Tensors:
    """Without it."""
    vllm_gdn._module(MODEL)
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm

    head_dim = len(q_weight)

    def norm(weight: Tensor) -> Any:
        kept = SimpleNamespace(weight=weight - 1.0, variance_epsilon=epsilon)
        return lambda heads: GemmaRMSNorm.forward_native(kept, heads)

    def rotate(positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        turned = vllm_ops.rotary_embedding(positions, q, k, head_dim, cos_sin_cache, True)
        return turned["query"], turned["key"]

    parts = {"q_norm": norm(q_weight), "k_norm": norm(k_weight), "rotary_emb": rotate}
    return _project(False, head_dim=head_dim, **parts, **args)


@ORACLE.lane(
    "fused_qk_rmsnorm_rope_gate",
    "upstream-by-dtype",
    f"bf16, f16: {KERNEL}; f32: {WHOLE} without it",
)
def fused_qk_rmsnorm_rope_gate(q_gate: Tensor, **args: Any) -> Tensors:
    """The kernel rounds what it norms to a half, whatever it is given."""
    compute = _layers if q_gate.dtype == torch.float32 else _kernel
    return compute(q_gate=q_gate, **args)


@ORACLE.lane("fused_qk_rmsnorm_rope_gate", "layer-native", f"{WHOLE} without the kernel")
def fused_qk_rmsnorm_rope_gate_layers(**args: Any) -> Tensors:
    """The layers in every dtype."""
    return _layers(**args)

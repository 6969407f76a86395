# SPDX-License-Identifier: Apache-2.0
"""Oracle: upstream's CUDA kernels, on a GPU.

`python -m oracles.vllm_gpu_ops JOB OUT`; oracles/op_job.py says what JOB and OUT are. The first
lane of an op is the kernel that upstream runs on a GPU; the second is its definition in torch on
the same device, whose distance from the first says how much upstream disagrees with itself there.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from oracles import vllm_ops, vllm_pin
from oracles.op_job import Oracle, Tensors, main


def available() -> Literal[True] | str:
    """True where upstream's CUDA build is installed and there is a GPU, else the reason."""
    found = vllm_pin.available()
    if found is not True:
        return found
    if not torch.cuda.is_available():
        return "there is no GPU that torch can see"
    return True


class GpuOracle(Oracle):
    """An oracle whose facts name the GPU."""

    def describe(self) -> dict[str, Any]:
        """What computed, for the golden."""
        major, minor = torch.cuda.get_device_capability()
        device = f"{torch.cuda.get_device_name()} sm_{major}{minor} cuda {torch.version.cuda}"
        return {**super().describe(), "device": device}


ORACLE = GpuOracle("vllm_gpu_ops", vllm_pin.VERSION, available)


def _there(fn: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """`fn` with its tensors on the GPU and its answer back from there."""

    @functools.wraps(fn)
    def call(**given: Any) -> Tensors:
        moved = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in given.items()}
        with torch.device("cuda"):
            found = fn(**moved)
        return {name: value.cpu() for name, value in found.items()}

    return call


def kernel(op: str, upstream: str) -> Callable[[Callable[..., Tensors]], Any]:
    """Decorator of the first lane of `op`; `upstream` names what it calls."""
    return lambda fn: ORACLE.lane(op, "cuda-kernel", upstream)(_there(fn))


# These are called alike on both devices: the platform says which library they are of.
kernel("rms_norm", "torch.ops._C.rms_norm")(vllm_ops.rms_norm_kernel)
kernel("rotary_embedding", "torch.ops._C.rotary_embedding")(vllm_ops.rotary_embedding_kernel)
kernel("linear", "vllm.model_executor.layers.utils.default_unquantized_gemm")(vllm_ops.linear)


def _register_definitions() -> None:
    """The second lanes: what the CPU's oracle takes as definitions, on the GPU."""
    for op, fn in {
        "rms_norm": vllm_ops.rms_norm,
        "fused_add_rms_norm": vllm_ops.fused_add_rms_norm,
        "silu_and_mul": vllm_ops.silu_and_mul,
        "gelu_and_mul": vllm_ops.gelu_and_mul,
        "rotary_embedding": vllm_ops.rotary_embedding,
        "linear": vllm_ops.linear_in_order,
        "paged_attention": vllm_ops.paged_attention_einsum,
    }.items():
        ORACLE.lane(op, "torch-on-gpu", "")(_there(fn))


@kernel("fused_add_rms_norm", "torch.ops._C.fused_add_rms_norm")
def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor, epsilon: float, variance_size: int | None
) -> Tensors:
    """The kernel of a norm after a residual, which writes both of its inputs."""
    if variance_size is not None or weight.dtype != x.dtype:
        raise ValueError("the kernel wants a weight of x's dtype and the whole variance")
    vllm_ops._kernels().fused_add_rms_norm(x, x_residual, weight, epsilon)
    return {"out": x, "residual": x_residual}


@kernel("silu_and_mul", "torch.ops._C.silu_and_mul")
def silu_and_mul(x: Tensor) -> Tensors:
    """The kernel of the gated activation."""
    return {"out": _half(vllm_ops._kernels().silu_and_mul, x)}


@kernel("gelu_and_mul", "torch.ops._C.gelu_and_mul, torch.ops._C.gelu_tanh_and_mul")
def gelu_and_mul(x: Tensor, approximate: str) -> Tensors:
    """The kernels of both forms."""
    kernels = vllm_ops._kernels()
    fn = kernels.gelu_tanh_and_mul if approximate == "tanh" else kernels.gelu_and_mul
    return {"out": _half(fn, x)}


def _half(fn: Any, x: Tensor) -> Tensor:
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    fn(out, x)
    return out


@kernel("reshape_and_cache", "torch.ops._C_cache_ops.reshape_and_cache_flash")
def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> Tensors:
    """The kernel that writes FlashAttention's cache."""
    from vllm import _custom_ops

    vllm_ops._kernels()
    scale = torch.ones(())
    args = (slot_mapping, "auto", scale, scale)
    _custom_ops.reshape_and_cache_flash(key, value, key_cache, value_cache, *args)
    return {"key_cache": key_cache, "value_cache": value_cache}


@kernel("paged_attention", "vllm.vllm_flash_attn.flash_attn_varlen_func")
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None = None,
    attention_chunk_size: int | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensors:
    """FlashAttention over the paged cache, as the backend of that name calls it."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    if attention_chunk_size is not None:
        batch = (query_start_loc, seq_lens, block_table)
        query_start_loc, seq_lens, block_table = vllm_ops.pieces(
            *batch, attention_chunk_size, key_cache.shape[1]
        )
    window = [-1, -1] if sliding_window is None else [sliding_window - 1, 0]
    # Pages beyond a request's length hold NaN, which the kernel multiplies by a weight of zero.
    caches = (torch.nan_to_num(cache) for cache in (key_cache, value_cache))
    out = torch.empty_like(query)
    flash_attn_varlen_func(
        query,
        *caches,
        max_seqlen_q=int(query_start_loc.diff().max()),
        cu_seqlens_q=query_start_loc,
        max_seqlen_k=int(seq_lens.max()),
        seqused_k=seq_lens,
        softmax_scale=scale,
        causal=True,
        window_size=window,
        alibi_slopes=alibi_slopes,
        softcap=soft_cap or 0.0,
        block_table=block_table,
        out=out,
        s_aux=sinks,
        fa_version=3 if torch.cuda.get_device_capability()[0] == 9 else 2,
    )
    return {"out": out}


_register_definitions()

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    raise SystemExit(main(ORACLE))

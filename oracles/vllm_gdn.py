# SPDX-License-Identifier: Apache-2.0
"""Oracle: upstream's gated delta net, its CPU kernels and, in Triton's interpreter, its GPU ones.

`python -m oracles.vllm_gdn JOB OUT`; oracles/op_job.py says what JOB and OUT are.
"""

from __future__ import annotations

import functools
import os
import sys
from importlib import import_module
from typing import Any, Literal

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor

from oracles import triton_interpreter, vllm_pin
from oracles.op_job import Oracle, Tensors, main

FLA = "vllm.model_executor.layers.fla.ops"
MAMBA = "vllm.model_executor.layers.mamba.ops"


def available() -> Literal[True] | str:
    """True, or why nothing can be recorded in this process."""
    found = vllm_pin.available()
    return triton_interpreter.available() if found is True else found


ORACLE = Oracle("vllm_gdn", vllm_pin.VERSION, available)


@functools.cache
def _module(name: str) -> Any:
    """A module of upstream with its kernels ready for the interpreter."""
    if "vllm.triton_utils" not in sys.modules:
        triton_interpreter.prepare()
    module = import_module(name)
    for part in list(sys.modules):
        if part.startswith((f"{FLA}.", MAMBA)):
            triton_interpreter.patch(sys.modules[part])
    return module


@functools.cache
def _cpu() -> Any:
    """Upstream's compiled CPU kernels."""
    _module(FLA)
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return _custom_ops


# -------------------------------------------------------------------------------- convolution

CONV = f"{MAMBA}.cpu.causal_conv1d"


@ORACLE.lane("causal_conv1d_fn", "cpu-torch", f"{CONV}.causal_conv1d_torch")
def causal_conv1d_fn(x: Tensor, **args: Any) -> Tensors:
    """What upstream runs on a CPU without AMX."""
    states = args["conv_states"]
    out = _module(CONV).causal_conv1d_torch(x=x.T, **args)
    return {"out": out.T, "conv_states": states}


@ORACLE.lane("causal_conv1d_fn", "triton-interpreter", f"{MAMBA}.causal_conv1d.causal_conv1d_fn")
def causal_conv1d_fn_kernel(x: Tensor, **args: Any) -> Tensors:
    """The kernel of a GPU."""
    states = args["conv_states"]
    out = _module(f"{MAMBA}.causal_conv1d").causal_conv1d_fn(x.T, **args)
    return {"out": out.T, "conv_states": states}


@ORACLE.lane("causal_conv1d_update", "cpu-torch", f"{CONV}.causal_conv1d_update_torch")
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state_indices: Tensor,
    activation: str | None,
) -> Tensors:
    """What upstream runs on a CPU without AMX. It knows no padding and is not asked for it."""
    real = torch.nonzero(conv_state_indices).flatten()
    blocks = conv_state_indices[real].long()
    states = conv_state[blocks].contiguous()
    made = _module(CONV).causal_conv1d_update_torch(
        x=x[real].unsqueeze(-1), conv_state=states, weight=weight, bias=bias, activation=activation
    )
    out = torch.zeros_like(x)
    out[real] = made.squeeze(-1)
    conv_state[blocks] = states
    return {"out": out, "conv_state": conv_state}


@ORACLE.lane(
    "causal_conv1d_update", "triton-interpreter", f"{MAMBA}.causal_conv1d.causal_conv1d_update"
)
def causal_conv1d_update_kernel(x: Tensor, conv_state: Tensor, **args: Any) -> Tensors:
    """The kernel of a GPU, which leaves the rows of padding as they were."""
    if x.dtype == torch.bfloat16:
        raise ValueError("the interpreter multiplies bfloat16 wrongly here")
    padding = args["conv_state_indices"] == 0
    out = _module(f"{MAMBA}.causal_conv1d").causal_conv1d_update(x, conv_state, **args)
    return {"out": out.masked_fill(padding[:, None], 0.0), "conv_state": conv_state}


# --------------------------------------------------------------------------- gates and lengths


@ORACLE.lane(
    "fused_post_conv_prep",
    "triton-interpreter",
    f"{FLA}.fused_gdn_prefill_post_conv.fused_post_conv_prep",
)
def fused_post_conv_prep(**args: Any) -> Tensors:
    """The kernel of a GPU."""
    made = _module(FLA).fused_post_conv_prep(**args)
    return dict(zip(("q", "k", "v", "g", "beta"), made, strict=True))


@ORACLE.lane("fused_post_conv_prep", "cpu-kernel", "vllm._custom_ops.fused_gdn_gating_cpu")
def fused_post_conv_prep_cpu(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, **_: Any) -> Any:
    """The gates of the compiled kernel, which rounds beta to b's dtype."""
    g, beta = _cpu().fused_gdn_gating_cpu(A_log=A_log, a=a, b=b, dt_bias=dt_bias)
    return {"g": g.squeeze(0), "beta": beta.squeeze(0).float()}


# --------------------------------------------------------------------------------- the rule


def _rule(run: Any, ssm_state: Tensor, state_indices: Tensor, **args: Any) -> Tensors:
    """`run` of (q, k, v, g, beta) with a batch dimension and the states of the requests."""
    blocks = state_indices.long()
    initial = ssm_state[blocks]
    initial[~args["has_initial_state"]] = 0.0
    parts = {name: args[name].unsqueeze(0) for name in ("q", "k", "v", "g", "beta")}
    out, final = run(initial=initial, starts=args["query_start_loc"], scale=args["scale"], **parts)
    ssm_state[blocks] = final
    return {"out": out.squeeze(0), "ssm_state": ssm_state}


def _recurrent(*, initial: Tensor, starts: Tensor, scale: float, **parts: Tensor) -> Any:
    # Without a table of states the kernel has one a token: it begins with that of a request's first
    # token and leaves one behind at every token.
    spread = initial.new_zeros(parts["v"].shape[1], *initial.shape[1:])
    spread[starts[:-1].long()] = initial
    out, states = _module(FLA).fused_recurrent_gated_delta_rule(
        **parts,
        scale=scale,
        initial_state=spread,
        inplace_final_state=False,
        cu_seqlens=starts.long(),
    )
    return out, states[starts[1:].long() - 1]


def _chunk_cpu(*, initial: Tensor, starts: Tensor, scale: float, **parts: Tensor) -> Any:
    """The compiled kernel: bfloat16 only. It scales queries itself and holds states [HV, K, V]."""
    q, k, v = (parts[name] for name in "qkv")
    out, final = _cpu().chunk_gated_delta_rule_cpu(
        query=q,
        key=k,
        value=v,
        g=parts["g"],
        beta=parts["beta"].to(q.dtype),
        initial_state=initial.mT.contiguous(),
        output_final_state=True,
        cu_seqlens=starts,
        head_first=False,
        use_qk_l2norm_in_kernel=False,
    )
    return out, final.mT


def _chunk_triton(*, initial: Tensor, starts: Tensor, scale: float, **parts: Tensor) -> Any:
    return _module(FLA).chunk_gated_delta_rule(
        **parts,
        scale=scale,
        initial_state=initial,
        output_final_state=True,
        cu_seqlens=starts.long(),
        use_qk_l2norm_in_kernel=False,
    )


BY_DTYPE = {
    torch.bfloat16: _chunk_cpu,
    torch.float16: _chunk_triton,
    torch.float32: _recurrent,
}
"""The CPU's kernel takes bfloat16 alone. The GPU's takes no float32, for which upstream has the
rule token by token, and the interpreter multiplies no bfloat16."""


@ORACLE.lane(
    "chunk_gated_delta_rule",
    "upstream-by-dtype",
    "bf16: vllm._custom_ops.chunk_gated_delta_rule_cpu; "
    f"f16: {FLA}.chunk_gated_delta_rule; f32: {FLA}.fused_recurrent_gated_delta_rule",
)
def chunk_gated_delta_rule(q: Tensor, **args: Any) -> Tensors:
    """Whichever of upstream's takes the dtype here."""
    return _rule(BY_DTYPE[q.dtype], q=q, **args)


@ORACLE.lane("chunk_gated_delta_rule", "transformers", "torch_chunk_gated_delta_rule")
def chunk_gated_delta_rule_transformers(**args: Any) -> Tensors:
    """The chunked form of transformers, request by request."""
    _module(FLA)
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    def run(*, initial: Tensor, starts: Tensor, scale: float, **parts: Tensor) -> Any:
        outs, finals = [], []
        for i, (first, last) in enumerate(zip(starts.tolist(), starts.tolist()[1:])):
            q, k, v, g, beta = (parts[n][:, first:last] for n in ("q", "k", "v", "g", "beta"))
            out, final = torch_chunk_gated_delta_rule(
                q, k, v, g, beta, initial_state=initial[i : i + 1].mT, output_final_state=True
            )
            outs.append(out)
            finals.append(final.mT)
        return torch.cat(outs, dim=1), torch.cat(finals)

    return _rule(run, **args)


@ORACLE.lane(
    "recurrent_gated_delta_rule",
    "triton-interpreter",
    f"{FLA}.fused_recurrent_gated_delta_rule",
)
def recurrent_gated_delta_rule(**args: Any) -> Tensors:
    """The kernel of a GPU."""
    return _rule(_recurrent, **args)


PACKED = "fused_recurrent_gated_delta_rule_packed_decode"


@ORACLE.lane(PACKED, "triton-interpreter", f"{FLA}.{PACKED}")
def packed_decode(mixed_qkv: Tensor, ssm_state: Tensor, **args: Any) -> Tensors:
    """The kernel of a GPU."""
    heads, size = ssm_state.shape[1:3]
    out = torch.empty(len(mixed_qkv), 1, heads, size, dtype=mixed_qkv.dtype)
    getattr(_module(FLA), PACKED)(
        mixed_qkv=mixed_qkv,
        initial_state=ssm_state,
        out=out,
        use_qk_l2norm_in_kernel=True,
        **args,
    )
    return {"out": out.squeeze(1), "ssm_state": ssm_state}


@ORACLE.lane(PACKED, "cpu-kernel", "vllm._custom_ops.fused_sigmoid_gating_delta_rule_update_cpu")
def packed_decode_cpu(
    mixed_qkv: Tensor, ssm_state: Tensor, ssm_state_indices: Tensor, scale: float, **args: Any
) -> Tensors:
    """The compiled kernel: halves only. It knows no padding, and holds states [HV, K, V]."""
    heads, size_v, size_k = ssm_state.shape[1:]
    real = torch.nonzero(ssm_state_indices).flatten()
    key_dim = (mixed_qkv.shape[1] - heads * size_v) // 2
    parts = mixed_qkv[real].split((key_dim, key_dim, heads * size_v), dim=-1)
    q, k, v = (
        part.reshape(1, len(real), -1, size).contiguous()
        for part, size in zip(parts, (size_k, size_k, size_v))
    )
    states = ssm_state.mT.contiguous()
    made = _cpu().fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=args["A_log"],
        dt_bias=args["dt_bias"],
        q=q,
        k=k,
        v=v,
        a=args["a"][real],
        b=args["b"][real],
        initial_state_source=states,
        initial_state_indices=ssm_state_indices[real],
        cu_seqlens=torch.arange(len(real) + 1, dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
    )
    out = torch.zeros(len(mixed_qkv), heads, size_v, dtype=mixed_qkv.dtype)
    out[real] = made.reshape(len(real), heads, size_v)
    return {"out": out, "ssm_state": states.mT}


if __name__ == "__main__":
    # Another op whose kernel on a GPU is Triton's registers itself with the same oracle.
    from oracles import vllm_gdn, vllm_qk_gate

    assert vllm_qk_gate.ORACLE is vllm_gdn.ORACLE
    sys.exit(main(vllm_gdn.ORACLE))

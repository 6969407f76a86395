# SPDX-License-Identifier: Apache-2.0
"""Oracle: upstream's layers, ops and sampler steps on a CPU.

`python -m oracles.vllm_ops JOB OUT`; oracles/op_job.py says what JOB and OUT are. The first lane
of an op is what upstream runs on a CPU; the others are its other kernels for the same op, whose
distance from the first says how much upstream disagrees with itself.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor

from oracles.op_job import Oracle, Tensors, main
from oracles.vllm_pin import VERSION, available

ORACLE = Oracle("vllm_ops", VERSION, available)
IR = "vllm.ir.ops"
LAYERS = "vllm.model_executor.layers"


@functools.cache
def _kernels() -> Any:
    """The namespace of upstream's compiled CPU ops."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return torch.ops._C


@functools.cache
def _config() -> Any:
    from vllm.config import VllmConfig

    return VllmConfig()


def _layer(make: Any, *args: Any, **kwargs: Any) -> Any:
    """A layer, built where upstream expects a current config."""
    from vllm.config import set_current_vllm_config

    _kernels()  # some layers look for them when they are built
    with set_current_vllm_config(_config()):
        return make(*args, **kwargs)


# ------------------------------------------------------------------------------------- norms


@ORACLE.lane("rms_norm", "ir-native", f"{IR}.rms_norm.impls[native]")
def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None
) -> Tensors:
    """The definition of upstream's IR."""
    from vllm.ir import ops

    fn = ops.rms_norm.impls["native"].impl_fn
    return {"out": fn(x, weight, epsilon, variance_size)}


@ORACLE.lane("rms_norm", "cpu-kernel", "torch.ops._C.rms_norm")
def rms_norm_kernel(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None
) -> Tensors:
    """The compiled kernel."""
    if weight is None or variance_size is not None or weight.dtype != x.dtype:
        raise ValueError("the kernel wants a weight of x's dtype and the whole variance")
    out = torch.empty_like(x)
    _kernels().rms_norm(out, x, weight, epsilon)
    return {"out": out}


@ORACLE.lane("fused_add_rms_norm", "ir-native", f"{IR}.fused_add_rms_norm.impls[native]")
def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor, epsilon: float, variance_size: int | None
) -> Tensors:
    """The definition of upstream's IR."""
    from vllm.ir import ops

    fn = ops.fused_add_rms_norm.impls["native"].impl_fn
    out, residual = fn(x, x_residual, weight, epsilon, variance_size)
    return {"out": out, "residual": residual}


@ORACLE.lane("fused_add_rms_norm", "cpu-kernel", "torch.ops._C.fused_add_rms_norm")
def fused_add_rms_norm_kernel(
    x: Tensor, x_residual: Tensor, weight: Tensor, epsilon: float, variance_size: int | None
) -> Tensors:
    """The compiled kernel, which writes both of its inputs."""
    if weight.dtype != x.dtype:
        raise ValueError("the kernel wants a weight of x's dtype")
    _kernels().fused_add_rms_norm(x, x_residual, weight, epsilon)
    return {"out": x, "residual": x_residual}


@ORACLE.lane("rms_norm_gated", "layer-native", f"{LAYERS}.layernorm.RMSNormGated.forward_static")
def rms_norm_gated(
    x: Tensor, weight: Tensor, z: Tensor, epsilon: float, activation: str
) -> Tensors:
    """The layer's own torch code, the norm before the gate."""
    from vllm.model_executor.layers.layernorm import RMSNormGated

    fn = RMSNormGated.forward_static
    return {"out": fn(x, z, weight, epsilon, x.dtype, None, True, activation)}


# ------------------------------------------------------------------------------- activations


@ORACLE.lane("silu_and_mul", "layer-native", f"{LAYERS}.activation.SiluAndMul.forward_native")
def silu_and_mul(x: Tensor) -> Tensors:
    """The layer, as it runs on a CPU."""
    from vllm.model_executor.layers.activation import SiluAndMul

    return {"out": _layer(SiluAndMul).forward_native(x)}


@ORACLE.lane("silu_and_mul", "cpu-kernel", "torch.ops._C.silu_and_mul")
def silu_and_mul_kernel(x: Tensor) -> Tensors:
    """The compiled kernel."""
    return {"out": _half_op(_kernels().silu_and_mul, x)}


@ORACLE.lane("gelu_and_mul", "layer-native", f"{LAYERS}.activation.GeluAndMul.forward_native")
def gelu_and_mul(x: Tensor, approximate: str) -> Tensors:
    """The layer, as it runs on a CPU."""
    from vllm.model_executor.layers.activation import GeluAndMul

    return {"out": _layer(GeluAndMul, approximate=approximate).forward_native(x)}


@ORACLE.lane("gelu_and_mul", "cpu-kernel", "torch.ops._C.gelu_and_mul")
def gelu_and_mul_kernel(x: Tensor, approximate: str) -> Tensors:
    """The compiled kernels."""
    kernels = _kernels()
    kernel = kernels.gelu_tanh_and_mul if approximate == "tanh" else kernels.gelu_and_mul
    return {"out": _half_op(kernel, x)}


@ORACLE.lane(
    "mul_sigmoid", "attention-eager", "the gate in Qwen3NextAttention.forward, written in torch"
)
def mul_sigmoid(x: Tensor, gate: Tensor) -> Tensors:
    """Upstream has no callable of this: its layer multiplies by torch.sigmoid, rounded."""
    return {"out": x * torch.sigmoid(gate)}


def _half_op(kernel: Any, x: Tensor) -> Tensor:
    if x.shape[-1] % 32:
        raise ValueError("the kernels go over 16 elements at a time")
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    kernel(out, x)
    return out


# ---------------------------------------------------------------------------------- rotation


@ORACLE.lane(
    "rotary_embedding",
    "layer-native",
    f"{LAYERS}.rotary_embedding.RotaryEmbedding.forward_static",
)
def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool,
) -> Tensors:
    """The layer's own torch code over a given table."""
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    dim = cos_sin_cache.shape[-1]
    made = RotaryEmbedding.forward_static(
        positions, query, key, head_size, dim, cos_sin_cache, is_neox_style
    )
    return {name: value for name, value in zip(("query", "key"), made) if value is not None}


@ORACLE.lane("rotary_embedding", "cpu-kernel", "torch.ops._C.rotary_embedding")
def rotary_embedding_kernel(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool,
) -> Tensors:
    """The compiled kernel, whose table has the dtype of the query."""
    if cos_sin_cache.dtype != query.dtype:
        raise ValueError("the kernel wants its table in the dtype of the query")
    _kernels().rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox_style)
    return {name: value for name, value in (("query", query), ("key", key)) if value is not None}


@ORACLE.lane(
    "mrotary_embedding",
    "layer-native",
    f"{LAYERS}.rotary_embedding.MRotaryEmbedding.forward_native",
)
def mrotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    mrope_section: list[int],
    mrope_interleaved: bool,
    is_neox_style: bool,
) -> Tensors:
    """The layer's own torch code over a given table."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import MRotaryEmbedding

    with set_current_vllm_config(VllmConfig()):
        layer = MRotaryEmbedding(
            head_size,
            cos_sin_cache.shape[-1],
            len(cos_sin_cache),
            10000.0,
            is_neox_style,
            torch.float32,
            mrope_section=mrope_section,
            mrope_interleaved=mrope_interleaved,
        )
    layer._match_cos_sin_cache_dtype = lambda query: cos_sin_cache
    made = layer.forward_native(positions, query, key)
    return {name: value for name, value in zip(("query", "key"), made) if value is not None}


@ORACLE.lane("rope_table", "get_rope", f"{LAYERS}.rotary_embedding.get_rope")
def rope_table(
    head_size: int, max_position: int, rope_parameters: dict[str, Any], rows: Tensor
) -> Tensors:
    """Rows of the table that upstream's factory makes."""
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT, get_rope

    _ROPE_DICT.clear()  # it does not tell apart what differs in the longest length alone
    # The tables of scaled kinds cover `factor` times the length that they are told.
    told = rope_parameters.get("original_max_position_embeddings", max_position)
    length = told if rope_parameters["rope_type"] == "yarn" else max_position
    longest = rope_parameters.get("max_model_len")
    with _longest(longest or max_position):
        rope = _layer(
            get_rope,
            head_size=head_size,
            max_position=length,
            is_neox_style=True,
            rope_parameters={k: v for k, v in rope_parameters.items() if k != "max_model_len"},
            dtype=torch.float32,
        )
    if longest is None:
        return {"out": rope.cos_sin_cache[rows]}
    # Two tables, the one of short sequences first, which ends where the original context does.
    first = told if rope.use_long_rope else 0
    return {"out": rope.long_short_cos_sin_cache[rows + first]}


@contextlib.contextmanager
def _longest(max_model_len: int) -> Iterator[None]:
    """Let the current config say how long sequences get: without a model, it says nothing."""
    config = _config()
    before = config.model_config
    config.model_config = types.SimpleNamespace(max_model_len=max_model_len)
    try:
        yield
    finally:
        config.model_config = before


# -------------------------------------------------------------------- linear, embedding, cache


@ORACLE.lane("linear", "unquantized-gemm", f"{LAYERS}.utils.default_unquantized_gemm")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensors:
    """What an unquantised layer calls."""
    from vllm.model_executor.layers.utils import default_unquantized_gemm

    return {"out": default_unquantized_gemm(None, x, weight, bias)}


@ORACLE.lane("linear", "onednn", "vllm._custom_ops.onednn_mm")
def linear_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensors:
    """The kernel that upstream takes for float weights on a CPU where it can."""
    from vllm import _custom_ops as ops

    _kernels()
    return {"out": ops.onednn_mm(ops.create_onednn_mm(weight.t(), 32), x, bias)}


@ORACLE.lane("linear", "float32-in-order", "torch, product after product in float32")
def linear_in_order(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensors:
    """The sum from first to last, as a kernel with one accumulator an output has it."""
    total = torch.zeros(x.shape[0], weight.shape[0])
    for column, factor in zip(x.float().t(), weight.float().t()):
        total += column.unsqueeze(1) * factor
    return {"out": (total if bias is None else total + bias.float()).to(x.dtype)}


@ORACLE.lane(
    "embedding",
    "unquantized-embedding",
    f"{LAYERS}.vocab_parallel_embedding.UnquantizedEmbeddingMethod.embedding",
)
def embedding(input_ids: Tensor, weight: Tensor) -> Tensors:
    """What an unquantised table does."""
    from types import SimpleNamespace

    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    method = UnquantizedEmbeddingMethod()
    return {"out": method.embedding(SimpleNamespace(weight=weight), input_ids)}


def _isa(cache: Tensor) -> str:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return _get_attn_isa(cache.dtype, cache.shape[1], cache.shape[-1])


@ORACLE.lane("reshape_and_cache", "cpu-cache", "vllm._custom_ops.cpu_attn_reshape_and_cache")
def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> Tensors:
    """The CPU's writer. Its caches are [block, head, slot, element], which is turned back, and it
    lays keys out in its own order, so values go through it twice."""
    from vllm import _custom_ops

    _kernels()
    found = {}
    for name, rows, cache in (("key_cache", key, key_cache), ("value_cache", value, value_cache)):
        turned = cache.transpose(1, 2)
        keys, values = (torch.empty(turned.shape, dtype=cache.dtype) for _ in range(2))
        values.copy_(turned)
        args = (slot_mapping, _isa(cache))
        _custom_ops.cpu_attn_reshape_and_cache(rows, rows, keys, values, *args)
        found[name] = values.transpose(1, 2).contiguous()
    return found


@ORACLE.lane(
    "qk_norm_rope_cache",
    "layer-native",
    f"{IR}.rms_norm.impls[native], {LAYERS}.rotary_embedding.RotaryEmbedding.forward_static, "
    "vllm._custom_ops.cpu_attn_reshape_and_cache",
)
def qk_norm_rope_cache(
    qkv: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    epsilon: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    is_neox_style: bool,
) -> Tensors:
    """The layers that upstream calls one after another where it does not fuse them."""
    kv_heads, head_size = key_cache.shape[2:]
    size = kv_heads * head_size
    parts = qkv.split((qkv.shape[1] - 2 * size, size, size), dim=-1)
    normed = []
    for part, weight in zip(parts, (query_weight, key_weight)):
        heads = part.reshape(len(qkv), -1, head_size)
        if weight is not None:
            heads = rms_norm(heads, weight, epsilon, None)["out"]
        normed.append(heads.reshape(part.shape))
    turned = rotary_embedding(positions, *normed, head_size, cos_sin_cache, is_neox_style)
    rows = (-1, kv_heads, head_size)
    key, value = (x.reshape(rows).contiguous() for x in (turned["key"], parts[2]))
    stored = reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)
    return {"query": turned["query"], **stored}


@ORACLE.lane("paged_attention", "cpu-attention", "vllm._custom_ops.cpu_attention_with_kv_cache")
def paged_attention(**args: Any) -> Tensors:
    """The CPU's attention over its own paged cache."""
    return {"out": _attention(**args)}


@ORACLE.lane("paged_attention", "torch-sdpa", "torch scaled_dot_product_attention")
def paged_attention_sdpa(**args: Any) -> Tensors:
    """torch's own attention in the dtype of the query."""
    if args["soft_cap"] is not None:
        raise ValueError("it has no soft cap")
    if args.get("sinks") is not None:
        raise ValueError("it has no sinks")
    if args.get("alibi_slopes") is not None:
        raise ValueError("it has no slopes")

    def attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=seen, scale=args["scale"]
        )

    return {"out": _by_request(attend, **args)}


@ORACLE.lane("paged_attention", "torch-einsum", "torch einsum and softmax in float32")
def paged_attention_einsum(**args: Any) -> Tensors:
    """Scores, softmax and sum written out, in float32."""

    def attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        scores = torch.einsum("hqd,hkd->hqk", query.float(), keys.float()) * args["scale"]
        if args["soft_cap"] is not None:
            scores = args["soft_cap"] * torch.tanh(scores / args["soft_cap"])
        if args.get("alibi_slopes") is not None:
            ages = torch.arange(keys.shape[1] - 1, -1, -1)
            ages = ages - ages[-query.shape[1] :].unsqueeze(1)
            scores = scores - args["alibi_slopes"][:, None, None] * ages
        scores = scores.masked_fill(~seen, float("-inf"))
        if args.get("sinks") is not None:
            sinks = args["sinks"].float()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(-1)[..., : keys.shape[1]]
        return torch.einsum("hqk,hkd->hqd", weights, values.float()).to(query.dtype)

    return {"out": _by_request(attend, **args)}


def _by_request(attend: Any, **args: Any) -> Tensor:
    """`attend` of each request's queries [heads, n, d], keys, values and visibility [n, tokens]."""
    query, out = args["query"], torch.empty_like(args["query"])
    starts, window = args["query_start_loc"].tolist(), args["sliding_window"]
    for row, length in enumerate(args["seq_lens"].tolist()):
        part = query[starts[row] : starts[row + 1]].transpose(0, 1)
        group = part.shape[0] // args["key_cache"].shape[2]
        keys, values = (
            _gathered(args[name], args, row).transpose(0, 1).repeat_interleave(group, 0)
            for name in ("key_cache", "value_cache")
        )
        newest = torch.arange(length - part.shape[1], length).unsqueeze(1)
        seen = torch.arange(length) <= newest
        if window is not None:
            seen &= torch.arange(length) > newest - window
        if (chunk := args.get("attention_chunk_size")) is not None:
            seen &= torch.arange(length) // chunk == newest // chunk
        found = attend(part, keys, values, seen)
        out[starts[row] : starts[row + 1]] = found.transpose(0, 1)
    return out


def _gathered(cache: Tensor, args: dict[str, Any], row: int) -> Tensor:
    """Keys or values of one request, [tokens, heads, head_size]."""
    token = torch.arange(int(args["seq_lens"][row]))
    return cache[args["block_table"][row, token // cache.shape[1]].long(), token % cache.shape[1]]


BLOCK_SIZE = 32


def _attention(
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
) -> Tensor:
    from vllm import _custom_ops as ops

    _kernels()
    kv_heads, head_size = key_cache.shape[2:]
    counts = [-(-length // BLOCK_SIZE) for length in seq_lens.tolist()]
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    slots, keys, values, start = [], [], [], 1
    for row, length in enumerate(seq_lens.tolist()):
        token = torch.arange(length)
        named = {"block_table": block_table, "seq_lens": seq_lens}
        keys.append(_gathered(key_cache, named, row))
        values.append(_gathered(value_cache, named, row))
        table[row, : counts[row]] = torch.arange(start, start + counts[row])
        slots.append(table[row, token // BLOCK_SIZE].long() * BLOCK_SIZE + token % BLOCK_SIZE)
        start += counts[row]
    caches = [torch.zeros(start, kv_heads, BLOCK_SIZE, head_size, dtype=query.dtype) for _ in "kv"]
    isa = _isa(caches[0].transpose(1, 2))
    ops.cpu_attn_reshape_and_cache(
        torch.cat(keys), torch.cat(values), *caches, torch.cat(slots), isa
    )
    if attention_chunk_size is not None:
        batch = (query_start_loc, seq_lens, table)
        query_start_loc, seq_lens, table = pieces(*batch, attention_chunk_size, BLOCK_SIZE)
    window = -1 if sliding_window is None else sliding_window
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(seq_lens),
        num_heads=query.shape[1],
        num_kv_heads=kv_heads,
        head_dim=head_size,
        seq_lens=seq_lens,
        dtype=query.dtype,
        query_start_loc=query_start_loc,
        causal=True,
        sliding_window_size=window,
        isa=isa,
        enable_kv_split=False,
    )
    out = torch.empty_like(query)
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=caches[0],
        value_cache=caches[1],
        output=out,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        scale=scale,
        causal=True,
        alibi_slopes=alibi_slopes,
        sliding_window=window,
        block_table=table,
        softcap=0.0 if soft_cap is None else soft_cap,
        scheduler_metadata=metadata,
        s_aux=sinks,
    )
    return out


def pieces(
    query_start_loc: Tensor, seq_lens: Tensor, table: Tensor, chunk: int, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The batch as upstream's chunked local attention has it: a request for each piece."""
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.utils import make_local_attention_virtual_batches

    whole = CommonAttentionMetadata(
        query_start_loc=query_start_loc,
        query_start_loc_cpu=query_start_loc.cpu(),
        seq_lens=seq_lens,
        _seq_lens_cpu=seq_lens.cpu(),
        num_reqs=len(seq_lens),
        num_actual_tokens=int(query_start_loc[-1]),
        max_query_len=int(query_start_loc.diff().max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=table,
        slot_mapping=torch.empty(0, dtype=torch.int64),
    )
    cut, _ = make_local_attention_virtual_batches(chunk, whole, block_size)
    return cut.query_start_loc, cut.seq_lens, cut.block_table_tensor.contiguous()


if __name__ == "__main__":
    # The sampler's steps and the joined ops register themselves with the same oracle.
    from oracles import vllm_activation, vllm_fused, vllm_moe, vllm_ops, vllm_sampler

    for _sibling in (vllm_activation, vllm_fused, vllm_moe, vllm_sampler):
        assert _sibling.ORACLE is vllm_ops.ORACLE
    sys.exit(main(vllm_ops.ORACLE))

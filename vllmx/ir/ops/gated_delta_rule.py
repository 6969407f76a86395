# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/fla/ops/ @ v0.25.0
"""The gated delta rule: a matrix of memory a head that fades, is corrected, and is read.

    S <- exp(g) S;  S <- S + beta (v - S k) k^T;  out = scale S q

Shapes: T tokens, R requests, H key heads, HV value heads (a multiple of H; head h of v belongs to
head h // (HV / H) of q and k), K and V sizes of a head. The state of a request is S, [HV, V, K].
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllmx.ir.op import ANY_DEVICE, REFERENCE, register_op
from vllmx.ir.row_by_row import row_by_row

CHUNK_SIZE = 64
L2NORM_EPS = 1e-6
SOFTPLUS_THRESHOLD = 20.0


def prefills_in_chunks(dtype: torch.dtype) -> bool:
    """Whether prompts of activations of `dtype` take the chunked form: the halves do.

    float32 asks for the exact recurrence, whose result does not depend on how a prompt is split.
    """
    return dtype in (torch.bfloat16, torch.float16)


@register_op
def fused_post_conv_prep(
    conv_output: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the rule takes, of the convolution's output and the gates: (q, k, v, g, beta).

    conv_output: [T, 2 H K + HV V], queries, keys, values; a, b: [T, HV]; A_log, dt_bias: [HV].
    q, k: [T, H, K], each head of length 1, and v: [T, HV, V], in conv_output's dtype;
    g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b): float32 [T, HV].
    """
    q, k, v = _split_heads(conv_output, num_k_heads, head_k_dim, head_v_dim)
    g, beta = _gates(a, b, A_log, dt_bias)
    dtype = conv_output.dtype
    return _l2norm(q).to(dtype), _l2norm(k).to(dtype), v.contiguous(), g, beta


@register_op
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ssm_state: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor,
    query_start_loc: Tensor,
    scale: float,
) -> Tensor:
    """The rule over prompts or pieces of them, 64 tokens at a time; writes the states.

    q, k: [T, H, K]; v: [T, HV, V]; g, beta: float32 [T, HV]; ssm_state: [blocks, HV, V, K];
    state_indices: int32 [R]; has_initial_state: bool [R], false where the state before is zero;
    query_start_loc: int32 [R + 1]. Returns [T, HV, V] in v's dtype; computed in float32.

    The corrections of a chunk depend on each other by a triangular system, which is solved once
    (the WY form); then the chunk is a few products of matrices.
    """
    return _by_request(
        _chunks,
        q,
        k,
        v,
        g,
        beta,
        ssm_state,
        state_indices,
        has_initial_state,
        query_start_loc,
        scale,
    )


@register_op
def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ssm_state: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor,
    query_start_loc: Tensor,
    scale: float,
) -> Tensor:
    """The rule over prompts token by token, as it is written above.

    Arguments and result as those of `chunk_gated_delta_rule`. A prompt in pieces gives the bits of
    the prompt in one.
    """
    return _by_request(
        _tokens,
        q,
        k,
        v,
        g,
        beta,
        ssm_state,
        state_indices,
        has_initial_state,
        query_start_loc,
        scale,
    )


@register_op
def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    ssm_state: Tensor,
    ssm_state_indices: Tensor,
) -> Tensor:
    """One new token of each request, from the convolution's output; writes the states.

    mixed_qkv: [R, 2 H K + HV V]; a, b: [R, HV]; A_log, dt_bias: [HV]; ssm_state:
    [blocks, HV, V, K]; ssm_state_indices: int32 [R]. Returns [R, HV, V] in mixed_qkv's dtype.
    beta is rounded to b's dtype, queries and keys are not rounded once they have length 1. A
    request whose block is 0, which is nobody's, is padding: its rows are zero, no state is written.
    """
    heads, head_v, head_k = ssm_state.shape[1:]
    num_k_heads = (mixed_qkv.shape[1] - heads * head_v) // (2 * head_k)
    q, k, v = _split_heads(mixed_qkv, num_k_heads, head_k, head_v)
    g, beta = _gates(a, b, A_log, dt_bias)
    beta = beta.to(b.dtype).float()
    blocks = ssm_state_indices.long()
    before = ssm_state[blocks]
    q, k = (_for_value_heads(_l2norm(x), heads) for x in (q, k))
    state, out = _step(before.float(), q * scale, k, v.float(), g, beta)
    real = (blocks > 0)[:, None, None]
    ssm_state[blocks] = torch.where(real[..., None], state.to(before.dtype), before)
    return out.masked_fill(~real, 0.0).to(mixed_qkv.dtype)


def _split_heads(mixed: Tensor, num_k_heads: int, head_k: int, head_v: int) -> tuple[Tensor, ...]:
    key_dim = num_k_heads * head_k
    q, k, v = mixed.split((key_dim, key_dim, mixed.shape[1] - 2 * key_dim), dim=-1)
    return (
        q.unflatten(-1, (-1, head_k)),
        k.unflatten(-1, (-1, head_k)),
        v.unflatten(-1, (-1, head_v)),
    )


def _gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    x = a.float() + dt_bias.float()
    g = -A_log.float().exp() * F.softplus(x, threshold=SOFTPLUS_THRESHOLD)
    return g, b.float().sigmoid()


def _l2norm(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt((wide * wide).sum(dim=-1, keepdim=True) + L2NORM_EPS)


def _for_value_heads(x: Tensor, heads: int) -> Tensor:
    """[..., H, K] -> [..., HV, K], each head as often as value heads share it."""
    return x.repeat_interleave(heads // x.shape[-2], dim=-2)


def _step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: state [..., HV, V, K], q, k [..., HV, K], v [..., HV, V], g, beta [..., HV]."""
    state = state * g.exp()[..., None, None]
    told = (state * k[..., None, :]).sum(dim=-1)
    state = state + ((v - told) * beta[..., None])[..., None] * k[..., None, :]
    return state, (state * q[..., None, :]).sum(dim=-1)


def _by_request(
    run: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ssm_state: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor,
    query_start_loc: Tensor,
    scale: float,
) -> Tensor:
    """`run` of each request's tokens in float32 and its state."""
    out = torch.empty_like(v)
    starts, known = query_start_loc.tolist(), has_initial_state.tolist()
    for i, block in enumerate(state_indices.tolist()):
        rows = slice(starts[i], starts[i + 1])
        state = ssm_state[block].float()
        if not known[i]:
            state = torch.zeros_like(state)
        keys = _for_value_heads(k[rows].float(), v.shape[1])
        queries = _for_value_heads(q[rows].float(), v.shape[1]) * scale
        state, found = run(state, queries, keys, v[rows].float(), g[rows], beta[rows])
        out[rows] = found.to(v.dtype)
        ssm_state[block] = state.to(ssm_state.dtype)
    return out


def _tokens(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(v)
    for t in range(len(v)):
        state, out[t] = _step(state, q[t], k[t], v[t], g[t], beta[t])
    return state, out


def _chunks(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """state: [HV, V, K]; q, k: [T, HV, K]; v: [T, HV, V]; g, beta: [T, HV]."""
    tokens = len(v)
    # A token past the end has key and beta 0 and g 0: it leaves the state as it is.
    padding = -tokens % CHUNK_SIZE
    q, k, v = (_chunked(F.pad(x, (0, 0, 0, 0, 0, padding))) for x in (q, k, v))
    g, beta = (_chunked(F.pad(x, (0, 0, 0, padding))[..., None])[..., 0] for x in (g, beta))
    # Log of what is left, at each token, of the state before the chunk. It is double because of its
    # differences, which are small where it is large.
    faded = g.double().cumsum(dim=-1)
    after = torch.ones(CHUNK_SIZE, CHUNK_SIZE, dtype=torch.bool, device=v.device).triu(1)
    between = (faded[..., :, None] - faded[..., None, :]).masked_fill(after, float("-inf"))
    between = between.float().exp()
    to_end = (faded[..., -1:] - faded).float().exp()
    from_start = faded.float().exp()
    own = torch.eye(CHUNK_SIZE, dtype=torch.bool, device=v.device)
    system = ((k * beta[..., None]) @ k.mT * between).masked_fill(own, 1.0)
    wanted = torch.cat((v * beta[..., None], k * (beta * from_start)[..., None]), dim=-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    writes, reads = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    inside = q @ k.mT * between
    q = q * from_start[..., None]
    k = k * to_end[..., None]
    left = from_start[..., -1, None, None]
    out = torch.empty_like(v)
    for c in range(v.shape[1]):
        new = writes[:, c] - reads[:, c] @ state.mT
        out[:, c] = q[:, c] @ state.mT + inside[:, c] @ new
        state = state * left[:, c] + new.mT @ k[:, c]
    return state, out.flatten(1, 2).transpose(0, 1)[:tokens]


def _chunked(x: Tensor) -> Tensor:
    """[T, HV, d] -> [HV, T / 64, 64, d]."""
    return x.transpose(0, 1).unflatten(1, (-1, CHUNK_SIZE)).contiguous()


fused_post_conv_prep.set_batch_invariant(
    REFERENCE, ANY_DEVICE, row_by_row(fused_post_conv_prep.fn, "conv_output", "a", "b")
)
# Requests are computed one after another, token by token. Not so chunks: where a prompt is cut
# depends on what shares its steps.
recurrent_gated_delta_rule.set_batch_invariant(REFERENCE, ANY_DEVICE)
fused_recurrent_gated_delta_rule_packed_decode.set_batch_invariant(
    REFERENCE,
    ANY_DEVICE,
    row_by_row(
        fused_recurrent_gated_delta_rule_packed_decode.fn,
        *("mixed_qkv", "a", "b", "ssm_state_indices"),
    ),
)

BATCHES = (
    # (tokens of each request, which have a state, key heads, value heads, size of a head)
    ([5], [False], 1, 1, 32),
    ([1, 70, 3], [True, False, True], 2, 4, 32),
    ([64, 128], [True, True], 1, 2, 32),
    ([130], [True], 2, 2, 64),
)


@fused_post_conv_prep.register_inputs
def _fused_post_conv_prep_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    lengths, _, heads, value_heads, size = BATCHES[case % len(BATCHES)]
    tokens, width = sum(lengths), (2 * heads + value_heads) * size
    a, b = (torch.randn(tokens, value_heads, generator=generator) * 3 for _ in "ab")
    return {
        "conv_output": torch.randn(tokens, width, generator=generator).to(device, dtype),
        "a": a.to(device, dtype),
        "b": b.to(device, dtype),
        "A_log": torch.rand(value_heads, generator=generator).mul(16).log().to(device),
        "dt_bias": torch.randn(value_heads, generator=generator).to(device, dtype),
        "num_k_heads": heads,
        "head_k_dim": size,
        "head_v_dim": size,
    }


def _rule_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    lengths, known, _, value_heads, size = BATCHES[case % len(BATCHES)]
    prepared = fused_post_conv_prep.fn(
        **_fused_post_conv_prep_inputs(case, dtype, device, generator)
    )
    requests = len(lengths)
    blocks = torch.randperm(requests + 1, generator=generator)[:requests] + 1
    state = torch.randn(requests + 2, value_heads, size, size, generator=generator)
    return {
        **dict(zip(("q", "k", "v", "g", "beta"), prepared, strict=True)),
        "ssm_state": state.to(device),
        "state_indices": blocks.to(device, torch.int32),
        "has_initial_state": torch.tensor(known, device=device),
        "query_start_loc": torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32),
        "scale": size**-0.5,
    }


chunk_gated_delta_rule.register_inputs(_rule_inputs)
recurrent_gated_delta_rule.register_inputs(_rule_inputs)


@fused_recurrent_gated_delta_rule_packed_decode.register_inputs
def _packed_decode_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    prep = _fused_post_conv_prep_inputs(case, dtype, device, generator)
    rule = _rule_inputs(case, dtype, device, generator)
    indices = rule["state_indices"]
    if case % 4 == 1:
        indices[-1] = 0
    rows = len(indices)
    return {
        "mixed_qkv": prep["conv_output"][:rows],
        "a": prep["a"][:rows],
        "b": prep["b"][:rows],
        "A_log": prep["A_log"],
        "dt_bias": prep["dt_bias"],
        "scale": rule["scale"],
        "ssm_state": rule["ssm_state"],
        "ssm_state_indices": indices,
    }

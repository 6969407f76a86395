# SPDX-License-Identifier: Apache-2.0
"""Faults of ops, one for each thing that a provider may get wrong: (op, function in its place)."""

import torch
import torch.nn.functional as F

from vllmx.ir.select import load_ops


def rms(x, weight, epsilon, variance_size=None, mean=False, eps=None, drop=0):
    wide = x.float()
    part = wide[..., : variance_size or wide.shape[-1] - drop]
    if mean:
        wide = wide - wide.mean(-1, keepdim=True)
    scale = (part.square().sum(-1, keepdim=True) / part.shape[-1]) + (
        epsilon if eps is None else eps
    )
    wide = wide * scale.rsqrt()
    return (wide if weight is None else wide.to(weight.dtype) * weight).to(x.dtype)


def _height_and_width_swapped(positions, *others, **named):
    from vllmx.ir.ops.rotary import mrotary_embedding

    return mrotary_embedding.fn(positions[[0, 2, 1]], *others, **named)


def _rotated(change):
    def fn(positions, query, key, head_size, cos_sin_cache, is_neox_style=True):
        from vllmx.ir.ops.rotary import rotary_embedding

        return rotary_embedding.fn(
            *change(positions, query, key, head_size, cos_sin_cache, is_neox_style)
        )

    return fn


def _late_cache(key, value, key_cache, value_cache, slot_mapping):
    from vllmx.ir.ops.kv_cache import reshape_and_cache

    reshape_and_cache.fn(key[:-1], value[:-1], key_cache, value_cache, slot_mapping[:-1])


def _changed(op, **change):
    """The op with arguments of another make, each of all of them."""

    def fn(**args):
        return load_ops()[op].fn(**{**args, **{k: f(args) for k, f in change.items()}})

    return fn


def _unsummed(x, residual, weight):
    """The squares of the sum after it was rounded, one column short."""
    total = F.linear(x, weight) + residual
    return total, total.float()[:, :-1].square().sum(-1, keepdim=True)


def _ungated(x, squares, norm_weight, epsilon, weight):
    """The second half for the gate."""
    made = load_ops()["rms_norm_linear"].fn(x, squares, norm_weight, epsilon, weight)
    return F.silu(made.chunk(2, -1)[1]) * made.chunk(2, -1)[0]


def _cached_only(**args):
    """The new key and value are stored, but not attended to."""
    lengths = (args["seq_lens"] - 1).clamp(min=0)
    return load_ops()["qk_norm_rope_decode"].fn(**{**args, "seq_lens": lengths})


def _state_kept(op, state):
    """The op that leaves the states as they were."""

    def fn(**args):
        return load_ops()[op].fn(**{**args, state: args[state].clone()})

    return fn


def _fresh_from_block(op):
    """Requests that begin go on from what their block holds."""
    return _changed(op, has_initial_state=lambda a: torch.ones_like(a["has_initial_state"]))


def _whole_heads(**args):
    """Every query head serves the value heads in turn, not a run of them."""
    heads = args["v"].shape[1]
    turned = {name: args[name].repeat(1, heads // args[name].shape[1], 1) for name in "qk"}
    return load_ops()["recurrent_gated_delta_rule"].fn(**{**args, **turned})


def _halves_of_heads_swapped(args):
    """What lies before each head's gate for what lies behind its query."""
    heads = args["q_gate"].unflatten(-1, (-1, 2, len(args["q_weight"])))
    return heads.flip(-2).flatten(-3)


PACKED = "fused_recurrent_gated_delta_rule_packed_decode"
FAULTS = {
    "weights not renormalised": (
        "topk_softmax",
        _changed("topk_softmax", renormalize=lambda a: False),
    ),
    "softmax of half the scores": (
        "topk_softmax",
        _changed("topk_softmax", gating_output=lambda a: a["gating_output"] / 2),
    ),
    "groups are not asked": (
        "grouped_topk",
        _changed("grouped_topk", topk_group=lambda a: a["num_expert_group"]),
    ),
    "scores without the bias": (
        "grouped_topk",
        _changed("grouped_topk", e_score_correction_bias=lambda a: None),
    ),
    "weights as they are": (
        "grouped_topk",
        _changed("grouped_topk", routed_scaling_factor=lambda a: 1.0),
    ),
    "silu for every activation": (
        "fused_experts",
        _changed("fused_experts", activation=lambda a: "silu"),
    ),
    "an expert for another": (
        "fused_experts",
        _changed("fused_experts", topk_ids=lambda a: (a["topk_ids"] - 1).clamp(min=0)),
    ),
    "experts alike in weight": (
        "fused_experts",
        _changed("fused_experts", topk_weights=lambda a: a["topk_weights"].sort(1).values),
    ),
    "gate before the norm": (
        "rms_norm_gated",
        lambda x, weight, z, epsilon, activation: rms(F.silu(z) * x, weight, epsilon),
    ),
    "silu for sigmoid": (
        "rms_norm_gated",
        _changed("rms_norm_gated", activation=lambda a: "silu"),
    ),
    "output gate without sigmoid": ("mul_sigmoid", lambda x, gate: x * gate),
    "output gate by halves": ("mul_sigmoid", lambda x, gate: x * torch.sigmoid(gate / 2)),
    "convolution's state kept": (
        "causal_conv1d_fn",
        _state_kept("causal_conv1d_fn", "conv_states"),
    ),
    "begins from what the block holds": (
        "causal_conv1d_fn",
        _fresh_from_block("causal_conv1d_fn"),
    ),
    "newest input first": (
        "causal_conv1d_fn",
        _changed("causal_conv1d_fn", weight=lambda a: a["weight"].flip(1)),
    ),
    "decode's convolution state kept": (
        "causal_conv1d_update",
        _state_kept("causal_conv1d_update", "conv_state"),
    ),
    "bias of the convolution forgotten": (
        "causal_conv1d_update",
        _changed("causal_conv1d_update", bias=lambda a: None),
    ),
    "gates swapped": (
        "fused_post_conv_prep",
        _changed("fused_post_conv_prep", a=lambda a: a["b"], b=lambda a: a["a"]),
    ),
    "decay without its exponential": (
        "fused_post_conv_prep",
        _changed("fused_post_conv_prep", A_log=lambda a: torch.log1p(a["A_log"].exp())),
    ),
    "keys of another length": (
        "fused_post_conv_prep",
        lambda **a: tuple(
            x * 1.0005 if i == 1 else x
            for i, x in enumerate(load_ops()["fused_post_conv_prep"].fn(**a))
        ),
    ),
    "state not decayed": (
        "chunk_gated_delta_rule",
        _changed("chunk_gated_delta_rule", g=lambda a: a["g"] * 0),
    ),
    "chunked state kept": (
        "chunk_gated_delta_rule",
        _state_kept("chunk_gated_delta_rule", "ssm_state"),
    ),
    "queries not scaled": (
        "chunk_gated_delta_rule",
        _changed("chunk_gated_delta_rule", scale=lambda a: 1.0),
    ),
    "rule begins from what the block holds": (
        "recurrent_gated_delta_rule",
        _fresh_from_block("recurrent_gated_delta_rule"),
    ),
    "heads in turn": ("recurrent_gated_delta_rule", _whole_heads),
    "next token's step": (
        "recurrent_gated_delta_rule",
        _changed("recurrent_gated_delta_rule", beta=lambda a: a["beta"].roll(-1, 0)),
    ),
    "padding written": (
        PACKED,
        _changed(PACKED, ssm_state_indices=lambda a: a["ssm_state_indices"].clamp(min=1)),
    ),
    "another's state": (
        PACKED,
        _changed(PACKED, ssm_state_indices=lambda a: a["ssm_state_indices"].roll(1, 0)),
    ),
    "residual forgotten": (
        "linear_add",
        _changed("linear_add", residual=lambda a: a["x"][:, :1] * 0),
    ),
    "last column not in the squares": ("linear_add", _unsummed),
    "product half a thousandth more": (
        "linear_add",
        _changed("linear_add", weight=lambda a: a["weight"] * 1.0005),
    ),
    "first part of the squares": (
        "rms_norm_linear",
        _changed("rms_norm_linear", squares=lambda a: a["squares"][:, :1]),
    ),
    "squares of another row": (
        "rms_norm_linear",
        _changed("rms_norm_linear", squares=lambda a: a["squares"].roll(1, 0)),
    ),
    "epsilon ten times": (
        "rms_norm_linear",
        _changed("rms_norm_linear", epsilon=lambda a: a["epsilon"] * 10),
    ),
    "up for gate": ("rms_norm_gated_linear", _ungated),
    "norm weight without its last element": (
        "rms_norm_gated_linear",
        _changed(
            "rms_norm_gated_linear",
            norm_weight=lambda a: F.pad(a["norm_weight"][:-1], (0, 1), value=1.0),
        ),
    ),
    "new key not attended to": ("qk_norm_rope_decode", _cached_only),
    "new key in the next slot": (
        "qk_norm_rope_decode",
        _changed(
            "qk_norm_rope_decode", slot_mapping=lambda a: (a["slot_mapping"] - 1).clamp(min=0)
        ),
    ),
    "key weight for the query": (
        "qk_norm_rope_decode",
        _changed("qk_norm_rope_decode", query_weight=lambda a: a["key_weight"]),
    ),
    "query weight for the key": (
        "qk_norm_rope_cache",
        _changed("qk_norm_rope_cache", key_weight=lambda a: a["query_weight"]),
    ),
    "token in the next slot": (
        "qk_norm_rope_cache",
        _changed("qk_norm_rope_cache", slot_mapping=lambda a: (a["slot_mapping"] - 1).clamp(min=0)),
    ),
    "gate and query for each other": (
        "fused_qk_rmsnorm_rope_gate",
        _changed("fused_qk_rmsnorm_rope_gate", q_gate=_halves_of_heads_swapped),
    ),
    "query norm for the keys": (
        "fused_qk_rmsnorm_rope_gate",
        _changed("fused_qk_rmsnorm_rope_gate", k_weight=lambda a: a["q_weight"]),
    ),
    "epsilon of another config": ("rms_norm", lambda **a: rms(**a, eps=1e-5)),
    "no epsilon": ("rms_norm", lambda **a: rms(**a, eps=0.0)),
    "mean subtracted": ("rms_norm", lambda **a: rms(**a, mean=True)),
    "tail of the variance dropped": ("rms_norm", lambda **a: rms(**a, drop=8)),
    "residual not added": (
        "fused_add_rms_norm",
        lambda x, x_residual, weight, epsilon, variance_size: (
            rms(x, weight, epsilon, variance_size),
            x + x_residual,
        ),
    ),
    "residual rounded before the norm": (
        "fused_add_rms_norm",
        lambda x, x_residual, weight, epsilon, variance_size: (
            rms((x + x_residual).bfloat16().float(), weight, epsilon).to(x.dtype),
            x + x_residual,
        ),
    ),
    "gelu for silu": ("silu_and_mul", lambda x: F.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]),
    "halves swapped": ("silu_and_mul", lambda x: F.silu(x.chunk(2, -1)[1]) * x.chunk(2, -1)[0]),
    "gate clamped": (
        "silu_and_mul",
        lambda x: F.silu(x.chunk(2, -1)[0].clamp(max=7)) * x.chunk(2, -1)[1],
    ),
    "gelu of the other kind": (
        "activation",
        lambda x, kind: load_ops()["activation"].fn(
            x, {"gelu": "gelu_new", "silu": "quick_gelu"}.get(kind, kind)
        ),
    ),
    "clamped at twice the limit": (
        "activation_and_mul",
        _changed("activation_and_mul", limit=lambda a: 2 * a.get("limit", 0.0)),
    ),
    "coefficients swapped": (
        "xielu",
        _changed("xielu", alpha_p=lambda a: a["alpha_n"], alpha_n=lambda a: a["alpha_p"]),
    ),
    "mean kept": (
        "layer_norm",
        lambda x, weight, bias, epsilon: rms(x, weight, epsilon) + (0 if bias is None else bias),
    ),
    "exact gelu for tanh": (
        "gelu_and_mul",
        lambda x, approximate: F.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    ),
    "height and width swapped": ("mrotary_embedding", _height_and_width_swapped),
    "next position": (
        "rotary_embedding",
        _rotated(lambda p, q, k, h, c, n: (p + 1, q, k, h, c, n)),
    ),
    "other direction": (
        "rotary_embedding",
        _rotated(
            lambda p, q, k, h, c, n: (
                p,
                q,
                k,
                h,
                torch.cat((c.chunk(2, -1)[0], -c.chunk(2, -1)[1]), -1),
                n,
            )
        ),
    ),
    "pairs for halves": (
        "rotary_embedding",
        _rotated(lambda p, q, k, h, c, n: (p, q, k, h, c, not n)),
    ),
    "positions beyond 32767 clamped": (
        "rotary_embedding",
        _rotated(lambda p, q, k, h, c, n: (p.clamp(max=32767), q, k, h, c, n)),
    ),
    "last of K dropped": (
        "linear",
        lambda x, weight, bias=None: F.linear(x[:, :-1], weight[:, :-1], bias),
    ),
    "a row for another": (
        "linear",
        lambda x, weight, bias=None: F.linear(x.roll(1, 0), weight, bias),
    ),
    "bias forgotten": ("linear", lambda x, weight, bias=None: F.linear(x, weight)),
    "half a thousandth more": (
        "linear",
        lambda x, weight, bias=None: F.linear(x, weight, bias) * 1.0005,
    ),
    "an id off": (
        "embedding",
        lambda input_ids, weight: weight[(input_ids - 1).clamp(min=0).long()],
    ),
    "last token not stored": ("reshape_and_cache", _late_cache),
    "sharper": ("paged_attention", _changed("paged_attention", scale=lambda a: a["scale"] * 1.001)),
    "one key too few": (
        "paged_attention",
        _changed("paged_attention", seq_lens=lambda a: (a["seq_lens"] - 1).clamp(min=1)),
    ),
    "window one wider": (
        "paged_attention",
        _changed(
            "paged_attention",
            sliding_window=lambda a: a["sliding_window"] and a["sliding_window"] + 1,
        ),
    ),
    "window one narrower": (
        "paged_attention",
        _changed(
            "paged_attention",
            sliding_window=lambda a: a["sliding_window"] and a["sliding_window"] - 1,
        ),
    ),
    "no soft cap": ("paged_attention", _changed("paged_attention", soft_cap=lambda a: None)),
    "blocks in order": (
        "paged_attention",
        _changed("paged_attention", block_table=lambda a: a["block_table"].sort(-1).values),
    ),
    "scales without their sign": (
        "dequantize_gguf",
        lambda data, qtype, dtype: load_ops()["dequantize_gguf"].fn(data, qtype, dtype).abs(),
    ),
}

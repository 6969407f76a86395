# SPDX-License-Identifier: Apache-2.0
"""Every op that has goldens: its cases, the oracle that records it, how its outputs are judged.

Ops of vllmx's op table stand here under their own names; what the sampler and the rotary tables
do, which have one implementation each, is treated as an op with the provider `vllmx`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import (
    activation_cases,
    cache_cases,
    fused_cases,
    gdn_cases,
    gguf_cases,
    moe_cases,
    op_cases,
    qk_gate_cases,
    rope_cases,
    sampler_cases,
)
from .inputs import Case, CaseTable

EXACT = "exact"
OWN = "vllmx"
"""Provider of an op that has no choice of providers."""


@dataclass(frozen=True)
class OpEntry:
    """One op.

    outputs: the names of its outputs in order; kind: the class of limits in policy.yaml;
    exact: outputs that are compared bit by bit although the kind has limits; mutates: arguments
    that it writes, which are then outputs of the same name; lane: what of the oracle made it;
    wide: outputs that are float32 whatever the dtype of the case.
    """

    name: str
    table: CaseTable
    kind: str
    oracle: str
    lane: str
    outputs: tuple[str, ...] = ("out",)
    exact: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    sampler: bool = False
    wide: tuple[str, ...] = ()

    @property
    def feature(self) -> str:
        """The id under which evidence is kept."""
        return f"{'sample' if self.sampler else 'op'}.{self.name}"

    @property
    def cases(self) -> list[Case]:
        """Its cases."""
        return self.table.of(self.name)

    def kind_of(self, output: str) -> str:
        """The class of limits of one output."""
        return EXACT if output in self.exact else self.kind


def _ir(name: str, table: CaseTable, kind: str, lane: str, **facts: object) -> OpEntry:
    return OpEntry(name, table, kind, "vllm_ops", lane, **facts)  # type: ignore[arg-type]


def _gdn(name: str, kind: str, lane: str, **facts: object) -> OpEntry:
    return OpEntry(name, gdn_cases.CASES, kind, "vllm_gdn", lane, **facts)  # type: ignore[arg-type]


def _sampler(name: str, kind: str, lane: str, **facts: object) -> OpEntry:
    oracle = facts.pop("oracle", "vllm_ops")
    table = sampler_cases.CASES
    return OpEntry(name, table, kind, oracle, lane, sampler=True, **facts)  # type: ignore[arg-type]


_CACHES = ("key_cache", "value_cache")
LAYOUTS = {
    **dict.fromkeys(_CACHES, "[blocks, tokens of a block, key heads, head size]"),
    **dict.fromkeys(("conv_state", "conv_states"), "[blocks, channels, width - 1]"),
    "ssm_state": "[blocks, value heads, value size, key size]",
}
"""The axes of state that ops write, which its goldens name: upstream has other layouts beside."""
_STATE = {"outputs": ("out", "ssm_state"), "mutates": ("ssm_state",), "wide": ("ssm_state",)}
OPS = {
    entry.name: entry
    for entry in (
        _ir("rms_norm", op_cases.CASES, "norm", "ir-native"),
        _ir(
            "fused_add_rms_norm",
            op_cases.CASES,
            "norm",
            "ir-native",
            outputs=("out", "residual"),
        ),
        _ir("silu_and_mul", op_cases.CASES, "pointwise", "layer-native"),
        _ir("gelu_and_mul", op_cases.CASES, "pointwise", "layer-native"),
        _ir("activation", activation_cases.CASES, "pointwise", "layer-native"),
        _ir("activation_and_mul", activation_cases.CASES, "pointwise", "layer-native"),
        _ir("xielu", activation_cases.CASES, "pointwise", "layer-native"),
        _ir("layer_norm", activation_cases.CASES, "norm", "torch"),
        _ir(
            "rotary_embedding",
            op_cases.CASES,
            "rope",
            "layer-native",
            outputs=("query", "key"),
        ),
        _ir(
            "mrotary_embedding",
            op_cases.CASES,
            "rope",
            "layer-native",
            outputs=("query", "key"),
        ),
        _ir("rope_table", rope_cases.CASES, "table", "get_rope"),
        _ir("rms_norm_gated", op_cases.CASES, "norm", "layer-native"),
        _ir("mul_sigmoid", op_cases.CASES, "pointwise", "attention-eager"),
        _gdn(
            "causal_conv1d_fn",
            "pointwise",
            "cpu-torch",
            outputs=("out", "conv_states"),
            exact=("conv_states",),
            mutates=("conv_states",),
        ),
        _gdn(
            "causal_conv1d_update",
            "pointwise",
            "cpu-torch",
            outputs=("out", "conv_state"),
            exact=("conv_state",),
            mutates=("conv_state",),
        ),
        _gdn(
            "fused_post_conv_prep",
            "norm",
            "triton-interpreter",
            outputs=("q", "k", "v", "g", "beta"),
            exact=("v",),
            wide=("g", "beta"),
        ),
        _gdn("chunk_gated_delta_rule", "scan", "upstream-by-dtype", **_STATE),
        _gdn("recurrent_gated_delta_rule", "scan", "triton-interpreter", **_STATE),
        _gdn(
            "fused_recurrent_gated_delta_rule_packed_decode",
            "scan",
            "triton-interpreter",
            **_STATE,
        ),
        _ir(
            "topk_softmax",
            moe_cases.CASES,
            "probs",
            "cpu-select-experts",
            outputs=("weights", "ids"),
            exact=("ids",),
            wide=("weights",),
        ),
        _ir(
            "grouped_topk",
            moe_cases.CASES,
            "probs",
            "cpu-grouped-topk",
            outputs=("weights", "ids"),
            exact=("ids",),
            wide=("weights",),
        ),
        _ir("fused_experts", moe_cases.CASES, "moe", "cpu-fused-moe"),
        _ir("linear", op_cases.CASES, "gemm", "unquantized-gemm"),
        _ir(
            "linear_add",
            fused_cases.CASES,
            "gemm",
            "unquantized-gemm",
            outputs=("out", "squares"),
            wide=("squares",),
        ),
        _ir("rms_norm_linear", fused_cases.CASES, "gemm", "unquantized-gemm"),
        _ir("rms_norm_gated_linear", fused_cases.CASES, "gemm", "unquantized-gemm"),
        _ir("embedding", op_cases.CASES, EXACT, "unquantized-embedding"),
        _ir(
            "reshape_and_cache",
            cache_cases.CASES,
            EXACT,
            "cpu-cache",
            outputs=_CACHES,
            mutates=_CACHES,
        ),
        _ir(
            "qk_norm_rope_cache",
            cache_cases.CASES,
            "rope",
            "layer-native",
            outputs=("query", *_CACHES),
            exact=("value_cache",),
            mutates=_CACHES,
        ),
        OpEntry(
            "fused_qk_rmsnorm_rope_gate",
            qk_gate_cases.CASES,
            "rope",
            "vllm_gdn",
            "upstream-by-dtype",
            outputs=("q", "k", "gate"),
            exact=("gate",),
        ),
        _ir("paged_attention", cache_cases.CASES, "attention", "cpu-attention"),
        _ir(
            "qk_norm_rope_decode",
            cache_cases.CASES,
            "attention",
            "cpu-attention",
            outputs=("out", *_CACHES),
            exact=("value_cache",),
            mutates=_CACHES,
        ),
        OpEntry("dequantize_gguf", gguf_cases.CASES, EXACT, "gguf_dequant", "gguf-py"),
        _sampler("temperature", "pointwise", "v1-sampler"),
        _sampler("penalties", "pointwise", "v1-penalties"),
        _sampler("bad_words", EXACT, "v1-bad-words"),
        _sampler("logit_bias", EXACT, "v1-logits-processors"),
        _sampler("min_p", EXACT, "v1-logits-processors"),
        _sampler("top_k_top_p", EXACT, "v1-topk-topp-torch"),
        _sampler(
            "logprobs",
            "probs",
            "v1-sampler",
            outputs=("ids", "scores", "ranks"),
            exact=("ids", "ranks"),
        ),
        _sampler("gumbel_noise", "noise", "triton-interpreter", oracle="triton_noise"),
        _sampler(
            "seeded_token",
            EXACT,
            "triton-interpreter",
            oracle="triton_noise",
            outputs=("token",),
        ),
    )
}


GPU_OPS = {
    name: replace(OPS[name], oracle="vllm_gpu_ops", lane="cuda-kernel")
    for name in (
        *("rms_norm", "fused_add_rms_norm", "silu_and_mul", "gelu_and_mul", "rotary_embedding"),
        *("linear", "reshape_and_cache", "paged_attention"),
    )
}
"""Ops that upstream's GPU build has a kernel for: a second lane of goldens, goldens/ops_gpu."""


def golden_name(op: str, case: str, dtype: str) -> str:
    """Path of a golden under goldens/ops."""
    return f"{op}/{case}.{dtype}.safetensors"

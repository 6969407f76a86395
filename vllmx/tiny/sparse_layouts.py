# SPDX-License-Identifier: Apache-2.0
"""The tensors of families with experts, in the letters of dense_tensors.py."""

from __future__ import annotations

from vllmx.tiny.dense_tensors import NORMS, OUT, QKV, Layout, Named, named, with_biases


def gated(prefix: str, inner: str) -> Named:
    """The three matrices of a gated MLP of `inner` elements."""
    return named(f"{inner} H", f"{prefix}.gate_proj", f"{prefix}.up_proj") | named(
        f"H {inner}", f"{prefix}.down_proj"
    )


SPARSE_LAYOUTS: dict[str, Layout] = {
    "gpt_oss": Layout(
        with_biases(QKV, OUT, named("E H", "mlp.router"))
        | NORMS
        | {
            "self_attn.sinks": "N",
            "mlp.experts.gate_up_proj": "E H 2J",
            "mlp.experts.gate_up_proj_bias": "E 2J",
            "mlp.experts.down_proj": "E J H",
            "mlp.experts.down_proj_bias": "E H",
        }
    ),
    "llama4_text": Layout(
        QKV | OUT | NORMS,
        sparse=named("E H", "feed_forward.router")
        | gated("feed_forward.shared_expert", "I")
        | {
            "feed_forward.experts.gate_up_proj": "E H 2J",
            "feed_forward.experts.down_proj": "E J H",
        },
        dense=gated("feed_forward", "G"),
        is_sparse=lambda config, layer: (layer + 1) % config.interleave_moe_layer_step == 0,
    ),
}

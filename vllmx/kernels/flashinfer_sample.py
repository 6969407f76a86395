# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/sample/ops/topk_topp_sampler.py (flashinfer) @ v0.25.0
"""Provider `flashinfer` of the sampler: which tokens top-k and top-p keep.

Upstream has FlashInfer draw the token as well, from its own generator. Here the token is drawn as
with every provider, so that a seed gives the same answer with all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllmx.kernels.flashinfer_ops import library


def apply_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """As vllmx.sample.topk_topp.apply_top_k_top_p; the logits in place or new ones.

    logits: float32 [n, vocab]; top_k: int64 [n], vocab where a row keeps all; top_p: float32 [n].
    Tokens that tie at the edge of top_p stay, all of them.
    """
    sampling = library().sampling
    if top_k is not None:
        logits = sampling.top_k_mask_logits(logits, top_k.to(torch.int32))
    if top_p is not None:
        likely = logits.softmax(dim=-1)
        dropped = sampling.top_p_renorm_probs(likely, top_p) == 0
        # Of no probability in float32 are tokens that a row without top_p keeps, and that 0 keeps
        # the likeliest is not the library's rule.
        dropped &= (top_p < 1).unsqueeze(1) & (likely < likely.amax(dim=-1, keepdim=True))
        logits = logits.masked_fill_(dropped, float("-inf"))
    return logits

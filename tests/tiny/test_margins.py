# SPDX-License-Identifier: Apache-2.0
"""Tiny models for bfloat16: what they decide, a rounding does not change."""

import numpy as np
import pytest
import torch
from hybrid_driver import HybridDriver

from vllmx.tiny.checkpoint import save
from vllmx.tiny.configs import HYBRIDS
from vllmx.tiny.margins import CODE, SUFFIX, codes

TOKENS = np.random.default_rng(7).integers(3, 1024, 200).tolist()


def test_codes_of_any_two_tokens_differ_in_twelve_elements_at_least() -> None:
    found = codes()
    assert found.shape == (1024, CODE)
    same = found @ found.T - CODE * np.eye(1024)
    assert np.abs(same).max() == CODE - 2 * 12


def told(folder, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of TOKENS, and those of each router."""
    driver = HybridDriver(folder, dtype=dtype)
    routed: list[torch.Tensor] = []
    for layer in driver.model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda _, __, out: routed.append(out.float()))
    return driver.step({0: TOKENS})[0].float(), routed


@pytest.mark.parametrize("name", HYBRIDS)
def test_what_is_decided_is_far_from_what_bfloat16_rounds(name: str, tmp_path) -> None:
    folder = tmp_path / "model"
    save(name + SUFFIX, folder)
    exact, routed = told(folder, torch.float32)
    rounded, routed_too = told(folder, torch.bfloat16)
    assert len(routed) == {"tiny-qwen3_5": 0, "tiny-qwen3_5_moe": 4, "tiny-qwen3_next": 3}[name]
    for want, got in zip(routed, routed_too, strict=True):
        scores = want.sort(dim=-1, descending=True).values
        margin = (scores[:, 1] - scores[:, 2]).min()
        assert margin > 5 * (want - got).abs().max()
        chosen, theirs = (x.topk(2).indices.sort().values for x in (want, got))
        assert torch.equal(chosen, theirs)
        assert len(chosen.unique()) == want.shape[-1], "no expert is idle"
        assert len(chosen.unique(dim=0)) > 20, "where a token goes is its own"
    flips = (exact.argmax(dim=-1) != rounded.argmax(dim=-1)).float().mean()
    assert flips <= 0.02
    assert len(exact.argmax(dim=-1).unique()) > 100
    assert exact.softmax(dim=-1).amax(dim=-1).mean() < 0.5, "nothing is nearly certain"

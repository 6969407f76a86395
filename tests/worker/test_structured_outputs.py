# SPDX-License-Identifier: Apache-2.0
"""What grammars forbid is taken out of the logits of their requests, and of no others."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllmx.core.output import GrammarOutput
from vllmx.kernels.triton_bitmask import apply_grammar_bitmask
from vllmx.worker.structured_outputs import StructuredOutputsWorker, forbid

VOCABS = (64, 70, 5000)


def some(vocab: int, masks: int, seed: int = 0) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """Logits of 5 requests, masks, and the bits of the masks as booleans."""
    rng = np.random.default_rng(seed)
    bitmask = rng.integers(-(2**31), 2**31, (masks, -(-vocab // 32)), dtype=np.int64)
    bitmask = bitmask.astype(np.int32)
    bits = (bitmask[:, np.arange(vocab) // 32] >> (np.arange(vocab) % 32)) & 1
    logits = torch.from_numpy(rng.standard_normal((5, vocab)).astype(np.float32))
    return logits, bitmask, bits.astype(bool)


def wanted(logits: torch.Tensor, bits: np.ndarray, rows: list[int]) -> torch.Tensor:
    want = logits.clone()
    for mask, row in zip(bits, rows, strict=True):
        want[row][~torch.from_numpy(mask)] = float("-inf")
    return want


@pytest.mark.parametrize("rows", [[3, 0], [0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2]], ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("provider", ["torch", "triton"])
def test_masked_logits_are_minus_infinity(provider: str, vocab: int, rows: list[int]) -> None:
    logits, bitmask, bits = some(vocab, len(rows))
    want = wanted(logits, bits, rows)
    places = np.array(rows, dtype=np.int32)
    if provider == "torch":
        forbid(logits, bitmask, places)
    else:
        apply_grammar_bitmask(logits, torch.from_numpy(bitmask), torch.from_numpy(places))
    assert torch.equal(logits, want)


def test_masks_find_their_requests_among_those_that_are_sampled() -> None:
    logits, bitmask, bits = some(70, 2)
    batch = SimpleNamespace(req_ids=["c", "a", "d", "b"], sample_reqs=np.array([1, 2, 3]))
    want = wanted(logits[:3], bits, [2, 0])
    worker = StructuredOutputsWorker(8, 70, "cpu")
    rows = worker.apply_grammar_bitmask(logits[:3], batch, GrammarOutput(["b", "a"], bitmask))
    assert torch.equal(logits[:3], want) and rows.tolist() == [2, 0]

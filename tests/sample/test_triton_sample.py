# SPDX-License-Identifier: Apache-2.0
"""The sampler's Triton kernels against torch, in the interpreter."""

import numpy as np
import pytest
import torch

from vllmx.kernels import triton_sample, triton_top_k
from vllmx.sample import gumbel, penalties, topk_topp
from vllmx.sample.ops import get_sampler_ops
from vllmx.sample.sampler import Sampler
from vllmx.sampling_params import SamplingParams
from vllmx.worker.states import RequestState

pytestmark = pytest.mark.skipif(
    triton_sample.SUPPORTED is not True, reason=str(triton_sample.SUPPORTED)
)
VOCAB = 5000
"""More than a program looks at, and no multiple of it."""
NONE = float("-inf")


def make_logits(rows: int, columns: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [
        ([1, 7, VOCAB, 4999], None),
        (None, [1.0, 0.9, 0.3, 1e-7]),
        ([50, VOCAB, 3, 400], [0.8, 0.95, 1.0, 0.5]),
    ],
)
def test_top_k_and_top_p_keep_what_torch_keeps(top_k, top_p) -> None:
    logits = make_logits(4)
    logits[1] -= 50.0
    logits[2, 100:4000] = NONE
    k = None if top_k is None else torch.tensor(top_k)
    p = None if top_p is None else torch.tensor(top_p)
    want = topk_topp.apply_top_k_top_p(logits.clone(), k, p)
    got = triton_top_k.apply_top_k_top_p(logits.clone(), k, p)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("p", [1 - 2**-24, 1 - 1e-6, 0.0, 1e-30])
def test_no_p_brings_back_what_k_drops_nor_drops_the_likeliest(p: float) -> None:
    logits = make_logits(6) / 20
    k = torch.tensor([1, 2, 3, 700, 2500, 4999])
    only_k = triton_top_k.apply_top_k_top_p(logits.clone(), k, None) > NONE
    both = triton_top_k.apply_top_k_top_p(logits.clone(), k, torch.full((6,), p)) > NONE
    assert not (both & ~only_k).any()
    assert both.gather(1, logits.argmax(dim=1, keepdim=True)).all()
    if p < 1e-6:
        assert both.sum(dim=1).tolist() == [1] * 6


def test_a_rows_tokens_do_not_depend_on_its_batch() -> None:
    logits, p = make_logits(5) / 4, torch.tensor([0.5, 0.9, 0.99, 0.999, 0.3])
    k = torch.tensor([4000, VOCAB, 300, 4500, VOCAB])
    together = triton_top_k.apply_top_k_top_p(logits.clone(), k, p)
    for i in range(5):
        here = slice(i, i + 1)
        alone = triton_top_k.apply_top_k_top_p(logits[here].clone(), k[here], p[here])
        assert torch.equal(alone, together[here])


def test_ties_at_the_kth_stay_and_those_at_the_edge_of_p_stay_together() -> None:
    logits = torch.zeros(2, 8)
    logits[:, 0] = 2.0
    got = triton_top_k.apply_top_k_top_p(logits.clone(), torch.tensor([2, 8]), None)
    assert (got > NONE).sum(dim=1).tolist() == [8, 8]
    got = triton_top_k.apply_top_k_top_p(logits.clone(), None, torch.tensor([0.3, 0.7]))
    assert (got > NONE).sum(dim=1).tolist() == [1, 8]


def test_penalties_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(0, 3, (4, VOCAB), generator=generator, dtype=torch.int32)
    in_prompt = torch.rand(4, VOCAB, generator=generator) < 0.2
    numbers = torch.tensor([[0.5, -1.0, 0.0], [0.3, 0.0, 2.0], [1.2, 0.8, 1.0]])
    place, index = torch.tensor([3, 0, 1]), torch.tensor([2, 3, 0])
    want, got = make_logits(4), make_logits(4)
    penalties.apply_penalties(want, place, index, *numbers, counts, in_prompt)
    triton_sample.apply_penalties(got, place, index, *numbers, counts, in_prompt)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert (got[2] == make_logits(4)[2]).all()


@pytest.mark.parametrize("use_fp64", [False, True])
def test_seeded_rows_draw_the_token_that_torch_draws(use_fp64: bool) -> None:
    logits = make_logits(6) / 3
    logits[4, 10:] = NONE
    arguments = (
        torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0]),
        torch.tensor([0, 42, 5, -1, 2**63 - 1, 2**33]),
        torch.ones(6, dtype=torch.bool),
        torch.tensor([0, 1, 5, 4096, 7, 2**31 - 1]),
        torch.Generator(),
        use_fp64,
    )
    want = gumbel.gumbel_sample(logits, *arguments)
    got = triton_sample.gumbel_sample(logits, *arguments)
    assert got.tolist() == want.tolist()
    assert got[2] == logits[2].argmax()


def test_rows_without_a_seed_differ_from_call_to_call_and_repeat_with_the_generator() -> None:
    logits, ones = torch.zeros(4, 1100), torch.ones(4)
    zeros = torch.zeros(4, dtype=torch.int64)

    def draw(generator: torch.Generator) -> list[int]:
        has_seed = zeros.bool()
        return triton_sample.gumbel_sample(logits, ones, zeros, has_seed, zeros, generator).tolist()

    generator = torch.Generator().manual_seed(3)
    first, second = draw(generator), draw(generator)
    assert len(set(first)) > 2 and first != second
    assert draw(torch.Generator().manual_seed(3)) == first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["token_logprobs", "token_logits"])
def test_values_and_ranks_are_those_of_torch(kind: str, dtype: torch.dtype) -> None:
    logits = make_logits(3).to(dtype)
    ids = torch.tensor([[1, 2, 4999], [0, 0, 7], [4098, 3, 5]])
    want_scores, want_ranks = getattr(get_sampler_ops("cpu", provider="torch"), kind)(logits, ids)
    scores, ranks = getattr(get_sampler_ops("cpu", provider="triton"), kind)(logits, ids)
    torch.testing.assert_close(scores, want_scores, rtol=1e-5, atol=1e-5)
    if dtype == torch.float32:
        assert ranks.tolist() == want_ranks.tolist()


def test_a_sampler_on_triton_answers_as_one_on_torch() -> None:
    params = [
        SamplingParams(temperature=0.0, repetition_penalty=1.5, logprobs=3),
        SamplingParams(temperature=0.8, seed=3, top_k=40, top_p=0.9, frequency_penalty=0.5),
        SamplingParams(temperature=1.2, seed=9, min_p=0.02, logprob_token_ids=[5, 6]),
    ]
    found = []
    for provider in ("torch", "triton"):
        states = RequestState(4, 32, 600, "cpu")
        ops = get_sampler_ops("cpu", provider=provider)
        sampler = Sampler(states, "processed_logprobs", seed=0, ops=ops)
        rows = [states.add_request(str(i), 2, [1, 2, 3], 0) for i in range(3)]
        for row, p in zip(rows, params, strict=True):
            sampler.add_request(row, 2, p)
        for step in range(3):
            logits = make_logits(3, 600, seed=step)
            out = sampler(logits, np.array(rows), np.full(3, 2 + step))
            found.append((provider, out))
    for (_, want), (_, got) in zip(found[:3], found[3:], strict=True):
        assert got.sampled_token_ids.tolist() == want.sampled_token_ids.tolist()
        assert (got.logprobs.logprob_token_ids == want.logprobs.logprob_token_ids).all()
        np.testing.assert_allclose(got.logprobs.logprobs, want.logprobs.logprobs, rtol=1e-4)

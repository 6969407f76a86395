# SPDX-License-Identifier: Apache-2.0
"""The sampler's Triton kernels, compiled, against torch on the same GPU; and through an engine."""

import pytest
import torch
from gpu_engine import answers, engine, prompts

from vllmx import SamplingParams
from vllmx.kernels import triton_sample, triton_top_k
from vllmx.sample import gumbel, penalties, topk_topp
from vllmx.sample.ops import get_sampler_ops

ROWS, VOCAB = 16, 151_936


def make_logits(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    return (torch.randn(ROWS, VOCAB, generator=generator, device="cuda") * 3).to(dtype)


def test_a_gpu_takes_triton() -> None:
    assert get_sampler_ops("cuda").provider == "triton"


@pytest.mark.parametrize("which", ["k", "p", "both"])
def test_top_k_and_top_p_keep_what_torch_keeps(which: str) -> None:
    top_k = torch.arange(1, ROWS + 1, device="cuda") * 97 if which != "p" else None
    top_p = torch.linspace(0.1, 1.0, ROWS, device="cuda") if which != "k" else None
    want = topk_topp.apply_top_k_top_p(make_logits(), top_k, top_p) > float("-inf")
    got = triton_top_k.apply_top_k_top_p(make_logits(), top_k, top_p) > float("-inf")
    # Sums of many float32 may put the edge of p one token further.
    assert int((want != got).sum()) <= (0 if which == "k" else ROWS)


def test_penalties_are_those_of_torch() -> None:
    counts = torch.randint(0, 3, (ROWS, VOCAB), dtype=torch.int32, device="cuda")
    in_prompt = torch.rand(ROWS, VOCAB, device="cuda") < 0.2
    numbers = torch.rand(3, ROWS, device="cuda") + 0.5
    rows = torch.arange(ROWS, device="cuda")
    want, got = make_logits(), make_logits()
    penalties.apply_penalties(want, rows, rows.flip(0), *numbers, counts, in_prompt)
    triton_sample.apply_penalties(got, rows, rows.flip(0), *numbers, counts, in_prompt)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("use_fp64", [False, True])
def test_seeded_rows_draw_the_token_that_torch_draws(use_fp64: bool) -> None:
    logits = make_logits()
    seeds = torch.arange(ROWS, device="cuda") * 2**33 - 5
    arguments = (
        torch.ones(ROWS, device="cuda"),
        seeds,
        torch.ones(ROWS, dtype=torch.bool, device="cuda"),
        torch.arange(ROWS, device="cuda") * 1001,
        torch.Generator("cuda"),
        use_fp64,
    )
    want = gumbel.gumbel_sample(logits, *arguments)
    assert triton_sample.gumbel_sample(logits, *arguments).tolist() == want.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_are_those_of_torch(dtype: torch.dtype) -> None:
    logits = make_logits(dtype)
    ids = torch.randint(0, VOCAB, (ROWS, 21), device="cuda")
    want = get_sampler_ops("cuda", provider="torch").token_logprobs(logits, ids)
    got = get_sampler_ops("cuda", provider="triton").token_logprobs(logits, ids)
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=2e-5)
    if dtype == torch.float32:
        # The last bit of a row's normaliser decides which of its neighbours round to a token's own.
        every = logits.double().log_softmax(-1)
        own = every.gather(1, ids[:, :1])
        above, not_below = ((every > own + e).sum(-1) for e in (2e-6, -2e-6))
        assert ((above < got[1]) & (got[1] <= not_below)).all()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_every_rule_holds_in_an_engine(folder, async_scheduling: bool) -> None:
    common = {"max_tokens": 12, "ignore_eos": True, "detokenize": False}
    rules = [
        {"temperature": 0.0, "logit_bias": {7: 100.0}},
        {"seed": 1, "allowed_token_ids": [5, 6, 9]},
        {"seed": 2, "min_p": 0.2, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.3},
        {"temperature": 0.0, "logprob_token_ids": [4, 8]},
    ]
    params = [SamplingParams(**common, **rules[i % 5]) for i in range(20)]
    llm = engine(folder, async_scheduling=async_scheduling)
    found = [tokens for tokens, _ in answers(llm, prompts(20, longest=30), params)]
    assert all(set(tokens) == {7} for tokens in found[0::5])
    assert all(set(tokens) <= {5, 6, 9} for tokens in found[1::5])
    again = [tokens for tokens, _ in answers(llm, prompts(20, longest=30), params)]
    assert again == found

# SPDX-License-Identifier: Apache-2.0
"""What is sampled with drafts is what would be sampled without them."""

import itertools

import numpy as np
import pytest
import torch
from chi_square import follows

from vllmx.config import ReasoningConfig, SpeculativeConfig
from vllmx.exceptions import UserError
from vllmx.sample import rejection_sampler
from vllmx.sample.rejection_sampler import RejectionSampler, unconditional_to_conditional_rates
from vllmx.sample.sampler import Sampler
from vllmx.sampling_params import SamplingParams
from vllmx.spec_decode.metadata import SpecDecodeMetadata
from vllmx.worker.states import RequestState

VOCAB, DRAFTS, ROWS, STEPS = 6, 2, 1024, 16
START, END = [20, 21], [22, 23]


def config(method: str = "standard", **more) -> SpeculativeConfig:
    return SpeculativeConfig(
        num_speculative_tokens=DRAFTS, method="ngram", rejection_sample_method=method, **more
    )


def make(
    requests: list[tuple[list[int], list[int], SamplingParams]],
    vocab: int,
    speculative: SpeculativeConfig | None = None,
    logprobs_mode: str = "raw_logprobs",
) -> tuple[RejectionSampler, np.ndarray, np.ndarray]:
    """A sampler, and rows and positions of requests (prompt, output, parameters)."""
    states = RequestState(len(requests), 64, vocab, "cpu")
    reasoning = ReasoningConfig(reasoning_start_str="s", reasoning_end_str="e")
    reasoning.initialize_token_ids(START, END)
    sampler = Sampler(states, logprobs_mode, seed=3, reasoning_config=reasoning)
    rows = []
    for i, (prompt, output, params) in enumerate(requests):
        row = states.add_request(str(i), len(prompt), [*prompt, *output], 0)
        sampler.add_request(row, len(prompt), params)
        rows.append(row)
    index = np.array(rows)
    return RejectionSampler(sampler, speculative), index, states.total_len[index] - 1


def metadata(drafts: list[list[int]]) -> SpecDecodeMetadata:
    flat = torch.tensor([token for row in drafts for token in row], dtype=torch.int64)
    return SpecDecodeMetadata.make(flat, np.array([len(row) for row in drafts]))


# ---- the distribution ----


class Chain:
    """A target and a drafter, whose next token depends on the one before."""

    def __init__(self, temperature: float = 1.0, top_k: int = 0) -> None:
        noise = torch.Generator().manual_seed(17)
        self.temperature, self.top_k = temperature, top_k
        self.target = torch.randn(VOCAB, VOCAB, generator=noise) * 1.5
        self.draft = torch.randn(VOCAB, VOCAB, generator=noise).softmax(-1)

    def wanted(self) -> np.ndarray:
        """The distribution of DRAFTS + 1 tokens after token 0, float64, by definition."""
        probs = (self.target.double() / self.temperature).softmax(-1)
        if self.top_k:
            least = probs.sort(descending=True).values[:, self.top_k - 1 : self.top_k]
            probs = torch.where(probs >= least, probs, 0.0)
            probs /= probs.sum(-1, keepdim=True)
        sequences = torch.einsum("a,ab,bc->abc", probs[0], probs, probs)
        return sequences.flatten().numpy(), probs.numpy()


def sequences(chain: Chain, method: str, with_probs: bool, seeded: bool) -> np.ndarray:
    """How often each sequence of DRAFTS + 1 tokens came up; one cut short by a rejection is gone
    on with by the target alone."""
    params = [
        SamplingParams(temperature=chain.temperature, top_k=chain.top_k, seed=i if seeded else None)
        for i in range(ROWS)
    ]
    sampler, rows, _ = make([([0], [], p) for p in params], VOCAB, config(method))
    _, probs = chain.wanted()
    draws = torch.Generator().manual_seed(23)
    going_on = np.random.default_rng(29)
    seen = np.zeros((VOCAB,) * (DRAFTS + 1), dtype=np.int64)
    counts = np.full(ROWS, DRAFTS)
    for step in range(STEPS):
        tokens = [torch.zeros(ROWS, dtype=torch.int64)]
        for _ in range(DRAFTS):
            tokens.append(torch.multinomial(chain.draft[tokens[-1]], 1, generator=draws)[:, 0])
        inputs = torch.stack(tokens, dim=1)
        drafts = SpecDecodeMetadata.make(inputs[:, 1:].flatten(), counts)
        given = chain.draft[inputs[:, :-1]] if with_probs else None
        logits = chain.target[inputs].reshape(-1, VOCAB)
        positions = np.full(ROWS, step * (DRAFTS + 1))
        output = sampler(logits, rows, positions, drafts, given)
        sampled = output.sampled_token_ids.numpy()
        for i in range(1, DRAFTS + 1):
            missing = np.flatnonzero(sampled[:, i] < 0)
            cumulated = probs[sampled[missing, i - 1]].cumsum(-1)
            drawn = going_on.random((len(missing), 1)) < cumulated / cumulated[:, -1:]
            sampled[missing, i] = drawn.argmax(-1)
        np.add.at(seen, tuple(sampled.T), 1)
    return seen.flatten()


CASES = [
    pytest.param(method, with_probs, seeded, id=f"{method}-{probs}-{noise}")
    for method in ("standard", "block")
    for with_probs, probs in ((True, "probs"), (False, "certain"))
    for seeded, noise in ((False, "free"), (True, "seeded"))
]


@pytest.mark.parametrize(("method", "with_probs", "seeded"), CASES)
def test_tokens_follow_the_target_whatever_was_drafted(method, with_probs, seeded) -> None:
    chain = Chain(temperature=0.8)
    assert follows(sequences(chain, method, with_probs, seeded), chain.wanted()[0])


@pytest.mark.parametrize("method", ["standard", "block"])
def test_the_target_is_what_the_filters_leave(method) -> None:
    chain = Chain(temperature=1.3, top_k=3)
    assert follows(sequences(chain, method, True, False), chain.wanted()[0])


def recovered_from_the_target(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rejection_sampler, "residual", lambda probs, tokens, draft_probs: probs)


def every_second_draft_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rejection_sampler, "leading", lambda holds: holds.sum(dim=1))


def accepted_too_readily(patch: pytest.MonkeyPatch) -> None:
    drawn = RejectionSampler._uniform
    patch.setattr(RejectionSampler, "_uniform", lambda *arguments: drawn(*arguments) * 0.8)


def one_number_for_all_drafts(patch: pytest.MonkeyPatch) -> None:
    drawn = RejectionSampler._uniform

    def first(*arguments):
        numbers = drawn(*arguments)
        return numbers[:, :1].expand_as(numbers)

    patch.setattr(RejectionSampler, "_uniform", first)


@pytest.mark.parametrize(
    "plant",
    [
        recovered_from_the_target,
        every_second_draft_counts,
        accepted_too_readily,
        one_number_for_all_drafts,
    ],
)
def test_the_test_sees_a_planted_fault(plant, monkeypatch) -> None:
    plant(monkeypatch)
    chain = Chain(temperature=0.8)
    assert not follows(sequences(chain, "standard", True, False), chain.wanted()[0])


def test_blocks_accept_more_than_single_drafts() -> None:
    chain = Chain()
    noise = torch.Generator().manual_seed(5)
    inputs = torch.zeros(ROWS, DRAFTS + 1, dtype=torch.int64)
    for i in range(DRAFTS):
        probs = chain.draft[inputs[:, i]]
        inputs[:, i + 1] = torch.multinomial(probs, 1, generator=noise)[:, 0]
    drafts = SpecDecodeMetadata.make(inputs[:, 1:].flatten(), np.full(ROWS, DRAFTS))
    accepted = {}
    for method in ("standard", "block"):
        params = SamplingParams(temperature=1.0)
        sampler, rows, positions = make([([0], [], params)] * ROWS, VOCAB, config(method))
        logits = chain.target[inputs].reshape(-1, VOCAB)
        output = sampler(logits, rows, positions, drafts, chain.draft[inputs[:, :-1]])
        accepted[method] = int(output.num_sampled.sum())
    assert accepted["block"] > accepted["standard"]


# ---- greedy requests ----


def test_greedy_requests_say_what_they_say_without_drafts() -> None:
    vocab, noise = 50, torch.Generator().manual_seed(7)
    table = torch.randn(vocab, vocab, generator=noise)
    follower = table.argmax(-1)
    params = SamplingParams(temperature=0.0)
    draw = np.random.default_rng(2)
    for method in ("standard", "block"):
        said = [[int(t)] for t in draw.integers(0, vocab, 8)]
        wanted = [[first[0]] for first in said]
        for row in wanted:
            while len(row) < 40:
                row.append(int(follower[row[-1]]))
        sampler, rows, positions = make([([1], [], params)] * 8, vocab, config(method))
        while min(map(len, said)) < 40:
            drafts = []
            for row in said:
                true = [int(follower[row[-1]])]
                true.append(int(follower[true[-1]]))
                # Right, wrong at some place, cut short or none at all.
                kept = [t if draw.random() < 0.7 else int(draw.integers(vocab)) for t in true]
                drafts.append(kept[: int(draw.integers(0, 3))])
            inputs = [token for r, d in zip(said, drafts, strict=True) for token in (r[-1], *d)]
            output = sampler(table[inputs], rows, positions, metadata(drafts))
            for row, tokens in zip(said, output.sampled_token_ids.tolist(), strict=True):
                row += [token for token in tokens if token >= 0]
        assert [row[:40] for row in said] == wanted


def peaked(*tokens: int, vocab: int = 12) -> torch.Tensor:
    logits = torch.zeros(len(tokens), vocab)
    logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 50.0
    return logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("drafts", "says", "want"),
    [
        ([[1, 2, 3]], [1, 2, 3, 4], [[1, 2, 3, 4]]),
        ([[1, 2, 3]], [1, 5, 3, 4], [[1, 5, -1, -1]]),
        ([[1, 2, 3]], [6, 2, 3, 4], [[6, -1, -1, -1]]),
        ([[]], [7], [[7]]),
        ([[1, 2], [], [4]], [1, 2, 5, 7, 6, 8], [[1, 2, 5], [7, -1, -1], [6, -1, -1]]),
        ([[1, -1, 3]], [1, 2, 3, 4], [[1, 2, -1, -1]]),
        ([[-1]], [1, 2], [[1, -1]]),
    ],
)
@pytest.mark.parametrize("method", ["standard", "block"])
def test_by_hand(temperature, drafts, says, want, method) -> None:
    """A sure target says what it says, whatever was drafted; -1 is never right."""
    params = SamplingParams(temperature=temperature)
    sampler, rows, positions = make([([0], [], params)] * len(drafts), 12, config(method))
    output = sampler(peaked(*says), rows, positions, metadata(drafts))
    assert output.sampled_token_ids.tolist() == want
    assert output.num_sampled.tolist() == [sum(t >= 0 for t in row) for row in want]


def test_greedy_and_random_requests_share_a_batch() -> None:
    greedy, free = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
    sampler, rows, positions = make([([0], [], greedy), ([0], [], free)], 12)
    # The second request's target likes its draft a little less than all: greedy would say 3.
    logits = torch.zeros(4, 12)
    logits[0, 3], logits[1, 4], logits[2, 3], logits[3, 4] = 1.0, 1.0, 0.1, 50.0
    certain = torch.zeros(2, 1, 12)
    certain[:, 0] = 1 / 12
    got = [
        sampler(logits, rows, positions, metadata([[2], [2]]), certain).sampled_token_ids.tolist()
        for _ in range(50)
    ]
    assert all(first == [3, -1] for first, _ in got)
    assert sum(second == [2, 4] for _, second in got) > 40


def test_a_drafter_may_know_fewer_tokens_than_the_target() -> None:
    """What it cannot draft has no probability there, and is all the likelier to be recovered."""
    params = SamplingParams(temperature=1.0)
    sampler, rows, positions = make([([0], [], params)] * 400, 12)
    logits = torch.full((800, 12), -50.0)
    logits[:, 1] = logits[:, 11] = 0.0
    narrow = torch.zeros(400, 1, 4)
    narrow[:, 0, 1] = 1.0
    output = sampler(logits, rows, positions, metadata([[1]] * 400), narrow)
    first = output.sampled_token_ids[:, 0]
    assert 120 < int((first == 11).sum()) < 280
    assert set(first.tolist()) == {1, 11}


def test_a_seeded_request_does_not_notice_its_batch() -> None:
    noise = torch.Generator().manual_seed(4)
    logits = torch.randn(6, 12, generator=noise)
    probs = torch.randn(2, 2, 12, generator=noise).softmax(-1)
    seeded = SamplingParams(temperature=1.0, seed=11)
    other = SamplingParams(temperature=1.0)
    drafts = [[1, 2], [3, 4]]
    sampler, rows, positions = make([([0], [], other), ([0], [], seeded)], 12)
    both = sampler(logits, rows, positions, metadata(drafts), probs).sampled_token_ids[1]
    sampler, rows, positions = make([([0], [], seeded)], 12)
    alone = sampler(logits[3:], rows, positions, metadata(drafts[1:]), probs[1:])
    assert alone.sampled_token_ids[0].tolist() == both.tolist()


# ---- parameters at each draft's place ----


PROMPT, OUTPUT = [1, 2, 3, 20, 21], [4, 5]
DRAFTED = [5, 7, 22, 5]
PARAMETERS = {
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": -0.4, "repetition_penalty": 1.6},
    "bad_words": {"bad_words": [[5, 7], [7, 22, 5], [9], [4, 5, 5, 7]]},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": [6, 8]},
    "allowed": {"allowed_token_ids": [4, 5, 7, 22, 30]},
    "bias": {"logit_bias": {7: 3.0, 9: -2.0}},
    "budget": {"thinking_token_budget": 4},
    "filters": {"top_k": 9, "top_p": 0.8, "min_p": 0.02},
}
PARAMETERS["all"] = {name: value for given in PARAMETERS.values() for name, value in given.items()}


def params_of(given: dict) -> SamplingParams:
    given = dict(given)
    words = given.pop("bad_words", None)
    params = SamplingParams(temperature=0.9, **given)
    params._bad_words_token_ids = words
    params._all_stop_token_ids = set(params.stop_token_ids or ())
    return params


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_draft_is_judged_as_if_those_before_it_were_output(name: str) -> None:
    """Row j of a request's logits is changed as the only row of a request that has said its first
    j drafts already; requests without the parameter stand around it."""
    vocab = 40
    params, plain = params_of(PARAMETERS[name]), SamplingParams(temperature=0.5)
    noise = torch.Generator().manual_seed(8)
    batch = [
        (PROMPT, [], plain),
        (PROMPT, OUTPUT, params),
        ([3], [6], plain),
        (PROMPT, [4], params),
    ]
    sampler, rows, positions = make(batch, vocab)
    drafts = metadata([[4], DRAFTED, [], DRAFTED[:2]])
    logits = torch.randn(len(drafts.requests), vocab, generator=noise)
    places = positions[drafts.requests] + drafts.local_pos
    got = sampler.sampler.apply_sampling_params(
        logits, rows[drafts.requests], places, drafts=drafts
    )
    wanted = []
    for i, (prompt, output, given) in enumerate(batch):
        for j in range(int(drafts.num_draft_tokens[i]) + 1):
            said = [*output, *drafts.draft_token_ids[i, :j].tolist()]
            alone, row, position = make([(prompt, said, given)], vocab)
            here = logits[len(wanted)].unsqueeze(0)
            wanted.append(alone.sampler.apply_sampling_params(here, row, position)[0])
    torch.testing.assert_close(got, torch.stack(wanted), rtol=0, atol=2e-6)


@pytest.mark.parametrize("says", [[5, 7, 22, 5, 9], [5, 8, 22, 5, 9]], ids=["all", "one"])
def test_what_was_accepted_counts_in_the_next_step(says: list[int]) -> None:
    vocab = 40
    params = params_of(PARAMETERS["penalties"] | PARAMETERS["budget"])
    params.temperature = 0.0
    sampler, rows, positions = make([([3], [6], params), (PROMPT, OUTPUT, params)], vocab)
    budget_free = peaked(1, *says, vocab=vocab)
    output = sampler(budget_free, rows, positions, metadata([[], DRAFTED]))
    said = [token for token in output.sampled_token_ids[1].tolist() if token >= 0]
    fresh, fresh_rows, _ = make([([3], [6, 1], params), (PROMPT, OUTPUT + said, params)], vocab)
    for name in ("output_counts", "prompt_mask"):
        mine = getattr(sampler.sampler.penalties_state, name)
        assert torch.equal(mine[rows], getattr(fresh.sampler.penalties_state, name)[fresh_rows])
    mine, theirs = sampler.sampler.thinking_budget_state, fresh.sampler.thinking_budget_state
    assert torch.equal(mine.table[rows], theirs.table[fresh_rows])


def test_no_draft_evades_the_minimum_of_tokens() -> None:
    """The drafted end comes too early by one token, and in its place it may stand."""
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[6])
    params._all_stop_token_ids = {6}
    sampler, rows, positions = make([([1], [], params)] * 2, 12)
    logits = peaked(3, 6, 9, 3, 3, 6)
    logits[1, 5] = 20.0
    output = sampler(logits, rows, positions, metadata([[3, 6], [3, 3]]))
    assert output.sampled_token_ids.tolist() == [[3, 5, -1], [3, 3, 6]]


# ---- log-probabilities ----


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits"])
def test_logprobs_are_of_the_tokens_that_were_sampled(mode: str) -> None:
    params = SamplingParams(temperature=0.5, logprobs=2)
    batch = [([0], [], params), ([0], [], SamplingParams(temperature=0.0)), ([0], [], params)]
    sampler, rows, positions = make(batch, 12, logprobs_mode=mode)
    logits = peaked(1, 2, 5, 7, 8, 4, 3) / 5
    output = sampler(logits, rows, positions, metadata([[1, 2], [9], [4]]))
    lists = output.logprobs
    assert output.sampled_token_ids.tolist() == [[1, 2, 5], [7, -1, -1], [4, 3, -1]]
    assert lists.cu_num_generated_tokens == [0, 3, 4, 6]
    divisor = {"raw_logprobs": 1.0, "processed_logprobs": 0.5}.get(mode)
    temperatures = torch.tensor([1, 1, 1, 0, 0, 1, 1])
    for request, sampled in enumerate(([1, 2, 5], [7], [4, 3])):
        mine = lists.slice_request(request, len(sampled))
        assert mine.logprob_token_ids[:, 0].tolist() == sampled
        assert mine.logprob_token_ids.shape[1] == 3
        assert mine.sampled_token_ranks.tolist() == [1] * len(sampled)
        first = [0, 3, 5][request]
        values = logits[first : first + len(sampled)]
        if divisor is not None:
            drawn = temperatures[first : first + len(sampled)].unsqueeze(1)
            values = (values / torch.where(drawn == 1, divisor, 1.0)).log_softmax(-1)
        want = values[torch.arange(len(sampled)), torch.tensor(sampled)].numpy()
        np.testing.assert_allclose(mine.logprobs[:, 0], want, atol=1e-5)


def test_no_logprobs_unless_somebody_asks() -> None:
    sampler, rows, positions = make([([0], [], SamplingParams(temperature=0.0))], 12)
    assert sampler(peaked(1, 2), rows, positions, metadata([[1]])).logprobs is None


# ---- acceptance at given rates ----


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_synthetic_rates_are_met_whatever_was_drafted(temperature: float) -> None:
    rates = [0.8, 0.3]
    params = SamplingParams(temperature=temperature)
    speculative = config("synthetic", synthetic_acceptance_rates=rates)
    sampler, rows, positions = make([([0], [], params)] * 4000, 12, speculative)
    logits = torch.randn(12_000, 12, generator=torch.Generator().manual_seed(1))
    output = sampler(logits, rows, positions, metadata([[1, 2]] * 4000))
    for i, rate in enumerate(rates):
        # Five standard deviations of a rate that 4,000 draws estimate are at most 0.04.
        assert abs(float((output.num_sampled > i + 1).float().mean()) - rate) < 0.04


def test_rates_given_what_came_before() -> None:
    assert unconditional_to_conditional_rates([0.9, 0.45, 0.0, 0.0]) == [0.9, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "exactly one of"),
        ({"synthetic_acceptance_rates": [1, 0.5], "synthetic_acceptance_length": 2}, "exactly one"),
        ({"synthetic_acceptance_rates": [0.5]}, "must be 2 numbers"),
        ({"synthetic_acceptance_rates": [0.5, 0.6]}, "none larger"),
        ({"synthetic_acceptance_rates": [1.5, 0.6]}, r"in \[0, 1\]"),
        ({"synthetic_acceptance_length": 3.5}, r"must be in \[1, 3\]"),
        ({"synthetic_acceptance_length": 0.5}, r"must be in \[1, 3\]"),
        ({"rejection_sample_method": "block", "synthetic_acceptance_length": 2}, "only valid"),
    ],
)
def test_rates_that_mean_nothing_are_refused(given: dict, words: str) -> None:
    given = {"rejection_sample_method": "synthetic", **given}
    with pytest.raises(UserError, match=words):
        SpeculativeConfig(num_speculative_tokens=2, method="ngram", **given)


def test_a_mean_length_becomes_rates() -> None:
    made = config("synthetic", synthetic_acceptance_length=2.6)
    assert made.synthetic_acceptance_rates == pytest.approx([1.0, 0.6])


# ---- where drafts lie ----


def test_the_rows_of_logits() -> None:
    drafts = metadata([[5, 6], [], [7]])
    assert drafts.draft_token_ids.tolist() == [[5, 6], [-1, -1], [7, -1]]
    assert drafts.requests.tolist() == [0, 0, 0, 1, 2, 2]
    assert drafts.local_pos.tolist() == [0, 1, 2, 0, 0, 1]
    assert drafts.first_logits_indices.tolist() == [0, 3, 4]
    assert drafts.bonus_logits_indices.tolist() == [2, 3, 5]
    tokens, before = drafts.drafts_before(np.array([1, 2, 5]))
    kept = [
        list(itertools.compress(*row)) for row in zip(tokens.tolist(), before.tolist(), strict=True)
    ]
    assert kept == [[5], [5, 6], [7]]

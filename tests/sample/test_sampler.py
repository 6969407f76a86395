# SPDX-License-Identifier: Apache-2.0
"""The sampler on logits made by hand: greedy, filters, penalties, masks, seeds, logprobs."""

import math
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch

from vllmx.sample.gumbel import seeded_noise
from vllmx.sample.sampler import Sampler, SamplerOutput
from vllmx.sample.topk_topp import apply_top_k_top_p
from vllmx.sampling_params import SamplingParams
from vllmx.worker.states import RequestState

VOCAB = 32


class Batch:
    """A sampler with one row for each SamplingParams."""

    def __init__(self, *params: SamplingParams, prompt=(1, 2, 3), output=(), mode="raw_logprobs"):
        self.states = RequestState(8, 64, VOCAB, "cpu")
        self.sampler = Sampler(self.states, mode, seed=0)
        self.rows = []
        tokens = [*prompt, *output]
        for i, p in enumerate(params):
            row = self.states.add_request(f"r{i}", len(prompt), tokens, 0)
            self.sampler.add_request(row, len(prompt), p)
            self.rows.append(row)
        self.positions = np.full(len(params), len(tokens) - 1, dtype=np.int64)

    def __call__(self, logits: torch.Tensor, positions: np.ndarray | None = None) -> SamplerOutput:
        positions = self.positions if positions is None else positions
        return self.sampler(logits, np.array(self.rows), positions)

    def processed(self, logits: torch.Tensor) -> torch.Tensor:
        return self.sampler.apply_sampling_params(logits, np.array(self.rows), self.positions)


def greedy(**more) -> SamplingParams:
    return SamplingParams(temperature=0.0, **more)


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def draws(params: SamplingParams, logits: torch.Tensor, count: int) -> Counter:
    batch = Batch(*[params] * 8)
    rows = logits.repeat(8, 1)
    return Counter(t for _ in range(count // 8) for t in batch(rows).sampled_token_ids.tolist())


def test_greedy_takes_the_lowest_id_among_ties_alone_and_in_a_mixed_batch() -> None:
    logits = torch.full((2, VOCAB), -1.0)
    logits[:, 7] = logits[:, 9] = 1.0
    assert Batch(greedy())(logits[:1]).sampled_token_ids.tolist() == [7]
    mixed = Batch(greedy(top_p=0.5, top_k=3), SamplingParams(temperature=1.0, seed=1))
    assert mixed(logits).sampled_token_ids[0] == 7


def test_top_k_one_at_temperature_one_takes_a_largest_logit() -> None:
    logits = random_logits(1)
    assert set(draws(SamplingParams(top_k=1), logits, 64)) == {int(logits.argmax())}


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_top_k_one_takes_one_of_the_largest_logits_alone_and_beside_others(top_p: float) -> None:
    logits = torch.full((3, VOCAB), -1.0)
    logits[:, [7, 9]] = 1.0
    for seed in (None, *range(100)):
        only = SamplingParams(top_k=1, top_p=top_p, seed=seed)
        assert Batch(only)(logits[:1]).sampled_token_ids[0] in (7, 9)
        mixed = Batch(greedy(), only, SamplingParams(temperature=1.5, seed=seed))
        first, second, _ = mixed(logits).sampled_token_ids.tolist()
        assert first == 7 and second in (7, 9)


def test_masked_greedy_row_beside_a_random_row_is_as_alone() -> None:
    logits = random_logits(2)
    allowed = greedy(allowed_token_ids=[4, 5, 6], logprobs=3)
    alone = Batch(allowed)(logits[:1])
    beside = Batch(allowed, SamplingParams(temperature=1.0, top_p=0.9, logprobs=3))(logits)
    assert alone.sampled_token_ids[0] == beside.sampled_token_ids[0]
    assert np.isfinite(beside.logprobs.logprobs).all()


@pytest.mark.parametrize("seed", [1, -5, 2**63 - 1])
def test_a_seeded_row_does_not_depend_on_its_neighbours(seed: int) -> None:
    logits = random_logits(3)
    mine = SamplingParams(temperature=0.8, seed=seed)
    other = SamplingParams(temperature=1.5, top_p=0.8)
    alone = Batch(mine)(logits[:1]).sampled_token_ids[0]
    first = Batch(mine, other, greedy())(logits).sampled_token_ids[0]
    last = Batch(other, other, mine)(logits.flip(0)).sampled_token_ids[2]
    assert alone == first == last


def test_a_seeded_row_changes_with_position_and_seed() -> None:
    logits = torch.zeros(1, VOCAB)
    batch = Batch(SamplingParams(seed=3))
    at = {int(batch(logits, np.array([p])).sampled_token_ids[0]) for p in range(20)}
    by_seed = {int(Batch(SamplingParams(seed=s))(logits).sampled_token_ids[0]) for s in range(20)}
    assert len(at) > 5 and len(by_seed) > 5


def test_seeded_noise_is_the_stream_of_tritons_philox() -> None:
    from triton_noise import noise_kernel

    out = torch.empty(64)
    noise_kernel[(1,)](out, 1234567890123, 42, 64)
    seeds, positions = torch.tensor([[1234567890123]]), torch.tensor([[42]])
    got = seeded_noise(seeds, positions, torch.arange(64).unsqueeze(0))[0]
    torch.testing.assert_close(got, out, rtol=1e-5, atol=1e-6)


def test_seeded_draws_follow_the_distribution_too() -> None:
    logits = random_logits(1, seed=5) / 2
    batch, rows = Batch(*[SamplingParams(seed=9)] * 8), logits.repeat(8, 1)
    seen = Counter()
    for first in range(0, 4_000, 8):
        seen.update(batch(rows, np.arange(first, first + 8)).sampled_token_ids.tolist())
    probs = logits[0].double().softmax(-1)
    for token, probability in enumerate(probs.tolist()):
        error = 5 * math.sqrt(4_000 * probability) + 5
        assert abs(seen[token] - 4_000 * probability) < error


def test_top_k_and_top_p_rows_are_filtered_each_by_its_own() -> None:
    logits = random_logits(3)
    out = apply_top_k_top_p(
        logits.clone(), torch.tensor([3, VOCAB, 2]), torch.tensor([1.0, 0.5, 1.0])
    )
    kept = (out > float("-inf")).sum(dim=1).tolist()
    assert kept[0] == 3 and kept[2] == 2
    probs = logits[1].softmax(-1).sort(descending=True).values
    assert kept[1] == int((probs.cumsum(0) < 0.5).sum()) + 1


def test_a_tiny_top_p_keeps_the_likeliest_token() -> None:
    logits = random_logits(1)
    out = apply_top_k_top_p(logits.clone(), None, torch.tensor([1e-6]))
    assert (out > float("-inf")).nonzero().tolist() == [[0, int(logits.argmax())]]


def test_penalties_count_output_tokens_and_repetition_the_prompt_too() -> None:
    params = greedy(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    batch = Batch(params, prompt=(1, 2), output=(3, 3))
    logits = torch.ones(1, VOCAB)
    logits[0, 2] = -1.0
    out = batch.processed(logits)[0]
    assert out[1] == pytest.approx(0.5)  # prompt: repetition halves a positive logit
    assert out[2] == pytest.approx(-2.0)  # and doubles a negative one
    assert out[3] == pytest.approx(0.5 - 0.5 - 2 * 0.25)  # output, twice
    assert out[4] == 1.0


def test_penalties_count_what_was_sampled_since() -> None:
    batch = Batch(greedy(frequency_penalty=1.0))
    logits = torch.zeros(1, VOCAB)
    logits[0, 8] = 1.5
    assert batch(logits).sampled_token_ids.tolist() == [8]
    assert batch.processed(logits)[0, 8] == pytest.approx(0.5)


def test_allowed_ids_bias_and_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 4.0
    assert Batch(greedy(allowed_token_ids=[7, 9]))(logits).sampled_token_ids.tolist() == [7]
    assert Batch(greedy(logit_bias={9: 100.0}))(logits).sampled_token_ids.tolist() == [9]
    assert Batch(greedy(logit_bias={5: -100.0}))(logits).sampled_token_ids.tolist() == [0]
    stopping = greedy(stop_token_ids=[5], min_tokens=2)
    assert Batch(stopping)(logits).sampled_token_ids.tolist() == [0]
    assert Batch(stopping, output=(6,))(logits).sampled_token_ids.tolist() == [0]
    assert Batch(stopping, output=(6, 6))(logits).sampled_token_ids.tolist() == [5]


@pytest.mark.parametrize(
    ("output", "banned"),
    [((), False), ((5, 6), True), ((9, 5, 6), True), ((6,), False), ((5, 7, 6), False)],
)
def test_bad_word_is_banned_only_after_its_beginning(output: tuple, banned: bool) -> None:
    params = greedy()
    params._bad_words_token_ids = [[5, 6, 7]]
    # The word's beginning in the prompt does not count: only generated tokens do.
    batch = Batch(params, prompt=(5, 6), output=output)
    logits = torch.zeros(1, VOCAB)
    assert math.isinf(batch.processed(logits)[0, 7]) == banned


def test_raw_logprobs_do_not_depend_on_the_parameters() -> None:
    logits = random_logits(1)
    want = logits.log_softmax(-1)[0]
    for params in (
        greedy(logprobs=5),
        SamplingParams(temperature=0.1, logprobs=5),
        SamplingParams(temperature=2.0, logprobs=5, seed=1),
        SamplingParams(top_k=1, logprobs=5),
        greedy(repetition_penalty=2.0, logit_bias={3: 5.0}, logprobs=5),
    ):
        out = Batch(params)(logits).logprobs
        ids = out.logprob_token_ids[0, 1:]
        np.testing.assert_array_equal(ids, logits.topk(5).indices[0])
        np.testing.assert_allclose(out.logprobs[0, 1:], want[ids.tolist()], rtol=1e-5)


def test_processed_logprobs_show_the_changes() -> None:
    logits = random_logits(1)
    out = Batch(greedy(allowed_token_ids=[1, 2], logprobs=2), mode="processed_logprobs")(logits)
    pair = logits[0, 1:3].log_softmax(-1)
    np.testing.assert_allclose(
        sorted(out.logprobs.logprobs[0, 1:]), sorted(pair.tolist()), rtol=1e-5
    )


def test_rank_is_one_for_the_best_and_counts_larger_logprobs() -> None:
    logits = random_logits(1)
    worst = int(logits.argmin())
    out = Batch(greedy(allowed_token_ids=[worst], logprobs=0))(logits).logprobs
    assert out.sampled_token_ranks.tolist() == [VOCAB]
    assert out.logprob_token_ids.tolist() == [[worst]]
    best = Batch(greedy(logprobs=0))(logits).logprobs
    assert best.sampled_token_ranks.tolist() == [1]


def test_all_logprobs_and_named_ones() -> None:
    logits = random_logits(1)
    out = Batch(greedy(logprobs=-1))(logits).logprobs
    assert out.logprobs.shape == (1, VOCAB + 1)
    named = Batch(greedy(logprob_token_ids=[30, 2]))(logits).logprobs
    assert named.logprob_token_ids[0, 1:].tolist() == [30, 2]
    np.testing.assert_allclose(named.logprobs[0, 1:], logits.log_softmax(-1)[0, [30, 2]], rtol=1e-5)


def test_a_row_used_again_forgets_the_request_before() -> None:
    batch = Batch(greedy(logit_bias={9: 100.0}, frequency_penalty=2.0, logprobs=3))
    batch(torch.zeros(1, VOCAB))
    batch.states.remove_request("r0")
    row = batch.states.add_request("new", 1, [1], 0)
    assert row == batch.rows[0]
    batch.sampler.add_request(row, 1, greedy())
    logits = torch.zeros(1, VOCAB)
    logits[0, 4] = 1.0
    out = batch(logits)
    assert out.sampled_token_ids.tolist() == [4] and out.logprobs is None


def test_lists_of_a_batch_are_packed_anew_when_one_of_its_rows_is_given_away() -> None:
    """Neither the number of rows nor their order tells that one is another request's now."""
    batch = Batch(*[greedy(logit_bias={i: 50.0}, logprob_token_ids=[i]) for i in (4, 5)])
    logits = torch.zeros(2, VOCAB)
    assert batch(logits).sampled_token_ids.tolist() == [4, 5]
    batch.sampler.add_request(batch.rows[0], 3, greedy(logprobs=1))
    logits[0, 9] = 1.0
    out = batch(logits)
    assert out.sampled_token_ids.tolist() == [9, 5]
    assert out.logprobs.logprob_token_ids[1].tolist() == [5, 5]


def test_sixteen_bad_words_of_all_lengths_hold_for_each_row_alone() -> None:
    rng = np.random.default_rng(3)
    outputs = rng.integers(0, 6, (4, 8)).tolist()
    words = [
        [rng.integers(0, 6, n).tolist() for n in range(1, 5) for _ in range(4)] for _ in outputs
    ]
    states = RequestState(4, 64, VOCAB, "cpu")
    sampler = Sampler(states, "raw_logprobs", seed=0)
    for i, output in enumerate(outputs):
        params = greedy()
        params._bad_words_token_ids = words[i]
        states.add_request(f"r{i}", 2, [1, 2, *output], 0)
        sampler.add_request(states.req_id_to_index[f"r{i}"], 2, params)
    rows = np.array([states.req_id_to_index[f"r{i}"] for i in range(4)])
    got = sampler.apply_sampling_params(torch.zeros(4, VOCAB), rows, np.full(4, 9))
    for i, output in enumerate(outputs):
        want = {w[-1] for w in words[i] if w[:-1] == output[len(output) - len(w) + 1 :]}
        assert set((got[i] == float("-inf")).nonzero().flatten().tolist()) == want


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_logits_are_returned_as_they_are_and_as_they_were_changed(mode: str) -> None:
    logits = random_logits(1)
    out = Batch(greedy(logit_bias={3: 50.0}, logprobs=2), mode=mode)(logits).logprobs
    want = logits[0] + (torch.arange(VOCAB) == 3) * 50.0 if mode[0] == "p" else logits[0]
    np.testing.assert_array_equal(out.logprob_token_ids[0, 1:], want.topk(2).indices)
    np.testing.assert_array_equal(out.logprobs[0], want[out.logprob_token_ids[0]])


def test_noise_in_float64_draws_the_same_distribution_and_other_numbers() -> None:
    seeds, positions, ids = torch.tensor([[7]]), torch.tensor([[3]]), torch.arange(4000)[None]
    wide = seeded_noise(seeds, positions, ids, use_fp64=True)
    narrow = seeded_noise(seeds, positions, ids)
    assert wide.dtype == torch.float64 and narrow.dtype == torch.float32
    # Gumbel: mean 0.5772, variance pi^2 / 6.
    for noise in (wide, narrow):
        assert float(noise.mean()) == pytest.approx(0.5772, abs=5 * 1.2825 / 4000**0.5)
        assert float(noise.var()) == pytest.approx(math.pi**2 / 6, rel=0.15)


@pytest.mark.parametrize("params", [greedy(), SamplingParams(), SamplingParams(seed=1)], ids=str)
@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_a_row_without_a_possible_token_harms_nobody(params, value: float) -> None:
    logits = random_logits(2)
    logits[0] = value
    out = Batch(params, greedy(logprobs=2))(logits)
    assert 0 <= int(out.sampled_token_ids[0]) < VOCAB
    assert out.sampled_token_ids[1] == logits[1].argmax()


def test_tied_tokens_share_the_larger_rank() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [3, 5]] = 1.0
    out = Batch(greedy(logprobs=0))(logits).logprobs
    assert out.sampled_token_ranks.tolist() == [2]


def test_first_seeded_token_imports_nothing_large():
    """torch.broadcast_shapes loads SymPy, which made the first token of an engine a second late."""
    code = (
        "import sys, torch\n"
        "from vllmx.sample.gumbel import gumbel_sample\n"
        "one = torch.ones(1)\n"
        "args = one, one.long(), one.bool(), one.long(), torch.Generator()\n"
        "before = set(sys.modules)\n"
        "gumbel_sample(torch.zeros(1, 8), *args)\n"
        "print(sorted(set(sys.modules) - before))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

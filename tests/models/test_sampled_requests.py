# SPDX-License-Identifier: Apache-2.0
"""A request says the same whatever runs beside it, and its log-probabilities are those of the
whole vocabulary; through an engine over a tiny model."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
from checkpoints import VOCAB, build_engine, save_tiny

from vllmx import LLM, SamplingParams

PROMPT = [5, 9, 13, 40, 7, 11, 3, 90]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sampled") / "llama"
    save_tiny("llama", path)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> LLM:
    return build_engine(folder, max_logprobs=-1)


def tokens_of(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]


def sampled(**more) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.8, "max_tokens": 16, "ignore_eos": True, **more})


SEEDED = {
    "plain": sampled(seed=42),
    "filtered": sampled(seed=42, top_k=30, top_p=0.9, min_p=0.01),
    "penalised": sampled(
        seed=42, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2
    ),
}


def with_bad_words() -> SamplingParams:
    """Greedy, with words of two and three tokens that a greedy answer would say."""
    params = sampled(temperature=0.0, logit_bias={20: 9.0, 21: 9.0}, frequency_penalty=0.3)
    params._bad_words_token_ids = [[20, 21], [21, 20, 20], [22]]
    return params


@pytest.mark.parametrize("kind", [*SEEDED, "bad words"])
@pytest.mark.parametrize(
    ("happens", "settings"),
    [
        ("beside others", {}),
        ("in parts", {"max_num_batched_tokens": 5, "max_num_seqs": 4}),
        ("preempted", {"num_gpu_blocks_override": 5, "max_model_len": 48}),
    ],
)
def test_a_request_does_not_depend_on_what_runs_beside_it(
    folder: Path, engine: LLM, kind: str, happens: str, settings: dict
) -> None:
    mine = SEEDED[kind] if kind in SEEDED else with_bad_words()
    want = tokens_of(engine, [PROMPT], [mine])[0]
    llm = build_engine(folder, **settings) if settings else engine
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []
    scheduler._preempt_request = lambda request, *args: (
        preempted.append(request.request_id),
        preempt(request, *args),
    )[1]
    rng = random.Random(3)
    for count, place in ((0, 0), (1, 0), (1, 1), (3, 3), (3, 1)):
        others = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 30))] for _ in range(3)]
        prompts, params = others[:count], [sampled() for _ in range(count)]
        prompts.insert(place, PROMPT)
        params.insert(place, mine)
        assert tokens_of(llm, prompts, params)[place] == want, (count, place)
    scheduler._preempt_request = preempt
    assert bool(preempted) == (happens == "preempted")


def test_bad_words_are_not_said_though_the_logits_want_them(engine: LLM) -> None:
    ((said,),) = tokens_of(engine, [PROMPT], [with_bad_words()])
    pairs = list(pairwise(said))
    triples = [(*pair, third) for pair, third in zip(pairs, said[2:])]
    assert {20, 21} & set(said) and 22 not in said
    assert (20, 21) not in pairs and (21, 20, 20) not in triples
    free = with_bad_words()
    free._bad_words_token_ids = None
    ((freely,),) = tokens_of(engine, [PROMPT], [free])
    assert said != freely


def test_without_a_seed_answers_vary(engine: LLM) -> None:
    for seed in (None, -1):
        params = [sampled(temperature=2.0, seed=seed) for _ in range(6)]
        assert len({str(answer) for answer in tokens_of(engine, [PROMPT] * 6, params)}) > 1


def test_answers_of_one_seed_differ_and_do_not_depend_on_their_number(engine: LLM) -> None:
    def answers(n: int) -> list[list[int]]:
        return tokens_of(engine, [PROMPT], [sampled(temperature=1.2, seed=7, n=n)])[0]

    four = answers(4)
    assert answers(4) == four and answers(2) == four[:2]
    assert len({str(answer) for answer in four}) > 1


@pytest.mark.parametrize("count", [0, 2])
def test_logprobs_hold_the_chosen_token_and_the_best_with_their_ranks(
    engine: LLM, count: int
) -> None:
    params = {"temperature": 1.5, "seed": 3, "max_tokens": 30}
    (few,) = engine.generate([PROMPT], sampled(**params, logprobs=count), use_tqdm=False)
    (all_,) = engine.generate([PROMPT], sampled(**params, logprobs=-1), use_tqdm=False)
    assert few.outputs[0].token_ids == all_.outputs[0].token_ids
    outside = 0
    for chosen, entries, whole in zip(
        few.outputs[0].token_ids, few.outputs[0].logprobs, all_.outputs[0].logprobs, strict=True
    ):
        assert len(whole) == VOCAB
        values = {token: entry.logprob for token, entry in whole.items()}
        best = sorted(values, key=lambda token: -values[token])[:count]
        assert set(entries) == {chosen, *best}
        outside += chosen not in best
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(values[token], abs=1e-4)
            above = sum(value >= values[token] for value in values.values())
            assert entry.rank == above
    assert outside > 0


@pytest.mark.parametrize("length", [31, 32, 33, 48])
def test_prompt_logprobs_are_whole_and_the_same_with_a_cached_prompt(
    folder: Path, length: int
) -> None:
    rng = random.Random(length)
    prompt = [rng.randrange(3, VOCAB) for _ in range(length)]
    asked = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)
    plain = SamplingParams(temperature=0.0, max_tokens=2)
    cached, uncached = (
        build_engine(folder, enable_prefix_caching=caching, block_size=16)
        for caching in (True, False)
    )
    cached.generate([prompt], plain, use_tqdm=False)
    (want,) = uncached.generate([prompt], asked, use_tqdm=False)
    for _ in range(2):
        (got,) = cached.generate([prompt], asked, use_tqdm=False)
        assert got.num_cached_tokens == 0
        assert len(got.prompt_logprobs) == length and got.prompt_logprobs[0] is None
        for mine, other in zip(got.prompt_logprobs[1:], want.prompt_logprobs[1:], strict=True):
            assert mine.keys() == other.keys()
            for token, entry in mine.items():
                assert entry.logprob == pytest.approx(other[token].logprob, abs=1e-4)
    (again,) = cached.generate([prompt], plain, use_tqdm=False)
    assert again.num_cached_tokens == (length - 1) // 16 * 16

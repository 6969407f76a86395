# SPDX-License-Identifier: Apache-2.0
"""What a request may ask of the sampler, through a whole engine over a tiny model."""

import random

import pytest
import torch
from checkpoints import POOL_BYTES, VOCAB, build_engine, save_tiny

from vllmx import LLM, BeamSearchParams, SamplingParams
from vllmx.config import ReasoningConfig, finalize
from vllmx.engine.arg_utils import engine_args_to_config
from vllmx.exceptions import UserError, VLLMValidationError
from vllmx.metrics import reader
from vllmx.sample.logits_processor import AdapterLogitsProcessor
from vllmx.sampling_params import RepetitionDetectionParams

PROMPT = [5, 9, 13, 40, 7]


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple:
    """(folder, transformers model)."""
    folder = tmp_path_factory.mktemp("sampling") / "llama"
    return folder, save_tiny("llama", folder)


class OnlyTokens(AdapterLogitsProcessor):
    """Allows extra_args["only"], one a position."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if (sampling_params.extra_args or {}).get("only") == []:
            raise ValueError("only is empty")

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params):
        only = (params.extra_args or {}).get("only")
        if only is None:
            return None

        def processor(output_ids, logits):
            masked = torch.full_like(logits, float("-inf"))
            masked[only[len(output_ids)]] = 0.0
            return masked

        return processor


@pytest.fixture(scope="module")
def engine(llama) -> LLM:
    return LLM(
        str(llama[0]),
        skip_tokenizer_init=True,
        num_threads=1,
        use_tqdm_on_load=False,
        logits_processors=[OnlyTokens],
        max_logprobs=-1,
        disable_log_stats=False,
        max_num_seqs=32,
        block_size=4,
        kv_cache_memory_bytes=POOL_BYTES,
    )


def token_ids(output) -> list[list[int]]:
    return [list(answer.token_ids) for answer in output.outputs]


def run(llm: LLM, *params: SamplingParams) -> list:
    return llm.generate([PROMPT] * len(params), list(params), use_tqdm=False)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_beams_are_those_of_a_search_over_transformers(llama, engine, ignore_eos: bool) -> None:
    width, steps, end = 3, 4, 2

    @torch.inference_mode()
    def logprobs(tokens: list[int]) -> torch.Tensor:
        return llama[1](torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1)

    beams, done = [(0.0, PROMPT)], []
    for _ in range(steps):
        grown = []
        for total, tokens in beams:
            best = logprobs(tokens).topk(2 * width)
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                ended = token == end and not ignore_eos
                (done if ended else grown).append((total + value, [*tokens, token]))
        beams = sorted(grown, reverse=True)[:width]
    want = sorted([*done, *beams], key=lambda b: -b[0] / (len(b[1]) - (b[1][-1] == end)))
    params = BeamSearchParams(beam_width=width, max_tokens=steps, ignore_eos=ignore_eos)
    first, second = engine.beam_search([PROMPT, [3]], params, concurrency_limit=1)
    assert [beam.tokens for beam in first.sequences] == [tokens for _, tokens in want[:width]]
    for beam, (total, _) in zip(first.sequences, want, strict=False):
        assert beam.cum_logprob == pytest.approx(total, abs=2e-2)  # packed weights are rounded
    assert all(beam.tokens[0] == 3 for beam in second.sequences)


def test_a_search_wider_than_logprobs_allow_is_refused(llama) -> None:
    llm = build_engine(llama[0])
    with pytest.raises(VLLMValidationError, match=r"beam_width=11 is .* max_logprobs=22"):
        llm.beam_search([PROMPT], BeamSearchParams(beam_width=11, max_tokens=2))
    with pytest.raises(TypeError, match="must be BeamSearchParams, got SamplingParams"):
        llm.beam_search([PROMPT], SamplingParams(max_tokens=2))
    with pytest.raises(UserError, match="disable_log_stats=False"):
        llm.get_metrics()


def test_processors_of_an_engine_and_of_a_request(engine) -> None:
    greedy = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True}
    plain, only = run(
        engine,
        SamplingParams(**greedy),
        SamplingParams(**greedy, extra_args={"only": [7, 8, 9]}),
    )
    assert token_ids(only) == [[7, 8, 9]]
    assert token_ids(plain) == token_ids(run(engine, SamplingParams(**greedy))[0])
    with pytest.raises(ValueError, match="only is empty"):
        run(engine, SamplingParams(extra_args={"only": []}))


def test_processors_follow_requests_that_overtake_each_other(engine) -> None:
    rng = random.Random(1)
    params, want = [], []
    for _ in range(60):
        tokens = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 9))]
        asked = rng.random() < 0.7
        params.append(
            SamplingParams(
                max_tokens=len(tokens),
                ignore_eos=True,
                seed=rng.randrange(1000),
                extra_args={"only": tokens} if asked else None,
            )
        )
        want.append([tokens] if asked else None)
    for output, expected in zip(run(engine, *params), want, strict=True):
        assert expected is None or token_ids(output) == expected


def test_answers_share_the_blocks_of_their_prompt(engine) -> None:
    prompt = [random.Random(2).randrange(3, VOCAB) for _ in range(41)]
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    engine.enqueue([prompt], SamplingParams(n=8, max_tokens=3, seed=1, ignore_eos=True))
    engine.llm_engine.step()
    # 10 blocks of 4 tokens for the prompt, then one of each answer's own.
    assert free - pool.get_num_free_blocks() == 10 + 8
    (output,) = engine.wait_for_completion(use_tqdm=False)
    assert len(output.outputs) == 8 and len({tuple(t) for t in token_ids(output)}) > 1
    assert pool.get_num_free_blocks() == free


def test_what_is_queued_runs_when_it_is_waited_for(engine) -> None:
    first = engine.enqueue(PROMPT, SamplingParams(max_tokens=1))
    second = engine.enqueue([[3, 4], [5]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len({*first, *second}) == 3
    outputs = engine.wait_for_completion(use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [PROMPT, [3, 4], [5]]
    assert engine.wait_for_completion(use_tqdm=False) == []
    with pytest.raises(TypeError, match="output_type"):
        engine.wait_for_completion(int, use_tqdm=False)


def test_metrics_are_read_as_they_stand(engine) -> None:
    def value(name: str):
        return next(m for m in engine.get_metrics() if m.name == name)

    before = value("vllm:generation_tokens")
    run(engine, SamplingParams(max_tokens=5, ignore_eos=True))
    after = value("vllm:generation_tokens")
    assert isinstance(after, reader.Counter) and after.value == before.value + 5
    assert after.labels["engine"] == "0"
    assert value("vllm:num_requests_running").value == 0.0
    seconds = value("vllm:e2e_request_latency_seconds")
    assert isinstance(seconds, reader.Histogram) and seconds.count == seconds.buckets["+Inf"] > 0
    assert all(m.name.startswith("vllm:") for m in engine.get_metrics())


def test_named_and_all_logprobs_come_back_whole(engine) -> None:
    everything, named = run(
        engine,
        SamplingParams(temperature=0.0, max_tokens=2, logprobs=-1, prompt_logprobs=-1),
        SamplingParams(
            temperature=0.0, max_tokens=2, logprob_token_ids=[11, 3], flat_logprobs=True
        ),
    )
    answer = everything.outputs[0]
    assert [len(position) for position in answer.logprobs] == [VOCAB, VOCAB]
    assert [p and len(p) for p in everything.prompt_logprobs] == [None, *[VOCAB] * 4]
    for chosen, position, whole in zip(
        named.outputs[0].token_ids, named.outputs[0].logprobs, answer.logprobs, strict=True
    ):
        assert set(position) == {chosen, 11, 3}
        for token, entry in position.items():
            assert entry.logprob == pytest.approx(whole[token].logprob, abs=1e-4)


def test_repetition_ends_an_answer(engine) -> None:
    params = SamplingParams(
        max_tokens=20,
        extra_args={"only": [7, 8] * 10},
        repetition_detection=RepetitionDetectionParams(max_pattern_size=3, min_count=3),
    )
    (answer,) = run(engine, params)[0].outputs
    assert list(answer.token_ids) == [7, 8, 7, 8, 7, 8] and answer.finish_reason == "repetition"


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_reasoning_has_its_budget_also_when_it_is_preempted(llama, async_scheduling) -> None:
    run_config = engine_args_to_config(
        model=str(llama[0]),
        skip_tokenizer_init=True,
        num_gpu_blocks_override=16,
        block_size=4,
        max_model_len=32,
        async_scheduling=async_scheduling,
    )
    config = finalize(run_config)
    start, end = [50, 51], [60, 61]
    config.reasoning_config = ReasoningConfig("<think>", "</think>")
    config.reasoning_config.initialize_token_ids(start, end)
    with LLM(config=config) as llm:
        params = [
            SamplingParams(
                temperature=0.0, max_tokens=20, ignore_eos=True, thinking_token_budget=budget,
                logit_bias={60: -100.0},
            )
            for budget in (0, 3, 9, -1)
        ]  # fmt: skip
        outputs = llm.generate([start] * 4, params, use_tqdm=False)
    for output, budget in zip(outputs, (0, 3, 9, None), strict=True):
        tokens = list(output.outputs[0].token_ids)
        assert len(tokens) == 20
        assert (tokens.index(60) if 60 in tokens else None) == budget
        assert budget is None or tokens[budget : budget + 2] == end


def test_a_budget_without_markers_is_refused(engine) -> None:
    with pytest.raises(VLLMValidationError, match="reasoning_config is not configured"):
        run(engine, SamplingParams(thinking_token_budget=3))
    with pytest.raises(UserError, match="reasoning_end_str is missing"):
        finalize(engine_args_to_config(model="x", reasoning_config={"reasoning_start_str": "<t>"}))

# SPDX-License-Identifier: Apache-2.0
"""With kernel.batch_invariant a request's answer has the same bits whatever shares its steps."""

from gpu_engine import engine, prompts

from vllmx import SamplingParams

REQUESTS = 12


def kinds() -> list[SamplingParams]:
    """Greedy, seeded and filtered, all with log-probabilities."""
    ways = [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 20}]
    common = {"logprobs": 4, "max_tokens": 24, "ignore_eos": True, "detokenize": False}
    return [SamplingParams(**ways[i % 3], seed=i, **common) for i in range(REQUESTS)]


def bits(llm, which: range) -> list:
    """Tokens and every log-probability of some of the requests, asked together."""
    given, params = prompts(REQUESTS, longest=200), kinds()
    outputs = llm.generate([given[i] for i in which], [params[i] for i in which], use_tqdm=False)
    return [
        (
            o.outputs[0].token_ids,
            [[(t, v.logprob) for t, v in r.items()] for r in o.outputs[0].logprobs],
        )
        for o in outputs
    ]


def alone(llm) -> list:
    """Each request by itself."""
    return [answer for i in range(REQUESTS) for answer in bits(llm, range(i, i + 1))]


def test_bits_do_not_depend_on_the_batch_nor_on_graphs_nor_on_chunks(folder) -> None:
    how = {"batch_invariant": True, "dtype": "bfloat16"}
    llm = engine(folder, **how)
    want = alone(llm)
    assert bits(llm, range(REQUESTS)) == want
    assert bits(engine(folder, enforce_eager=True, **how), range(REQUESTS)) == want
    assert bits(engine(folder, max_num_batched_tokens=64, **how), range(REQUESTS)) == want


def test_without_it_they_do(folder) -> None:
    """Else the test above would say nothing."""
    llm = engine(folder, dtype="bfloat16")
    assert bits(llm, range(REQUESTS)) != alone(llm)

# SPDX-License-Identifier: Apache-2.0
"""Witness inputs of what the sampler does to logits, in float32.

Rows with and without each parameter lie side by side; logits are all negative in one row, tied in
another, and tails are long enough that a filter which does nothing is seen. Noise is drawn from
seeds, so that the token is a matter of arithmetic.
"""

from __future__ import annotations

import numpy as np

from .inputs import Arguments, CaseTable, Maker

CASES = CaseTable()
VOCAB = 509
ONLY = {"dtypes": ("f32",)}


def _logits(m: Maker, rows: int = 8, std: float = 2.0) -> np.ndarray:
    logits = m.normal("logits", rows, VOCAB, std=std)
    logits[1] -= 40.0  # a maximum that starts from zero would be wrong here
    logits[2] += 5.0
    logits[3] *= 4.0
    return logits


def _filter(m: Maker, top_k: list[int] | None, top_p: list[float] | None) -> Arguments:
    return {
        "logits": m.float(_logits(m)),
        "top_k": None if top_k is None else m.ints(top_k),
        "top_p": None if top_p is None else m.float(np.array(top_p)),
    }


@CASES.add("top_k_top_p", "top_k", cells=("k=1", "k of a row that keeps all"), **ONLY)
def _(m: Maker) -> Arguments:
    return _filter(m, [1, 2, 50, VOCAB, 5, 508, 300, 7], None)


@CASES.add("top_k_top_p", "top_p", cells=("p=1", "p near 0"), **ONLY)
def _(m: Maker) -> Arguments:
    return _filter(m, None, [0.9, 0.5, 0.1, 0.95, 1.0, 1e-6, 0.999, 0.7])


@CASES.add("top_k_top_p", "both", cells=("k then p",), **ONLY)
def _(m: Maker) -> Arguments:
    top_k = [10, VOCAB, 50, 100, 3, 20, 400, 1]
    return _filter(m, top_k, [0.9, 0.5, 1.0, 0.95, 0.6, 0.3, 0.99, 0.5])


@CASES.add("top_k_top_p", "ties", cells=("ties at the k-th",), **ONLY)
def _(m: Maker) -> Arguments:
    logits = m.integers("steps", -3, 4, 4, VOCAB).astype(np.float64)
    return {"logits": m.float(logits), "top_k": m.ints([1, 20, 100, VOCAB]), "top_p": None}


@CASES.add("min_p", "plain", cells=("rows without",), **ONLY)
def _(m: Maker) -> Arguments:
    min_p = np.array([0.05, 0.1, 0.0, 0.5, 0.99, 0.01, 0.2, 1e-4])
    return {"logits": m.float(_logits(m)), "min_p": m.float(min_p)}


@CASES.add("temperature", "plain", cells=("0", "1", "1e-2", "2"), **ONLY)
def _(m: Maker) -> Arguments:
    temperature = np.array([0.0, 1.0, 0.01, 2.0, 0.7, 0.3, 1.5, 0.99])
    return {"logits": m.float(_logits(m)), "temperature": m.float(temperature)}


@CASES.add("temperature", "tiny", cells=("2e-5", "1e-3"), **ONLY)
def _(m: Maker) -> Arguments:
    """Upstream takes what is below 1e-5 for 0; SamplingParams makes 0.01 of what is below it."""
    temperature = np.array([2e-5, 1e-4, 5e-4, 1e-3, 2e-5, 1.0, 0.0, 5e-3])
    return {"logits": m.float(_logits(m)), "temperature": m.float(temperature)}


def _penalised(
    m: Maker, presence: list[float], frequency: list[float], repetition: list[float]
) -> Arguments:
    prompts = [m.integers(f"prompt{i}", 0, VOCAB, 9 + i).tolist() for i in range(8)]
    outputs = [m.integers(f"output{i}", 0, 40, 3 * i).tolist() for i in range(8)]
    outputs[4] = [prompts[4][0]] * 5 + [VOCAB - 1]
    return {
        "logits": m.float(_logits(m)),
        "prompt_tokens": prompts,
        "output_tokens": outputs,
        "presence": m.float(np.array(presence)),
        "frequency": m.float(np.array(frequency)),
        "repetition": m.float(np.array(repetition)),
    }


@CASES.add("penalties", "each", cells=("one penalty a row", "no output yet"), **ONLY)
def _(m: Maker) -> Arguments:
    return _penalised(
        m,
        [0.5, 0, 0, 1.5, -1.0, 0, 0, 2.0],
        [0, 0.5, 0, 0, 0, 1.0, -0.5, 0],
        [1, 1, 1.3, 1, 1, 1, 1, 1],
    )


@CASES.add("penalties", "all", cells=("three at once", "repetition below 1"), **ONLY)
def _(m: Maker) -> Arguments:
    return _penalised(
        m,
        [0.5, 0.25, -0.5, 1.5, 1.0, 0.1, 0.2, 2.0],
        [0.1, 0.5, 0.3, -0.4, 0.7, 1.0, -0.5, 0.25],
        [1.1, 1.5, 1.3, 0.8, 2.0, 1.05, 0.9, 1.2],
    )


@CASES.add("bad_words", "plain", cells=("prefix met and not",), **ONLY)
def _(m: Maker) -> Arguments:
    outputs = [[5, 6, 7], [7], [], [9, 9, 9], [1, 2, 3, 4], [5, 6], [8], [3, 3]]
    words = {
        "0": [[7, 8], [6, 7, 11], [5, 7, 12]],
        "1": [[7, 7], [100]],
        "2": [[4], [1, 2]],
        "3": [[9, 9, 9, 9], [9, 9, 9, 9, 9]],
        "4": [[2, 3, 4, 5], [3, 4]],
        "7": [[VOCAB - 1], [3, 0]],
    }
    return {"logits": m.float(_logits(m)), "words": words, "output_tokens": outputs}


@CASES.add("logit_bias", "plain", cells=("bias", "allowed", "before min_tokens"), **ONLY)
def _(m: Maker) -> Arguments:
    return {
        "logits": m.float(_logits(m)),
        "bias": {"0": [[3, 5.0], [4, -5.0]], "3": [[508, 100.0]], "6": [[0, -100.0]]},
        "allowed": {"1": [1, 2, 3], "4": [508], "6": [0, 7]},
        # row: [tokens to generate at least, tokens that end it]
        "min_tokens": {"2": [4, [2, 11]], "5": [3, [2]], "7": [2, [2, 9]]},
        "num_generated": [0, 1, 3, 2, 0, 3, 1, 2],
    }


@CASES.add("logprobs", "plain", cells=("ranks", "top 5 and the chosen"), **ONLY)
def _(m: Maker) -> Arguments:
    return {
        "logits": m.float(_logits(m)),
        "num_logprobs": 5,
        "chosen": m.ints(m.integers("chosen", 0, VOCAB, 8)),
    }


@CASES.add("logprobs", "none", cells=("the chosen only",), **ONLY)
def _(m: Maker) -> Arguments:
    chosen = m.ints(m.integers("chosen", 0, VOCAB, 8))
    return {"logits": m.float(_logits(m)), "num_logprobs": 0, "chosen": chosen}


SEEDS = [0, 1, 42, 2**31 - 1, 2**32, 2**63 - 1, -1, -(2**63)]
POSITIONS = [0, 1, 5, 255, 4096, 40000, 7, 2**31 - 1]


@CASES.add("gumbel_noise", "plain", cells=("seeds of 64 bits", "positions to 2^31"), **ONLY)
def _(m: Maker) -> Arguments:
    return {"seeds": m.ints(SEEDS), "positions": m.ints(POSITIONS), "count": VOCAB}


@CASES.add("seeded_token", "plain", cells=("greedy rows", "excluded tokens", "a tie"), **ONLY)
def _(m: Maker) -> Arguments:
    logits = _logits(m)
    logits[4, 10:400] = -np.inf
    logits[5] = 0.0
    logits[6, [17, 300]] = 50.0
    temperature = np.array([1.0, 0.7, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0])
    return {
        "logits": m.float(logits),
        "temperature": m.float(temperature),
        "seeds": m.ints(SEEDS),
        "positions": m.ints(POSITIONS),
    }

# SPDX-License-Identifier: Apache-2.0
"""Lanes of the oracle `vllm_ops` for what upstream's sampler does to logits on a CPU.

Upstream's Model Runner V2 has these steps as Triton kernels, which the CPU build lacks; the steps
of its first runner, recorded here, are defined to do the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oracles.op_job import Tensors
from oracles.vllm_ops import ORACLE, _config

SAMPLE = "vllm.v1.sample"
UNUSED_ID = 1 << 20


@ORACLE.lane("temperature", "v1-sampler", f"{SAMPLE}.sampler.Sampler.apply_temperature")
def temperature(logits: Tensor, temperature: Tensor) -> Tensors:
    """Division; greedy rows stay."""
    from vllm.v1.sample.sampler import Sampler

    return {"out": Sampler.apply_temperature(logits, temperature, all_random=False)}


@ORACLE.lane("penalties", "v1-penalties", f"{SAMPLE}.ops.penalties.apply_all_penalties")
def penalties(
    logits: Tensor,
    prompt_tokens: list[list[int]],
    output_tokens: list[list[int]],
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> Tensors:
    """Repetition, frequency and presence, in that order."""
    from vllm.v1.sample.ops.penalties import apply_all_penalties

    width = max(map(len, prompt_tokens))
    vocab = logits.shape[1]
    padded = [[*row, *[vocab] * (width - len(row))] for row in prompt_tokens]
    args = (torch.tensor(padded), presence, frequency, repetition, output_tokens)
    return {"out": apply_all_penalties(logits, *args)}


@ORACLE.lane("bad_words", "v1-bad-words", f"{SAMPLE}.ops.bad_words.apply_bad_words")
def bad_words(
    logits: Tensor, words: dict[str, list[list[int]]], output_tokens: list[list[int]]
) -> Tensors:
    """Words excluded where all but their last token was just generated."""
    from vllm.v1.sample.ops.bad_words import apply_bad_words

    apply_bad_words(logits, {int(row): found for row, found in words.items()}, output_tokens)
    return {"out": logits}


@ORACLE.lane("top_k_top_p", "v1-topk-topp-torch", f"{SAMPLE}.ops.topk_topp_sampler")
def top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensors:
    """What lies outside becomes -inf."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    return {"out": apply_top_k_top_p(logits, top_k, top_p)}


def _processor(name: str, rows: list[tuple[Any, list[int]]], logits: Tensor) -> Tensor:
    """`logits` after upstream's logits processor `name`; rows: (params, output) of each request."""
    from vllm.v1.sample.logits_processor import builtin
    from vllm.v1.sample.logits_processor.interface import BatchUpdate

    processor = getattr(builtin, name)(_config(), torch.device("cpu"), False)
    added: list[Any] = [(row, params, [], output) for row, (params, output) in enumerate(rows)]
    processor.update_state(BatchUpdate(len(rows), removed=[], added=added, moved=[]))
    return processor.apply(logits)


@ORACLE.lane("min_p", "v1-logits-processors", f"{SAMPLE}.logits_processor.MinPLogitsProcessor")
def min_p(logits: Tensor, min_p: Tensor) -> Tensors:
    """Tokens less likely than min_p times the likeliest."""
    from vllm import SamplingParams

    rows: list[Any] = [(SamplingParams(min_p=value), []) for value in min_p.tolist()]
    return {"out": _processor("MinPLogitsProcessor", rows, logits)}


@ORACLE.lane(
    "logit_bias",
    "v1-logits-processors",
    f"{SAMPLE}.logits_processor.LogitBiasLogitsProcessor, MinTokensLogitsProcessor",
)
def logit_bias(
    logits: Tensor,
    bias: dict[str, list[list[float]]],
    allowed: dict[str, list[int]],
    min_tokens: dict[str, list[Any]],
    num_generated: list[int],
) -> Tensors:
    """The three rules in the order of Model Runner V2: allowed tokens, bias, min_tokens."""
    from vllm import SamplingParams

    for place, kept in allowed.items():
        mask = torch.ones(logits.shape[1], dtype=torch.bool)
        mask[kept] = False
        logits[int(place)].masked_fill_(mask, float("-inf"))
    rows: list[Any] = []
    for row, count in enumerate(num_generated):
        pairs, rule = bias.get(str(row)), min_tokens.get(str(row))
        params = SamplingParams(
            logit_bias={int(token): value for token, value in pairs} if pairs else None,
            min_tokens=rule[0] if rule else 0,
            stop_token_ids=rule[1] if rule else None,
            max_tokens=16,
        )
        params.update_from_generation_config({}, None)
        rows.append((params, [UNUSED_ID] * count))
    logits = _processor("LogitBiasLogitsProcessor", rows, logits)
    return {"out": _processor("MinTokensLogitsProcessor", rows, logits)}


@ORACLE.lane("logprobs", "v1-sampler", f"{SAMPLE}.sampler.Sampler.gather_logprobs")
def logprobs(logits: Tensor, num_logprobs: int, chosen: Tensor) -> Tensors:
    """Token ids, their log-probabilities, and ranks."""
    from vllm.v1.sample.sampler import Sampler

    values = Sampler.compute_logprobs(logits)
    # The rank is a compiled function upstream; its definition is the same without a compiler.
    torch.compiler.set_stance("force_eager")
    found = Sampler.gather_logprobs(values, num_logprobs, chosen)
    return {
        "ids": found.logprob_token_ids,
        "scores": found.logprobs,
        "ranks": found.selected_token_ranks.to(torch.int32),
    }

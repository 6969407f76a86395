# SPDX-License-Identifier: Apache-2.0
"""How the sampler's steps and the rotary tables of vllmx are asked, by op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllmx.config import KernelConfig
from vllmx.ir.select import OpTable
from vllmx.layers.rotary_embedding import get_rope
from vllmx.sample.bad_words import BadWordsState
from vllmx.sample.gumbel import seeded_noise
from vllmx.sample.logit_bias import LogitBiasState
from vllmx.sample.logprob import compute_topk_logprobs
from vllmx.sample.min_p import apply_min_p
from vllmx.sample.ops import get_sampler_ops
from vllmx.sample.penalties import PenaltiesState
from vllmx.sample.states import SamplingStates
from vllmx.sampling_params import SamplingParams
from vllmx.worker.states import RequestState

PROMPT_LEN = 3
"""Prompt tokens of a request whose case names none."""


def _states(logits: Tensor, prompts: list[list[int]], outputs: list[list[int]]) -> RequestState:
    """Request rows in order, each with its prompt and what it has generated."""
    longest = max(len(p) + len(o) for p, o in zip(prompts, outputs)) + 1
    states = RequestState(len(prompts), longest, logits.shape[1], str(logits.device))
    for row, (prompt, output) in enumerate(zip(prompts, outputs)):
        states.all_token_ids.np[row, : len(prompt) + len(output)] = prompt + output
        states.prompt_len[row], states.total_len[row] = len(prompt), len(prompt) + len(output)
    states.all_token_ids.gpu.copy_(states.all_token_ids.cpu)
    return states


def temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """The logits in place."""
    states = SamplingStates(len(logits), logits.shape[1], str(logits.device))
    states.temperature[:] = temperature.cpu().numpy()
    states.apply_temperature(logits, np.arange(len(logits)))
    return logits


def penalties(
    logits: Tensor,
    prompt_tokens: list[list[int]],
    output_tokens: list[list[int]],
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> Tensor:
    """The logits in place; the last tokens are recorded as sampled, the others at admission."""
    earlier = [output[:-1] for output in output_tokens]
    ops = get_sampler_ops(str(logits.device))
    state = PenaltiesState(_states(logits, prompt_tokens, earlier), ops.apply_penalties)
    for row in range(len(logits)):
        params = SamplingParams(
            presence_penalty=float(presence[row]),
            frequency_penalty=float(frequency[row]),
            repetition_penalty=float(repetition[row]),
        )
        state.add_request(row, params)
    rows = np.array([row for row, output in enumerate(output_tokens) if output])
    last = torch.tensor([output_tokens[row][-1] for row in rows], device=logits.device)
    state.record(rows, last)
    state.apply(logits, np.arange(len(logits)))
    return logits


def bad_words(
    logits: Tensor, words: dict[str, list[list[int]]], output_tokens: list[list[int]]
) -> Tensor:
    """The logits in place."""
    prompts = [[8] * PROMPT_LEN for _ in output_tokens]
    state = BadWordsState(_states(logits, prompts, output_tokens))
    for row in range(len(output_tokens)):
        params = SamplingParams()
        params._bad_words_token_ids = words.get(str(row))
        state.add_request(row, params)
    state.apply(logits, np.arange(len(logits)))
    return logits


def logit_bias(
    logits: Tensor,
    bias: dict[str, list[list[float]]],
    allowed: dict[str, list[int]],
    min_tokens: dict[str, list[Any]],
    num_generated: list[int],
) -> Tensor:
    """The logits in place."""
    state = LogitBiasState(len(logits), str(logits.device))
    for row in range(len(logits)):
        pairs, rule = bias.get(str(row)), min_tokens.get(str(row))
        params = SamplingParams(
            logit_bias={int(token): value for token, value in pairs} if pairs else None,
            allowed_token_ids=allowed.get(str(row)),
            min_tokens=rule[0] if rule else 0,
            stop_token_ids=rule[1] if rule else None,
            max_tokens=16,
        )
        params.update_from_generation_config({}, None)
        state.add_request(row, PROMPT_LEN, params)
    positions = np.array([PROMPT_LEN + count - 1 for count in num_generated])
    state.apply(logits, np.arange(len(logits)), positions)
    return logits


def min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """The logits in place."""
    apply_min_p(logits, min_p)
    return logits


def top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """The logits, in place or not."""
    return get_sampler_ops(str(logits.device)).apply_top_k_top_p(logits, top_k, top_p)


def logprobs(logits: Tensor, num_logprobs: int, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(token ids, log-probabilities, ranks)."""
    values = get_sampler_ops(str(logits.device)).token_logprobs
    found = compute_topk_logprobs(logits, num_logprobs, chosen, values)
    return tuple(torch.from_numpy(np.ascontiguousarray(part)) for part in found[:3])  # type: ignore[return-value]


def gumbel_noise(seeds: Tensor, positions: Tensor, count: int) -> Tensor:
    """Noise of every token id."""
    tokens = torch.arange(count, device=seeds.device).unsqueeze(0)
    return seeded_noise(seeds.unsqueeze(1), positions.unsqueeze(1), tokens)


def seeded_token(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The token of each row; every row has a seed."""
    has_seed = torch.ones(len(seeds), dtype=torch.bool, device=seeds.device)
    generator = torch.Generator(device=logits.device)
    sample = get_sampler_ops(str(logits.device)).gumbel_sample
    return sample(logits, temperature, seeds, has_seed, positions, generator)


def rope_table(
    head_size: int, max_position: int, rope_parameters: dict[str, Any], rows: Tensor
) -> Tensor:
    """Rows of the table of the layer that rotates by the op's definition."""
    config = KernelConfig(ir_op_priority={"rotary_embedding": ["torch"]})
    table = OpTable(config, rows.device.type, torch.float32)
    longest = rope_parameters.get("max_model_len")
    rope = get_rope(head_size, max_position, rope_parameters, table, max_model_len=longest)
    return rope.cos_sin_cache[rows]


CALLS: dict[str, Callable[..., Any]] = {
    fn.__name__: fn
    for fn in (
        *(temperature, penalties, bad_words, logit_bias, min_p, top_k_top_p, logprobs),
        *(gumbel_noise, seeded_token, rope_table),
    )
}

# SPDX-License-Identifier: Apache-2.0
"""vllmx asked the questions of a model's golden, in each of the ways that an engine batches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oracles.sketch import sketch
from vllmx import LLM, SamplingParams
from vllmx.config import finalize
from vllmx.engine.arg_utils import engine_args_to_config

from .checkpoints import tiny_folder
from .model_gate import Ours
from .model_golden import Scores
from .model_table import PROVIDERS, SKETCH_TOKENS, STRADDLED, ModelEntry
from .model_watch import CHUNK, Seen, watched

LIST = 64
"""How many of our log-probabilities are asked for: the oracle's 32 are nearly always among them."""


@dataclass(frozen=True)
class Part:
    """What came of one part of what a mode asks.

    short: answers that have not as many tokens as were asked for; asked: lengths of the prompts
    that were given; seen: what the runner was told meanwhile; decoding: whether tokens were to
    follow, or the prompts' own were scored.
    """

    ours: Ours
    short: int
    asked: list[int]
    seen: Seen
    decoding: bool = True


def build(entry: ModelEntry, provider: str, device: str, chunked: bool, eager: bool = False) -> LLM:
    """An engine for the model: whole prompts and no cache, or cut ones and prefix caching;
    `eager`: without CUDA graphs where a GPU would take them."""
    model = str(tiny_folder(entry)) if entry.tiny else entry.name
    run = engine_args_to_config(
        model=model,
        max_model_len=entry.longest,
        max_logprobs=min(LIST, entry.vocab_size),
        enable_prefix_caching=chunked,
        skip_tokenizer_init=True,
        enforce_eager=eager,
        # What a float32 checkpoint is computed in on a GPU, unless it is told, is bfloat16.
        **({} if entry.quantised else {"dtype": entry.dtype}),
        **({"max_num_batched_tokens": CHUNK, "max_num_seqs": 16} if chunked else {}),
    )
    run.kernel.default_priority = list(PROVIDERS[provider])
    # Times that somebody measured on this machine must not decide.
    run.kernel.cache_dir = os.devnull
    run.device.device = device
    if device == "cuda":
        run.compilation.cudagraph_capture_sizes = [1, 2, 4, 8, 16, 24]
        run.cache.kv_cache_memory_bytes = 256 << 20
    run.device.num_threads = 1  # the order of a sum must not depend on the machine
    run.load.use_tqdm_on_load = False
    return LLM(config=finalize(run))


def scored(llm: LLM, want: Scores, one_by_one: bool) -> Part:
    """Our scores of every position, all sequences at once or each alone."""
    params = SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=listed(llm), detokenize=False
    )
    rows = _Rows(block_of(llm))
    groups = [[s] for s in want.sequences] if one_by_one else [want.sequences]
    position = short = 0
    with logit_steps(llm) as steps, watched(runner_of(llm)) as seen:
        answers = [generate(llm, group, params) for group in groups]
    for group, outputs in zip(groups, answers, strict=True):
        for sequence, output in zip(group, outputs, strict=True):
            short += len(output.outputs[0].token_ids) != 1
            assert output.prompt_logprobs is not None
            for following, entries in zip(sequence[1:], output.prompt_logprobs[1:], strict=True):
                rows.add(position, entries, following)
                position += 1
    return Part(rows.ours(steps), short, [len(s) for s in want.sequences], seen, False)


def shown(
    mode: str, llm: LLM, want: Scores, prompts: list[list[int]], count: int
) -> tuple[dict[str, Part], int]:
    """(what came of each part of what a mode asks, prompts that should have hit the cache and did
    not)."""
    misses = 0
    if mode == "bs1":
        return {"prefill": scored(llm, want, one_by_one=True)}, misses
    if mode == "straddle":
        sizes = {size: decoded(llm, want, prompts, count, size) for size in STRADDLED}
        return {f"decode{size}": part for size, part in sizes.items()}, misses
    parts = {}
    if mode == "prefix":
        # Half of what the oracle generated is given: a prompt may be less than a block.
        given = count // 2
        prompts = [want.sequences[i][: len(p) + given] for i, p in enumerate(prompts)]
        count -= given
        misses = cache_misses(llm, prompts)
    else:
        parts["prefill"] = scored(llm, want, one_by_one=False)
    parts["decode"] = decoded(llm, want, prompts, count)
    return parts, misses


def cache_misses(llm: LLM, prompts: list[list[int]]) -> int:
    """How many of `prompts` that are longer than a block, asked twice, take no token from the cache
    the second time; all of them where none is longer."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    block_size = block_of(llm)
    generate(llm, prompts, params)
    hits = [
        bool(output.num_cached_tokens)
        for output, prompt in zip(generate(llm, prompts, params), prompts)
        if len(prompt) > block_size
    ]
    return hits.count(False) if hits else len(prompts)


def decoded(
    llm: LLM, want: Scores, prompts: list[list[int]], max_tokens: int, batch: int | None = None
) -> Part:
    """Our scores at the tokens that we generate, as long as they are the golden's; `batch`: how
    many are asked at once, over and over the same prompts.

    The position where a sequence first differs is the last of it: there, too, both saw the same.
    However it goes on, it has to have as many tokens as the golden's: no token ends a request.
    """
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        logprobs=listed(llm),
        ignore_eos=True,
        detokenize=False,
    )
    rows = _Rows(block_of(llm))
    asked = [i % len(prompts) for i in range(len(prompts) if batch is None else batch)]
    short = 0
    with logit_steps(llm) as steps, watched(runner_of(llm)) as seen:
        outputs = generate(llm, [prompts[i] for i in asked], params)
    for index, output in zip(asked, outputs, strict=True):
        sequence = want.sequences[index]
        completion = output.outputs[0]
        assert completion.logprobs is not None
        start = len(prompts[index])
        answer = list(zip(completion.token_ids, completion.logprobs, strict=True))
        short += len(answer) != len(sequence) - start
        for step, (token, entries) in enumerate(answer[: len(sequence) - start]):
            following = sequence[start + step]
            rows.add(want.first_position(index) + start + step - 1, entries, following)
            if token != following:
                break
    return Part(rows.ours(steps), short, [len(prompts[i]) for i in asked], seen)


def block_of(llm: LLM) -> int:
    """Tokens of a block of the engine's cache."""
    block_size = llm.llm_engine.vllm_config.cache_config.block_size
    assert block_size is not None
    return block_size


def listed(llm: LLM) -> int:
    """How many log-probabilities the engine may be asked for."""
    return llm.llm_engine.vllm_config.model_config.max_logprobs


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
    """The answers to prompts of token ids."""
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


class _Rows:
    def __init__(self, block: int) -> None:
        self.block = block
        self.where: list[int] = []
        self.ids: list[list[int]] = []
        self.val: list[list[float]] = []
        self.next: list[float] = []

    def add(self, position: int, entries: Any, following: int) -> None:
        ranked = sorted(entries.items(), key=lambda item: -item[1].logprob)[:LIST]
        self.where.append(position)
        self.ids.append([token for token, _ in ranked])
        self.val.append([entry.logprob for _, entry in ranked])
        found = entries.get(following)
        self.next.append(found.logprob if found is not None else ranked[-1][1].logprob)

    def ours(self, steps: list[float]) -> Ours:
        return Ours(
            np.array(self.where),
            np.array(self.ids),
            np.array(self.val, dtype=np.float64),
            np.array(self.next, dtype=np.float64),
            min(steps, default=0.0),
            self.block,
        )


@contextmanager
def logit_steps(llm: LLM) -> Iterator[list[float]]:
    """Collects a unit in the last place of the logits at the smallest of their tops, call by call:
    what two tokens that are the same but for rounding may be apart."""
    found: list[float] = []
    model = model_of(llm)
    inner = model.compute_logits

    def compute_logits(hidden_states: torch.Tensor) -> torch.Tensor:
        logits = inner(hidden_states)
        # What is captured now would be part of the graph for ever.
        capturing = logits.is_cuda and torch.cuda.is_current_stream_capturing()
        if len(logits) and not capturing:
            top = logits.amax(dim=-1).abs().amin()
            found.append(float(top.nextafter(top.new_tensor(torch.inf)) - top))
        return logits

    model.compute_logits = compute_logits
    try:
        yield found
    finally:
        del model.compute_logits


def model_of(llm: LLM) -> Any:
    """The model inside an engine of this process."""
    return runner_of(llm).model


def runner_of(llm: LLM) -> Any:
    """The model runner inside an engine of this process."""
    core: Any = llm.llm_engine.engine_core
    return core.engine_core.model_executor.driver_worker.model_runner


@contextmanager
def tapped(llm: LLM, graft: np.ndarray | None = None) -> Iterator[list[np.ndarray]]:
    """Collects hidden state plus residual before the first layer and after each, as float32.

    `graft`, float32 [layers + 1, tokens, hidden]: what every layer is given in place of what came
    out of the one before it, so that a layer's error is its own.
    """
    seen: list[np.ndarray] = []
    layers = model_of(llm).model.layers

    def stream(hidden: Any, residual: Any) -> torch.Tensor:
        return hidden.detach().clone() if residual is None else hidden + residual

    def before(index: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...]) -> Any:
            positions, hidden, residual = args
            if index == 0:
                seen.append(stream(hidden, residual).float().cpu().numpy())
            if graft is None:
                return None
            given = torch.from_numpy(graft[index]).to(hidden)
            none = None if residual is None else torch.zeros_like(given)
            return positions, given, none

        return hook

    def after(module: Any, args: tuple[Any, ...], output: tuple[Any, Any]) -> None:
        seen.append(stream(*output).float().cpu().numpy())

    handles = [layer.register_forward_pre_hook(before(i)) for i, layer in enumerate(layers)]
    handles += [layer.register_forward_hook(after) for layer in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def streams(llm: LLM, sequence: list[int], graft: np.ndarray | None = None) -> list[np.ndarray]:
    """The stream of one sequence computed alone: [tokens, hidden] before and after each layer."""
    with tapped(llm, graft) as seen:
        generate(llm, [sequence], SamplingParams(temperature=0.0, max_tokens=1, detokenize=False))
    return seen


def provider_of(llm: LLM) -> dict[str, str]:
    """Op -> the provider that serves it in an engine of this process."""
    choices = runner_of(llm).ops.choices
    return {name: choice.provider for name, choice in sorted(choices.items())}


def sketches(llm: LLM, sequence: list[int]) -> np.ndarray:
    """float32 [layers, rows, 64], as a golden's `stream`."""
    rows = streams(llm, sequence)
    return np.stack([sketch(layer[-SKETCH_TOKENS:]) for layer in rows[1:]])

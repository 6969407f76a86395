# SPDX-License-Identifier: Apache-2.0
"""`vllmx generate`: the answer of one prompt, streamed, or of every prompt of a file, in order."""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllmx.config import RunConfig
from vllmx.tasks import local, prompts
from vllmx.tasks.prompts import Item
from vllmx.tasks.sampling import check_shown, given, sampling_params

if TYPE_CHECKING:
    from vllmx.entrypoints.llm import LLM
    from vllmx.outputs import RequestOutput
    from vllmx.sampling_params import SamplingParams


@dataclass
class Answer:
    """What has come so far for one prompt; the lists have one entry a completion."""

    item: Item
    texts: list[str]
    token_ids: list[list[int]]
    logprobs: list[list[Any]]
    finish_reasons: list[str | None]
    num_prompt_tokens: int = 0
    prompt_logprobs: list[Any] | None = None
    finished: bool = False

    @classmethod
    def empty(cls, item: Item, n: int) -> Answer:
        """An answer with `n` completions yet to come."""
        return cls(item, [""] * n, [[] for _ in range(n)], [[] for _ in range(n)], [None] * n)

    def add(self, output: RequestOutput) -> int:
        """Take in what a step brought; returns the number of its tokens."""
        tokens = 0
        self.num_prompt_tokens = len(output.prompt_token_ids or ())
        if output.prompt_logprobs:  # of the step that ended the prefill
            self.prompt_logprobs = list(output.prompt_logprobs)
        for part in output.outputs:
            self.texts[part.index] += part.text
            self.token_ids[part.index] += part.token_ids
            self.logprobs[part.index] += part.logprobs or []
            self.finish_reasons[part.index] = part.finish_reason
            tokens += len(part.token_ids)
        self.finished = output.finished
        return tokens


@dataclass
class Timing:
    """Counts and times of a run, on time.monotonic's clock."""

    started: float
    ready: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    num_output_tokens: int = 0

    def add(self, tokens: int) -> None:
        """Count tokens that came just now."""
        if tokens and self.first_token is None:
            self.first_token = time.monotonic()
        self.num_output_tokens += tokens

    def report(self, num_prompt_tokens: int) -> str:
        """The summary line; rates count from when the engine was ready."""
        seconds = max(time.monotonic() - self.ready, 1e-9)
        line = f"vllmx: {num_prompt_tokens} prompt tokens, {self.num_output_tokens} output tokens, "
        line += f"{self.num_output_tokens / seconds:.1f} tok/s"
        if self.first_token is not None:
            line += f", first token {self.first_token - self.started:.2f} s after start"
        return line


def run(config: RunConfig, started: float) -> int:
    """Answer the prompts of `config`; text on stdout, progress and timing on stderr."""
    fields = given(config.sampling)
    check_shown(fields, config.output)
    items = prompts.items(config)
    with local.load(config) as llm:
        params = sampling_params(llm.get_default_sampling_params(), fields)
        timing = Timing(started)
        answers = [Answer.empty(item, params.n) for item in items]
        _answer(llm, answers, params, timing, config.output)
    print(timing.report(sum(a.num_prompt_tokens for a in answers)), file=sys.stderr)
    return 0


def _answer(
    llm: LLM, answers: list[Answer], params: SamplingParams, timing: Timing, form: str
) -> None:
    """Fill the answers in, and show each as soon as it is its turn."""
    requests = [(_prompt(llm, answer.item), params) for answer in answers]
    shown = _Printer(form, answers)
    num_finished = 0
    with _progress(len(answers)) as bar:
        for output in local.stream(llm, requests, [answer.item.where for answer in answers]):
            tokens = answers[int(output.request_id)].add(output)
            timing.add(tokens)
            bar.update(tokens)
            if output.finished:
                num_finished += 1
                bar.set_postfix_str(f"{num_finished}/{len(answers)} prompts", False)
            # Without it the text of an answer goes on in the bar's line.
            with bar.external_write_mode() if output.finished else nullcontext():
                shown.show()


def _prompt(llm: LLM, item: Item) -> Any:
    if item.messages is not None:
        return local.chat_prompt(llm, item.messages)
    if item.prompt_token_ids is not None:
        return {"prompt_token_ids": item.prompt_token_ids}
    return item.prompt


def _progress(num_prompts: int) -> Any:
    from tqdm import tqdm

    return tqdm(unit=" tok", desc="generate", file=sys.stderr, disable=num_prompts < 2, leave=False)


class _Printer:
    """Prints answers in the order of the prompts: a single one as it comes, others when whole."""

    def __init__(self, form: str, answers: list[Answer]) -> None:
        self.form = form
        self.answers = answers
        self.next = 0
        self.streamed = 0
        self.streams = form == "text" and len(answers) == 1 and len(answers[0].texts) == 1

    def show(self) -> None:
        """Print what has become printable."""
        if self.streams:
            text = self.answers[0].texts[0]
            sys.stdout.write(text[self.streamed :])
            self.streamed = len(text)
        while self.next < len(self.answers) and self.answers[self.next].finished:
            self._show_whole(self.answers[self.next])
            self.next += 1
        sys.stdout.flush()

    def _show_whole(self, answer: Answer) -> None:
        if self.form == "json":
            print(json.dumps(as_json(answer), ensure_ascii=False))
        elif self.streams:
            print()
        else:
            for text in answer.texts:
                print(text)


def as_json(answer: Answer) -> dict[str, Any]:
    """The JSON object of an answer: its prompt and one entry a completion."""
    item = answer.item
    line: dict[str, Any] = {"id": item.id} if item.id is not None else {}
    for key in prompts.KEYS[:3]:
        if getattr(item, key) is not None:
            line[key] = getattr(item, key)
    line["num_prompt_tokens"] = answer.num_prompt_tokens
    if answer.prompt_logprobs is not None:
        line["prompt_logprobs"] = [_position(entry) for entry in answer.prompt_logprobs]
    line["outputs"] = [
        {"text": text, "token_ids": list(ids), "finish_reason": reason}
        | ({"logprobs": [_position(entry) for entry in logprobs]} if logprobs else {})
        for text, ids, reason, logprobs in zip(
            answer.texts, answer.token_ids, answer.finish_reasons, answer.logprobs
        )
    ]
    return line


def _position(entry: Any) -> list[dict[str, Any]] | None:
    """The log-probabilities of one position; -inf becomes null, as JSON has no infinity."""
    if entry is None:
        return None
    return [
        {
            "token_id": token_id,
            "logprob": value.logprob if value.logprob > float("-inf") else None,
            "rank": value.rank,
            "token": value.decoded_token,
        }
        for token_id, value in entry.items()
    ]

# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/engine/logprobs.py @ v0.25.0
"""Log-probabilities of one request, collected step by step, with the text of every token."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllmx.engine.token_pieces import PieceDecoder, get_token_pieces
from vllmx.logprobs import (
    PromptLogprobs,
    SampleLogprobs,
    append_logprobs_for_next_position,
    create_prompt_logprobs,
    create_sample_logprobs,
)

if TYPE_CHECKING:
    from vllmx.core.output import LogprobsLists
    from vllmx.engine import EngineCoreOutput, EngineCoreRequest
    from vllmx.model_loader.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_CONTEXT = 4
"""Tokens that a character may be spread over, besides its last."""


def decode_in_context(
    decode: Callable[[list[int]], str], token_id: int, context: Sequence[int]
) -> str:
    """What a token shows that leaves a character unfinished or finishes one, by decoding alone.

    context: the tokens before it. The token that finishes a character shows all of it, with what
    stood before it in the tokens that showed nothing; one that leaves it unfinished shows nothing.
    """
    for count in range(1, min(len(context), _CONTEXT) + 1):
        before = list(context)[-count:]
        whole = decode([*before, token_id])
        if whole.endswith(_REPLACEMENT):
            continue
        while before and decode(before[-1:]).endswith(_REPLACEMENT):
            before.pop()  # it showed nothing
        # Some tokenizers write the same tokens otherwise at the end of a text.
        prefix = decode(before) if before else ""
        pairs = zip(prefix, whole, strict=False)
        return whole[sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)) :]
    return ""


class _TokenTexts:
    """Texts of the tokens that compete for a position, given the tokens before it.

    The texts of the chosen tokens put together are the text of the sequence: the token that
    completes a character shows it whole, those before it are "". The text of another token never
    ends in U+FFFD: what it leaves unfinished or broken is not shown.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        pieces = get_token_pieces(tokenizer, skip_special_tokens=False)
        self._decoder = None if pieces is None else PieceDecoder(pieces, prompt_token_ids)
        self._before: deque[int] = deque(prompt_token_ids[-_CONTEXT:], maxlen=_CONTEXT)

    def advance(self, token_ids: list[int]) -> list[str]:
        """Texts of `token_ids`, which all stand at the next position; the first is the chosen."""
        decoder = self._decoder
        chosen = token_ids[0]
        if decoder is None:
            texts = [self._alone(token_id) for token_id in token_ids]
            text = texts[0]
            self._before.append(chosen)
        elif not decoder.partial:
            texts = [decoder.peek(token_id) for token_id in token_ids]
            text = decoder.push(chosen)
        else:
            # Inside a character. Tokens that do not go on with it show what they are by
            # themselves, but the chosen one has to account for the bytes left behind.
            whole = decoder.pieces
            texts = [
                piece if isinstance(piece := whole[token_id], str) else decoder.peek(token_id)
                for token_id in token_ids
            ]
            text = decoder.push(chosen)
        return [
            text if token_id == chosen else other.rstrip(_REPLACEMENT)
            for token_id, other in zip(token_ids, texts, strict=True)
        ]

    def _alone(self, token_id: int) -> str:
        """Text of a token of a tokenizer whose pieces are not known."""
        text = self._tokenizer.decode([token_id])
        if not text.endswith(_REPLACEMENT):
            return text
        return decode_in_context(self._tokenizer.decode, token_id, self._before)


@dataclass
class LogprobsProcessor:
    """What a request has been told of its log-probabilities so far."""

    tokenizer: Tokenizer | None
    """None: no texts."""
    logprobs: SampleLogprobs | None
    """One position for each generated token; None if they were not asked for."""
    prompt_logprobs: PromptLogprobs | None
    """One position for each prompt token; None if they were not asked for."""
    cumulative_logprob: float | None
    """Sum over the generated tokens."""
    num_logprobs: int | None
    """Likeliest tokens at each position; -1 is all."""
    num_prompt_logprobs: int | None
    """The same for the prompt."""
    ranked: bool = True
    """The alternatives are the likeliest in order, not ids that the request chose."""
    prompt_token_ids: Sequence[int] = ()
    """The prompt: an unfinished character at its end goes on in the output."""

    @classmethod
    def from_new_request(
        cls, tokenizer: Tokenizer | None, request: EngineCoreRequest
    ) -> LogprobsProcessor:
        """The processor for `request`; `tokenizer` None leaves texts out."""
        params = request.sampling_params
        assert params is not None
        num_logprobs = params.num_logprobs
        num_prompt_logprobs = params.prompt_logprobs
        return cls(
            tokenizer,
            None if num_logprobs is None else create_sample_logprobs(params.flat_logprobs),
            None if num_prompt_logprobs is None else create_prompt_logprobs(params.flat_logprobs),
            None if num_logprobs is None else 0.0,
            num_logprobs,
            num_prompt_logprobs,
            not params.logprob_token_ids,
            request.prompt_token_ids or (),
        )

    def __post_init__(self) -> None:
        self._texts: _TokenTexts | None = None
        self._prompt_texts: _TokenTexts | None = None
        if self.tokenizer is not None and self.logprobs is not None:
            self._texts = _TokenTexts(self.tokenizer, self.prompt_token_ids)
        if self.tokenizer is not None and self.prompt_logprobs is not None:
            self._prompt_texts = _TokenTexts(self.tokenizer, self.prompt_token_ids[:1])

    def _update_sample_logprobs(self, logprobs_lists: LogprobsLists) -> None:
        assert self.logprobs is not None and self.num_logprobs is not None
        assert self.cumulative_logprob is not None
        for row in self._append(
            self.logprobs, logprobs_lists, self._texts, self.num_logprobs, self.ranked
        ):
            self.cumulative_logprob += row[0]

    def _update_prompt_logprobs(self, logprobs_lists: LogprobsLists) -> None:
        assert self.prompt_logprobs is not None and self.num_prompt_logprobs is not None
        self._append(
            self.prompt_logprobs, logprobs_lists, self._prompt_texts, self.num_prompt_logprobs
        )

    @staticmethod
    def _append(
        target: SampleLogprobs | PromptLogprobs,
        lists: LogprobsLists,
        texts: _TokenTexts | None,
        num_logprobs: int,
        ranked: bool = True,
    ) -> list[list[float]]:
        """Add the positions of `lists`; returns the log-probabilities, a row a position."""
        # A row is as wide as the widest request of the batch needs.
        width = None if num_logprobs == -1 else num_logprobs + 1
        rows = lists.logprobs[:, :width].tolist()
        for token_ids, logprobs, rank in zip(
            lists.logprob_token_ids[:, :width].tolist(),
            rows,
            lists.sampled_token_ranks.tolist(),
            strict=True,
        ):
            tokens: Iterable[str | None] = itertools.repeat(None)
            if texts is not None:
                tokens = texts.advance(token_ids)
            append_logprobs_for_next_position(
                target, token_ids, logprobs, tokens, rank, num_logprobs, ranked
            )
        return rows

    def pop_prompt_logprobs(self) -> PromptLogprobs | None:
        """All prompt log-probabilities once, then nothing: a stream gets them in one piece."""
        prompt_logprobs = self.prompt_logprobs
        if prompt_logprobs:
            self.prompt_logprobs = []
        return prompt_logprobs

    def update_from_output(self, output: EngineCoreOutput) -> None:
        """Take what `output` says about generated and prompt tokens."""
        if output.new_logprobs is not None:
            self._update_sample_logprobs(output.new_logprobs)
        if output.new_prompt_logprobs_tensors is not None:
            self._update_prompt_logprobs(output.new_prompt_logprobs_tensors)

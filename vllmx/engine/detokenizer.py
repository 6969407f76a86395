# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/engine/detokenizer.py @ v0.25.0
"""From token ids to text as they come, and the search for stop strings in that text.

Text is made when somebody wants to see it: at each step for a stream or for stop strings, once
at the end for a request that has neither.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

from vllmx.engine.token_pieces import PieceDecoder, TokenPieces, get_token_pieces

if TYPE_CHECKING:
    from vllmx.engine import EngineCoreRequest
    from vllmx.model_loader.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_CONTEXT = 8
"""Prompt tokens that a decoder is shown first, so that it knows that it is not at the start."""


class IncrementalDetokenizer:
    """Collects token ids and makes no text: the detokenizer of a request with detokenize=False."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens so far; the list itself, not a copy."""
        return self.token_ids

    def num_output_tokens(self) -> int:
        """Number of generated tokens so far."""
        return len(self.token_ids)

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """Take new tokens; returns the stop string that they complete, if any.

        `stop_terminated`: the engine ended the request on the last of them.
        """
        self.token_ids.extend(new_token_ids)
        return None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        """The text to show now: all of it, or with `delta` what was not shown before."""
        return ""

    @classmethod
    def from_new_request(
        cls, tokenizer: Tokenizer | None, request: EngineCoreRequest
    ) -> IncrementalDetokenizer:
        """The detokenizer that suits `tokenizer` (None: make no text)."""
        assert request.sampling_params is not None
        if tokenizer is None:
            return IncrementalDetokenizer()
        pieces = get_token_pieces(tokenizer, request.sampling_params.skip_special_tokens)
        if pieces is not None:
            return FastIncrementalDetokenizer(tokenizer, request, pieces)
        return SlowIncrementalDetokenizer(tokenizer, request)


class BaseIncrementalDetokenizer(IncrementalDetokenizer, ABC):
    """Text and stop strings, whatever way a token is decoded."""

    def __init__(self, request: EngineCoreRequest) -> None:
        super().__init__()
        params = request.sampling_params
        assert params is not None
        stop = params.stop
        self.stop: list[str] = [stop] if isinstance(stop, str) else list(stop or ())
        self.min_tokens = params.min_tokens
        self.include_stop_str_in_output = params.include_stop_str_in_output
        # Text that may turn out to be the start of a stop string is not shown.
        self.stop_buffer_length = 0
        if self.stop and not self.include_stop_str_in_output:
            self.stop_buffer_length = max(map(len, self.stop)) - 1
        self.output_text = ""
        self._num_decoded = 0
        self._num_hidden = 0
        self._last_output_text_offset = 0
        self._stopped = False

    @abstractmethod
    def decode_next(self, next_token_id: int) -> str:
        """The text that the next token brings, "" while a character is unfinished."""

    def _decode_all(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self.decode_next, token_ids))

    def _flush(self) -> str:
        """The text still held when no more tokens come."""
        return ""

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """Take new tokens; returns the stop string that they complete, if any.

        A stop string counts if its last character came after the first `min_tokens` tokens. The
        text is cut before it (or after it, with include_stop_str_in_output).
        """
        if not new_token_ids:
            return None
        self.token_ids.extend(new_token_ids)
        if stop_terminated and not self.include_stop_str_in_output:
            self._num_hidden = 1  # the stop token is no text
        if not self.stop or len(self.token_ids) <= self.min_tokens:
            return None
        if self._num_decoded < self.min_tokens:
            self._decode_to(self.min_tokens)
        num_searched = len(self.output_text)
        self._decode_to(len(self.token_ids) - self._num_hidden)
        match = check_stop_strings(
            self.output_text,
            len(self.output_text) - num_searched,
            self.stop,
            self.include_stop_str_in_output,
        )
        if match is None:
            return None
        stop_string, end = match
        if end != -1:
            self.output_text = self.output_text[:end]
        self._stopped = True
        return stop_string

    def _decode_to(self, num_tokens: int) -> None:
        num_decoded = self._num_decoded
        if num_decoded < num_tokens:
            self._num_decoded = num_tokens
            # Python appends in place where nothing else refers to the text; += on the attribute
            # would copy all of it for every token.
            text, self.output_text = self.output_text, ""
            text += self._decode_all(self.token_ids[num_decoded:num_tokens])
            self.output_text = text

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        """The text to show now: all of it, or with `delta` what was not shown before.

        Text that could become a stop string is held back until `finished`.
        """
        self._decode_to(len(self.token_ids) - self._num_hidden)
        if finished and not self._stopped:
            self.output_text += self._flush()
        text = self.output_text
        end = len(text) if finished else len(text) - self.stop_buffer_length
        start = self._last_output_text_offset if delta else 0
        if end <= start:
            return ""
        self._last_output_text_offset = end
        return text[start:end]


class FastIncrementalDetokenizer(BaseIncrementalDetokenizer):
    """For tokenizers whose text is the sum of their tokens' bytes: a dict look-up a token.

    A prompt that ends inside a character is continued: the first token shows the whole character
    and nothing else of the prompt. At the end an unfinished character is left out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: EngineCoreRequest,
        pieces: TokenPieces | None = None,
    ) -> None:
        super().__init__(request)
        assert request.sampling_params is not None
        if pieces is None:
            pieces = get_token_pieces(tokenizer, request.sampling_params.skip_special_tokens)
            assert pieces is not None, "this tokenizer needs SlowIncrementalDetokenizer"
        self._decoder = PieceDecoder(pieces, request.prompt_token_ids or ())

    def decode_next(self, next_token_id: int) -> str:
        """The text that the next token brings, "" while a character is unfinished."""
        return self._decoder.push(next_token_id)

    def _decode_all(self, token_ids: Sequence[int]) -> str:
        return self._decoder.push_all(token_ids)


class SlowIncrementalDetokenizer(BaseIncrementalDetokenizer):
    """For any other tokenizer: `tokenizers.DecodeStream`, which decodes a window at each step."""

    def __init__(self, tokenizer: Tokenizer, request: EngineCoreRequest) -> None:
        super().__init__(request)
        params = request.sampling_params
        assert params is not None
        self.tokenizer = tokenizer.backend
        self.skip_special_tokens = params.skip_special_tokens
        # The tokens whose text was shown last, or those of the prompt's end, and those after them.
        self._shown = self._prompt_context(request.prompt_token_ids or [])
        self._held: list[int] = []
        self.stream = self._new_stream()
        # Contents of the added tokens, where no space may come between two of them.
        self._added: dict[int, str] = {}
        if not (params.skip_special_tokens or params.spaces_between_special_tokens):
            added = self.tokenizer.get_added_tokens_decoder()
            self._added = {token_id: token.content for token_id, token in added.items()}
        self._last_was_added = False

    def _prompt_context(self, prompt_token_ids: list[int]) -> list[int]:
        size = _CONTEXT
        while True:
            context = prompt_token_ids[-size:]
            text = self._decode(context)
            if text and not text.endswith(_REPLACEMENT):
                return context
            if size >= len(prompt_token_ids):
                # Nothing to be seen of the prompt, or it ends inside a character: a stream that
                # starts there would take all of it for output.
                return [] if text else context
            size *= 4

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(ids=self._shown, skip_special_tokens=self.skip_special_tokens)

    def decode_next(self, next_token_id: int) -> str:
        """The text that the next token brings, "" while the decoder may yet change it."""
        text = self._step(next_token_id)
        if self._added:
            content = self._added.get(next_token_id)
            if content is not None and self._last_was_added:
                text = content
            self._last_was_added = content is not None
        return text

    def _step(self, token_id: int) -> str:
        try:
            text = self.stream.step(self.tokenizer, token_id)
        except (OverflowError, TypeError):  # no token id at all
            return ""
        except Exception as error:
            if not str(error).startswith("Invalid prefix encountered"):
                raise
            return self._restart(token_id)
        if text is None:
            self._held.append(token_id)
            return ""
        self._shown, self._held = [*self._held, token_id], []
        return text

    def _restart(self, token_id: int) -> str:
        # The decoder took back text that it had given; go on with what was not yet given.
        self._held.append(token_id)
        text = self._flush()
        self._shown = [token_id]
        self.stream = self._new_stream()
        return text

    def _flush(self) -> str:
        shown, held = self._shown, self._held
        self._held = []
        before = self._decode(shown)
        whole = self._decode(shown + held)
        return whole[len(before) :] if whole.startswith(before) else self._decode(held)

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=self.skip_special_tokens)


def check_stop_strings(
    output_text: str, new_char_count: int, stop: list[str], include_in_output: bool
) -> tuple[str, int] | None:
    """Look for the stop string that ends first, in matches that reach into the new characters.

    Returns it and the length to cut the text to, -1 for no cut; None if there is none. The first
    to end, not the first in the list: the result must not depend on how many tokens come at once.
    """
    if not new_char_count or not stop:
        return None
    found: tuple[int, str] | None = None
    for stop_string in stop:
        length = len(stop_string)
        start = max(0, len(output_text) - new_char_count - length + 1)
        index = output_text.find(stop_string, start)
        if index != -1 and (found is None or index + length < found[0]):
            found = index + length, stop_string
    if found is None:
        return None
    end, stop_string = found
    if include_in_output:
        return stop_string, (-1 if end == len(output_text) else end)
    return stop_string, end - len(stop_string)

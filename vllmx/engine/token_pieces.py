# SPDX-License-Identifier: Apache-2.0
"""The bytes of each token, for tokenizers whose text is just those bytes one after the other.

That is so for byte-level BPE (GPT-2, Llama 3, Qwen) and for SentencePiece models with byte
fallback (Llama 2, Gemma), but not for WordPiece and the like, which look at neighbours. Where it
holds, a dict look-up decodes a token, and a character that is split over tokens is seen exactly:
decoding whole ids tells an unfinished character and an invalid byte alike as U+FFFD.
"""

from __future__ import annotations

import json
from codecs import utf_8_decode
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

    from vllmx.model_loader.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_PARTIAL = 3
"""A UTF-8 character has four bytes at most, so three may wait for the rest."""


class TokenPieces(dict[int, str | bytes]):
    """Token id -> its text, or its bytes where they are not whole characters by themselves.

    Filled as ids are met. An id the tokenizer does not know is "", as is a special token with
    `skip_special_tokens`.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, steps: list[dict[str, Any]], skip_special_tokens: bool
    ) -> None:
        self._backend = backend
        self._steps = steps
        self._skipped = frozenset(
            token.content
            for token in backend.get_added_tokens_decoder().values()
            if token.special and skip_special_tokens
        )
        self.max_leading_spaces = max(map(_leading_spaces, steps), default=0)
        """Spaces that the decoder drops at the very start of a text."""
        self.byte_fallback = any(step["type"] == "ByteFallback" for step in steps)
        """Bytes have tokens of their own, and the decoder takes a run of them as one text."""

    def __missing__(self, token_id: int) -> str | bytes:
        try:
            token = self._backend.id_to_token(token_id)
        except (OverflowError, TypeError):  # not an unsigned 32-bit number
            token = None
        data = b""
        if token is not None and token not in self._skipped:
            data = _to_bytes(token, self._steps)
        piece: str | bytes = data
        with suppress(UnicodeDecodeError):  # part of a character, or no character at all
            piece = data.decode()
        self[token_id] = piece
        return piece

    def partial_at_end(self, token_ids: Sequence[int]) -> bytes:
        """The bytes of an unfinished character at the end of `token_ids`, b"" mostly."""
        tail = b""
        for token_id in reversed(token_ids):
            piece = self[token_id]
            tail = (piece.encode() if isinstance(piece, str) else piece) + tail
            if len(tail) > _MAX_PARTIAL or (piece and isinstance(piece, str)):
                break
        return _decode_utf8(tail)[1]


class PieceDecoder:
    """Text of a token sequence that continues `prompt_token_ids`, one token at a time.

    An unfinished character gives nothing until it is finished, an invalid byte U+FFFD as soon as
    it is certain to be one. With byte fallback an invalid byte gives nothing where characters of
    its run of byte tokens have been shown: the library takes those back then, which can't be done,
    so it is the byte that goes, as in upstream's restarted stream.
    """

    __slots__ = ("_at_start", "_in_run", "_watch", "partial", "pieces")

    def __init__(self, pieces: TokenPieces, prompt_token_ids: Sequence[int]) -> None:
        self.pieces = pieces
        self.partial = pieces.partial_at_end(prompt_token_ids)
        """Bytes of a character that still lacks some."""
        self._at_start = pieces.max_leading_spaces > 0 and not any(
            pieces[token_id] for token_id in prompt_token_ids
        )
        # Whether a character of the run of byte tokens that goes on here has been shown.
        self._in_run = False
        self._watch = self._at_start

    def push(self, token_id: int) -> str:
        """The text that `token_id` brings; the sequence now ends in it."""
        piece = self.pieces[token_id]
        if self.partial or self._watch or not isinstance(piece, str):
            return self._push_slowly(piece)
        return piece

    def _push_slowly(self, piece: str | bytes) -> str:
        text, self.partial = self._join(piece)
        if not isinstance(piece, str):
            self._in_run |= self.pieces.byte_fallback and text.strip(_REPLACEMENT) != ""
        elif piece:
            self._in_run = False
        if self._at_start and (text or self.partial):
            self._at_start = False
            text = _strip_start(text, self.pieces.max_leading_spaces)
        self._watch = self._at_start or self._in_run
        return text

    def push_all(self, token_ids: Sequence[int]) -> str:
        """The text that several tokens bring."""
        if len(token_ids) == 1:
            return self.push(token_ids[0])
        if not self.partial and not self._watch:
            try:
                return "".join(map(self.pieces.__getitem__, token_ids))  # type: ignore[arg-type]
            except TypeError:
                pass  # one of them is bytes
        return "".join(map(self.push, token_ids))

    def peek(self, token_id: int) -> str:
        """The text `token_id` would bring; the sequence stays as it is."""
        piece = self.pieces[token_id]
        if not isinstance(piece, str):
            piece = self._join(piece)[0]
        if self._at_start:
            piece = _strip_start(piece, self.pieces.max_leading_spaces)
        return piece

    def _join(self, piece: str | bytes) -> tuple[str, bytes]:
        if not self.partial and isinstance(piece, str):
            return piece, b""
        data = self.partial + (piece.encode() if isinstance(piece, str) else piece)
        return _decode_utf8(data, "ignore" if self._in_run else "replace")


def get_token_pieces(tokenizer: Tokenizer, skip_special_tokens: bool) -> TokenPieces | None:
    """The pieces of `tokenizer`, made on first use; None if its text is more than their sum."""
    cache = tokenizer.__dict__.setdefault("_token_pieces", {})
    if skip_special_tokens not in cache:
        steps = _decoder_steps(tokenizer.backend)
        cache[skip_special_tokens] = (
            None if steps is None else TokenPieces(tokenizer.backend, steps, skip_special_tokens)
        )
    return cache[skip_special_tokens]


def _decode_utf8(data: bytes, errors: str = "replace") -> tuple[str, bytes]:
    """The text of `data` and the bytes of an unfinished character at its end.

    `errors`: invalid bytes become U+FFFD ("replace") or nothing ("ignore").
    """
    text, used = utf_8_decode(data, errors, False)
    rest = data[used:]
    # Python waits for the third byte of a surrogate, which is never valid.
    if rest[:1] == b"\xed" and rest[1:2] >= b"\xa0":
        return text + _REPLACEMENT * 2 * (errors == "replace"), b""
    return text, rest


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]] | None:
    if backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds[-1:] == ["Strip"] and steps[-1]["content"] == " " and steps[-1]["stop"] == 0:
        kinds.pop()  # of the whole text, since a Fuse comes before it
        if kinds[-1:] != ["Fuse"]:
            return None
    if kinds[-1:] == ["Fuse"]:
        kinds.pop()
    if not kinds or "ByteLevel" in kinds[:-1]:
        return None
    by_token = {"ByteLevel", "ByteFallback", "Metaspace", "Replace"}
    plain = all("String" in step["pattern"] for step in steps if step["type"] == "Replace")
    return steps if plain and by_token.issuperset(kinds) else None


def _leading_spaces(step: dict[str, Any]) -> int:
    if step["type"] == "Strip":
        return step["start"]
    if step["type"] == "Metaspace" and step["prepend_scheme"] != "never":
        return 1 << 30  # all those of the first token
    return 0


def _strip_start(text: str, max_spaces: int) -> str:
    stripped = text.lstrip(" ")
    return stripped if len(text) - len(stripped) <= max_spaces else text[max_spaces:]


def _to_bytes(token: str, steps: list[dict[str, Any]]) -> bytes:
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel":
            try:
                return bytes(map(_BYTE_OF_CHAR.__getitem__, token))
            except KeyError:  # an added token outside the byte alphabet stands for itself
                return token.encode()
        if kind == "ByteFallback" and len(token) == 6 and token[:3] == "<0x" and token[5] == ">":
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                continue
        if kind == "Metaspace":
            token = token.replace(step["replacement"], " ")
        elif kind == "Replace":
            token = token.replace(step["pattern"]["String"], step["content"])
    return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes stand for themselves, the others for the characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = sorted(set(range(256)).difference(printable))
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()

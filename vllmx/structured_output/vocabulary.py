# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/structured_output/utils.py @ v0.25.0
"""The model's tokens as the libraries of structured output see them: bytes, and how a text ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllmx.engine.token_pieces import get_token_pieces

if TYPE_CHECKING:
    from vllmx.model_loader.tokenizer import Tokenizer


def token_bytes(tokenizer: Tokenizer, vocab_size: int, with_special: bool = False) -> list[bytes]:
    """What each of `vocab_size` tokens adds to a text, b"" for an id without a token.

    Special tokens are left out of the text that a user gets, so they are b"" as well and no
    grammar lets them stand for their spelling, unless `with_special`.
    """
    pieces = get_token_pieces(tokenizer, skip_special_tokens=not with_special)
    found: list[bytes] = []
    for token_id in range(vocab_size):
        if pieces is not None:
            piece: str | bytes = pieces[token_id]
        else:
            piece = tokenizer.decode([token_id], skip_special_tokens=not with_special)
        found.append(piece.encode() if isinstance(piece, str) else piece)
    return found


def end_token_ids(model_config: Any, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Ids that end an answer: the tokenizer's, the generation config's or the model config's."""
    ids = [tokenizer.eos_token_id, *tokenizer.extra_eos_token_ids]
    generation = getattr(model_config, "generation_config_dict", None) or {}
    hf_config = getattr(model_config, "hf_config", None)
    for named in (generation.get("eos_token_id"), getattr(hf_config, "eos_token_id", None)):
        ids += named if isinstance(named, (list, tuple)) else [named]
    known = (i for i in ids if isinstance(i, int) and 0 <= i < vocab_size)
    return list(dict.fromkeys(known))

# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of a thousand tokens: every byte, every pair of small letters, and some more.

It is spelt out, not trained: what a text becomes can be told by hand, and no corpus is needed.
"""

from __future__ import annotations

import string
from typing import Any

SPECIAL = ("<unk>", "<s>", "</s>")
TEMPLATE = (
    "{% for message in messages %}{{ '<s>' + message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant: ' }}{% endif %}"
)


def byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary, as GPT-2's does."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def pairs(count: int) -> list[tuple[str, str]]:
    """The first `count` merges: two small letters, a space and a letter, a capital and a letter."""
    low, space = string.ascii_lowercase, byte_letters()[ord(" ")]
    firsts = [*low, space, *string.ascii_uppercase]
    return [(first, second) for first in firsts for second in low][:count]


def tokenizer_files(vocab_size: int) -> dict[str, Any]:
    """File name -> JSON of the files that a tokenizer of `vocab_size` tokens (260 - 1637) has."""
    merges = pairs(vocab_size - len(SPECIAL) - 256)
    words = [*SPECIAL, *byte_letters(), *("".join(pair) for pair in merges)]
    assert len(words) == vocab_size, f"{len(words)} tokens can be spelt, not {vocab_size}"
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    added = [
        {
            "id": i,
            "content": word,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, word in enumerate(SPECIAL)
    ]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": {word: i for i, word in enumerate(words)},
        "merges": [" ".join(pair) for pair in merges],
    }
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": model,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": SPECIAL[0],
            "bos_token": SPECIAL[1],
            "eos_token": SPECIAL[2],
            "chat_template": TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
    }

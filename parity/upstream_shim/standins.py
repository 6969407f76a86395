# SPDX-License-Identifier: Apache-2.0
"""Models that stand for those which a test names: models.yaml says which, this file writes them.

A stand-in is a folder with a config and a byte-level tokenizer. It has no weights: the engine is
built with load_format=dummy, whose generator is seeded.
"""

from __future__ import annotations

import itertools
import json
import os
import string
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
import yaml
from tokenizers import decoders, pre_tokenizers, processors
from tokenizers import models as tokenizer_models

MODELS: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("models.yaml").read_text(encoding="utf-8")
)
BOS, EOS, END_OF_TURN = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"


@cache
def folder_of(name: str) -> Path | None:
    """The folder of the model that stands for upstream's `name`; None if none does."""
    key = MODELS["stand_ins"].get(name)
    return None if key is None else _write(key)


@cache
def _write(key: str) -> Path:
    """Write stand-in `key` of models.yaml below $UPSTREAM_SCRATCH, if no process did so before."""
    folder = Path(os.environ["UPSTREAM_SCRATCH"]) / key
    if folder.is_dir():
        return folder
    spec = MODELS["models"][key]
    tokenizer = make_tokenizer(spec["special_tokens"], spec.get("first_special_token"))
    ids = {f"{name}_token_id": tokenizer.token_to_id(t) for name, t in (("bos", BOS), ("eos", EOS))}
    part = folder.with_name(f"{key}.{os.getpid()}")
    part.mkdir(parents=True)
    (part / "config.json").write_text(json.dumps({**spec["config"], **ids}))
    (part / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS, "eos_token": EOS}))
    tokenizer.save(str(part / "tokenizer.json"))
    part.rename(folder)
    return folder


@cache
def tagged_folder(name: str) -> Path | None:
    """The folder of a tokenizer with the tags that models.yaml gives for `name`, if it does."""
    tags = MODELS["tags"].get(name)
    if tags is None:
        return None
    folder = Path(os.environ["UPSTREAM_SCRATCH"]) / f"tags-{name.replace('/', '--')}"
    if not folder.is_dir():
        tokenizer = make_tokenizer(10)
        tokenizer.add_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in tags])
        part = folder.with_name(f"{folder.name}.{os.getpid()}")
        part.mkdir(parents=True)
        (part / "tokenizer_config.json").write_text(
            json.dumps({"bos_token": BOS, "eos_token": EOS})
        )
        tokenizer.save(str(part / "tokenizer.json"))
        part.rename(folder)
    return folder


def make_tokenizer(special_tokens: int, first: int | None = None) -> tokenizers.Tokenizer:
    """Byte-level BPE over the words of models.yaml and all pairs of small letters.

    special_tokens: how many there are, named as Llama 3's; the first has id `first`, by default
    the next that is free, and tokens that no text needs fill the ids before it. Texts are encoded
    with BOS, the first of the special tokens, before them.
    """
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    letters = string.ascii_lowercase
    pairs = map("".join, itertools.product(letters, repeat=2))
    for word in [*MODELS["words"], *pairs]:
        symbols = word.replace(" ", "\u0120")  # a space in the byte alphabet
        for length in range(2, len(symbols) + 1):
            if symbols[:length] not in vocabulary:
                merges.append((symbols[: length - 1], symbols[length - 1]))
                vocabulary[symbols[:length]] = len(vocabulary)
    names = [f"<|reserved_special_token_{i}|>" for i in range(special_tokens)]
    names[0], names[1], names[9] = BOS, EOS, END_OF_TURN
    start = len(vocabulary) if first is None else first
    for word in map("".join, itertools.product(letters, repeat=4)):
        if len(vocabulary) >= start:
            break
        vocabulary.setdefault(word, len(vocabulary))
    vocabulary |= {name: start + i for i, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(tokenizer_models.BPE(vocabulary, merges))
    tokenizer.add_special_tokens([tokenizers.AddedToken(n, normalized=False) for n in names])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, start)]
    )
    return tokenizer

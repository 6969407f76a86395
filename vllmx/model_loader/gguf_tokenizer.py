# SPDX-License-Identifier: Apache-2.0
"""Builds a tokenizer from the vocabulary in a GGUF file.

tokenizer.ggml.model is "gpt2" (byte-level BPE with merges and a named pre-tokenizer) or "llama"
(SentencePiece BPE with scores). Flags and their defaults are llama.cpp's.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from vllmx.exceptions import CheckpointError
from vllmx.model_loader.gguf_config import Metadata
from vllmx.model_loader.gguf_reader import GGUFReader
from vllmx.model_loader.spm_merges import merges_from_ranking
from vllmx.model_loader.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"
SPECIAL_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


class PreTokenizer(NamedTuple):
    """How a byte-level vocabulary cuts text before merging."""

    splits: tuple[str, ...]
    """Regular expressions, applied one after the other; matches and gaps become pieces."""
    ignore_merges: bool = False
    """Take a piece that is a token whole, whatever the merges say."""
    add_bos: bool = False
    """Whether BOS is added where the file has no add_bos_token."""
    nfc: bool = False
    """Whether text is put into Unicode NFC first."""


_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _CASED.replace("%s", "") + r"|\p{N}|" + _CASED_TAIL
_GPT4O = _CASED.replace("%s", _CONTRACTIONS + "?") + r"|\p{N}{1,3}|" + _CASED_TAIL
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)

_DIGITS_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_LLAMA3_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_BPE = PreTokenizer((_QWEN2,), nfc=True)
_O200K = PreTokenizer((_GPT4O,))
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer(_DEFAULT),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4"), _PLAIN_GPT2),
    **dict.fromkeys(("roberta-bpe", "jina-v2-code", "modern-bert"), _PLAIN_GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _DIGITS_GPT2),
    **dict.fromkeys(("codeshell", "exaone", "minerva-7b"), _DIGITS_GPT2),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3"), _LLAMA3_BPE),
    **dict.fromkeys(("falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3_BPE),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2_BPE),
    **dict.fromkeys(("stablelm2", "megrez"), PreTokenizer((_QWEN2,))),
    "qwen35": PreTokenizer((_QWEN35,)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _O200K),
    "deepseek-v3": PreTokenizer(_DEEPSEEK3),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "falcon": PreTokenizer(_FALCON),
}
"""tokenizer.ggml.pre -> how text is cut."""


class _Vocabulary(NamedTuple):
    """What both kinds of vocabulary have: spellings, types and the ids of special tokens."""

    reader: GGUFReader
    meta: Metadata
    tokens: list[str]
    types: np.ndarray
    special_ids: dict[str, int]


def tokenizer_from_gguf(reader: GGUFReader) -> Tokenizer:
    """Build the tokenizer that `reader`'s metadata describes.

    Raises CheckpointError for a tokenizer model or pre-tokenizer that vllmx doesn't know, and for
    metadata that contradicts itself.
    """
    vocab = _read_vocabulary(reader)
    kind = vocab.meta.read("tokenizer.ggml.model", str)
    if kind == "gpt2":
        backend, add_bos = _byte_level(vocab)
    elif kind == "llama":
        backend, add_bos = _sentencepiece(vocab), True
    else:
        raise CheckpointError(
            f"{reader.path}: tokenizer model {kind!r} is not supported (gpt2 and llama are); set "
            "model.tokenizer to a folder with a tokenizer.json."
        )
    _register_added_tokens(backend, vocab, kind)
    _add_bos_and_eos(backend, vocab, add_bos)
    ids = vocab.special_ids
    ends = (vocab.meta.read(f"tokenizer.ggml.{key}_token_id", int, None) for key in ("eot", "eom"))
    return Tokenizer(
        backend,
        special_tokens_map={key: vocab.tokens[token] for key, token in ids.items()},
        chat_templates=_chat_templates(vocab.meta),
        extra_eos_token_ids={e for e in ends if e is not None} - {ids.get("eos_token")},
    )


def _read_vocabulary(reader: GGUFReader) -> _Vocabulary:
    tokens = reader.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise CheckpointError(
            f"{reader.path} holds no vocabulary (tokenizer.ggml.tokens); set model.tokenizer to a "
            "folder with a tokenizer.json."
        )
    types = reader.metadata.get("tokenizer.ggml.token_type")
    if types is None:
        types = np.full(len(tokens), NORMAL)
    elif not isinstance(types, np.ndarray) or len(types) != len(tokens):
        raise CheckpointError(f"{reader.path}: token_type and tokens differ in length.")
    meta = Metadata(reader)
    special_ids = {}
    for name, key in SPECIAL_KEYS.items():
        token = meta.read(key, int, None)
        if token is None:
            continue
        if not 0 <= token < len(tokens):
            raise CheckpointError(
                f"{reader.path}: {key} is {token}, the vocabulary has {len(tokens)} tokens."
            )
        special_ids[name] = token
    return _Vocabulary(reader, meta, tokens, types, special_ids)


def _ids_by_token(tokens: list[str]) -> dict[str, int]:
    """Spelling -> id; of equal spellings the first counts, as in llama.cpp."""
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) != len(tokens):
        ids = {token: i for i, token in reversed(list(enumerate(tokens)))}
    return ids


def _byte_level(vocab: _Vocabulary) -> tuple[Backend, bool]:
    """A GPT-2 style backend, and whether it adds BOS by default."""
    path = vocab.reader.path
    name = vocab.meta.read("tokenizer.ggml.pre", str, None)
    if name is None:
        logger.warning("%s names no pre-tokenizer (tokenizer.ggml.pre); using 'default'.", path)
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{path}: pre-tokenizer {name!r} is not supported (supported: "
            f"{', '.join(PRE_TOKENIZERS)}); set model.tokenizer to a folder with a tokenizer.json."
        )
    pre = PRE_TOKENIZERS[name]
    merges = vocab.reader.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise CheckpointError(f"{path}: tokenizer.ggml.merges is missing.")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = Backend(_bpe(path, vocab.tokens, pairs, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in pre.splits]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _bpe(path: Any, tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=_ids_by_token(tokens), merges=merges, **options)
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{path}: the vocabulary contradicts itself: {error}.") from error


def _sentencepiece(vocab: _Vocabulary) -> Backend:
    """A SentencePiece BPE backend; its merges follow from the scores."""
    path = vocab.reader.path
    scores = vocab.reader.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(vocab.tokens):
        raise CheckpointError(f"{path}: tokenizer.ggml.scores is missing or of another length.")
    tokens = [token.replace(" ", SPACE) for token in vocab.tokens]
    # User-defined runs of spaces come first, then pieces by score; equal scores by id.
    pieces = np.nonzero((vocab.types == NORMAL) | (vocab.types == USER_DEFINED))[0]
    keys = np.where(vocab.types[pieces] == USER_DEFINED, -np.inf, -scores[pieces])
    ranked = pieces[np.argsort(keys, kind="stable")]
    merges = merges_from_ranking([tokens[i] for i in ranked.tolist()])
    unknown = vocab.special_ids.get("unk_token")
    backend = Backend(
        _bpe(
            path,
            tokens,
            merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=bool((vocab.types == BYTE).any()),
        )
    )
    spaces = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocab.meta.read("tokenizer.ggml.add_space_prefix", bool, True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(steps)
    return backend


def _register_added_tokens(backend: Backend, vocab: _Vocabulary, kind: str) -> None:
    """Make control tokens special and user-defined ones whole but visible.

    In SentencePiece a token of spaces alone is left to the merges, as transformers does.
    """
    special = np.nonzero((vocab.types == CONTROL) | (vocab.types == UNKNOWN))[0].tolist()
    special += [i for i in vocab.special_ids.values() if vocab.types[i] == NORMAL]
    visible = np.nonzero(vocab.types == USER_DEFINED)[0].tolist()
    if kind == "llama":
        visible = [i for i in visible if vocab.tokens[i].strip(" ")]
    for ids, is_special in ((special, True), (visible, False)):
        tokens = [vocab.tokens[i] for i in ids if vocab.tokens[i]]
        add = backend.add_special_tokens if is_special else backend.add_tokens
        add([AddedToken(t, special=is_special, normalized=False) for t in tokens])


def _add_bos_and_eos(backend: Backend, vocab: _Vocabulary, add_bos_default: bool) -> None:
    add_bos = vocab.meta.read("tokenizer.ggml.add_bos_token", bool, add_bos_default)
    add_eos = vocab.meta.read("tokenizer.ggml.add_eos_token", bool, False)
    template, special = ["$A"], []
    for wanted, name, at in ((add_bos, "bos", 0), (add_eos, "eos", 2)):
        token = vocab.special_ids.get(f"{name}_token")
        if wanted and token is not None:
            template.insert(at, name)
            special.append({"id": name, "ids": [token], "tokens": [vocab.tokens[token]]})
    if special:
        backend.post_processor = processors.TemplateProcessing(
            single=" ".join(template), special_tokens=special
        )


def _chat_templates(meta: Metadata) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    templates = {}
    for key in meta.reader.metadata:
        if key == prefix or key.startswith(f"{prefix}."):
            templates[key[len(prefix) + 1 :] or "default"] = meta.read(key, str)
    return templates

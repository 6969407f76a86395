# SPDX-License-Identifier: Apache-2.0
"""Tokenizers built from GGUF metadata give the ids of the model's own tokenizer.

token_ids.json holds expected ids and where they come from. The byte-level pre-tokenizers were
also run once over llama.cpp's own golden files (47 texts each) for command-r, deepseek-coder,
falcon, gpt-2, llama-bpe, mpt, qwen2, refact, starcoder, and SentencePiece for llama-spm and
phi-3: all equal.
"""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from vllmx.entrypoints.chat_utils import render_chat
from vllmx.exceptions import CheckpointError
from vllmx.model_loader.gguf_reader import GGUFReader
from vllmx.model_loader.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_from_gguf
from vllmx.model_loader.spm_merges import merges_from_ranking

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "\u0120 hello"]
BPE_TOKENS = [*BYTES, "he", "ll", "hell", "hello", "\u0120hello", "<|im_end|>", "<think>", "<s>"]
IM_END, THINK, BOS = (BPE_TOKENS.index(t) for t in ("<|im_end|>", "<think>", "<s>"))
BPE = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": BPE_TOKENS,
    "tokenizer.ggml.token_type": [1] * (len(BPE_TOKENS) - 3) + [3, 4, 3],
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.eos_token_id": IM_END,
    "tokenizer.ggml.bos_token_id": BOS,
}
SPM_TOKENS = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "ab", "\u2581a", "\u2581ab", "<tool>"]
SPM_TOKENS += [f"<0x{i:02X}>" for i in range(256)]
SPM = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": SPM_TOKENS,
    "tokenizer.ggml.scores": [0.0] * 3 + [-5.0, -6.0, -7.0, -1.0, -2.0, -3.0, 0.0] + [0.0] * 256,
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1, 1, 4] + [6] * 256,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


@pytest.fixture
def build(write_gguf):
    def make(base, **changes):
        changes = {f"tokenizer.ggml.{k}": v for k, v in changes.items()}
        values = {k: v for k, v in (base | changes).items() if v is not None}
        return tokenizer_from_gguf(GGUFReader(write_gguf({}, values)))

    return make


def test_merges_and_byte_fallback_of_byte_level(build) -> None:
    tokenizer = build(BPE)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("hello hello")) == [
        "hello",
        "\u0120hello",
    ]
    text = "h\u00e9\u4e2d\U0001f642\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_and_user_defined_tokens_are_whole(build) -> None:
    tokenizer = build(BPE)
    text = "a<|im_end|>b<think>c"
    a, b, c = (BPE_TOKENS.index(letter) for letter in "abc")
    ids = tokenizer.encode(text)
    assert ids == [a, IM_END, b, THINK, c]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab<think>c"
    assert tokenizer.all_special_ids == {IM_END, BOS}
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", IM_END)


def test_eot_and_eom_are_extra_ends(build) -> None:
    tokenizer = build(BPE, eot_token_id=BOS, eom_token_id=IM_END)
    assert tokenizer.extra_eos_token_ids == {BOS}


@pytest.mark.parametrize(
    ("base", "changes", "bos", "eos"),
    [
        (SPM, {}, True, False),
        (SPM, {"add_bos_token": False}, False, False),
        (SPM, {"add_bos_token": True, "add_eos_token": True}, True, True),
        (SPM, {"bos_token_id": None}, False, False),
        (BPE, {}, False, False),
        (BPE, {"add_bos_token": True}, True, False),
        (BPE, {"pre": "llama-bpe"}, True, False),
        (BPE, {"pre": "llama-bpe", "add_bos_token": False}, False, False),
        (BPE, {"pre": "tekken"}, True, False),
        (BPE, {"pre": "qwen2"}, False, False),
        (BPE, {"add_bos_token": True, "bos_token_id": None}, False, False),
    ],
)
def test_bos_and_eos_follow_the_flags_and_llama_cpp_s_defaults(
    build, base, changes, bos, eos
) -> None:
    tokenizer = build(base, **changes)
    plain = tokenizer.encode("a", add_special_tokens=False)
    begin, end = [tokenizer.bos_token_id] * bos, [tokenizer.eos_token_id] * eos
    assert tokenizer.encode("a") == begin + plain + end
    if changes.get("bos_token_id", 1) is None:
        assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("", None)


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(build) -> None:
    tokenizer = build(SPM)

    def pieces(text):
        return tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False))

    assert pieces("ab") == ["\u2581ab"]
    assert pieces("a b") == ["\u2581a", "\u2581", "b"]
    assert pieces(" ab") == ["\u2581", "\u2581ab"]
    assert pieces("a<tool>") == ["\u2581a", "<tool>"]
    assert pieces("\u00e9") == ["\u2581", "<0xC3>", "<0xA9>"]
    for text in ("ab ab", " a", "a\u00e9b", "\U0001f642"):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_add_space_prefix_false_adds_no_space(build) -> None:
    tokenizer = build(SPM, add_space_prefix=False)
    ids = tokenizer.encode("ab<tool>ab", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["ab", "<tool>", "ab"]
    assert tokenizer.decode(ids) == "ab<tool>ab"


def test_merges_are_every_cut_into_known_pieces_best_first() -> None:
    pieces = ["ab", "a", "b", "abab", "aba", "x\U0001f642", "x", "\U0001f642"]
    expected = []
    for piece in pieces:
        cuts = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        expected += [cut for cut in cuts if cut[0] in pieces and cut[1] in pieces]
    assert merges_from_ranking(pieces) == expected
    assert merges_from_ranking([]) == []
    draw = np.random.default_rng(0)
    many = list({"".join(draw.choice(list("abc\u4e2d"), draw.integers(1, 7))) for _ in range(900)})
    known, expected = set(many), []
    for piece in many:
        cuts = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        expected += [cut for cut in cuts if cut[0] in known and cut[1] in known]
    assert merges_from_ranking(many) == expected


def test_missing_pre_tokenizer_warns_and_unknown_one_is_refused(build, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        build(BPE, pre=None)
    assert "names no pre-tokenizer" in caplog.text
    with pytest.raises(CheckpointError, match="pre-tokenizer 'mystery' is not supported"):
        build(BPE, pre="mystery")


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_builds_and_round_trips(build, name) -> None:
    tokenizer = build(BPE, pre=name)
    text = "It's 12345 hello\u00e9 HELLO's\r\n\n  x \u4e2d\u6587 !?"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(
    ("base", "changes", "problem"),
    [
        (BPE, {"model": "bert"}, "tokenizer model 'bert' is not supported"),
        (BPE, {"tokens": None}, "holds no vocabulary"),
        (BPE, {"merges": None}, "merges is missing"),
        (BPE, {"merges": ["q zzz"]}, "contradicts itself"),
        (BPE, {"token_type": [1]}, "differ in length"),
        (BPE, {"eos_token_id": 9999}, "eos_token_id is 9999"),
        (SPM, {"scores": None}, "scores is missing"),
    ],
)
def test_contradictory_metadata_is_refused(build, base, changes, problem) -> None:
    with pytest.raises(CheckpointError, match=problem):
        build(base, **changes)


def test_chat_templates_are_read(write_gguf) -> None:
    named = {"tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "B"}
    tokenizer = tokenizer_from_gguf(GGUFReader(write_gguf({}, BPE | named)))
    assert tokenizer.chat_template == "A"
    assert tokenizer.chat_templates == {"default": "A", "tool_use": "B"}
    assert tokenizer_from_gguf(GGUFReader(write_gguf({}, BPE))).chat_template is None


def test_chat_has_exactly_one_bos(write_gguf) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}"
    for values, count in ((SPM, 1), ({**SPM, "tokenizer.ggml.bos_token_id": None}, 0)):
        metadata = {k: v for k, v in values.items() if v is not None}
        metadata["tokenizer.chat_template"] = template
        tokenizer = tokenizer_from_gguf(GGUFReader(write_gguf({}, metadata)))
        text = render_chat(tokenizer, [{"role": "user", "content": "ab"}])
        assert tokenizer.encode(text, add_special_tokens=False).count(1) == count


@pytest.fixture(scope="module")
def real_tokenizer(real_model):
    cache = {}

    def get(name):
        if name not in cache:
            cache[name] = tokenizer_from_gguf(GGUFReader(real_model(name)))
        return cache[name]

    return get


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_real_model_s_ids_equal_transformers(real_tokenizer, name) -> None:
    tokenizer = real_tokenizer(name)
    expected = json.loads((Path(__file__).parent / "token_ids.json").read_text())
    for text, ids in zip(expected["texts"], expected[name]):
        assert tokenizer.encode(text) == ids, text
        decoded = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
        if name == "gemma3-270m":  # SentencePiece writes a space as this sign
            text = text.replace("\u2581", " ")
        assert decoded == text


@pytest.mark.slow
def test_real_models_have_their_special_tokens(real_tokenizer) -> None:
    smol, gemma = real_tokenizer("smollm2-135m"), real_tokenizer("gemma3-270m")
    assert (smol.vocab_size, smol.max_token_id, len(smol)) == (49152, 49151, 49152)
    assert (smol.bos_token_id, smol.eos_token_id, len(smol.all_special_ids)) == (1, 2, 17)
    assert "<|im_start|>" in smol.chat_template
    assert (gemma.vocab_size, gemma.bos_token_id, gemma.eos_token_id) == (262144, 2, 1)
    assert gemma.chat_template is None
    assert gemma.convert_tokens_to_ids("<end_of_turn>") in gemma.all_special_ids

# SPDX-License-Identifier: Apache-2.0
"""What is asked of tokenizers, detokenizers, chat templates and block hashes.

A spec is plain JSON: `kind`, `name`, the `model` whose tokenizer it needs (or none) and `cases`,
each with an `id`. `oracles/vllm_text.py` says what each kind answers. Left out is what vllmx does
otherwise on purpose: adapters in block hashes (a salt can imitate upstream's key); several stop
strings that end at the same step (upstream takes the first of the list, vllmx the first to end);
in streams, bytes that are no character (upstream shows nothing from there on, vllmx U+FFFD) and
prompts that end inside a character (upstream shows what stands before it once more).
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

from .inputs import Maker
from .text_chats import CHATS

Case = dict[str, Any]
Spec = dict[str, Any]

TEXTS = {
    "empty": "",
    "one": "x",
    "plain": "The capital of France is Paris.",
    "leading_spaces": "   three before",
    "trailing_spaces": "two after  ",
    "only_spaces": "     ",
    "runs": "a  b   c    d     e      f        g",
    "tabs": "\tone\t\ttwo\t \tthree",
    "newlines": "a\nb\n\nc\n\n\nd\r\ne\rf",
    "space_newline": " \n  \n\t\n \r\n",
    "exotic_spaces": "no\u00a0break em\u2003em thin\u2009thin ideographic\u3000end line\u2028sep",
    "zero_width": "zero\u200bwidth joiner\u200dhere mark\ufeffbom soft\u00adhyphen",
    "code": "def f(n: int) -> int:\n    if n <= 1:\n        return n\n\treturn f(n-1)  # tab\n",
    "json": '{"a": [1, 2.50, -3e-7], "b": {"c": null, "d": "\\u00e9"}}',
    "digits": "0 12 345 6789 1234567890 3.14159 1,000,000 0x1F 10^-5 ²³ ½ Ⅷ ٣٤ १२",
    "contractions": "It's I'm you've we'll they'd DON'T 'tis rock'n'roll ’s",
    "punctuation": "!!! ??? ... --- === ### $%^&*()[]{}<>|\\/`~@_+;:\"'",
    "latin": "café naïve Übergrößte Straße żółć İstanbul ǆ",
    "combining": "e\u0301 vs \u00e9, a\u0308\u0323, Z\u0351\u0343\u036f, \ufb01 lig \u1e9b\u0323",
    "cjk": "日本語のテキスト、中文文本。漢字かな交じり文「引用」",
    "hangul": "한국어 문장입니다. \u1112\u1161\u11ab",
    "mixed_cjk": "GPUの速度は3倍、价格¥1,999。",
    "cyrillic": "Привет, мир! Ёлка, щука.",
    "rtl": "שלום עולם مرحبا بالعالم \u202eabc\u202c",
    "indic": "नमस्ते दुनिया தமிழ் ไทยไม่เว้นวรรค ကမ္ဘာ",
    "emoji": "🙂 🔥🔥 👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 👍🏽 🧿",
    "astral": "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𠜎𠜱 \U0001f9ff\U0010ffff",
    "controls": "a\x00b\x01c\x1bd\x7fe\x85f",
    "replacement": "bad \ufffd\ufffd byte",
    "noncharacters": "\ufffe\uffff end",
    "long_word": "pneumonoultramicroscopicsilicovolcanoconiosis" * 2,
    "repeat": "a" * 65 + " " + "=" * 40 + "\n" * 9,
    "url": "https://example.org/a/b?q=%20x&y=1#z user@example.org C:\\dir\\f.txt",
    "byte_spelling": "<0x0A> <0xE2><0x82><0xAC> ▁ Ġ Ċ",
    "chatml": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "end_of_text": "before<|endoftext|>after <|endoftext|> <|im_end|><|im_end|>",
    "torn_special": "<|im_start |> <|im_end| |im_end|> <bo s> <<bos>>",
    "gemma_turns": "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    "gemma_others": "a<eos>b <pad><unk> <unused7> <mask> [multimodal] <h1>t</h1>",
    "jupyter": "<repo_name>x<file_sep><jupyter_code>1+1<jupyter_output>2<empty_output>",
    "spaces_and_special": "  <|im_end|>  <eos>  x",
}
"""Id of a case -> text that is encoded, and decoded again."""

BYTES = {
    "euro": [0xE2, 0x82, 0xAC],
    "lone_lead": [0xC3],
    "lone_continuation": [0x80],
    "cut_emoji": [0xF0, 0x9F, 0x99],
    "cut_then_ascii": [0xF0, 0x9F, 0x41],
    "overlong": [0xC0, 0xAF],
    "surrogate": [0xED, 0xA0, 0x80],
    "too_high": [0xF4, 0x90, 0x80, 0x80],
    "never": [0xFE, 0xFF],
    "two_cut": [0xE2, 0x82, 0xE2, 0x82, 0xAC],
    "valid_between": [0xFF, 0x41, 0xC3, 0xA9, 0xFF],
    "zero": [0x00, 0x0A, 0x20],
}
"""Id of a case -> bytes, each a token of its own."""

STREAMED = {
    "smollm2-135m": ("euro", "cut_emoji", "lone_lead", "zero", "cut_then_ascii", "two_cut"),
    "gemma3-270m": ("euro", "cut_emoji", "lone_lead", "zero"),
}
"""Those of BYTES that are streamed too, by model."""

VOCABULARY = {"smollm2-135m": 49152, "gemma3-270m": 262144}
SPECIAL = {"smollm2-135m": (0, 1, 2, 16), "gemma3-270m": (0, 1, 2, 105)}
"""Ids of special tokens, but for Gemma's 105, which is a visible one."""
NEWLINE = {"smollm2-135m": 198, "gemma3-270m": 107}


ABSENT = {4, 6, 19, 20, 22, 29, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}
"""Bytes that SmolLM2 has no token for."""


def byte_ids(model: str, data: list[int]) -> list[int]:
    """The tokens that stand for one byte each; bytes without one are left out.

    Gemma has them from 238 on; GPT-2's alphabet begins with the printable bytes, in SmolLM2 after
    17 special tokens.
    """
    if model == "gemma3-270m":
        return [238 + byte for byte in data]
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    order = printable + [byte for byte in range(256) if byte not in printable]
    order = [byte for byte in order if byte not in ABSENT]
    return [17 + order.index(byte) for byte in data if byte not in ABSENT]


def tokenizer_cases(model: str) -> list[Case]:
    """Texts to encode, ids to decode, and how the vocabulary spells some of them."""
    make = Maker("text", f"tokenizer/{model}", "f32")
    size = VOCABULARY[model]
    cases: list[Case] = [{"id": f"text.{name}", "text": text} for name, text in TEXTS.items()]
    ids = {f"bytes.{name}": byte_ids(model, data) for name, data in BYTES.items()}
    ids |= {f"random.{i}": make.integers(f"random{i}", 0, size, 24).tolist() for i in range(12)}
    ids["nothing"] = []
    ids["special"] = [*SPECIAL[model], NEWLINE[model], *SPECIAL[model]]
    ids["unknown"] = [NEWLINE[model], size, size + 70000, NEWLINE[model]]
    return cases + [{"id": name, "ids": value} for name, value in ids.items()]


def _stream(name: str, steps: list[list[int]], **facts: Any) -> Case:
    params = {"skip_special_tokens": True, "spaces_between_special_tokens": True}
    params |= {"stop": [], "include_stop_str_in_output": False, "min_tokens": 0}
    given = {"text": None, "prompt": [], "stop_terminated": False, **facts}
    params |= {key: given.pop(key) for key in list(given) if key in params}
    return {"id": name, "steps": steps, **given, "params": params}


def detokenizer_cases(model: str) -> list[Case]:
    """Streams of tokens. `text` is encoded and comes one token a step, before `steps`."""
    make = Maker("text", f"detokenizer/{model}", "f32")
    size, newline = VOCABULARY[model], NEWLINE[model]
    shown = ("plain", "runs", "cjk", "hangul", "indic", "emoji", "astral", "rtl", "combining")
    cases = [_stream(f"text.{name}", [], text=TEXTS[name]) for name in shown]
    cases += [
        _stream(f"bytes.{name}", [[i] for i in byte_ids(model, BYTES[name])], prompt=[newline])
        for name in STREAMED[model]
    ]
    euro = byte_ids(model, BYTES["euro"])
    special = [[i] for i in (*SPECIAL[model], newline, *SPECIAL[model])]
    for skip in (True, False):
        for spaces in (True, False):
            options = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
            name = f"special.{'skip' if skip else 'show'}.{'spaces' if spaces else 'joined'}"
            cases.append(_stream(name, special, prompt=[newline], **options))
    for i in range(8):
        ids = make.integers(f"random{i}", 300, size, 20).tolist()
        cuts = [0, 1, 3, 4, 8, 9, 14, 20] if i % 2 else range(21)
        steps = [ids[a:b] for a, b in pairwise(cuts)]
        cases.append(_stream(f"random.{i}", steps, prompt=ids[:3]))
    sentence = TEXTS["plain"]
    cases += [
        _stream("stop.word", [], text=sentence, stop=["France"]),
        _stream("stop.within", [], text=sentence, stop=["ran"]),
        _stream("stop.kept", [], text=sentence, stop=["ran"], include_stop_str_in_output=True),
        _stream("stop.never", [], text=sentence, stop=["Berlin", "Paris!"]),
        _stream("stop.two", [], text=sentence, stop=["Paris", "capital"]),
        _stream("stop.early", [], text=sentence, stop=["The", "Paris"], min_tokens=3),
        _stream("stop.emoji", [], text=TEXTS["emoji"], stop=["👩‍👩‍👧"]),
        _stream("stop.newline", [], text="one\n\ntwo\n\nthree", stop=["\n\n"]),
        _stream("ended", [[newline]], text=sentence, stop_terminated=True),
        _stream(
            *("ended.kept", [[newline]]),
            text=sentence,
            stop_terminated=True,
            include_stop_str_in_output=True,
        ),
        _stream("together", [euro[:2], [euro[2], *byte_ids(model, [0x41])]]),
    ]
    return cases


HASHED = [
    # id, prompt tokens, output tokens, block size, PYTHONHASHSEED, and what else decides
    ("plain.4", 19, 0, 4, "0", {}),
    ("plain.16", 100, 0, 16, "0", {}),
    ("plain.1", 7, 0, 1, "0", {}),
    ("exact.16", 64, 0, 16, "0", {}),
    ("short.32", 31, 0, 32, "0", {}),
    ("long.128", 400, 0, 128, "0", {}),
    ("growing.8", 13, 30, 8, "0", {}),
    ("growing.from_nothing_full", 3, 9, 4, "0", {}),
    ("seed.1", 32, 0, 16, "1", {}),
    ("seed.other", 32, 0, 16, "4294967295", {}),
    ("salt", 40, 0, 16, "0", {"cache_salt": "tenant-a"}),
    ("salt.other", 40, 0, 16, "0", {"cache_salt": "tenant-b"}),
    ("salt.unicode", 40, 8, 16, "0", {"cache_salt": "Ключ 🔑 \u0000"}),
    ("salt.empty", 40, 0, 16, "0", {"cache_salt": ""}),
    ("image", 48, 0, 16, "0", {"items": [["a" * 64, 5, 20]]}),
    ("image.moved", 48, 0, 16, "0", {"items": [["a" * 64, 6, 20]]}),
    ("images", 80, 0, 16, "0", {"items": [["one", 0, 16], ["two", 16, 8], ["three", 30, 40]]}),
    ("image.late", 64, 6, 16, "0", {"items": [["late", 40, 10]], "cache_salt": "s"}),
    ("embeds", 24, 0, 8, "0", {"embeds": 3}),
    ("embeds.salt", 24, 0, 8, "0", {"embeds": 5, "cache_salt": "s"}),
]


def block_hash_cases(function: str) -> list[Case]:
    """Requests whose blocks are hashed, and single blocks with any extra keys."""
    make = Maker("text", "block_hash", "f32")
    cases: list[Case] = []
    for name, prompt, output, size, seed, other in HASHED:
        # Half of the prompts share their beginning, so that chains part where tokens do.
        tokens = make.integers("shared", 0, 262144, prompt + output)
        own = make.integers(name, 0, 262144, prompt + output)
        tokens[prompt // 2 :] = own[prompt // 2 :]
        extra: dict[str, Any] = {"cache_salt": None, "items": [], "embeds": None, **other}
        if extra["embeds"]:
            values = make.integers(f"{name}/embeds", -64, 64, prompt, extra["embeds"]) / 64
            extra["embeds"] = values.tolist()
        ids = tokens.tolist()
        cases.append(
            {
                "id": name,
                "prompt": None if extra["embeds"] else ids[:prompt],
                "output": ids[prompt:],
                "block_size": size,
                "PYTHONHASHSEED": seed,
                **extra,
            }
        )
    blocks: dict[str, tuple[list[int], list[Any] | None]] = {
        "small": ([0, 1, 23, 24, 255, 256], None),
        "large": ([65535, 65536, 2**31 - 1, 2**31, 2**32, 2**40], None),
        "nothing": ([], None),
        "text_key": ([1, 2], ["key"]),
        "keys": ([1, 2], ["a", ["b", -3], 7, None, True, ""]),
        "unicode_key": ([1, 2], ["é🙂"]),
    }
    cases += [
        {"id": f"block.{name}", "tokens": ids, "extra_keys": keys, "PYTHONHASHSEED": "0"}
        for name, (ids, keys) in blocks.items()
    ]
    return cases


def _spec(kind: str, case: str, model: str | None, cases: list[Case]) -> Spec:
    ids = [entry["id"] for entry in cases]
    assert len(set(ids)) == len(ids), f"{kind}/{case}: an id twice"
    return {"name": f"{kind}/{case}", "kind": kind, "model": model, "cases": cases}


@functools.cache
def specs() -> tuple[Spec, ...]:
    """All specs; not to be changed."""
    found = []
    for model in VOCABULARY:
        found.append(_spec("tokenizer", model, model, tokenizer_cases(model)))
        found.append(_spec("detokenizer", model, model, detokenizer_cases(model)))
        found.append(_spec("chat", model, model, CHATS[model]))
    for function in ("sha256_cbor", "sha256"):
        found.append(_spec("block_hash", function, None, block_hash_cases(function)))
    return tuple(found)


def selected(select: str | None) -> list[Spec]:
    """The specs that `select` (prefixes of text.KIND/CASE, by comma) leaves."""
    words = [word.strip() for word in select.split(",")] if select else ["text."]
    return [s for s in specs() if any(f"text.{s['name']}".startswith(w) for w in words)]

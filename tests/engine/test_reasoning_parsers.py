# SPDX-License-Identifier: Apache-2.0
"""Answers are taken apart into reasoning and content, whole or in whatever pieces they come."""

import random
from types import SimpleNamespace

import pytest
import tokenizers
from front_helpers import byte_level_tokenizer, piece_tokenizer

from vllmx.config import StructuredOutputsConfig
from vllmx.engine.front import set_reasoning_markers
from vllmx.exceptions import UserError
from vllmx.model_loader.tokenizer import Tokenizer
from vllmx.reasoning import ReasoningParser, ReasoningParserManager

TAGS = ["<think>", "</think>", "<seed:think>", "</seed:think>", "[THINK]", "[/THINK]"]
TAGS += ["<|channel|>", "<|message|>", "<|end|>", "<response>", "</response>"]


def tokenizer_with_tags() -> Tokenizer:
    made = byte_level_tokenizer()
    made.backend = tokenizers.Tokenizer.from_str(made.backend.to_str())
    made.backend.add_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in TAGS])
    return made


TOKENIZER = tokenizer_with_tags()
REQUEST = SimpleNamespace(chat_template_kwargs=None)
THINKS = {"chat_template_kwargs": {"thinking": True, "reasoning_effort": "high"}}
SILENT = {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}
TOKENS = "deepseek_r1 qwen3 mimo glm45 glm47 kimi_k2 minimax_m2 nemotron_v3".split()
TOKENS += "step3 deepseek_v3 holo2 hy_v3".split()
CASES = [
    *((name, THINKS, "why</think>so", ("why", "so")) for name in TOKENS),
    *((name, THINKS, "why", ("why", None)) for name in TOKENS),
    *((name, THINKS, "why</think>", ("why", None)) for name in TOKENS),
    *((name, THINKS, "<think>why</think>so", ("why", "so")) for name in TOKENS if name != "step3"),
    *((name, SILENT, "so it is", (None, "so it is")) for name in ("qwen3", "kimi_k2", "holo2")),
    ("deepseek_v3", {}, "so", (None, "so")),
    ("hy_v3", {}, "so", (None, "so")),
    ("seed_oss", {}, "<seed:think>why</seed:think>so", ("why", "so")),
    ("identity", {}, "<think>a</think>b", (None, "<think>a</think>b")),
    ("minimax_m2_append_think", {}, "a</think>b", (None, "<think>a</think>b")),
    ("ernie45", {}, "why</think>\n\n<response>\nso\n</response>\n", ("why", "\nso\n")),
    ("ernie45", {}, "why</think>so", ("why", "so")),
    ("mistral", {}, "[THINK]why[/THINK]so", ("why", "so")),
    ("mistral", {}, "so", (None, "so")),
    ("granite", {}, "Here is my thought process: why Here's my response: so", (" why ", " so")),
    ("granite", {}, "Here's my thought process: Here is my", (" Here is my", None)),
    ("granite", {}, "Here is my thought on it", (None, "Here is my thought on it")),
    ("olmo3", {}, "<think>why</think>so", ("why", "so")),
    ("olmo3", {}, "why</think>so", ("why", "so")),
    ("olmo3", {}, "why </thin", ("why </thin", None)),
    (
        *("hunyuan_a13b", {}),
        *("<think>\nwhy\n</think>\n<answer>\nso\n</answer>", ("why", "so")),
    ),
    ("hunyuan_a13b", {}, "so <b", (None, "so <b")),
]


def make(name: str, kwargs: dict) -> ReasoningParser:
    return ReasoningParserManager.get_reasoning_parser(name)(TOKENIZER, **kwargs)


def streamed(name: str, kwargs: dict, text: str, pieces: int) -> tuple[str | None, str | None]:
    """The parts of a stream that comes in `pieces` pieces, cut between tokens anywhere."""
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    cuts = sorted(random.Random(pieces).sample(range(1, len(ids)), min(pieces, len(ids)) - 1))
    parser, parts = make(name, kwargs), {"reasoning": [], "content": []}
    before_text, before = "", []
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        # Characters come whole, with their last token.
        text_so_far = TOKENIZER.decode(ids[:end]).rstrip("\ufffd")
        delta_text, delta = text_so_far[len(before_text) :], ids[start:end]
        message = parser.extract_reasoning_streaming(
            *(before_text, before_text + delta_text, delta_text, before, before + delta, delta)
        )
        before_text, before = before_text + delta_text, before + delta
        for each in (message, parser.finish() if end == len(ids) else None):
            for part in parts if each is not None else ():
                if getattr(each, part) is not None:
                    parts[part].append(getattr(each, part))
    return tuple("".join(found) or None for found in parts.values())


@pytest.mark.parametrize(
    ("name", "kwargs", "text", "want"), CASES, ids=lambda value: str(value)[:24]
)
def test_an_answer_is_taken_apart(name: str, kwargs: dict, text: str, want: tuple) -> None:
    assert make(name, kwargs).extract_reasoning(text, REQUEST) == want
    count = len(TOKENIZER.encode(text, add_special_tokens=False))
    stripped = tuple(part and part.strip("\n") for part in want)
    for pieces in {1, 2, 3, count}:
        got = streamed(name, kwargs, text, pieces)
        # A stream can't take back a line end before it knows what follows.
        assert tuple(part and part.strip("\n") for part in got) == stripped, (pieces, got)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("r</think>c", ("r", "c")),
        ("<think>r</think>c", ("r", "c")),
        ("r", ("r", None)),
        ("<think>r", ("r", None)),
        ("<think></think>c", (None, "c")),
        ("</think>c", (None, "c")),
        ("<think>r</think>", ("r", None)),
        ("<think>é🔥</think>🔥é", ("é🔥", "🔥é")),
        ("", (None, None)),
    ],
)
@pytest.mark.parametrize("name", [name for name in TOKENS if name != "step3"])
def test_a_tag_may_stand_in_the_prompt_or_the_answer_and_parts_may_be_empty(
    name: str, text: str, want: tuple
) -> None:
    whole = make(name, THINKS).extract_reasoning(text, REQUEST)
    assert tuple(part or None for part in whole) == want
    count = len(TOKENIZER.encode(text, add_special_tokens=False))
    for pieces in range(1, count + 1):
        assert streamed(name, THINKS, text, pieces) == want, pieces


REPEATED = ["{s}é🔥{e}🔥b", "🔥{e}{e}é"]
REPEATED += ["a{e}b{e}c", "a{e}{e}b", "{s}a{e}b{e}c{e}", "{s}{s}a{e}b", "{e}a{e}b"]


@pytest.mark.parametrize("kwargs", [THINKS, SILENT, {}], ids=["thinks", "silent", "untold"])
@pytest.mark.parametrize("name", [*TOKENS, "seed_oss", "identity"])
def test_a_stream_with_repeated_tags_says_what_the_whole_says(name: str, kwargs: dict) -> None:
    is_seed = name == "seed_oss"
    tags = (
        {"s": "<seed:think>", "e": "</seed:think>"} if is_seed else {"s": "<think>", "e": TAGS[1]}
    )
    for text in (pattern.format(**tags) for pattern in REPEATED):
        reasoning, content = make(name, kwargs).extract_reasoning(text, REQUEST)
        for pieces in range(1, len(TOKENIZER.encode(text, add_special_tokens=False)) + 1):
            got = streamed(name, kwargs, text, pieces)
            assert got == (reasoning or None, content or None), (text, pieces)


def test_every_name_is_a_parser() -> None:
    for name in ReasoningParserManager.list_registered():
        parser = make(name, {})
        assert isinstance(parser.is_reasoning_end(TOKENIZER.encode("a")), bool)


@pytest.mark.parametrize(
    ("name", "text", "ended", "content"),
    [
        ("deepseek_r1", "a</think>b", True, "b"),
        ("deepseek_r1", "a</think><think>b", False, "<think>b"),
        ("step3", "a</think><think>b", True, "<think>b"),
        ("mistral", "x[THINK]a[/THINK]b", True, "xb"),
        ("mistral", "a", False, "a"),
        ("granite", "Here is my thought process: a Here is my response:b", True, "b"),
        ("olmo3", "a</think>b", True, "b"),
        ("openai_gptoss", "<|channel|>final<|message|>b", True, "b"),
        ("openai_gptoss", "<|channel|>final json<|message|>b", True, "b"),
        ("openai_gptoss", "<|channel|>analysis<|message|>a", False, ""),
        ("openai_gptoss", "<|channel|>final<|message|>b<|end|><|channel|>analysis", False, None),
        ("identity", "a", True, "a"),
    ],
)
def test_a_grammar_begins_after_the_reasoning(name, text, ended, content) -> None:
    parser, ids = make(name, {}), TOKENIZER.encode(text, add_special_tokens=False)
    assert parser.is_reasoning_end(ids) is ended
    if content is not None:
        assert TOKENIZER.decode(parser.extract_content_ids(ids)) == content


def test_the_end_token_may_come_before_its_text() -> None:
    """A text is held back where it may be a stop string; its tokens are not."""
    parser = make("deepseek_r1", {})
    (end,) = TOKENIZER.encode("</think>", add_special_tokens=False)
    assert parser.extract_reasoning_streaming("", "a", "a", [], [1], [1]).reasoning == "a"
    assert parser.extract_reasoning_streaming("a", "a", "", [1], [1, end], [end]) is None
    late = parser.extract_reasoning_streaming(
        "a", "ab</think>c", "b</think>c", [1, end], [1, end, 2], [2]
    )
    assert (late.reasoning, late.content) == ("b", "c")


def test_nemotron_may_be_asked_for_content_at_any_rate() -> None:
    request = SimpleNamespace(chat_template_kwargs={"force_nonempty_content": True})
    assert make("nemotron_v3", {}).extract_reasoning("why", request) == (None, "why")


def test_a_parser_that_the_vocabulary_is_not_made_for_is_refused_by_name() -> None:
    config = SimpleNamespace(
        reasoning_config=None,
        structured_outputs_config=StructuredOutputsConfig(reasoning_parser="qwen3"),
        model_config=SimpleNamespace(model="letters"),
    )
    with pytest.raises(
        UserError, match=r"--reasoning-parser qwen3 is not for letters: .*no <think>"
    ):
        set_reasoning_markers(config, piece_tokenizer("a", "b", "c"))


@pytest.mark.parametrize("name", ReasoningParserManager.list_registered())
def test_no_parser_makes_a_table_of_the_vocabulary(name: str, monkeypatch) -> None:
    """One is made for each answer, in the loop that serves all of them."""
    monkeypatch.delattr(ReasoningParser, "vocab")
    make(name, {})

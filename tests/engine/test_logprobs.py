# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities: who is in a position, ranks, texts of tokens, containers."""

import math

import numpy as np
import pytest
from front_helpers import (
    TEXTS,
    byte_level_tokenizer,
    llama_style_tokenizer,
    make_request,
    piece_tokenizer,
    wordpiece_tokenizer,
)

from vllmx.core.output import LogprobsLists
from vllmx.engine import EngineCoreOutput
from vllmx.engine.logprobs import LogprobsProcessor
from vllmx.logprobs import FlatLogprobs, Logprob, append_logprobs_for_next_position


def lists(*positions: tuple[list[int], list[float], int]) -> LogprobsLists:
    """LogprobsLists of (token ids, logprobs, rank of the first) a position."""
    return LogprobsLists(
        np.array([p[0] for p in positions], dtype=np.int32),
        np.array([p[1] for p in positions], dtype=np.float32),
        np.array([p[2] for p in positions], dtype=np.int32),
    )


def top(*rows: list[int]) -> LogprobsLists:
    """The given ids a position, with made-up log-probabilities."""
    return lists(*((ids, [-float(i) for i in range(len(ids))], 1) for ids in rows))


def run(tokenizer, *steps: LogprobsLists, prompt=(), **params) -> LogprobsProcessor:
    request = make_request(prompt_token_ids=list(prompt), **params)
    processor = LogprobsProcessor.from_new_request(tokenizer, request)
    for step in steps:
        processor.update_from_output(EngineCoreOutput("r", [], new_logprobs=step))
    return processor


def run_prompt(tokenizer, ids: list[int], *chunks: LogprobsLists, **params) -> LogprobsProcessor:
    request = make_request(prompt_token_ids=ids, **params)
    processor = LogprobsProcessor.from_new_request(tokenizer, request)
    for chunk in chunks:
        processor.update_from_output(EngineCoreOutput("r", [], new_prompt_logprobs_tensors=chunk))
    return processor


TOKENIZER = piece_tokenizer("a", "b", "c", "d")


def test_sampled_token_among_the_likeliest_is_counted_once():
    processor = run(TOKENIZER, lists(([1, 0, 1], [-2.0, -1.0, -2.0], 2)), logprobs=2)
    assert processor.logprobs == [{1: Logprob(-2.0, 2, "b"), 0: Logprob(-1.0, 1, "a")}]


def test_sampled_token_outside_the_likeliest_is_one_more():
    processor = run(TOKENIZER, lists(([3, 0, 1], [-5.0, -1.0, -2.0], 4)), logprobs=2)
    (position,) = processor.logprobs
    assert list(position) == [3, 0, 1]
    assert [entry.rank for entry in position.values()] == [4, 1, 2]


def test_zero_logprobs_is_the_sampled_token_alone():
    processor = run(TOKENIZER, lists(([2], [-0.5], 3)), logprobs=0)
    assert processor.logprobs == [{2: Logprob(-0.5, 3, "c")}]


def test_rows_that_another_request_made_wider_are_cut():
    wide = lists(([3, 0, 1, 2], [-5.0, -1.0, -2.0, -3.0], 4))
    assert list(run(TOKENIZER, wide, logprobs=1).logprobs[0]) == [3, 0]
    assert list(run(TOKENIZER, wide, logprobs=0).logprobs[0]) == [3]
    assert list(run(TOKENIZER, wide, logprobs=-1).logprobs[0]) == [3, 0, 1, 2]


def test_cumulative_logprob_is_the_sum_over_sampled_tokens():
    steps = lists(([0, 1], [-0.5, -1.0], 1), ([1, 0], [-2.0, -0.25], 2))
    assert run(TOKENIZER, steps, logprobs=1).cumulative_logprob == -2.5
    assert run(TOKENIZER, logprobs=None).cumulative_logprob is None


def test_without_logprobs_nothing_is_kept():
    processor = run(TOKENIZER)
    assert processor.logprobs is None
    assert processor.prompt_logprobs is None


def test_infinite_logprobs_are_kept_as_they_are():
    processor = run(TOKENIZER, lists(([0, 1], [0.0, -math.inf], 1)), logprobs=1)
    assert processor.logprobs[0][1].logprob == -math.inf


def test_requested_tokens_have_no_rank_but_the_sampled_one():
    steps = lists(([1, 3, 1], [-2.0, -9.0, -2.0], 2))
    (position,) = run(TOKENIZER, steps, logprob_token_ids=[3, 1]).logprobs
    assert position == {1: Logprob(-2.0, 2, "b"), 3: Logprob(-9.0, None, "d")}


def test_without_tokenizer_tokens_have_no_text():
    processor = run(None, top([1, 2]), logprobs=1)
    assert [entry.decoded_token for entry in processor.logprobs[0].values()] == [None, None]


# ------------------------------------------------------------------ texts


def test_alternatives_of_a_split_character_are_decoded_after_the_sampled_tokens_only():
    # “ is e2 80 9c, ” is e2 80 9d, … is e2 80 a6.
    tokenizer = piece_tokenizer(b"\xe2\x80", b"\x9c", b"\x9d", b"\xa6", "x", b"\xf0\x9f", "hi")
    processor = run(
        tokenizer,
        top([0, 5, 4]),  # two beginnings and a letter
        top([1, 2, 3]),  # three ways to go on
        top([6, 0, 1]),
        logprobs=2,
    )
    texts = [[e.decoded_token for e in position.values()] for position in processor.logprobs]
    assert texts[0] == ["", "", "x"]
    assert texts[1] == ["“", "”", "…"]
    assert texts[2] == ["hi", "", ""], "the last one is a byte that continues nothing"


def test_letter_among_the_ways_to_go_on_is_itself():
    tokenizer = piece_tokenizer(b"\xe2\x80", b"\x9c", "x")
    processor = run(tokenizer, top([0, 2]), top([1, 2]), logprobs=1)
    assert processor.logprobs[1][2].decoded_token == "x"
    # Sampled, it has to account for the two bytes that nothing completes.
    processor = run(tokenizer, top([0, 2]), top([2, 1]), logprobs=1)
    assert processor.logprobs[1][2].decoded_token == "\ufffdx"
    assert processor.logprobs[1][1].decoded_token == "“"


@pytest.mark.parametrize("make", [byte_level_tokenizer, llama_style_tokenizer])
@pytest.mark.parametrize("text", [*TEXTS, "\n2. ann owns 15"])
def test_texts_of_the_sampled_tokens_join_to_the_text(make, text):
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False)
    processor = run(tokenizer, *(top([i, 0]) for i in ids), logprobs=1)
    tokens = [position[i].decoded_token for i, position in zip(ids, processor.logprobs)]
    assert "".join(tokens) == text


@pytest.mark.parametrize("make", [byte_level_tokenizer, llama_style_tokenizer])
@pytest.mark.parametrize("text", ["\n2. ann owns 15", "hello  日本", "a\n\nb 🔥!"])
def test_texts_of_the_prompt_tokens_join_to_the_prompt(make, text):
    tokenizer = make()
    bos = tokenizer.bos_token_id or tokenizer.eos_token_id
    ids = [bos, *tokenizer.encode(text, add_special_tokens=False)]
    rows = [[i, 0] for i in ids[1:]]
    processor = run_prompt(tokenizer, ids, top(*rows[:3]), top(*rows[3:]), prompt_logprobs=1)
    assert processor.prompt_logprobs[0] is None
    assert len(processor.prompt_logprobs) == len(ids)
    tokens = [p[i].decoded_token for i, p in zip(ids[1:], processor.prompt_logprobs[1:])]
    # "<s> a" keeps the space that "a" alone loses: the special token is text here.
    assert "".join(tokens).lstrip(" ") == text.lstrip(" ")


def test_character_that_the_prompt_began_is_whole_in_the_first_token():
    tokenizer = piece_tokenizer(b"\xe2\x80", b"\x9c", "x")
    processor = run(tokenizer, top([1, 2]), prompt=[2, 0], logprobs=1)
    assert processor.logprobs[0][1].decoded_token == "“"


def test_prompt_character_split_between_first_and_second_token():
    tokenizer = piece_tokenizer(b"\xe2\x80", b"\x9c")
    processor = run_prompt(tokenizer, [0, 1], top([1, 0]), prompt_logprobs=1)
    assert processor.prompt_logprobs[1][1].decoded_token == "“"


def test_tokenizer_without_pieces_decodes_each_token_alone():
    tokenizer = wordpiece_tokenizer()
    ids = tokenizer.encode("hello worldly")
    processor = run(tokenizer, *(top([i]) for i in ids), logprobs=0)
    tokens = [position[i].decoded_token for i, position in zip(ids, processor.logprobs)]
    assert tokens == [tokenizer.decode([i]) for i in ids]


def test_special_tokens_have_a_text():
    eos = TOKENIZER.eos_token_id
    processor = run(TOKENIZER, top([eos, 999]), logprobs=1)
    assert processor.logprobs[0][eos].decoded_token == "<|end|>"
    assert processor.logprobs[0][999].decoded_token == ""


# ------------------------------------------------------------------ prompt


def test_prompt_logprobs_are_popped_once():
    processor = run_prompt(TOKENIZER, [0, 1], top([1, 2]), prompt_logprobs=1)
    assert len(processor.pop_prompt_logprobs()) == 2
    assert processor.pop_prompt_logprobs() == []
    assert run(TOKENIZER).pop_prompt_logprobs() is None


# ------------------------------------------------------------------ containers


def test_flat_logprobs_read_like_the_list_of_dicts():
    steps = [top([1, 0, 2]), top([2, 2, 0])]
    plain = run(TOKENIZER, *steps, logprobs=2).logprobs
    flat = run(TOKENIZER, *steps, logprobs=2, flat_logprobs=True).logprobs
    assert isinstance(flat, FlatLogprobs)
    assert list(flat) == plain
    assert len(flat) == 2
    assert flat[-1] == plain[-1]
    assert list(flat[1:]) == plain[1:]
    assert list(flat[0:1]) == plain[:1]


def test_flat_prompt_logprobs_begin_with_an_empty_position():
    ids = [0, 1]
    processor = run_prompt(TOKENIZER, ids, top([1, 2]), prompt_logprobs=1, flat_logprobs=True)
    assert processor.prompt_logprobs[0] == {}
    assert list(processor.prompt_logprobs[1]) == [1, 2]


def test_flat_logprobs_take_dicts_and_empty_slices():
    flat = FlatLogprobs()
    flat.append({5: Logprob(-1.0, 1, "x"), 6: Logprob(-2.0, 2, "y")})
    flat.append(None)
    flat.extend([{7: Logprob(-3.0)}])
    assert flat[0] == {5: Logprob(-1.0, 1, "x"), 6: Logprob(-2.0, 2, "y")}
    assert flat[1] == {}
    assert flat[2] == {7: Logprob(-3.0)}
    assert len(flat[3:]) == 0
    assert list(flat[1:]) == [{}, {7: Logprob(-3.0)}]
    assert flat.ranks == [1, 2, None]


def test_flat_logprobs_can_only_grow():
    flat = FlatLogprobs()
    flat.append(None)
    for change in (
        lambda: flat.__setitem__(0, {}),
        lambda: flat.__delitem__(0),
        lambda: flat.insert(0, {}),
        lambda: flat["a"],
    ):
        with pytest.raises(TypeError):
            change()


def test_append_with_minus_one_takes_everything():
    target = []
    append_logprobs_for_next_position(target, [4, 7, 4], [-2.0, -1.0, -2.0], ["a", "b", "a"], 2, -1)
    assert target == [{4: Logprob(-2.0, 2, "a"), 7: Logprob(-1.0, 1, "b")}]


@pytest.mark.parametrize("text", ["a “quoted” word", "né 😀😀 über", "plain"])
def test_texts_by_decoding_alone_join_to_the_text(monkeypatch, text: str) -> None:
    """Of tokenizers whose decoder is none that is known piece by piece."""
    monkeypatch.setattr("vllmx.engine.logprobs.get_token_pieces", lambda *_, **__: None)
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    other = tokenizer.encode("x", add_special_tokens=False)[0]
    found = run(tokenizer, *(top([i, other]) for i in ids), logprobs=1).logprobs
    shown = [position[i].decoded_token for i, position in zip(ids, found, strict=True)]
    assert "".join(shown) == text
    assert all("\ufffd" not in one for one in shown)
    assert {p[other].decoded_token for i, p in zip(ids, found, strict=True) if i != other} == {"x"}

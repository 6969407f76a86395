# SPDX-License-Identifier: Apache-2.0
"""Incremental detokenizing: characters over tokens, stop strings, prompts, odd ids."""

import random

import pytest
from front_helpers import (
    TEXTS,
    byte_level_tokenizer,
    llama_style_tokenizer,
    make_request,
    piece_tokenizer,
    wordpiece_tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from vllmx.engine.detokenizer import (
    FastIncrementalDetokenizer,
    IncrementalDetokenizer,
    SlowIncrementalDetokenizer,
    check_stop_strings,
)
from vllmx.engine.token_pieces import get_token_pieces

TOKENIZERS = {"byte_level": byte_level_tokenizer(), "llama": llama_style_tokenizer()}


def chunks(ids: list[int], rng: random.Random) -> list[list[int]]:
    """`ids` cut into runs of 1 to 4."""
    result = []
    while ids:
        size = rng.randint(1, 4)
        result.append(ids[:size])
        ids = ids[size:]
    return result


def stream(tokenizer, steps, *, prompt_ids=(), stop_terminated=False, **params) -> list[str]:
    """Deltas of a request that ends after `steps`, or at the stop string."""
    detokenizer = IncrementalDetokenizer.from_new_request(
        tokenizer, make_request(prompt_token_ids=list(prompt_ids), **params)
    )
    deltas = []
    for number, step in enumerate(steps):
        last = number == len(steps) - 1
        stopped = detokenizer.update(step, stop_terminated and last)
        deltas.append(detokenizer.get_next_output_text(last or stopped is not None, delta=True))
        if stopped is not None:
            break
    return deltas


def whole(tokenizer, steps, **kwargs) -> str:
    """Text of the same request when it is asked for once, at the end."""
    params = {k: v for k, v in kwargs.items() if k not in ("prompt_ids", "stop_terminated")}
    detokenizer = IncrementalDetokenizer.from_new_request(
        tokenizer, make_request(prompt_token_ids=list(kwargs.get("prompt_ids", ())), **params)
    )
    for number, step in enumerate(steps):
        last = number == len(steps) - 1
        if detokenizer.update(step, kwargs.get("stop_terminated", False) and last) is not None:
            break
    return detokenizer.get_next_output_text(True, delta=False)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_joined_deltas_equal_full_decode_for_every_chunking(name, text):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    rng = random.Random(text)
    for steps in ([[i] for i in ids], [ids], *(chunks(ids, rng) for _ in range(20))):
        deltas = stream(tokenizer, steps)
        assert "".join(deltas) == tokenizer.decode(ids) == whole(tokenizer, steps)
        assert not any("\ufffd" in delta for delta in deltas)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30), name=st.sampled_from(sorted(TOKENIZERS)), data=st.data())
def test_any_text_streams_whole_characters(text, name, data):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    steps = chunks(ids, data.draw(st.randoms(use_true_random=False)))
    deltas = stream(tokenizer, steps)
    assert "".join(deltas) == tokenizer.decode(ids)
    if "\ufffd" not in text and "".join(deltas) == text:
        assert not any("\ufffd" in delta for delta in deltas)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 399), max_size=25), data=st.data())
def test_any_byte_level_ids_equal_full_decode_but_for_an_unfinished_end(ids, data):
    tokenizer = TOKENIZERS["byte_level"]
    steps = chunks(ids, data.draw(st.randoms(use_true_random=False)))
    text = "".join(stream(tokenizer, steps, skip_special_tokens=False))
    full = tokenizer.decode(ids)
    assert text == full or text + "\ufffd" == full
    assert text == whole(tokenizer, steps, skip_special_tokens=False)


def test_unfinished_character_at_the_end_is_left_out():
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("ok 🔥")[:-1]
    assert "".join(stream(tokenizer, [[i] for i in ids])) == "ok "
    assert whole(tokenizer, [ids]) == "ok "


@pytest.mark.parametrize("name", TOKENIZERS)
def test_lone_invalid_byte_is_one_replacement_and_later_text_streams_at_once(name):
    tokenizer = TOKENIZERS[name]
    bad = next(i for i in range(len(tokenizer)) if piece(tokenizer, i) == b"\x94")
    rest = tokenizer.encode(" plain ascii text", add_special_tokens=False)
    deltas = stream(tokenizer, [[bad], *([i] for i in rest)])
    assert "".join(deltas).startswith("\ufffd")
    assert "".join(deltas).count("\ufffd") == 1
    assert "".join(deltas).endswith("plain ascii text")
    assert all(deltas[1:]), "text must not be held back after the bad byte"


def piece(tokenizer, token_id):
    found = get_token_pieces(tokenizer, True)[token_id]
    return found if isinstance(found, bytes) else found.encode()


def test_replacement_character_in_the_text_itself_is_shown_at_once():
    tokenizer = piece_tokenizer("a", "\ufffd", "b")
    assert stream(tokenizer, [[0], [1], [1], [2], [1]]) == ["a", "\ufffd", "\ufffd", "b", "\ufffd"]


def test_byte_fallback_group_with_an_invalid_byte_keeps_its_good_characters():
    # The library's decoder turns the whole run of byte tokens into U+FFFD, text that is already
    # on its way to the user included. Upstream begins a new stream then and loses the byte.
    tokenizer = TOKENIZERS["llama"]
    good = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "日".encode()]
    x = tokenizer.convert_tokens_to_ids("x")
    ids = [*good, good[0], x]
    assert stream(tokenizer, [[i] for i in ids]) == ["", "", "日", "", "x"]
    assert stream(tokenizer, [ids]) == ["日x"]
    # The next run is another: nothing of it has been shown when its first byte turns out bad.
    assert "".join(stream(tokenizer, [[i] for i in [*ids, good[1], *ids]])) == "日x\ufffd日x"


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", ["Hello world 🌶 x", "č x", "日 x"])
def test_prompt_that_ends_inside_a_character_shows_only_what_is_generated(name, text):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    for cut in range(1, len(ids)):
        joined = "".join(stream(tokenizer, [[i] for i in ids[cut:]], prompt_ids=ids[:cut]))
        before = whole(tokenizer, [ids[:cut]])  # complete characters of the prompt
        assert before + joined == text


def test_prompt_of_invalid_bytes_is_not_shown():
    tokenizer = piece_tokenizer(b"\x94", "x", "hello ")
    assert "".join(stream(tokenizer, [[1]], prompt_ids=[2, 0, 0, 0, 0, 0])) == "x"


def test_llama_style_first_token_keeps_its_space_after_text_and_loses_it_at_the_start():
    tokenizer = TOKENIZERS["llama"]
    bos = tokenizer.bos_token_id
    ids = tokenizer.encode("hello", add_special_tokens=False)
    assert "".join(stream(tokenizer, [ids], prompt_ids=[bos])) == "hello"
    assert "".join(stream(tokenizer, [ids], prompt_ids=[bos, *ids])) == " hello"


@pytest.mark.parametrize("bad_id", [-1, 401, 10**6, 2**31, 2**32, 2**64])
@pytest.mark.parametrize("make", [byte_level_tokenizer, llama_style_tokenizer, wordpiece_tokenizer])
def test_unknown_id_decodes_to_nothing(make, bad_id):
    tokenizer = make()
    good = tokenizer.convert_tokens_to_ids("hello") or tokenizer.convert_tokens_to_ids("el")
    text = "".join(stream(tokenizer, [[good], [bad_id], [good]]))
    assert text == "".join(stream(tokenizer, [[good], [good]]))


def test_unknown_id_in_the_prompt_does_no_harm():
    tokenizer = piece_tokenizer("a")
    assert "".join(stream(tokenizer, [[0]], prompt_ids=[999, 0, 999])) == "a"


def test_special_tokens_are_shown_only_on_request():
    tokenizer = TOKENIZERS["byte_level"]
    eos = tokenizer.eos_token_id
    ids = tokenizer.encode("hello")
    assert "".join(stream(tokenizer, [ids, [eos], ids])) == "hellohello"
    shown = stream(tokenizer, [ids, [eos], ids], skip_special_tokens=False)
    assert "".join(shown) == "hello<|end|>hello"


# ------------------------------------------------------------------ other tokenizers


def test_tokenizer_with_neighbour_rules_takes_the_slow_way_and_equals_full_decode():
    tokenizer = wordpiece_tokenizer()
    ids = tokenizer.encode("hello world goodly !")
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, make_request())
    assert isinstance(detokenizer, SlowIncrementalDetokenizer)
    for rng in map(random.Random, range(10)):
        steps = chunks(ids, rng)
        assert "".join(stream(tokenizer, steps)) == tokenizer.decode(ids)
        assert whole(tokenizer, steps) == tokenizer.decode(ids)


def test_slow_way_does_not_show_the_prompt():
    tokenizer = wordpiece_tokenizer()
    prompt = tokenizer.encode("good hello [SEP] [SEP] [SEP] [SEP] [SEP] [SEP] [SEP] [SEP] [SEP]")
    ids = tokenizer.encode("worldly")
    assert "".join(stream(tokenizer, [ids], prompt_ids=prompt)) == " worldly"


def test_slow_way_shows_a_held_replacement_character_at_the_end():
    tokenizer = wordpiece_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ("hello", "\ufffd")]
    assert "".join(stream(tokenizer, [[i] for i in ids])) == tokenizer.decode(ids)
    assert tokenizer.decode(ids) == "hello \ufffd"


def test_byte_level_tokenizer_takes_the_fast_way():
    request = make_request()
    for tokenizer in TOKENIZERS.values():
        detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
        assert isinstance(detokenizer, FastIncrementalDetokenizer)


def test_without_tokenizer_tokens_are_collected_and_text_is_empty():
    detokenizer = IncrementalDetokenizer.from_new_request(None, make_request())
    assert detokenizer.update([1, 2], False) is None
    assert detokenizer.output_token_ids == [1, 2]
    assert detokenizer.get_next_output_text(True, delta=False) == ""


# ------------------------------------------------------------------ stop strings


def test_stop_string_split_over_tokens_is_cut_before_it():
    for last in ("IJK", "IJtail"):
        tokenizer = piece_tokenizer("AB", "C DE", "FGH", last)
        deltas = stream(tokenizer, [[0], [1], [2], [3]], stop=["EFGHI"])
        assert "".join(deltas) == "ABC D"


def test_stop_string_inside_one_token_drops_what_follows():
    tokenizer = piece_tokenizer("one ", "two END three")
    for include, expected in ((False, "one two "), (True, "one two END")):
        params = {"stop": ["END"], "include_stop_str_in_output": include}
        assert "".join(stream(tokenizer, [[0], [1]], **params)) == expected
        assert whole(tokenizer, [[0, 1]], **params) == expected


def test_no_character_of_a_stop_string_is_ever_streamed():
    tokenizer = piece_tokenizer("one ", "two", "th", "ree", "!", "X")
    deltas = stream(tokenizer, [[0], [1], [2], [3], [4]], stop=["twothree!"])
    assert "".join(deltas) == "one "
    # The match fails: what was held comes later.
    deltas = stream(tokenizer, [[0], [1], [5], [0]], stop=["twothree!"])
    assert "".join(deltas) == "one twoXone "


@pytest.mark.parametrize("stop_terminated", [False, True])
def test_held_tail_is_shown_at_the_end(stop_terminated):
    tokenizer = piece_tokenizer("hello wor", "ld")
    eos = tokenizer.eos_token_id
    steps = [[0], [1], [eos]] if stop_terminated else [[0], [1]]
    kwargs = {"stop": ["ZZZZZZ"], "stop_terminated": stop_terminated}
    assert "".join(stream(tokenizer, steps, **kwargs)) == "hello world"
    assert whole(tokenizer, steps, **kwargs) == "hello world"


def test_text_of_a_stop_token_is_shown_only_with_include_stop_str():
    tokenizer = piece_tokenizer("a", "STOP")
    assert whole(tokenizer, [[0], [1]], stop_terminated=True) == "a"
    kwargs = {"stop_terminated": True, "include_stop_str_in_output": True}
    assert whole(tokenizer, [[0], [1]], **kwargs) == "aSTOP"


def test_stop_string_before_min_tokens_neither_ends_nor_cuts():
    tokenizer = piece_tokenizer("a", "\n", "b", "c", "d")
    steps = [[0], [1], [2], [3], [4], [1], [0]]
    for grouped in (steps, [[i for step in steps for i in step]], [[0, 1, 2], *steps[3:]]):
        kwargs = {"stop": ["\n"], "min_tokens": 4, "max_tokens": 10}
        assert "".join(stream(tokenizer, grouped, **kwargs)) == "a\nbcd"


def test_stop_string_that_ends_first_wins_however_many_tokens_come_at_once():
    tokenizer = piece_tokenizer("x", "B", "A", "y")
    for steps in ([[0], [2], [1], [3]], [[0, 2, 1, 3]], [[0], [2, 1], [3]]):
        assert whole(tokenizer, steps, stop=["B", "A"]) == "x"


def test_stop_string_that_matches_only_invalid_text_does_not_hang():
    tokenizer = piece_tokenizer(b"\xf0\x9f", "x")
    assert "".join(stream(tokenizer, [[0], [0], [1]], stop=["x"])) == "\ufffd\ufffd"


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="ab c✓🔥\n", min_size=1, max_size=30),
    stops=st.lists(st.text(alphabet="ab c✓🔥", min_size=1, max_size=5), min_size=1, max_size=3),
    include=st.booleans(),
    data=st.data(),
)
def test_text_ends_at_the_first_stop_string_for_every_chunking(text, stops, include, data):
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode(text)
    steps = chunks(ids, data.draw(st.randoms(use_true_random=False)))
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    expected = text
    if ends:
        end = min(end for end, _ in ends)
        # Of those that end together, the first in the list counts.
        first = next(s for s in stops if text.find(s) + len(s) == end and s in text)
        expected = text[:end] if include else text[: end - len(first)]
    params = {"stop": stops, "include_stop_str_in_output": include}
    deltas = stream(tokenizer, steps, **params)
    assert "".join(deltas) == whole(tokenizer, steps, **params) == expected


@pytest.mark.parametrize(
    ("text", "new", "stop", "include", "expected"),
    [
        ("hello", 5, ["ll"], False, ("ll", 2)),
        ("hello", 5, ["ll"], True, ("ll", 4)),
        ("hello", 5, ["lo"], True, ("lo", -1)),
        ("hello", 0, ["lo"], False, None),
        ("hello", 1, ["hell"], False, None),
        ("hello", 2, ["hell"], False, ("hell", 0)),
        ("hello", 5, [], False, None),
        ("abab", 4, ["ab"], False, ("ab", 0)),
    ],
)
def test_check_stop_strings(text, new, stop, include, expected):
    assert check_stop_strings(text, new, stop, include) == expected


# ------------------------------------------------------------------ real tokenizers


@pytest.mark.slow
def test_real_vocabularies_stream_like_they_decode(real_tokenizer):
    for text in TEXTS:
        ids = real_tokenizer.encode(text, add_special_tokens=False)
        rng = random.Random(text)
        for _ in range(20):
            deltas = stream(real_tokenizer, chunks(ids, rng))
            assert "".join(deltas) == real_tokenizer.decode(ids) == text
            assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.slow
def test_every_id_of_a_real_vocabulary_has_the_bytes_that_the_library_decodes(real_tokenizer):
    pieces = get_token_pieces(real_tokenizer, False)
    for token_id in range(len(real_tokenizer) + 10):
        found = pieces[token_id]
        text = found if isinstance(found, str) else found.decode(errors="replace")
        assert text == real_tokenizer.decode([token_id])


@pytest.mark.slow
def test_stop_string_at_every_place_of_a_real_text(real_tokenizer):
    text = "The capital of France is Paris. It is known for the Louvre – “le musée” – and 🔥."
    ids = real_tokenizer.encode(text, add_special_tokens=False)
    for k in range(len(text) - 7):
        stop = text[k : k + 7]
        deltas = stream(real_tokenizer, [[i] for i in ids], stop=[stop])
        assert "".join(deltas) == text[: text.find(stop)]

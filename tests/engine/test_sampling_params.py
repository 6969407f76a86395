# SPDX-License-Identifier: Apache-2.0
"""Values that SamplingParams takes, refuses and changes."""

import math
import subprocess
import sys
from fractions import Fraction
from inspect import signature
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
from front_helpers import piece_tokenizer

from vllmx.engine.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllmx.exceptions import VLLMValidationError
from vllmx.sampling_params import (
    MAX_LOGPROB_TOKEN_IDS,
    BeamSearchParams,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    SamplingType,
    StructuredOutputsParams,
)

NAN, INF = math.nan, math.inf


def model(vocab_size: int = 1000, max_logprobs: int = 20) -> SimpleNamespace:
    return SimpleNamespace(get_vocab_size=lambda: vocab_size, max_logprobs=max_logprobs)


def verify(params: SamplingParams, tokenizer=None, **kwargs) -> None:
    params.verify(model(**kwargs), None, None, tokenizer)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("n", 0, "n must be at least 1, got 0."),
        ("n", 20000, "n must be at most 16384, got 20000. Send several requests"),
        ("n", 1.5, "n must be an int"),
        ("presence_penalty", 2.1, r"presence_penalty must be in \[-2, 2\], got 2.1."),
        ("presence_penalty", NAN, "presence_penalty must be in"),
        ("frequency_penalty", -3, "frequency_penalty must be in"),
        ("frequency_penalty", NAN, "frequency_penalty must be in"),
        ("repetition_penalty", 0.0, "repetition_penalty must be greater than zero, got 0.0."),
        ("repetition_penalty", NAN, "repetition_penalty must be a finite number, got nan."),
        ("repetition_penalty", INF, "repetition_penalty must be a finite number, got inf."),
        ("temperature", -0.1, "temperature must be non-negative, got -0.1."),
        ("temperature", 2.1, r"temperature must be in \[0, 2\], got 2.1."),
        ("temperature", NAN, "temperature must be a finite number, got nan."),
        ("temperature", INF, "temperature must be a finite number, got inf."),
        ("top_p", 0.0, r"top_p must be in \(0, 1\], got 0.0."),
        ("top_p", 1.1, r"top_p must be in \(0, 1\]"),
        ("top_p", NAN, r"top_p must be in \(0, 1\], got nan."),
        ("top_k", -2, r"top_k must be 0 \(disable\), or at least 1, got -2."),
        ("min_p", -0.1, r"min_p must be in \[0, 1\]"),
        ("min_p", NAN, r"min_p must be in \[0, 1\]"),
        ("max_tokens", 0, "max_tokens must be at least 1, got 0."),
        ("max_tokens", NAN, "max_tokens must be an integer, got nan."),
        ("max_tokens", 2.5, "max_tokens must be an integer"),
        ("min_tokens", -1, "min_tokens must be greater than or equal to 0, got -1."),
        ("min_tokens", 17, "min_tokens must be less than or equal to max_tokens=16, got 17."),
        ("min_tokens", NAN, "min_tokens must be an integer"),
        ("logprobs", -2, "logprobs must be non-negative or -1, got -2."),
        ("prompt_logprobs", -2, "prompt_logprobs must be non-negative or -1, got -2."),
        ("prompt_logprobs", 0.5, "prompt_logprobs must be an integer"),
        ("seed", 2**63, "seed must fit in 64 bits"),
        ("seed", 1.5, "seed must be an integer"),
        ("stop", [""], "stop cannot contain an empty string."),
        ("stop", "", "stop cannot contain an empty string."),
        ("stop", [5], "stop must contain only strings"),
        ("stop_token_ids", ["a"], "stop_token_ids must contain only integers"),
        ("allowed_token_ids", [1.5], "allowed_token_ids must contain only integers"),
        ("bad_words", [""], "bad_words cannot contain an empty string."),
        ("bad_words", [None], "bad_words must contain only strings"),
        ("logit_bias", {5: NAN}, "logit_bias must map token ids to numbers, got 5: nan."),
        ("logit_bias", {5: INF}, "logit_bias must map token ids to numbers"),
        ("logit_bias", {"5": 1.0}, "logit_bias must map token ids to numbers"),
        ("thinking_token_budget", -5, "must be a non-negative integer or -1"),
        ("thinking_token_budget", True, "must be a non-negative integer or -1"),
        ("thinking_token_budget", 2**63, "must fit in 64 bits, got 9223372036854775808"),
        ("skip_special_tokens", [], "skip_special_tokens must be true or false, not list"),
        ("detokenize", "no", "detokenize must be true or false, not str"),
    ],
)
def test_value_out_of_range_is_refused_with_its_name(name, value, message):
    with pytest.raises(VLLMValidationError, match=message) as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name
    assert f" (parameter={name}, value=" in str(caught.value)


ENDLESS = 10**5000  # more digits than Python writes
ODD = [
    None,
    True,
    0,
    1,
    -1,
    2**40,
    2**63 - 1,
    2**63,
    -(2**70),
    10**400,
    ENDLESS,
    1.5,
    NAN,
    INF,
    -INF,
]
ODD += ["1", "", "\ud800", b"1", [], [1], [True], [None], [2**70], [ENDLESS], ["\ud800"], [[1]]]
ODD += [(1,), {1}, range(3), {}, {1: 2}, {True: True}, {1: 10**400}, {1: -(10**400)}, {1: ENDLESS}]
ODD += [{"a": 2**70}, {"a": ["\ud800"]}, {"a": {"b": ENDLESS}}, MappingProxyType({1: 1.0})]
ODD += [object(), 1j, dict, Fraction(1, 2), Fraction(10**400), np.int64(1), np.ones(2)]


def through(params):
    """What arrives in the engine's process."""
    return MsgpackDecoder(type(params)).decode(MsgpackEncoder().encode(params))


@pytest.mark.parametrize("make", [SamplingParams, SamplingParams.from_optional])
@pytest.mark.parametrize("value", ODD, ids=lambda v: type(v).__name__)
def test_value_of_any_kind_is_refused_with_its_name_or_reaches_the_engine(make, value):
    """Whatever the parameter, private ones among them: nothing fails inside, no other parameter is
    named, and what is taken arrives in another process as it was."""
    names = list(signature(make).parameters)
    assert {"temperature", "stop", "logit_bias", "output_kind", "seed"} <= set(names)
    for name in names:
        try:
            params = make(**{name: value})
            params.verify(model(), None, None, None)
        except VLLMValidationError as error:
            assert error.parameter == name
            assert name in str(error)
        except TypeError as error:
            assert (name, str(error)[:26]) == ("top_k", "top_k must be an integer, ")
        else:
            assert through(params) == params


PARTS = [
    (RepetitionDetectionParams, {"max_pattern_size": 3, "min_count": 3}, "repetition_detection"),
    (StructuredOutputsParams, {}, "structured_outputs"),
    (BeamSearchParams, {"beam_width": 2, "max_tokens": 2}, None),
]


@pytest.mark.parametrize("value", ODD, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize(("make", "sane", "named"), PARTS, ids=lambda v: getattr(v, "__name__", ""))
def test_fields_of_what_parameters_hold_are_refused_in_the_same_way(make, sane, named, value):
    for name in signature(make).parameters:
        given = {**sane, name: value}
        if make is StructuredOutputsParams and name in ("whitespace_pattern", *FLAGS):
            given["regex"] = "a"
        try:
            params = make(**given)
        except VLLMValidationError as error:
            assert error.parameter == (named or name)
            assert name in str(error)
            continue
        # A schema becomes text before it is sent, whatever numbers it holds.
        if not (name == "json" and isinstance(value, dict)):
            assert through(params) == params


FLAGS = ("disable_any_whitespace", "disable_additional_properties")


@pytest.mark.parametrize("name", ["_bad_words_token_ids", "_all_stop_token_ids"])
def test_private_token_ids_outside_the_vocabulary_are_refused(name):
    value = {10**9} if name == "_all_stop_token_ids" else [[3, 10**9]]
    with pytest.raises(VLLMValidationError, match=f"1000000000.*{name}") as caught:
        verify(SamplingParams(**{name: value}))
    assert caught.value.parameter == name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("guided_decoding", "no argument guided_decoding: give structured_outputs=Structured"),
        ("guided_json", "no argument guided_json: give structured_outputs=Structured"),
        ("best_of", "no argument best_of: give n,"),
        ("use_beam_search", "LLM.beam_search"),
        ("logits_processors", "LLM\\(logits_processors="),
        ("truncate_prompt_tokens", "tokenization_kwargs="),
        ("temprature", "no argument temprature. Did you mean temperature"),
        ("zzz", r"no argument zzz\.$"),
    ],
)
def test_an_unknown_argument_is_answered_with_what_is_meant(name, words):
    with pytest.raises(TypeError, match=words):
        SamplingParams(**{name: None})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", "1", "temperature must be a number, not str, got 1."),
        ("temperature", None, "temperature must be a number, not NoneType"),
        ("top_p", "a", "top_p must be a number, not str"),
        ("logit_bias", [1], "logit_bias must be of type Mapping, not list"),
        ("stop", 5, "stop must be a list, not int"),
        ("stop_token_ids", 5, "stop_token_ids must be a list, not int"),
        ("bad_words", "word", "bad_words must be a list, not str"),
        ("output_kind", None, "output_kind must be of type RequestOutputKind"),
        ("repetition_detection", {}, "must be of type RepetitionDetectionParams, not dict"),
    ],
)
def test_value_of_another_type_is_refused_with_its_name(name, value, message):
    with pytest.raises(VLLMValidationError, match=message) as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name


def test_numbers_of_numpy_are_taken():
    params = SamplingParams(temperature=np.float32(0.5), top_p=np.float64(0.5), seed=np.int64(3))
    assert (params.temperature, params.top_p, params.seed) == (0.5, 0.5, 3)


def test_top_k_of_another_type_is_a_type_error_as_upstream():
    with pytest.raises(TypeError, match="top_k must be an integer, got float"):
        SamplingParams(top_k=1.5)


def test_greedy_with_several_answers_is_refused():
    with pytest.raises(ValueError, match=r"n must be 1 when using greedy sampling, got 2\."):
        SamplingParams(temperature=0, n=2)


def test_stop_strings_need_detokenizing():
    with pytest.raises(ValueError, match="only supported when detokenize is True"):
        SamplingParams(stop=["a"], detokenize=False)


def test_greedy_ignores_filters():
    params = SamplingParams(temperature=0, top_p=0.5, top_k=7, min_p=0.3)
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    assert params.sampling_type is SamplingType.GREEDY


def test_tiny_temperature_is_raised_with_a_warning(caplog):
    assert SamplingParams(temperature=0.001).temperature == 0.01
    assert "temperature=0.001" in caplog.text


def test_sampling_type_follows_seed():
    assert SamplingParams().sampling_type is SamplingType.RANDOM
    assert SamplingParams(seed=1).sampling_type is SamplingType.RANDOM_SEED
    assert SamplingParams(seed=-1).seed is None


def test_inputs_are_normalised():
    params = SamplingParams(stop="END", logprobs=True, prompt_logprobs=True, top_k=-1)
    assert params.stop == ["END"]
    assert (params.logprobs, params.prompt_logprobs) == (1, 1)
    assert params.stop_token_ids == [] == params.bad_words
    assert params.output_text_buffer_length == 2
    assert (
        SamplingParams(stop="END", include_stop_str_in_output=True).output_text_buffer_length == 0
    )
    assert params.skip_reading_prefix_cache
    assert not SamplingParams().skip_reading_prefix_cache
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None


def test_integers_of_other_libraries_are_taken():
    assert type(SamplingParams(max_tokens=np.int64(5)).max_tokens) is int


def test_caller_list_is_not_shared():
    ids = [1, 2]
    params = SamplingParams(stop_token_ids=ids)
    params.update_from_generation_config({"eos_token_id": [9]}, 8)
    assert ids == [1, 2]


def test_from_optional_takes_none_for_defaults():
    params = SamplingParams.from_optional(
        n=None, temperature=None, top_p=None, top_k=None, min_p=None, repetition_penalty=None
    )
    assert params == SamplingParams()


@pytest.mark.parametrize("bias", [{"abc": 1}, {"5": "x"}, {"5": NAN}, {None: 1}])
def test_from_optional_names_the_bad_logit_bias(bias):
    with pytest.raises(VLLMValidationError, match=str(next(iter(bias)))) as caught:
        SamplingParams.from_optional(logit_bias=bias)
    assert caught.value.parameter == "logit_bias"


def test_from_optional_clamps_logit_bias():
    params = SamplingParams.from_optional(logit_bias={"5": 1000, 6: -INF, "7": 0.5})
    assert params.logit_bias == {5: 100.0, 6: -100.0, 7: 0.5}


@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias", "logprob_token_ids"])
@pytest.mark.parametrize("bad_id", [1000, 999999, -1, -5])
def test_ids_outside_the_vocabulary_are_refused(name, bad_id):
    value = {bad_id: 1.0} if name == "logit_bias" else [3, bad_id]
    params = SamplingParams(min_tokens=1, **{name: value})
    with pytest.raises(VLLMValidationError, match=f"{bad_id}.*{name}.*Vocabulary size: 1000") as e:
        verify(params)
    assert e.value.parameter == name
    assert e.value.value == [bad_id]


def test_ids_inside_the_vocabulary_are_taken():
    verify(SamplingParams(stop_token_ids=[0, 999], logit_bias={0: 1.0, 999: -1.0}))


@pytest.mark.parametrize("bad_ids", [[-1], [3], [500]])
def test_allowed_token_ids_must_be_known_to_tokenizer_and_model(bad_ids):
    tokenizer = piece_tokenizer("a", "b")  # and EOS: three tokens
    with pytest.raises(VLLMValidationError, match="out-of-vocab token id"):
        verify(SamplingParams(allowed_token_ids=[0, *bad_ids]), tokenizer)
    with pytest.raises(VLLMValidationError, match="out-of-vocab token id"):
        verify(SamplingParams(allowed_token_ids=[1000]))  # without tokenizer as well
    with pytest.raises(VLLMValidationError, match="not None and empty"):
        verify(SamplingParams(allowed_token_ids=[]), tokenizer)
    verify(SamplingParams(allowed_token_ids=[0, 1, 2]), tokenizer)


@pytest.mark.parametrize(("name", "what"), [("logprobs", "sample"), ("prompt_logprobs", "prompt")])
def test_logprobs_are_bounded_by_the_config(name, what):
    message = rf"{what} logprobs of 21, which is greater than max allowed: 20 \(--max-logprobs\)"
    with pytest.raises(VLLMValidationError, match=message):
        verify(SamplingParams(**{name: 21}))
    with pytest.raises(VLLMValidationError, match=rf"{what} logprobs of 1000 \(-1: all\)"):
        verify(SamplingParams(**{name: -1}))
    verify(SamplingParams(**{name: -1}), max_logprobs=-1)
    verify(SamplingParams(**{name: 20}))


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_logprobs_are_bounded_by_the_vocabulary(name):
    with pytest.raises(VLLMValidationError, match=r"logprobs of 51,.*: 50") as caught:
        verify(SamplingParams(**{name: 51}), vocab_size=50, max_logprobs=100)
    assert caught.value.parameter == name
    verify(SamplingParams(**{name: 50}), vocab_size=50, max_logprobs=100)
    verify(SamplingParams(**{name: -1}), vocab_size=50, max_logprobs=100)


@pytest.mark.parametrize(
    ("limits", "widest", "words"),
    [
        ({"max_logprobs": 20}, 10, r"the limit is 20 \(max_logprobs\).*=10 at most.*_logprobs=22"),
        ({"max_logprobs": 21}, 10, r"the limit is 21 .*=10 at most, or start.*_logprobs=22"),
        ({"max_logprobs": 1}, 0, r"the limit is 1 \(max_logprobs\): start .*max_logprobs=2 "),
        ({"max_logprobs": -1, "vocab_size": 8}, 4, r"the limit is 8 \(the size .*=4 at most\."),
        ({"max_logprobs": 50, "vocab_size": 8}, 4, r"the limit is 8 \(the size of the vocabulary"),
        ({"max_logprobs": -1, "vocab_size": 1}, 0, "there is no beam search with this model"),
    ],
    ids=str,
)
def test_beams_too_many_are_told_by_their_own_name(limits, widest, words):
    for name in ("beam_width", "n"):
        with pytest.raises(VLLMValidationError, match=words) as caught:
            BeamSearchParams(beam_width=widest + 1, max_tokens=1).verify(model(**limits), name)
        assert caught.value.parameter == name and caught.value.value == widest + 1
        assert f"{name}={widest + 1} is too wide" in str(caught.value)
        assert "sample logprobs" not in str(caught.value)
    if widest:
        BeamSearchParams(beam_width=widest, max_tokens=1).verify(model(**limits))


def test_logprob_token_ids_are_bounded_and_agree_with_logprobs():
    with pytest.raises(VLLMValidationError, match="of length 129"):
        verify(SamplingParams(logprob_token_ids=[0] * (MAX_LOGPROB_TOKEN_IDS + 1)))
    with pytest.raises(VLLMValidationError, match=r"must equal len\(logprob_token_ids\)"):
        verify(SamplingParams(logprob_token_ids=[1, 2], logprobs=3))
    params = SamplingParams(logprob_token_ids=[1, 2])
    verify(params)
    assert params.num_logprobs == 2


def test_structured_outputs_take_exactly_one_constraint():
    with pytest.raises(ValueError, match="multiple are specified"):
        StructuredOutputsParams(regex="a", choice=["b"])
    with pytest.raises(ValueError, match="none are specified"):
        StructuredOutputsParams()
    params = StructuredOutputsParams(structural_tag="{}")
    assert params.all_non_structural_tag_constraints_none()
    assert not params.all_constraints_none()


@pytest.mark.parametrize("kwargs", [{"max_pattern_size": -1}, {"min_pattern_size": 2}])
def test_repetition_detection_checks_its_sizes(kwargs):
    with pytest.raises(ValueError, match="max_pattern_size, min_pattern_size must be >=0"):
        RepetitionDetectionParams(**kwargs)
    with pytest.raises(ValueError, match="min_count must be >= 2"):
        RepetitionDetectionParams(max_pattern_size=3, min_count=1)
    assert RepetitionDetectionParams().max_pattern_size == 0


# ------------------------------------------------------------------ end tokens


@pytest.mark.parametrize("stop", [{"stop": []}, {"stop": None}, {"stop": ["ZZZ"]}])
@pytest.mark.parametrize("stop_token_ids", [None, [], [77]])
def test_stop_lists_add_to_the_models_end_tokens(stop, stop_token_ids):
    params = SamplingParams(stop_token_ids=stop_token_ids, **stop)
    params.update_from_generation_config({"eos_token_id": [2, 5]}, 2)
    assert params.eos_token_id == 2
    assert set(params.stop_token_ids) == {5, *(stop_token_ids or ())}
    assert params.all_stop_token_ids == {2, 5, *(stop_token_ids or ())}


def test_ignore_eos_keeps_only_the_callers_stop_tokens():
    params = SamplingParams(ignore_eos=True, stop_token_ids=[77])
    params.update_from_generation_config({"eos_token_id": 5}, 2)
    assert params.eos_token_id is None
    assert params.stop_token_ids == [77]
    assert params.all_stop_token_ids == {2, 5, 77}  # still banned before min_tokens


def test_model_without_end_tokens():
    params = SamplingParams()
    params.update_from_generation_config({}, None)
    assert params.eos_token_id is None
    assert params.all_stop_token_ids == set()


# ------------------------------------------------------------------ bad words


class Encoder:
    """A tokenizer with given encodings."""

    max_token_id = 99

    def __init__(self, encodings: dict[str, list[int]]) -> None:
        self.encodings = encodings

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return self.encodings.get(text, [])


def banned(word: str, encodings: dict[str, list[int]]) -> list[list[int]] | None:
    params = SamplingParams(bad_words=[word])
    params.update_from_tokenizer(Encoder(encodings))
    return params.bad_words_token_ids


def test_bad_word_is_banned_bare_and_after_a_space_whatever_their_lengths():
    assert banned("exag", {"exag": [1, 2, 3], " exag": [7]}) == [[1, 2, 3], [7]]
    assert banned("word", {"word": [1], " word": [2]}) == [[1], [2]]
    assert banned(" word", {"word": [1], " word": [2]}) == [[1], [2]]
    # Same first token, other rest.
    assert banned("word", {"word": [1, 2], " word": [1, 3]}) == [[1, 2], [1, 3]]


def test_spaced_form_that_ends_in_the_bare_one_is_covered_by_it():
    assert banned("word", {"word": [1, 2], " word": [9, 1, 2]}) == [[1, 2]]


def test_bad_word_of_spaces_bans_the_space():
    assert banned("  ", {" ": [5]}) == [[5]]


def test_bad_word_with_an_id_outside_the_vocabulary_is_refused():
    with pytest.raises(VLLMValidationError, match=r"specified as bad: \[500\]"):
        banned("word", {"word": [500], " word": [1]})


@pytest.mark.slow
def test_real_bad_word_of_other_length_after_a_space(smollm2_tokenizer):
    word = "exaggerated"
    bare = smollm2_tokenizer.encode(word, add_special_tokens=False)
    spaced = smollm2_tokenizer.encode(" " + word, add_special_tokens=False)
    assert len(bare) != len(spaced)
    params = SamplingParams(bad_words=[word])
    params.update_from_tokenizer(smollm2_tokenizer)
    assert params.bad_words_token_ids == [bare, spaced]


# ------------------------------------------------------------------ the object


def test_clone_is_independent():
    params = SamplingParams(stop=["a"], logit_bias={1: 1.0}, extra_args={"x": [1]})
    clone = params.clone()
    assert clone == params
    clone.stop.append("b")
    clone.logit_bias[2] = 2.0
    clone.extra_args["x"].append(2)
    assert (params.stop, params.logit_bias, params.extra_args) == (["a"], {1: 1.0}, {"x": [1]})
    shared = SamplingParams(stop=["a"], skip_clone=True)
    assert shared.clone().stop is shared.stop


def test_repr_names_what_users_set():
    text = repr(SamplingParams(temperature=0.5, stop="x"))
    assert text.startswith("SamplingParams(n=1, presence_penalty=0.0, ")
    assert "temperature=0.5" in text
    assert "stop=['x']" in text


def test_output_kinds():
    assert [kind.name for kind in RequestOutputKind] == ["CUMULATIVE", "DELTA", "FINAL_ONLY"]


def test_import_is_light():
    code = (
        "import sys, vllmx; from vllmx import SamplingParams; SamplingParams();"
        "print([m for m in ('torch', 'pydantic', 'numpy', 'tokenizers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"

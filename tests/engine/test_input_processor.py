# SPDX-License-Identifier: Apache-2.0
"""What the input processor makes of prompts and parameters, and what it refuses."""

import math

import numpy as np
import pytest
from front_helpers import (
    byte_level_tokenizer,
    llama_style_tokenizer,
    piece_tokenizer,
    vllm_config,
)

from vllmx.engine.input_processor import InputProcessor, prompt_text
from vllmx.exceptions import VLLMValidationError
from vllmx.sampling_params import SamplingParams

INF = math.inf


def processor(tokenizer="byte_level", **config) -> InputProcessor:
    if tokenizer == "byte_level":
        tokenizer = byte_level_tokenizer()
    config = {"vocab_size": 400, "max_model_len": 1024, **config}
    return InputProcessor(vllm_config(**config), tokenizer)


def process(prompt, params=None, tokenizer="byte_level", config=None, **kwargs):
    return processor(tokenizer, **(config or {})).process_inputs(
        "r", prompt, params or SamplingParams(), **kwargs
    )


@pytest.mark.parametrize("key", ["multi_modal_data", "prompt_embeds", "encoder_prompt"])
def test_more_than_text_is_refused_by_name(key):
    value = np.zeros((2, 3)) if key == "prompt_embeds" else {"image": object()}
    with pytest.raises(VLLMValidationError, match=f"{key}: no model of vllmx takes") as caught:
        process({"prompt": "hello", key: value})
    assert caught.value.parameter == key
    nothing = None if key == "prompt_embeds" else {}
    assert process({"prompt": "hello", key: nothing}).prompt_token_ids


def test_text_and_ids_in_every_form_give_the_same_tokens():
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.encode("hello")
    for prompt in (
        "hello",
        {"prompt": "hello"},
        ids,
        tuple(ids),
        {"prompt_token_ids": ids},
        {"prompt_token_ids": ids, "prompt": "hello"},
    ):
        assert process(prompt, tokenizer=tokenizer).prompt_token_ids == ids


def test_integers_of_numpy_are_token_ids():
    import numpy as np

    assert process(np.array([1, 2])).prompt_token_ids == [1, 2]
    assert process([np.int32(1), 2]).prompt_token_ids == [1, 2]


def test_prompt_text():
    assert prompt_text("a") == "a"
    assert prompt_text({"prompt": "a"}) == "a"
    assert prompt_text({"prompt_token_ids": [1]}) is None
    assert prompt_text([1]) is None


@pytest.mark.parametrize(
    "ids",
    [[-1], [1, -5], [400], [1, 400], [4611686018427387904], [2**70], [1.5], ["a", 1], [True],
     [1, None], [[1], [2, 3]]],
)  # fmt: skip
@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_bad_token_id_is_out_of_vocabulary(ids, with_tokenizer):
    with pytest.raises(ValueError, match="out of vocabulary"):
        process(ids, tokenizer="byte_level" if with_tokenizer else None)


def test_id_that_only_the_tokenizer_knows_is_refused():
    # The embedding has no row for it, though the tokenizer's text would produce it.
    tokenizer = byte_level_tokenizer()
    config = {"vocab_size": len(tokenizer) - 1}
    with pytest.raises(ValueError, match="out of vocabulary"):
        process([len(tokenizer) - 1], tokenizer=tokenizer, config=config)


def test_id_that_only_the_model_knows_is_taken():
    assert process([420], config={"vocab_size": 450}).prompt_token_ids == [420]


@pytest.mark.parametrize("prompt", ["", [], {"prompt": ""}, {"prompt_token_ids": []}])
def test_empty_prompt_is_refused(prompt):
    with pytest.raises(ValueError, match="The decoder prompt cannot be empty"):
        process(prompt)


@pytest.mark.parametrize("prompt", [None, 5, 1.5, {}, {"text": "a"}, b"a", {"prompt": None}])
def test_prompt_of_another_type_is_refused(prompt):
    with pytest.raises(VLLMValidationError, match="prompt"):
        process(prompt)


def test_prompt_longer_than_the_context_is_refused():
    message = r"prompt \(length 1025\) is longer than the maximum model length of 1024"
    with pytest.raises(ValueError, match=message):
        process([1] * 1025)
    with pytest.raises(ValueError, match=r"\(length 1024\) plus the number of requested output"):
        process([1] * 1024)
    assert len(process([1] * 1023).prompt_token_ids) == 1023


def test_limit_is_read_when_it_is_needed():
    front = processor()
    front.model_config.max_model_len = 16  # as the engine does for a small KV cache
    with pytest.raises(ValueError, match="maximum model length of 16"):
        front.process_inputs("r", [1] * 100, SamplingParams())
    params = SamplingParams(max_tokens=None)
    assert front.process_inputs("r", [1] * 10, params).sampling_params.max_tokens == 6


def test_text_that_cannot_fit_is_refused_before_it_is_tokenized():
    front = processor()
    front.tokenizer.encode = None  # must not be called
    with pytest.raises(VLLMValidationError, match="maximum context length is 1024 tokens"):
        front.process_inputs("r", "x" * 10_000_000, SamplingParams())


def test_text_needs_a_tokenizer():
    with pytest.raises(ValueError, match="skip_tokenizer_init"):
        process("hello", tokenizer=None)
    assert process([1], tokenizer=None).prompt_token_ids == [1]


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_parameters_that_need_a_tokenizer_are_refused_without(name):
    with pytest.raises(VLLMValidationError, match="skip_tokenizer_init") as caught:
        process([1], SamplingParams(**{name: ["a"]}), tokenizer=None)
    assert caught.value.parameter == name


def test_max_tokens_defaults_to_the_room_that_is_left():
    assert process([1] * 24, SamplingParams(max_tokens=None)).sampling_params.max_tokens == 1000
    assert process([1], SamplingParams(max_tokens=10**9)).sampling_params.max_tokens == 10**9


def test_callers_parameters_are_not_changed():
    params = SamplingParams(max_tokens=None, bad_words=["hello"])
    request = process("a", params)
    assert params.max_tokens is None
    assert params.bad_words_token_ids is None
    assert params.eos_token_id is None
    assert request.sampling_params.bad_words_token_ids
    assert request.sampling_params.eos_token_id == byte_level_tokenizer().eos_token_id


def test_end_tokens_come_from_generation_config_tokenizer_and_config_json():
    tokenizer = byte_level_tokenizer()
    tokenizer.extra_eos_token_ids = {7}
    config = vllm_config(vocab_size=400)
    config.model_config.generation_config_dict = {"eos_token_id": [5, tokenizer.eos_token_id]}
    request = InputProcessor(config, tokenizer).process_inputs("r", [1], SamplingParams())
    assert request.sampling_params.eos_token_id == tokenizer.eos_token_id
    assert set(request.sampling_params.stop_token_ids) == {5, 7}

    config.model_config.generation_config_dict = {}
    config.model_config.hf_config._values["eos_token_id"] = 9
    request = InputProcessor(config, None).process_inputs("r", [1], SamplingParams())
    assert request.sampling_params.stop_token_ids == [9]


def test_stop_token_ids_outside_the_vocabulary_are_refused():
    for bad in (999999, -5):
        params = SamplingParams(max_tokens=4, min_tokens=1, stop_token_ids=[bad])
        with pytest.raises(VLLMValidationError, match="stop_token_ids") as caught:
            process([1], params)
        assert caught.value.parameter == "stop_token_ids"


@pytest.mark.parametrize("min_tokens", [0, 3])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_end_tokens_that_the_model_has_no_row_for_are_dropped(min_tokens, ignore_eos):
    tokenizer = byte_level_tokenizer()
    tokenizer.extra_eos_token_ids = {7, 5000}
    tokenizer.eos_token_id = 310
    config = vllm_config(vocab_size=300)
    config.model_config.generation_config_dict = {"eos_token_id": [5, 300, -1, None, "a"]}
    params = SamplingParams(min_tokens=min_tokens, ignore_eos=ignore_eos)
    sent = InputProcessor(config, tokenizer).process_inputs("r", [1], params).sampling_params
    assert sent.eos_token_id is None
    assert sent.all_stop_token_ids == {5, 7}
    assert sent.stop_token_ids == ([] if ignore_eos else [5, 7])


@pytest.mark.parametrize("vocab_size", [97, 200, 291])
def test_bad_words_are_checked_against_the_models_vocabulary(vocab_size):
    tokenizer = byte_level_tokenizer()
    refused = 0
    for word in ("hello", "quick", "日", "a"):
        params = SamplingParams(bad_words=[word])
        spelled = process([1], params, tokenizer).sampling_params.bad_words_token_ids
        if max(map(max, spelled)) < vocab_size:
            process([1], params, tokenizer, {"vocab_size": vocab_size})
            continue
        refused += 1
        with pytest.raises(VLLMValidationError, match=f"size is {vocab_size}, but") as caught:
            process([1], params, tokenizer, {"vocab_size": vocab_size})
        assert caught.value.parameter == "bad_words"
    assert 0 < refused < 4


A, B, END = 0, 1, 2  # tokens of piece_tokenizer("a", "b")


@pytest.mark.parametrize(
    ("params", "parameter"),
    [
        ({"allowed_token_ids": [A], "bad_words": ["a"]}, "allowed_token_ids"),
        ({"allowed_token_ids": [A, B], "bad_words": ["a", "b"]}, "allowed_token_ids"),
        ({"allowed_token_ids": [A], "bad_words": ["aa"]}, "allowed_token_ids"),  # after one a
        ({"allowed_token_ids": [END], "min_tokens": 3}, "allowed_token_ids"),
        ({"allowed_token_ids": [A, END], "min_tokens": 3, "stop_token_ids": [A]},
         "allowed_token_ids"),
        ({"allowed_token_ids": [A, END], "min_tokens": 1, "bad_words": ["a"]}, "allowed_token_ids"),
        ({"allowed_token_ids": [A], "logit_bias": {A: -INF}}, "allowed_token_ids"),
        ({"bad_words": ["a", "b"], "min_tokens": 1}, "bad_words"),
        ({"logit_bias": {A: -INF, B: -INF, END: -INF}}, "logit_bias"),
        ({"stop_token_ids": [A, B], "min_tokens": 1}, "min_tokens"),
    ],
)  # fmt: skip
def test_rules_that_leave_no_token_are_refused(params, parameter):
    tokenizer = piece_tokenizer("a", "b")
    with pytest.raises(VLLMValidationError, match="leave no token that may be generated") as caught:
        process([A], SamplingParams(**params), tokenizer, {"vocab_size": 3})
    assert caught.value.parameter == parameter
    assert all(name in str(caught.value) for name in params if name != "stop_token_ids")


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [A], "bad_words": ["b"]},
        {"allowed_token_ids": [A], "bad_words": ["ba"]},  # b can't come
        {"allowed_token_ids": [A, B], "bad_words": ["ab"]},
        {"allowed_token_ids": [END]},
        {"allowed_token_ids": [A, END], "min_tokens": 3},
        {"allowed_token_ids": [A], "logit_bias": {A: -100.0}},
        {"bad_words": ["a", "b"]},  # the end is left
        {"logit_bias": {A: -INF, B: -INF}},
        {"min_tokens": 3, "bad_words": ["a"]},
    ],
)
def test_rules_that_leave_a_token_are_taken(params):
    process([A], SamplingParams(**params), piece_tokenizer("a", "b"), {"vocab_size": 3})


@pytest.mark.parametrize("salt", ["", 5, ["a"], {}])
def test_cache_salt_must_be_a_non_empty_string(salt):
    with pytest.raises(VLLMValidationError, match="must be a non-empty string") as caught:
        process({"prompt_token_ids": [1], "cache_salt": salt})
    assert caught.value.parameter == "cache_salt"


def test_cache_salt_is_passed_on():
    assert process({"prompt": "a", "cache_salt": "tenant"}).cache_salt == "tenant"
    assert process({"prompt": "a", "cache_salt": None}).cache_salt is None
    assert process("a").cache_salt is None


def test_what_is_not_built_is_refused_by_name():
    with pytest.raises(VLLMValidationError, match="reasoning_config is not configured"):
        process("a", SamplingParams(thinking_token_budget=5))
    with pytest.raises(VLLMValidationError, match="LoRA is not enabled"):
        process("a", lora_request=object())
    with pytest.raises(TypeError, match="params must be SamplingParams"):
        process("a", params={"n": 1})


def test_special_tokens_are_added_unless_told_otherwise():
    from tokenizers.processors import TemplateProcessing

    tokenizer = llama_style_tokenizer()
    tokenizer.backend.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    bos = tokenizer.bos_token_id
    assert process("hello", tokenizer=tokenizer).prompt_token_ids.count(bos) == 1
    kwargs = {"tokenization_kwargs": {"add_special_tokens": False}}
    assert bos not in process("hello", tokenizer=tokenizer, **kwargs).prompt_token_ids


def test_truncation_keeps_the_end_or_the_start():
    ids = list(range(10))

    def cut(**kwargs):
        params = SamplingParams(max_tokens=4)
        config = {"max_model_len": 12}
        return process(ids, params, config=config, tokenization_kwargs=kwargs).prompt_token_ids

    assert cut(truncate_prompt_tokens=3) == [7, 8, 9]
    assert cut(truncate_prompt_tokens=3, truncation_side="right") == [0, 1, 2]
    assert cut(truncate_prompt_tokens=-1) == ids[-8:]
    assert cut(truncate_prompt_tokens=11) == ids
    for bad in (0, -2, 12):
        with pytest.raises(VLLMValidationError, match="truncate_prompt_tokens"):
            cut(truncate_prompt_tokens=bad)
    with pytest.raises(VLLMValidationError, match="truncation_side"):
        cut(truncate_prompt_tokens=3, truncation_side="middle")
    with pytest.raises(VLLMValidationError, match="Unknown tokenization arguments max_lenght"):
        cut(max_lenght=3)


def test_request_id_is_made_unique_and_the_callers_kept():
    first, second = process("a"), process("a")
    for request in (first, second):
        InputProcessor.assign_request_id(request)
        assert request.external_req_id == "r"
        assert request.request_id.startswith("r-")
    assert first.request_id != second.request_id
    with pytest.raises(ValueError, match="external_req_id"):
        InputProcessor.assign_request_id(first)


def test_priority_and_arrival_time_are_passed_on():
    request = process("a", priority=-3, arrival_time=12.5)
    assert (request.priority, request.arrival_time) == (-3, 12.5)
    assert process("a").arrival_time > 1e9


def test_rank_of_a_data_parallel_engine_is_passed_on_and_checked():
    assert process("a", data_parallel_rank=0).data_parallel_rank == 0
    assert process("a").data_parallel_rank is None
    for rank in (1, -1):
        with pytest.raises(VLLMValidationError, match=rf"_rank {rank} is out of range \[0, 1\)"):
            process("a", data_parallel_rank=rank)

# SPDX-License-Identifier: Apache-2.0
"""LLM and LLMEngine over a worker without a model."""

import functools
import gc
import weakref

import pytest
from front_helpers import (
    byte_level_tokenizer,
    make_llm,
    piece_tokenizer,
    script_of,
    vllm_config,
)

from vllmx import LLM, SamplingParams
from vllmx.exceptions import EngineDeadError, UserError, VLLMValidationError
from vllmx.sampling_params import RequestOutputKind

PIECES = ("Hi", "a", "b", "\n", "garbage", "one ", "two", "th", "ree!")
HI, A, B, NEWLINE, GARBAGE = range(5)
EOS = len(PIECES)


@pytest.fixture
def build(monkeypatch):
    """build(*tokens): an LLM whose answers to a one-token prompt are these tokens."""

    def make(*tokens: int, prompt_len=1, then=A, **overrides) -> LLM:
        script = script_of(*tokens, prompt_len=prompt_len, then=then)
        return make_llm(
            monkeypatch, piece_tokenizer(*PIECES), vllm_config(script=script, **overrides)
        )

    return make


def answer(llm: LLM, **params):
    (output,) = llm.generate([A], SamplingParams(**params), use_tqdm=False)
    return output.outputs[0]


def test_outputs_are_in_the_order_of_the_prompts(build):
    llm = build()
    params = [SamplingParams(max_tokens=n) for n in (9, 1, 5)]
    outputs = llm.generate([[A], [B], [HI]], params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [[A], [B], [HI]]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5]
    assert all(output.finished for output in outputs)
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("prompts", "count"),
    [([A, B], 1), ([[A], [B]], 2), ({"prompt_token_ids": [A]}, 1), ([{"prompt_token_ids": [A]}], 1),
     ([[A], {"prompt_token_ids": [B]}], 2), ([], 0)],
)  # fmt: skip
def test_prompts_in_every_form(build, prompts, count):
    assert len(build().generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)) == count


@pytest.mark.parametrize("prompts", [[1.5], [-1], [[-1]], ["a", 1], [[1], [2, "x"]], [True]])
def test_bad_prompt_is_refused_and_none_of_the_prompts_runs(build, prompts):
    llm = build()
    with pytest.raises(ValueError, match=r"out of vocabulary|must be a string"):
        llm.generate(prompts, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(llm.generate([[A]], SamplingParams(max_tokens=1), use_tqdm=False)) == 1


def test_lengths_of_lists_must_agree(build):
    llm = build()
    with pytest.raises(ValueError, match=r"prompts \(2\) and params \(1\) must be the same"):
        llm.generate([[A], [B]], [SamplingParams()], use_tqdm=False)
    with pytest.raises(ValueError, match=r"prompts \(1\) and priority \(2\)"):
        llm.generate([[A]], SamplingParams(), use_tqdm=False, priority=[1, 2])


def test_callers_parameters_are_not_changed(build):
    params = SamplingParams(max_tokens=2, output_kind=RequestOutputKind.CUMULATIVE)
    before = params.clone()
    build().generate([[A], [B]], params, use_tqdm=False)
    assert params == before


@pytest.mark.parametrize(
    "stop",
    [{"stop": []}, {"stop": None}, {"stop": ["ZZZ"]}, {"stop_token_ids": []},
     {"stop_token_ids": [NEWLINE]}],
)  # fmt: skip
def test_stop_lists_do_not_replace_the_end_of_sequence(build, stop):
    llm = build(HI, EOS, GARBAGE)
    completion = answer(llm, **stop)
    assert completion.text == "Hi"
    assert completion.finish_reason == "stop"
    assert completion.stop_reason is None
    assert list(completion.token_ids) == [HI, EOS]


def test_ignore_eos_goes_on(build):
    completion = answer(build(HI, EOS, GARBAGE), ignore_eos=True, max_tokens=3)
    assert completion.text == "Higarbage"
    assert completion.finish_reason == "length"


def test_stop_token_is_reported(build):
    completion = answer(build(HI, B, GARBAGE), stop_token_ids=[B])
    assert (completion.text, completion.stop_reason) == ("Hi", B)


def test_stop_string_before_min_tokens_does_not_end_the_request(build):
    completion = answer(build(A, NEWLINE, B, A, A, NEWLINE, B), stop=["\n"], min_tokens=4)
    assert completion.text == "a\nbaa"
    assert completion.stop_reason == "\n"
    completion = answer(build(A, NEWLINE, B), stop=["\n"], min_tokens=4, max_tokens=10)
    assert completion.text == "a\nb" + "a" * 7
    assert completion.finish_reason == "length"


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_stop_over_tokens_gives_the_same_text_streamed_or_not(build, kind):
    llm = build(5, 6, 7, 8, GARBAGE)  # "one ", "two", "th", "ree!"
    llm.llm_engine.add_request("x", [A], SamplingParams(stop=["twothree!"], output_kind=kind))
    texts = []
    while llm.llm_engine.has_unfinished_requests():
        texts += [output.outputs[0].text for output in llm.llm_engine.step()]
    assert ("".join(texts) if kind == RequestOutputKind.DELTA else texts[-1]) == "one "


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ({"max_tokens": 2}, "length"),
        ({}, "stop"),
        ({"stop_token_ids": [GARBAGE]}, "stop"),
        ({"stop": ["ZZZZZZZZ", "ga"]}, "stop"),
    ],
    ids=str,
)
def test_what_was_held_back_for_a_stop_string_comes_however_the_answer_ends(
    build, kind, end, reason
):
    last = GARBAGE if "stop_token_ids" in end or "stop" in end else EOS
    llm = build(5, 6, last)  # "one ", "two"
    params = SamplingParams(**{"stop": ["ZZZZZZZZ"], "output_kind": kind, **end})
    llm.llm_engine.add_request("x", [A], params)
    answers = []
    while llm.llm_engine.has_unfinished_requests():
        answers += [output.outputs[0] for output in llm.llm_engine.step()]
    texts = [each.text for each in answers]
    assert ("".join(texts) if kind == RequestOutputKind.DELTA else texts[-1]) == "one two"
    assert answers[-1].finish_reason == reason


def test_id_without_a_token_decodes_to_nothing(build):
    completion = answer(build(HI, 900, HI), max_tokens=3)
    assert completion.text == "HiHi"
    assert list(completion.token_ids) == [HI, 900, HI]


@pytest.mark.parametrize("n", [2, 3])
def test_n_answers_have_distinct_indices(build, n):
    (output,) = build().generate([A], SamplingParams(n=n, max_tokens=4, seed=1), use_tqdm=False)
    assert [completion.index for completion in output.outputs] == list(range(n))
    assert all(completion.finish_reason == "length" for completion in output.outputs)


def test_several_prompts_with_several_answers(build):
    outputs = build().generate([[A], [B]], SamplingParams(n=2, max_tokens=2), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [[A], [B]]
    assert [len(output.outputs) for output in outputs] == [2, 2]


def test_greedy_with_several_answers_is_a_value_error():
    with pytest.raises(ValueError, match="greedy"):
        SamplingParams(temperature=0, n=2)


def test_interrupted_call_leaves_nothing_behind(build):
    llm = build()

    class Interrupt:
        format_dict = {"elapsed": 1.0}

        def update(self, n):
            raise KeyboardInterrupt

        def set_postfix_str(self, *args, **kwargs):
            pass

        def close(self):
            pass

    with pytest.raises(KeyboardInterrupt):
        llm.generate(
            [[A], [B]],
            [SamplingParams(max_tokens=1), SamplingParams(max_tokens=50)],
            use_tqdm=lambda **kwargs: Interrupt(),
        )
    assert not llm.llm_engine.has_unfinished_requests()
    (output,) = llm.generate([A], SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.prompt_token_ids == [A]


def test_interrupted_step_does_not_spoil_the_same_prompt_later(build, monkeypatch):
    llm = build(HI, prompt_len=40, worker__check=True, model__enforce_eager=True)
    engine = llm.llm_engine
    params = SamplingParams(max_tokens=3)

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.engine_core.engine_core.model_executor, "execute_model", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[A] * 40], params, use_tqdm=False)
    assert not engine.has_unfinished_requests()
    (output,) = llm.generate([[A] * 40], params, use_tqdm=False)
    assert output.outputs[0].token_ids == [HI, A, A]
    assert output.num_cached_tokens == 0


def test_interruption_between_two_answers_of_a_request_leaves_none(build, monkeypatch):
    llm = build()
    engine = llm.llm_engine
    add = engine.engine_core.add_request

    def interrupt_at_the_second(request):
        add(request)
        if request.request_id.startswith("1_"):
            raise KeyboardInterrupt

    monkeypatch.setattr(engine.engine_core, "add_request", interrupt_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([A], SamplingParams(n=3, temperature=1.0), use_tqdm=False)
    assert not engine.has_unfinished_requests()
    assert engine.engine_core.engine_core.scheduler.get_request_counts() == (0, 0)


def test_engine_that_is_let_go_of_frees_its_worker_at_once(build):
    gc.disable()
    try:
        llm = build()
        answer(llm, max_tokens=2)
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
        freed = weakref.ref(worker)
        del worker
        del llm
        assert freed() is None
    finally:
        gc.enable()


def test_llm_shuts_down_at_the_end_of_its_with(build):
    with build() as llm:
        answer(llm, max_tokens=1)
    with pytest.raises(EngineDeadError, match="has been shut down"):
        answer(llm, max_tokens=1)


def test_progress_goes_to_stderr_and_nothing_to_stdout(build, capsys):
    build().generate([A], SamplingParams(max_tokens=1))
    out, err = capsys.readouterr()
    assert out == ""
    assert "Processed prompts" in err
    build().generate([A], SamplingParams(max_tokens=1), use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_progress_bar_of_ones_own(build):
    from tqdm import tqdm

    made = []

    def make(**kwargs):
        made.append(kwargs)
        return functools.partial(tqdm, leave=False)(**kwargs)

    build().generate([[A], [B]], SamplingParams(max_tokens=1), use_tqdm=make)
    assert made[0]["total"] == 2


# ------------------------------------------------------------------ defaults, config


GENERATION_CONFIG = {
    "temperature": 0.3,
    "top_k": 7,
    "repetition_penalty": 1.1,
    "max_new_tokens": 5,
    "do_sample": True,
}


def test_generation_config_is_the_default_and_only_the_default(monkeypatch):
    config = vllm_config(script=script_of(prompt_len=1, then=A))
    config.model_config.generation_config_dict = GENERATION_CONFIG
    llm = make_llm(monkeypatch, piece_tokenizer(*PIECES), config)
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_k, defaults.repetition_penalty) == (0.3, 7, 1.1)
    assert defaults.max_tokens == 5
    (output,) = llm.generate([A], use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5
    (output,) = llm.generate([A], SamplingParams(max_tokens=8), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8
    config.model_config.generation_config_dict = {}
    assert llm.get_default_sampling_params() == SamplingParams()


def test_config_and_arguments_exclude_each_other():
    with pytest.raises(UserError, match="config and model, dtype"):
        LLM("some-model", config=vllm_config(), dtype="float32")
    with pytest.raises(TypeError, match="needs a model"):
        LLM()


def test_unknown_argument_is_a_type_error_with_a_hint():
    with pytest.raises(TypeError, match=r"max_model_length.*max_model_len"):
        LLM("some-model", max_model_length=5)


def test_statistics_are_off_unless_asked_for(build, monkeypatch):
    (output,) = build().generate([A], SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.metrics is None
    config = vllm_config()
    llm = make_llm(monkeypatch, piece_tokenizer(*PIECES), config, disable_log_stats=False)
    (output,) = llm.generate([A], SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.metrics.num_generation_tokens == 2
    assert output.metrics.first_token_latency > 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_statistics_of_a_step_without_outputs_are_kept(monkeypatch, async_scheduling):
    config = vllm_config(
        script=script_of(prompt_len=200, then=A),
        scheduler__max_num_seqs=8,
        scheduler__max_num_batched_tokens=64,
        scheduler__async_scheduling=async_scheduling,
    )
    llm = make_llm(monkeypatch, piece_tokenizer(*PIECES), config, disable_log_stats=False)
    recorded = []
    llm.llm_engine.logger_manager.record = lambda *stats: recorded.append(stats)
    for prompt in ([A] * 200, [A] * 64 + [B] * 136):  # the second in two steps and a third
        llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
    counted = [scheduler_stats.prefix_cache_stats for scheduler_stats, _ in recorded]
    assert sum(stats.requests for stats in counted) == 2
    assert sum(stats.queries for stats in counted) == 400
    assert sum(stats.hits for stats in counted) == 64
    assert sum(stats is not None for _, stats in recorded) == 2  # only steps that had outputs


def test_prefix_cache_is_used_and_can_be_reset(build):
    llm = build(prompt_len=40)
    params = SamplingParams(max_tokens=1)

    def cached():
        (output,) = llm.generate([A] * 40, params, use_tqdm=False)
        return output.num_cached_tokens

    assert [cached(), cached()] == [0, 32]
    assert llm.reset_prefix_cache()
    assert cached() == 0


def test_limit_lowered_at_start_is_the_one_that_admits(monkeypatch):
    config = vllm_config(max_model_len=None, cache__num_gpu_blocks_override=5)
    config.model_config.max_model_len = 256
    config.model_config.max_model_len_pinned = False
    llm = make_llm(monkeypatch, piece_tokenizer(*PIECES), config)
    limit = llm.model_config.max_model_len
    assert limit < 256
    with pytest.raises(ValueError, match=f"maximum model length of {limit}"):
        llm.generate([A] * 200, use_tqdm=False)
    (output,) = llm.generate([A] * 20, SamplingParams(max_tokens=None), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == limit - 20


def test_without_tokenizer_only_ids_are_taken(monkeypatch):
    llm = make_llm(monkeypatch, None, vllm_config())
    (output,) = llm.generate([A], SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 2
    with pytest.raises(ValueError, match="skip_tokenizer_init"):
        llm.generate("text", use_tqdm=False)
    with pytest.raises(ValueError, match="skip_tokenizer_init"):
        llm.get_tokenizer()


def test_request_ids_of_the_engine_are_strings(build):
    with pytest.raises(TypeError, match="request_id must be a string"):
        build().llm_engine.add_request(1, [A], SamplingParams())


def test_aborted_request_has_no_further_output(build):
    engine = build().llm_engine
    engine.add_request("x", [A], SamplingParams(max_tokens=50))
    engine.add_request("y", [A], SamplingParams(max_tokens=2))
    engine.step()
    engine.abort_request(["x", "unknown"])
    ids = set()
    while engine.has_unfinished_requests():
        ids |= {output.request_id for output in engine.step()}
    assert ids == {"y"}


# ------------------------------------------------------------------ chat


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chat_llm(monkeypatch):
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_templates = {"default": TEMPLATE}
    return make_llm(monkeypatch, tokenizer, vllm_config(vocab_size=400))


def test_chat_renders_one_conversation_or_several(chat_llm):
    hi = [{"role": "user", "content": "hi"}]
    params = SamplingParams(max_tokens=1)
    (one,) = chat_llm.chat(hi, params, use_tqdm=False)
    assert one.prompt == "<user>hi<assistant>"
    two = chat_llm.chat([hi, [*hi, {"role": "assistant", "content": "yo"}]], params, use_tqdm=False)
    assert [output.prompt for output in two] == [
        "<user>hi<assistant>",
        "<user>hi<assistant>yo<assistant>",
    ]


def test_chat_template_of_ones_own_and_no_generation_prompt(chat_llm):
    (output,) = chat_llm.chat(
        [{"role": "user", "content": "hi"}],
        SamplingParams(max_tokens=1),
        use_tqdm=False,
        chat_template="{{ messages[0].content }}{{ suffix }}",
        add_generation_prompt=False,
        chat_template_kwargs={"suffix": "!"},
    )
    assert output.prompt == "hi!"


def test_chat_adds_no_special_tokens_to_those_of_the_template(monkeypatch):
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_level_tokenizer()
    tokenizer.chat_templates = {"default": TEMPLATE}
    tokenizer.bos_token = "<|end|>"
    tokenizer.special_tokens_map["bos_token"] = "<|end|>"
    tokenizer.backend.post_processor = TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", tokenizer.eos_token_id)]
    )
    llm = make_llm(monkeypatch, tokenizer, vllm_config(vocab_size=400))
    messages = [{"role": "user", "content": "hi"}]

    def count(**kwargs):
        (output,) = llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False, **kwargs)
        return output.prompt_token_ids.count(tokenizer.eos_token_id)

    assert count() == 1
    assert count(tokenization_kwargs={"add_special_tokens": True}) == 2
    (output,) = llm.generate("hi", SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.prompt_token_ids.count(tokenizer.eos_token_id) == 1


def test_bad_conversation_is_refused(chat_llm):
    for messages in ([{"content": "no role"}], [[]], [{"role": "user", "content": 5}]):
        with pytest.raises(VLLMValidationError):
            chat_llm.chat(messages, use_tqdm=False)
    with pytest.raises(VLLMValidationError, match="Cannot set both"):
        chat_llm.chat([{"role": "user", "content": "a"}], continue_final_message=True)
    assert not chat_llm.llm_engine.has_unfinished_requests()

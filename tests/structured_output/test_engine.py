# SPDX-License-Identifier: Apache-2.0
"""Constrained requests through the whole engine; the worker prefers nonsense to what is allowed."""

import asyncio
import json
import re
from collections import Counter

import jsonschema
import pytest
from front_helpers import make_async_llm, make_llm
from structured_helpers import END, THINK_END, TOKENIZER, VOCAB, EndsAtX, config, ids

from vllmx import SamplingParams
from vllmx.engine import input_processor
from vllmx.exceptions import EngineGenerateError, VLLMValidationError
from vllmx.sampling_params import StructuredOutputsParams
from vllmx.structured_output import manager as manager_module
from vllmx.structured_output import validation
from vllmx.structured_output.backend_guidance import GuidanceBackend
from vllmx.structured_output.backend_lm_format_enforcer import LMFormatEnforcerBackend

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 6}, "b": {"enum": [1, None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
KINDS = {
    "json": (SCHEMA, lambda text: set(json.loads(text)) == {"a", "b"}),
    "json_object": (True, lambda text: isinstance(json.loads(text), dict)),
    "regex": ("[0-9]{3,5}", lambda text: re.fullmatch("[0-9]{3,5}", text)),
    "choice": (["yes", "no", "St. John"], lambda text: text in ("yes", "no", "St. John")),
    "grammar": ('start: "hello" " "+ name\nname: "you" | "me"', lambda text: text[:6] == "hello "),
}


def script(req_id: str, position: int) -> int:
    """Anything, signs of JSON now and then: what is allowed is found from there."""
    if position % 3 == 0:
        return ids('"}:1')[position // 3 % 4]
    return (sum(map(ord, req_id)) * 31 + position * 7919) % VOCAB


@pytest.fixture(autouse=True)
def _the_tokenizer(monkeypatch) -> None:
    found = property(lambda self: TOKENIZER)
    monkeypatch.setattr(manager_module.StructuredOutputManager, "tokenizer", found)


def engine(monkeypatch, **settings):
    settings = {"worker__check": True, "structured_outputs__backend": "guidance", **settings}
    return make_llm(monkeypatch, TOKENIZER, config(**{"script": script, **settings}))


def generate(llm, params, count: int = 1, prompt: str = "hello world"):
    prompts = [f"{prompt} {i}" for i in range(count)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [answer for output in outputs for answer in output.outputs]


def constrained(kind: str, **params):
    given = StructuredOutputsParams(**{kind: KINDS[kind][0]})
    return SamplingParams(structured_outputs=given, **{"max_tokens": 120, **params})


@pytest.mark.parametrize("is_async", [False, True], ids=["steps", "async"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_answer_is_a_member_of_its_language(monkeypatch, kind, is_async) -> None:
    backend = "xgrammar" if kind == "grammar" else "guidance"
    settings = {"scheduler__async_scheduling": is_async, "structured_outputs__backend": backend}
    llm = engine(monkeypatch, **settings)
    answers = generate(llm, constrained(kind, n=2), count=3)
    assert len(answers) == 6
    for answer in answers:
        assert answer.finish_reason == "stop" and KINDS[kind][1](answer.text), answer.text


PLAIN = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "pattern": "^[a-z ]{1,9}$"},
        "b": {"enum": ["x", "yes"]},
    },
    "required": ["a", "b"],
}
SCHEMAS = {
    "xgrammar": {**PLAIN, "additionalProperties": False},
    "guidance": SCHEMA,
    "outlines": PLAIN,
    "lm-format-enforcer": {**PLAIN, "additionalProperties": False},
}


def note_schedule(llm, noted: Counter) -> None:
    """Count prompts that are computed in parts, preemptions, and prompt tokens from the cache."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule

    def counting(*args, **kwargs):
        output = schedule(*args, **kwargs)
        noted["preempted"] += len(output.preempted_req_ids or ())
        for new in output.scheduled_new_reqs:
            count = output.num_scheduled_tokens[new.req_id]
            noted["cached"] += new.num_computed_tokens
            noted["chunked"] += new.num_computed_tokens + count < len(new.prompt_token_ids)
        return output

    scheduler.schedule = counting


@pytest.mark.parametrize("is_async", [False, True], ids=["steps", "async"])
@pytest.mark.parametrize("backend", SCHEMAS)
@pytest.mark.parametrize(
    ("happens", "settings"),
    [
        ("chunked", {"scheduler__max_num_batched_tokens": 8, "scheduler__max_num_seqs": 8}),
        ("preempted", {"cache__num_gpu_blocks_override": 22, "max_model_len": 80}),
        ("uncached", {"cache__enable_prefix_caching": False}),
    ],
)
def test_grammars_hold_through_chunks_preemption_and_beside_free_requests(
    monkeypatch, happens, settings, backend, is_async
) -> None:
    settings = {"cache__block_size": 4, "scheduler__async_scheduling": is_async, **settings}
    if backend in ("xgrammar", "guidance"):
        settings["structured_outputs__disable_any_whitespace"] = True
    llm = engine(monkeypatch, structured_outputs__backend=backend, **settings)
    note_schedule(llm, noted := Counter())
    free = SamplingParams(max_tokens=30, ignore_eos=True)
    schema = StructuredOutputsParams(json=SCHEMAS[backend])
    json_params = SamplingParams(structured_outputs=schema, max_tokens=120, n=2)
    params = [json_params, free, constrained("regex", n=2), free, json_params]
    prompts = [f"the quick brown fox jumps over {i} and over again" for i in range(5)]
    for _ in range(2):  # the second time prompts are cached
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for i in (0, 4):
            assert len(outputs[i].outputs) == 2
            for answer in outputs[i].outputs:
                assert answer.finish_reason == "stop", answer.text
                jsonschema.validate(json.loads(answer.text), SCHEMAS[backend])
        for answer in outputs[2].outputs:
            assert answer.finish_reason == "stop" and KINDS["regex"][1](answer.text)
        assert len(outputs[1].outputs[0].token_ids) == len(outputs[3].outputs[0].token_ids) == 30
    assert happens == "uncached" or noted[happens] > 0
    assert (noted["cached"] == 0) == (happens == "uncached")


SHORT = {
    "choice": (["yes", "no"], ("yes", "no")),
    "regex": ("[0-9]{5}", tuple(f"{number:05}" for number in range(10**5))),
    "json": ({"type": "boolean"}, ("true", "false")),
}


@pytest.mark.parametrize("backend", SCHEMAS)
@pytest.mark.parametrize("kind", SHORT)
def test_an_answer_ends_with_its_grammar_whatever_else_the_request_says(
    monkeypatch, backend: str, kind: str
) -> None:
    llm = engine(monkeypatch, structured_outputs__backend=backend)
    given, language = SHORT[kind]
    free = SamplingParams(max_tokens=20, ignore_eos=True)
    for more in ({}, {"ignore_eos": True}, {"min_tokens": 10}, {"min_tokens": 50, "n": 2}):
        constraint = StructuredOutputsParams(**{kind: given})
        params = SamplingParams(structured_outputs=constraint, **{"max_tokens": 50, **more})
        tied, beside = llm.generate(["hello", "world"], [params, free], use_tqdm=False)
        for answer in tied.outputs:
            assert answer.text.strip() in language and answer.finish_reason == "stop"
            assert answer.token_ids[-1] == END
        assert len(beside.outputs[0].token_ids) == 20


def test_stop_strings_and_lengths_end_an_answer_before_its_grammar(monkeypatch) -> None:
    llm = engine(monkeypatch)
    regex = StructuredOutputsParams(regex="[0-9]{40}")
    cut = generate(llm, SamplingParams(structured_outputs=regex, max_tokens=7))[0]
    assert cut.finish_reason == "length" and re.fullmatch("[0-9]{7}", cut.text)
    llm = engine(monkeypatch, script=lambda req_id, position: script("r", position))
    whole = generate(llm, constrained("json"))[0].text
    stop = '"b"'
    assert stop in whole[4:]
    for included in (False, True):
        params = constrained("json", stop=[stop, "never"], include_stop_str_in_output=included)
        stopped = generate(llm, params)[0]
        assert stopped.finish_reason == "stop" and stopped.stop_reason == stop
        assert stopped.text == whole[: whole.index(stop) + len(stop) * included]


def test_parameters_may_be_shared_and_are_looked_at_once(monkeypatch) -> None:
    llm = engine(monkeypatch)
    params = constrained("json")
    checked = []
    check = validation._check_guidance
    monkeypatch.setitem(
        validation._CHECKS, "guidance", lambda *args: checked.append(args) or check(*args)
    )
    validation._choose.cache_clear()
    generate(llm, params, count=4)
    assert len(checked) == 1 and params.structured_outputs._backend is None


def test_a_grammar_that_fails_to_compile_ends_its_request_alone(monkeypatch, caplog) -> None:
    compile_grammar = GuidanceBackend.compile_grammar

    def fail(self, kind, spec, options=None):
        if spec == "broken":
            raise RuntimeError("the library gave up")
        return compile_grammar(self, kind, spec, options)

    monkeypatch.setattr(GuidanceBackend, "compile_grammar", fail)
    llm = engine(monkeypatch)
    broken = SamplingParams(structured_outputs=StructuredOutputsParams(regex="broken"))
    outputs = llm.generate(["a", "b", "c"], [broken, constrained("regex"), broken], use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "stop", "error"]
    assert KINDS["regex"][1](outputs[1].outputs[0].text)
    assert "the library gave up" in caplog.text
    assert generate(llm, constrained("choice"))[0].text in KINDS["choice"][0]
    assert not llm.llm_engine.has_unfinished_requests()


def test_what_would_stop_the_loop_is_made_when_the_engine_starts(monkeypatch) -> None:
    llm = engine(monkeypatch, structured_outputs__backend="lm-format-enforcer")

    def make_tree(self, without):
        raise AssertionError("a tree is made while requests run")

    monkeypatch.setattr(LMFormatEnforcerBackend, "_make_tree", make_tree)
    assert KINDS["regex"][1](generate(llm, constrained("regex"))[0].text)
    text = generate(llm, constrained("json_object"))[0].text  # which may be cut at max_tokens
    assert text.lstrip()[0] == "{"
    without = {
        "structured_outputs__backend": "lm-format-enforcer",
        "model__skip_tokenizer_init": True,
    }
    for settings in ({"structured_outputs__backend": "auto"}, without):
        made = manager_module.StructuredOutputManager(config(**settings))
        made.prepare()
        assert not made.backends


def test_what_cannot_be_enforced_never_reaches_the_engine(monkeypatch) -> None:
    llm = engine(monkeypatch)
    bad = SamplingParams(
        structured_outputs=StructuredOutputsParams(json={"contains": {"const": 1}})
    )
    with pytest.raises(VLLMValidationError, match="contains"):
        generate(llm, bad)
    assert generate(llm, constrained("choice"))[0].finish_reason == "stop"


def test_reasoning_goes_on_freely_until_it_ends(monkeypatch) -> None:
    def thinking(req_id: str, position: int) -> int:
        return THINK_END if position == start + 5 else ids("q")[0]

    start = len(ids("hello world 0"))
    llm = make_llm(
        monkeypatch, TOKENIZER, config(script=thinking, structured_outputs__backend="guidance")
    )
    llm.llm_engine.engine_core.engine_core.structured_output_manager.reasoner_cls = EndsAtX
    answer = generate(llm, constrained("regex"))[0]
    thought, _, content = answer.text.partition("x")
    assert thought == "qqqqq" and KINDS["regex"][1](content)


def test_a_server_validates_beside_its_loop_and_streams_the_answer(monkeypatch) -> None:
    async def main() -> None:
        made = config(script=script, structured_outputs__backend="guidance")
        llm = make_async_llm(monkeypatch, TOKENIZER, made)
        threads = []
        validate = input_processor.InputProcessor.validate_structured_outputs

        def note(self, params):
            try:
                asyncio.get_running_loop()
                threads.append("loop")
            except RuntimeError:
                threads.append("beside")
            return validate(self, params)

        monkeypatch.setattr(input_processor.InputProcessor, "validate_structured_outputs", note)
        try:
            final = None
            async for output in llm.generate("hello", constrained("json"), "r"):
                final = output
            assert KINDS["json"][1](final.outputs[0].text)
            bad = SamplingParams(structured_outputs=StructuredOutputsParams(json={"not": {}}))
            with pytest.raises((VLLMValidationError, EngineGenerateError), match="not"):
                async for _ in llm.generate("hello", bad, "s"):
                    pass
        finally:
            llm.shutdown()
        assert threads == ["beside", "loop", "beside"]

    asyncio.run(main())

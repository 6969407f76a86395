# SPDX-License-Identifier: Apache-2.0
"""The engine's manager of grammars: compiled beside the loop, masks with drafts, reasoning."""

import threading
import time

import numpy as np
import pytest
import tokenizers
from engine_helpers import make_request
from structured_helpers import END, THINK_END, TOKENIZER, VOCAB, EndsAtX, config, ids

from vllmx.exceptions import UserError
from vllmx.reasoning import ReasoningParserManager
from vllmx.reasoning.basic_parsers import DeepSeekR1ReasoningParser, Qwen3ReasoningParser
from vllmx.sampling_params import StructuredOutputsParams
from vllmx.structured_output import compilation
from vllmx.structured_output.backend_guidance import GuidanceBackend
from vllmx.structured_output.backend_types import StructuredOutputOptions
from vllmx.structured_output.manager import StructuredOutputManager


def manager(drafts=0, reasons=False, backend="guidance", **settings) -> StructuredOutputManager:
    made = config(drafts)
    made.structured_outputs_config.backend = backend
    for name, value in settings.items():
        setattr(made.structured_outputs_config, name, value)
    result = StructuredOutputManager(made, TOKENIZER)
    if reasons:
        result.reasoner_cls = EndsAtX
    return result


def constrained(regex="[0-9]+", name="a", **more):
    return make_request(
        name, ids("no"), structured_outputs=StructuredOutputsParams(regex=regex, **more)
    )


def ready(made: StructuredOutputManager, request):
    made.grammar_init(request)
    deadline = time.monotonic() + 20
    while request.structured_output_request.grammar is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return request.structured_output_request.grammar


def tokens(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def mask(made, request, *drafts):
    spec = {request.request_id: list(drafts)} if drafts else {}
    return made.grammar_bitmask({request.request_id: request}, [request.request_id], spec)


def test_a_grammar_is_compiled_in_another_thread_and_compiled_once(monkeypatch) -> None:
    made, held, names = manager(), threading.Event(), []
    compile_grammar = GuidanceBackend.compile_grammar

    def slow(self, *args):
        names.append(threading.current_thread().name)
        held.wait(10)
        return compile_grammar(self, *args)

    monkeypatch.setattr(GuidanceBackend, "compile_grammar", slow)
    request = constrained()
    made.grammar_init(request)
    assert request.structured_output_request.grammar is None
    assert not request.structured_output_request.is_grammar_ready
    held.set()
    first = ready(made, request)
    second = ready(made, constrained(name="b"))
    assert all(name.startswith("grammar") for name in names)
    assert first is not second and len(made.backends["guidance"]._compiled) == 1
    made.clear_backend()


@pytest.fixture
def held(monkeypatch):
    """Patterns that begin with an s take until this is set; `begun` has all that were begun."""
    release, compile_grammar = threading.Event(), GuidanceBackend.compile_grammar
    release.begun = []

    def compile_held(self, kind, spec, options=None):
        release.begun.append(spec)
        if spec[0] == "s":
            release.wait(20)
        return compile_grammar(self, kind, spec, options)

    monkeypatch.setattr(GuidanceBackend, "compile_grammar", compile_held)
    yield release
    release.set()


def wait_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def asked_for(made: StructuredOutputManager, *patterns: str) -> list:
    requests = [constrained(pattern, str(i)) for i, pattern in enumerate(patterns)]
    for request in requests:
        made.grammar_init(request)
    return [request.structured_output_request for request in requests]


def failure_of(made: StructuredOutputManager, pattern: str) -> str:
    """Why a pattern was not compiled, "" if it was."""
    structured = asked_for(made, pattern)[0]
    wait_until(structured._grammar.done)
    return str(structured.failure or "")


def test_a_grammar_that_is_known_waits_for_none_that_is_slow(held) -> None:
    made = manager()
    known = ready(made, constrained("a+"))
    slow = asked_for(made, *(f"s{i}" for i in range(80)))
    assert ready(made, constrained("a+")) is not known
    assert not any(structured.is_grammar_ready for structured in slow)
    made.clear_backend()


def test_one_slow_grammar_leaves_room_for_another_that_is_new(held) -> None:
    made = manager()
    # However many ask for it: it is begun once.
    slow = asked_for(made, *["slow"] * 40)
    assert ready(made, constrained("[0-9]"))
    assert held.begun.count("slow") == 1
    held.set()
    wait_until(lambda: all(structured.is_grammar_ready for structured in slow))
    assert len({id(structured.grammar) for structured in slow}) == 40


def test_what_nobody_waits_for_keeps_nobody_waiting(held) -> None:
    made = manager()
    first = asked_for(made, *(f"s{i}" for i in range(3)))
    wait_until(lambda: held.begun)
    num_workers = made._compiler._executor._max_workers
    slow = [*first, *asked_for(made, *(f"s{i}" for i in range(3, 3 + num_workers)))]
    wait_until(lambda: len(held.begun) >= num_workers)
    for structured in slow:
        structured.cancel()
        assert structured.failure is None
    assert ready(made, constrained("[a-c]"))
    assert len(held.begun) <= num_workers + 1, "what had not begun never does"
    # The thread that goes on is the one that its next client gets the grammar of.
    again = asked_for(made, held.begun[0])[0]
    held.set()
    wait_until(lambda: again.is_grammar_ready)
    assert again.grammar is not None and held.begun.count(held.begun[0]) == 1
    # Of several who wait for the same, one may leave.
    held.clear()
    left, stays = asked_for(made, "sx", "sx")
    left.cancel()
    held.set()
    wait_until(lambda: stays.is_grammar_ready)
    assert stays.grammar is not None


def test_every_grammar_has_a_time_limit_and_is_begun_once(held, monkeypatch) -> None:
    monkeypatch.setattr(compilation, "GRAMMAR_COMPILATION_TIMEOUT_S", 0.02)
    made = manager()
    for _ in range(3):
        assert "given up after 0.02 s" in failure_of(made, "slow")
    assert held.begun == ["slow"]
    held.set()
    monkeypatch.setattr(compilation, "GRAMMAR_COMPILATION_TIMEOUT_S", 10)
    wait_until(lambda: not failure_of(made, "slow"))


def test_threads_that_were_given_up_are_bounded(held, monkeypatch) -> None:
    monkeypatch.setattr(compilation, "GRAMMAR_COMPILATION_TIMEOUT_S", 0.005)
    made = manager()
    failures = [failure_of(made, f"s{i}") for i in range(100)]
    places = made._compiler._attempts.num_places
    assert len(held.begun) == places
    assert f"{places} others that nobody waits for" in failures[-1]
    held.set()
    monkeypatch.setattr(compilation, "GRAMMAR_COMPILATION_TIMEOUT_S", 10)
    wait_until(lambda: not failure_of(made, "[a-z]"))


def test_an_engine_that_ends_waits_for_no_grammar(held) -> None:
    made = manager()
    slow = asked_for(made, *(f"s{i}" for i in range(9)))
    wait_until(lambda: held.begun)
    made.clear_backend()
    assert all(structured._grammar.cancelled() for structured in slow)
    for worker in made._compiler._executor._threads:
        worker.join(10)
        assert not worker.is_alive()


@pytest.mark.parametrize(
    ("backend", "constraint"),
    [
        ("xgrammar", {"grammar": "root ::= root"}),
        ("xgrammar", {"regex": r"[^\s\S]"}),
        ("guidance", {"grammar": "start: start"}),
        ("guidance", {"regex": r"[^\s\S]"}),
        ("lm-format-enforcer", {"regex": r"[^\s\S]"}),
    ],
    ids=str,
)
def test_a_grammar_without_a_word_is_an_error_of_its_own(backend: str, constraint: dict) -> None:
    made = manager(backend=backend)
    asked = StructuredOutputsParams(**constraint)
    request = make_request("a", ids("no"), structured_outputs=asked)
    made.grammar_init(request)
    structured = request.structured_output_request
    wait_until(lambda: structured.failure is not None)
    assert "no answer can be written" in str(structured.failure)


@pytest.mark.parametrize("grammar", ['root ::= ""', 'root ::= "" | "a"'])
def test_the_empty_text_is_an_answer(grammar: str) -> None:
    made = manager(backend="xgrammar")
    request = make_request(
        "a", ids("no"), structured_outputs=StructuredOutputsParams(grammar=grammar)
    )
    ready(made, request)
    assert END in tokens(mask(made, request)[0])


def test_engines_launched_together_compile_at_once() -> None:
    made = manager()
    made.vllm_config.parallel_config.distributed_executor_backend = "external_launcher"
    request = constrained()
    made.grammar_init(request)
    assert request.structured_output_request.grammar is not None


def test_a_grammar_that_cannot_be_compiled_says_so_to_whoever_asks() -> None:
    made = manager(backend="outlines")
    request = constrained("(")
    made.grammar_init(request)
    structured = request.structured_output_request
    deadline = time.monotonic() + 10
    while structured.failure is None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert isinstance(structured.failure, ValueError)
    with pytest.raises(ValueError):
        _ = structured.grammar


def test_each_request_has_the_backend_that_was_chosen_for_it() -> None:
    made = manager(backend="auto")
    for name in ("xgrammar", "guidance"):
        request = constrained(name=name)
        request.structured_output_request.params._backend = name
        ready(made, request)
    assert sorted(made.backends) == ["guidance", "xgrammar"]
    request.structured_output_request.params._backend = "nobody"
    with pytest.raises(ValueError, match="nobody"):
        made._create_grammar(request)


def test_masks_of_one_step_hold_for_each_request_and_unconstrained_ends() -> None:
    made = manager()
    digits, letters = constrained(), constrained("a*b", "b")
    ready(made, digits)
    ready(made, letters)
    rows = made.grammar_bitmask({"a": digits, "b": letters}, ["b", "a"], {})
    assert tokens(rows[0]) == set(ids("a") + ids("b"))
    assert set(ids("07")) <= tokens(rows[1]) and END not in tokens(rows[1])
    grammar = digits.structured_output_request.grammar
    assert grammar.accept_tokens("a", [*ids("5"), END])
    assert (mask(made, digits) == -1).all()


def test_drafts_have_a_row_each_and_leave_the_grammar_where_it_was() -> None:
    made = manager(drafts=3)
    request = constrained("ab(c|d)")
    grammar = ready(made, request)
    a, b, c, d = (ids(letter)[0] for letter in "abcd")
    rows = mask(made, request, a, b, c)
    assert [tokens(row) for row in rows] == [{a}, {b}, {c, d}, {END}]
    rows = mask(made, request, a, -1, -1)
    assert [tokens(rows[0]), tokens(rows[1])] == [{a}, {b}] and (rows[2] == -1).all()
    assert grammar.validate_tokens([a, b, d]) == [a, b, d]
    with pytest.raises(AssertionError, match="was not checked"):
        mask(made, request, b)


def test_a_grammar_begins_after_the_reasoning() -> None:
    made = manager(reasons=True)
    request = constrained()
    ready(made, request)
    assert not made.should_fill_bitmask(request) and (mask(made, request) == -1).all()
    request.append_output_token_ids(ids("q"))
    request.num_computed_tokens = request.num_tokens - 1
    assert not made.should_advance(request)
    request.append_output_token_ids(THINK_END)
    request.num_computed_tokens = request.num_tokens - 1
    assert not made.should_advance(request)  # the marker itself is no part of the grammar
    assert made.should_fill_bitmask(request)
    request.append_output_token_ids(ids("7"))
    assert made.should_advance(request)
    assert made.trim_reasoning_for_advance(request, ids("7")) == ids("7")


def test_reasoning_may_be_over_in_the_prompt_or_by_the_callers_word() -> None:
    made = manager(reasons=True)
    over = make_request("a", [THINK_END], structured_outputs=StructuredOutputsParams(regex="a"))
    assert made.should_fill_bitmask(over)
    told = constrained()
    told.structured_output_request.reasoning_ended = True
    assert made.should_fill_bitmask(told) and made.should_advance(told)
    inside = manager(reasons=True, enable_in_reasoning=True)
    assert inside.should_fill_bitmask(constrained()) and inside.should_advance(constrained())
    assert not made.should_advance(make_request("plain"))


def test_reasoning_that_ends_among_drafts_constrains_the_rest_of_them() -> None:
    made = manager(drafts=3, reasons=True)
    request = constrained()
    ready(made, request)
    rows = mask(made, request, ids("q")[0], THINK_END, ids("q")[0])
    assert (rows[0] == -1).all() and (rows[1] == -1).all()
    assert set(ids("07")) <= tokens(rows[2]) and tokens(rows[2]) == tokens(rows[3])


def test_structural_tags_with_drafts_go_on_within_the_step_that_ends_the_reasoning() -> None:
    made = manager(drafts=3, reasons=True)
    tag = StructuredOutputsParams(structural_tag="{}")
    request = make_request("a", ids("no"), structured_outputs=tag)
    assert request.structured_output_request.structured_output_key == (
        StructuredOutputOptions.STRUCTURAL_TAG,
        "{}",
    )
    new = [*ids("q"), THINK_END, *ids("7")]
    request.append_output_token_ids(list(new))
    request.num_computed_tokens = request.num_tokens - len(new)
    assert made.should_advance(request)
    assert made.trim_reasoning_for_advance(request, new) == ids("7")


def thinking_tokenizer(*markers: str):
    backend = TOKENIZER.backend.__class__.from_str(TOKENIZER.backend.to_str())
    backend.add_tokens([tokenizers.AddedToken(marker, normalized=False) for marker in markers])
    return type(TOKENIZER)(backend, special_tokens_map=TOKENIZER.special_tokens_map)


def test_thinking_is_what_stands_between_its_tokens() -> None:
    tokenizer = thinking_tokenizer("<think>", "</think>")
    parser = ReasoningParserManager.get_reasoning_parser("deepseek_r1")(tokenizer)
    assert isinstance(parser, DeepSeekR1ReasoningParser)
    start, end = parser.start_token_id, parser.end_token_id
    assert (parser.reasoning_start_str, parser.reasoning_end_str) == ("<think>", "</think>")
    assert parser.is_reasoning_end([start, 5, end]) and parser.is_reasoning_end([5, end, 6])
    assert not parser.is_reasoning_end([end, start, 5]) and not parser.is_reasoning_end([5])
    assert parser.is_reasoning_end_streaming([start, 5, end], [end])
    assert not parser.is_reasoning_end_streaming([end, 5], [5])
    assert parser.extract_content_ids([start, 5, end, 6, 7]) == [6, 7]
    assert parser.extract_content_ids([start, 5, end]) == parser.extract_content_ids([5]) == []
    assert parser.count_reasoning_tokens([start, 5, 6, end, end, 7, start, 8]) == 3


def test_qwen3_does_not_think_where_its_template_is_told_so() -> None:
    tokenizer = thinking_tokenizer("<think>", "</think>")
    cls = ReasoningParserManager.get_reasoning_parser("qwen3")
    told = cls(tokenizer, chat_template_kwargs={"enable_thinking": False})
    assert isinstance(told, Qwen3ReasoningParser) and told.is_reasoning_end([5])
    assert not cls(tokenizer).is_reasoning_end([5])


def test_parsers_are_found_by_name_and_plugins_bring_more(tmp_path) -> None:
    with pytest.raises(KeyError, match=r"'nobody' not found. Available parsers: .*deepseek_r1"):
        ReasoningParserManager.get_reasoning_parser("nobody")
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from vllmx.reasoning import ReasoningParser, ReasoningParserManager\n"
        "@ReasoningParserManager.register_module('mine')\n"
        "class Mine(ReasoningParser):\n    pass\n"
    )
    made = config()
    made.structured_outputs_config.reasoning_parser = "mine"
    made.structured_outputs_config.reasoning_parser_plugin = str(plugin)
    assert StructuredOutputManager(made).reasoner_cls.__name__ == "Mine"
    made.structured_outputs_config.reasoning_parser = "nobody"
    with pytest.raises(UserError, match=r"--reasoning-parser: .*'nobody'"):
        StructuredOutputManager(made)
    with pytest.raises(RuntimeError, match="could not locate think start/end tokens"):
        DeepSeekR1ReasoningParser(TOKENIZER)
    with pytest.raises(TypeError, match="must be subclass"):
        ReasoningParserManager.register_module("x", module=int)
    del ReasoningParserManager.reasoning_parsers["mine"]


def test_nothing_is_loaded_before_it_is_needed() -> None:
    made = StructuredOutputManager(config())
    assert "tokenizer" not in vars(made) and not made.backends and made._compiler is None
    made.grammar_init(make_request("plain"))
    assert made._compiler is None and VOCAB % 32 == 0

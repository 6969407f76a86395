# SPDX-License-Identifier: Apache-2.0
"""Beams that are held to a grammar: the best of the texts that it allows."""

import json
import math
import random

import pytest
from structured_helpers import END, TOKENIZER, VOCAB, config

from vllmx.entrypoints.beam_search import BeamSearchInstance
from vllmx.exceptions import VLLMValidationError
from vllmx.logprobs import Logprob
from vllmx.outputs import CompletionOutput, RequestOutput
from vllmx.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from vllmx.structured_output.beams import BeamGrammar
from vllmx.structured_output.manager import StructuredOutputManager

PROMPT = TOKENIZER.encode("hello")


def logprobs_after(tokens: list[int]) -> list[float]:
    draw = random.Random(hash(tuple(tokens[-3:])))
    weights = [draw.random() ** 6 for _ in range(VOCAB)]
    return [math.log(weight / sum(weights)) for weight in weights]


def engine(tokens: list[int], step: SamplingParams) -> RequestOutput:
    """What an engine says to one step: the sampled token, and the candidates that are asked for."""
    values = logprobs_after(tokens)
    sampled = max(step.allowed_token_ids or range(VOCAB), key=values.__getitem__)
    named = step.logprob_token_ids
    likeliest = sorted(range(VOCAB), key=lambda token: -values[token])[: step.logprobs]
    position = {token: Logprob(values[token]) for token in [sampled, *(named or likeliest)]}
    return RequestOutput(
        "r", None, tokens, None, [CompletionOutput(0, "", [sampled], None, [position])], True
    )


def search(backend: str, width: int, steps: int, **constraint) -> list:
    manager = StructuredOutputManager(config(structured_outputs__backend=backend), TOKENIZER)
    asked = StructuredOutputsParams(**constraint)
    params = BeamSearchParams(beam_width=width, max_tokens=steps, structured_outputs=asked)
    instance = BeamSearchInstance(
        None, PROMPT, params, frozenset({END}), 500, grammar=BeamGrammar(manager, asked)
    )
    for _ in range(steps):
        asked_for = instance.begin_step()
        if not instance.beams:
            break
        beams = zip(instance.beams, asked_for, strict=True)
        instance.advance([engine(beam.tokens, step) for beam, step in beams])
    return instance.best()


def text_of(beam) -> str:
    tokens = beam.tokens[len(PROMPT) :]
    return TOKENIZER.decode([token for token in tokens if token != END])


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_beams_are_the_likeliest_of_what_may_be_said(backend: str) -> None:
    """Wide enough to keep everything, a search finds each text once, and scores it as it is."""
    choices = ["a", "b", "ab", "cd"]
    found = search(backend, 8, 8, choice=choices)
    ended = [beam for beam in found if beam.finish_reason == "stop"]
    assert {text_of(beam) for beam in ended} == set(choices)
    for beam in ended:
        total = sum(
            logprobs_after(beam.tokens[:i])[beam.tokens[i]]
            for i in range(len(PROMPT), len(beam.tokens))
        )
        assert beam.cum_logprob == pytest.approx(total)
    scores = [beam.cum_logprob / (len(beam.tokens) - (beam.tokens[-1] == END)) for beam in found]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_every_answer_that_ends_is_valid(backend: str) -> None:
    """In a string nearly every token is allowed, beside it hardly one."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^.{0,4}$"},
            "age": {"enum": [1, 23, None]},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    found = search(backend, 3, 60, json=schema, disable_any_whitespace=True)
    assert len(found) == 3
    for beam in found:
        assert beam.finish_reason == "stop"
        assert json.loads(text_of(beam)).keys() == {"name", "age"}


def test_what_no_backend_enforces_is_refused_before_the_search() -> None:
    with pytest.raises(VLLMValidationError, match="uniqueItems"):
        search("auto", 2, 4, json={"type": "array", "uniqueItems": True})


def test_a_grammar_without_a_word_is_refused_before_the_search() -> None:
    with pytest.raises(ValueError, match="no answer can be written"):
        search("xgrammar", 2, 5, grammar="root ::= root")

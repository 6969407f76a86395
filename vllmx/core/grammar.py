# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/sched/scheduler.py @ v0.25.0
"""Structured outputs as the scheduler sees them: a manager that it is given knows the grammars.

`manager` is upstream's StructuredOutputManager or anything with its `should_advance`,
`trim_reasoning_for_advance` and `grammar_bitmask`; None where no request can be constrained.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from vllmx.core.output import GrammarOutput, SchedulerOutput
from vllmx.request import Request

logger = logging.getLogger(__name__)


def is_grammar_ready(request: Request) -> bool:
    """Whether the grammar that `request` waits for has been compiled."""
    structured = request.structured_output_request
    return structured is not None and bool(structured.grammar)


def grammar_failure(request: Request) -> BaseException | None:
    """Why the grammar that `request` waits for could not be compiled; None if nothing failed."""
    failure = getattr(request.structured_output_request, "failure", None)
    return failure if isinstance(failure, BaseException) else None


def any_constrained(scheduler_output: SchedulerOutput, requests: Mapping[str, Request]) -> bool:
    """Whether a request that gets a token in this step has a grammar."""
    return any(
        request.structured_output_request is not None and not request.is_prefill_chunk
        for request in map(requests.__getitem__, scheduler_output.num_scheduled_tokens)
    )


def get_grammar_output(
    manager: Any, scheduler_output: SchedulerOutput, requests: Mapping[str, Request]
) -> GrammarOutput | None:
    """Allowed tokens of the constrained requests of a step; None if they have all ended."""
    req_ids = [
        req_id
        for req_id in scheduler_output.num_scheduled_tokens
        if (request := requests.get(req_id)) is not None
        and request.use_structured_output
        and not request.is_prefill_chunk
    ]
    if not req_ids:
        return None
    bitmask = manager.grammar_bitmask(
        requests, req_ids, scheduler_output.scheduled_spec_decode_tokens
    )
    return GrammarOutput(req_ids, bitmask)


def advance_grammar(manager: Any, request: Request, new_token_ids: list[int]) -> bool:
    """Tell the grammar of `request` what was sampled; False if it cannot go on from there."""
    if not manager.should_advance(request):
        return True
    token_ids = manager.trim_reasoning_for_advance(request, new_token_ids)
    if not token_ids or _grammar(request).accept_tokens(request.request_id, token_ids):
        return True
    logger.error(
        "Request %s ends with an error: its grammar does not allow the tokens %s that were "
        "sampled under it.",
        request.request_id,
        token_ids,
    )
    return False


def ends_by_grammar(request: Request) -> bool:
    """Whether nothing can follow in the grammar, though the request itself would go on (because of
    ignore_eos or min_tokens)."""
    structured = request.structured_output_request
    grammar = None if structured is None else structured.grammar
    return grammar is not None and grammar.is_terminated() is True


def keep_valid_tokens(manager: Any | None, request: Request, token_ids: list[int]) -> list[int]:
    """The first ones of `token_ids`, up to one that the grammar of `request` forbids."""
    if (
        manager is None
        or request.structured_output_request is None
        or not manager.should_advance(request)
    ):
        return token_ids
    return list(_grammar(request).validate_tokens(token_ids))


def _grammar(request: Request) -> Any:
    structured = request.structured_output_request
    assert structured is not None and structured.grammar is not None, "it runs without its grammar"
    return structured.grammar

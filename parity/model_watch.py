# SPDX-License-Identifier: Apache-2.0
"""Whether an engine batched as the mode of a cell says, by what its runner was told step by step.

The scores of a model are the same however its requests are put together. So a mode that stands for
batches or for cut prompts shows neither where the engine quietly runs each request alone, or every
prompt whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

CHUNK = 48
"""Tokens a step in the modes that cut prompts; of several sequences at once, each gets what the
others leave."""
CUTTING = ("chunked", "prefix")
EAGER = "eager"


@dataclass
class Seen:
    """What a runner was told while it was watched.

    requests, tokens: the most of one step; cut: requests whose prompt came in pieces; decodes:
    steps of one token a request, past all prompts; graphs: those that replayed a CUDA graph.
    """

    requests: int = 0
    tokens: int = 0
    decodes: int = 0
    graphs: int = 0
    cut: set[str] = field(default_factory=set)
    prompts: dict[str, int] = field(default_factory=dict)
    """Request -> tokens of its prompt."""

    def step(self, told: Any, replayed: bool) -> None:
        """Count a step that has tokens, as its SchedulerOutput tells of it."""
        scheduled = told.num_scheduled_tokens
        self.requests = max(self.requests, len(scheduled))
        self.tokens = max(self.tokens, told.total_num_scheduled_tokens)
        cached = told.scheduled_cached_reqs
        done = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in told.scheduled_new_reqs:
            self.prompts.setdefault(new.req_id, len(new.prompt_token_ids))
            done[new.req_id] = new.num_computed_tokens
        left = {name: self.prompts[name] - done[name] for name in scheduled}
        self.cut |= {name for name, count in scheduled.items() if count < left[name]}
        if told.total_num_scheduled_tokens == len(scheduled) and max(left.values()) <= 0:
            self.decodes += 1
            self.graphs += replayed

    def facts(self) -> dict[str, int]:
        """What evidence keeps."""
        names = ("requests", "tokens", "decodes", "graphs")
        return {**{name: getattr(self, name) for name in names}, "cut": len(self.cut)}


@contextmanager
def watched(runner: Any) -> Iterator[Seen]:
    """What `runner`, a GPUModelRunner, is told from here on."""
    seen = Seen()
    execute_model = runner.execute_model
    manager = None if runner.gpu_steps is None else runner.gpu_steps.cudagraph_manager
    replays: list[Any] = []
    if manager is not None:
        run_fullgraph = manager.run_fullgraph

        def counted(desc: Any) -> Any:
            replays.append(desc)
            return run_fullgraph(desc)

        manager.run_fullgraph = counted

    def told(scheduler_output: Any) -> Any:
        before = len(replays)
        result = execute_model(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            seen.step(scheduler_output, len(replays) > before)
        return result

    runner.execute_model = told
    try:
        yield seen
    finally:
        del runner.execute_model
        if manager is not None:
            del manager.run_fullgraph


def unlike(mode: str, device: str, asked: Sequence[int], seen: Seen, decoding: bool) -> list[str]:
    """What `seen` lacks of a mode, in words.

    asked: lengths of the prompts that were given; decoding: whether many tokens were to follow.
    """
    found = []
    together = 1 if mode == "bs1" else len(asked)
    # Long prompts that are cut can't all have a part of one step.
    if mode in CUTTING and not decoding:
        together = 1
    if seen.requests < together or (mode == "bs1" and seen.requests > together):
        found.append(f"{seen.requests} requests in the largest step, not {together}")
    if mode in CUTTING:
        if seen.tokens > CHUNK:
            found.append(f"{seen.tokens} tokens in a step, more than {CHUNK}")
        long = sum(length > CHUNK for length in asked)
        if not decoding and len(seen.cut) < long:
            found.append(f"{len(seen.cut)} prompts cut, of {long} longer than {CHUNK} tokens")
    elif seen.cut:
        found.append(f"{len(seen.cut)} prompts cut")
    if device == "cuda" and decoding:
        wanted = 0 if mode == EAGER else seen.decodes
        if not seen.decodes or seen.graphs != wanted:
            found.append(f"{seen.graphs} CUDA graphs in {seen.decodes} steps, not {wanted}")
    return found

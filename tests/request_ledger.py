# SPDX-License-Identifier: Apache-2.0
"""Random requests and aborts, and a check that every output is the one that was asked for."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine_helpers import make_engine_request

from vllmx.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllmx.worker.null_runner import cyclic_script

SHARED = list(range(500, 530))


@dataclass
class Asked:
    """A request and what has come of it."""

    prompt_len: int
    max_tokens: int
    aborted: bool = False
    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None


class Ledger:
    """Makes requests and checks every output against what was asked for.

    `late`: outputs may still arrive for a request whose abort is on its way.
    """

    def __init__(self, seed: int, late: bool) -> None:
        self.rng = random.Random(seed)
        self.late = late
        self.asked: dict[str, Asked] = {}
        self.open: list[str] = []

    def new_request(self, operation: int) -> EngineCoreRequest:
        """The next request: a prompt of its own, or one that begins like others."""
        rng = self.rng
        name = f"r{operation}"
        own = [1000 + operation] * rng.randint(1, 30)
        prompt = SHARED[: rng.randint(4, 30)] + own if rng.random() < 0.4 else own
        max_tokens = rng.choice([1, 2, 5, 15, 30])
        self.asked[name] = Asked(len(prompt), max_tokens)
        self.open.append(name)
        request = make_engine_request(name, prompt, max_tokens)
        request.priority = rng.randint(0, 3)
        return request

    def names_to_abort(self) -> list[str]:
        """Living requests, one that has ended, one that never was."""
        rng = self.rng
        names = rng.sample(self.open, min(len(self.open), rng.choice([1, 1, 1, 2, 5])))
        for name in names:
            self.open.remove(name)
            self.asked[name].aborted = True
        ended = rng.choice(list(self.asked)) if self.asked and rng.random() < 0.1 else None
        if ended is not None and self.asked[ended].reason is not None:
            names.append(ended)
        return [*names, "unknown"]

    def take(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Check the outputs of a step."""
        for output in outputs:
            asked = self.asked[output.request_id]
            assert asked.reason is None, f"{output.request_id}: output after the last one"
            assert self.late or not asked.aborted, f"{output.request_id}: output after its abort"
            for token in output.new_token_ids:
                position = asked.prompt_len + len(asked.tokens)
                assert token == cyclic_script(output.request_id, position), output.request_id
                asked.tokens.append(token)
            if output.finished:
                asked.reason = output.finish_reason
                if output.request_id in self.open:
                    self.open.remove(output.request_id)

    def check_all_answered(self) -> None:
        """Every request that was not aborted has all its tokens."""
        assert not self.open
        for name, asked in self.asked.items():
            if not asked.aborted:
                assert asked.reason == FinishReason.LENGTH, name
                assert len(asked.tokens) == asked.max_tokens, name
        aborted = [asked for asked in self.asked.values() if asked.aborted]
        assert len(self.asked) // 20 < len(aborted) < len(self.asked) * 19 // 20  # both were tried

# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/structured_output/__init__.py (StructuredOutputManager.executor),
#   vllm/v1/structured_output/utils.py (compile_regex_with_timeout) @ v0.25.0
"""Compilation beside the engine's loop, by libraries that may take for ever and can't be stopped.

Upstream gives up on patterns alone, begins a thread for each try, and lets whoever is compiled
already wait behind whoever is slow.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from threading import BoundedSemaphore, Lock, Thread
from typing import Any, TypeVar

Made = TypeVar("Made")

GRAMMAR_COMPILATION_TIMEOUT_S = 30.0
"""Seconds that any grammar may take to compile."""
MAX_ABANDONED = 4
"""Threads that may go on with grammars nobody waits for, beside which others are begun."""
KNOWN_GRAMMARS = 128
"""Compiled grammars that are known to be in their backend's cache; no backend keeps fewer."""


class GaveUp(ValueError):
    """It took too long, now or the last time it was tried."""


class NoPlace(ValueError):
    """Too much that took too long is going on."""


@dataclass
class _Attempt:
    result: Future[Any] = field(default_factory=Future)
    given_up: bool = False
    """Whether somebody has waited for it for as long as it may take."""


class Attempts:
    """Runs work in threads that nobody has to wait for. No work is begun twice at a time, and there
    are never more threads than places; a thread that was given up keeps its own until it ends."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._places = BoundedSemaphore(num_places)
        self._attempts: OrderedDict[Hashable, _Attempt] = OrderedDict()
        self._lock = Lock()

    def run(
        self,
        key: Hashable,
        work: Callable[[], Made],
        timeout: float,
        left: Future[None] | None = None,
        wait_for_place: float = 0.0,
    ) -> Made:
        """What `work` returns or raises, `key` being its name.

        GaveUp after `timeout` seconds, and then at once as long as that thread goes on; what it
        comes to is for whoever asks next. CancelledError once `left` is done. NoPlace if none
        becomes free within `wait_for_place` seconds.
        """
        attempt = self._begin(key, work, wait_for_place)
        if not attempt.given_up:
            futures = [attempt.result] if left is None else [attempt.result, left]
            wait(futures, timeout, FIRST_COMPLETED)
        if not attempt.result.done():
            if left is not None and left.done():
                raise CancelledError
            attempt.given_up = True
            raise GaveUp
        with self._lock:
            if self._attempts.get(key) is attempt:
                del self._attempts[key]
        return attempt.result.result()

    def _begin(self, key: Hashable, work: Callable[[], Any], wait_for_place: float) -> _Attempt:
        """The attempt at `key` that is going on, or has ended unseen, or else a new one."""
        with self._lock:
            if key in self._attempts:
                return self._attempts[key]
        if not self._places.acquire(timeout=wait_for_place):
            raise NoPlace
        with self._lock:
            if key in self._attempts:
                self._places.release()
                return self._attempts[key]
            attempt = self._attempts[key] = _Attempt()
            # What ended after all and was not asked for again.
            ended = [name for name, other in self._attempts.items() if other.result.done()]
            for name in ended[: -self.num_places]:
                del self._attempts[name]
        Thread(target=self._work, args=(attempt, work), name="grammar", daemon=True).start()
        return attempt

    def _work(self, attempt: _Attempt, work: Callable[[], Any]) -> None:
        try:
            made = work()
        except BaseException as error:  # a panic of a Rust library is no Exception
            self._places.release()
            attempt.result.set_exception(error)
        else:
            self._places.release()
            attempt.result.set_result(made)


@dataclass
class _Job:
    """A grammar that is being compiled, and who waits for it."""

    compile: Callable[[], Any]
    waiting: list[tuple[Future[Any], Callable[[Any], Any]]] = field(default_factory=list)
    left: Future[None] = field(default_factory=Future)
    """Done when nobody waits any more."""


class GrammarCompiler:
    """Compiles each grammar once, for a limited time and as long as anybody waits for it.

    A grammar that was compiled before does not wait for others to be compiled. Any thread may call.
    """

    def __init__(self) -> None:
        num_workers = max(2, (os.cpu_count() or 1) // 2)
        self._executor = ThreadPoolExecutor(num_workers, "grammar")
        self._cached = ThreadPoolExecutor(1, "grammar-cached")
        self._attempts = Attempts(num_workers + MAX_ABANDONED)
        self._jobs: dict[Hashable, _Job] = {}
        self._known: OrderedDict[Hashable, None] = OrderedDict()
        self._lock = Lock()

    def submit(
        self, key: Hashable, compile: Callable[[], Any], finish: Callable[[Any], Any]
    ) -> Future[Any]:
        """`finish(grammar)`: of `compile()`, or None where another took that.

        Equal keys compile to equal grammars, which their backend keeps. The future of whoever does
        not wait any more may be cancelled.
        """
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._cached.submit(finish, None)
            answer: Future[Any] = Future()
            job = self._jobs.get(key)
            if job is None:
                job = self._jobs[key] = _Job(compile)
                self._executor.submit(self._run, key, job)
            job.waiting.append((answer, finish))
        answer.add_done_callback(partial(self._note_done, key, job))
        return answer

    def close(self) -> None:
        """Let everybody go, and begin nothing any more."""
        with self._lock:
            jobs = list(self._jobs.values())
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._cached.shutdown(wait=False, cancel_futures=True)
        for job in jobs:
            for answer, _ in job.waiting:
                answer.cancel()

    def _note_done(self, key: Hashable, job: _Job, answer: Future[Any]) -> None:
        with self._lock:
            if self._jobs.get(key) is not job or not all(a.cancelled() for a, _ in job.waiting):
                return
            del self._jobs[key]
        job.left.set_result(None)

    def _run(self, key: Hashable, job: _Job) -> None:
        grammar: Any = None
        failure: BaseException | None = None
        if not job.left.done():
            try:
                limit = GRAMMAR_COMPILATION_TIMEOUT_S
                grammar = self._attempts.run(key, job.compile, limit, job.left)
            except CancelledError:
                pass  # `waiting` are all cancelled
            except GaveUp:
                failure = ValueError(
                    f"its compilation was given up after {limit:g} s. Make the constraint smaller: "
                    "fewer or lower bounds of repetitions, fewer properties."
                )
            except NoPlace:
                failure = ValueError(
                    f"{self._attempts.num_places} others that nobody waits for any more are being "
                    "compiled, and none is begun beside them. Send it again later."
                )
            except BaseException as error:
                failure = error
        with self._lock:
            if self._jobs.get(key) is job:
                del self._jobs[key]
            if grammar is not None:
                self._known[key] = None
                if len(self._known) > KNOWN_GRAMMARS:
                    self._known.popitem(last=False)
        for answer, finish in job.waiting:
            if not answer.set_running_or_notify_cancel():
                continue
            if failure is not None:
                answer.set_exception(failure)
                continue
            try:
                answer.set_result(finish(grammar))
            except BaseException as error:
                answer.set_exception(error)
            grammar = None  # each has its own

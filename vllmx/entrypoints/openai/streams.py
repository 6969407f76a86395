# SPDX-License-Identifier: Apache-2.0
"""Streams of engine outputs: merging, starting before the HTTP status is sent, closing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Generic, TypeVar

import anyio
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
"""Status in the log for a client that left; nobody reads it."""


async def merge_async_iterators(
    *iterators: AsyncGenerator[T, None],
) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (index of the iterator, item) as items come; one failure ends and closes them all."""
    if len(iterators) == 1:
        async with contextlib.aclosing(iterators[0]) as alone:
            async for only in alone:
                yield 0, only
        return
    queue: asyncio.Queue[tuple[int, T | None, BaseException | None]] = asyncio.Queue()

    async def pump(index: int, iterator: AsyncGenerator[T, None]) -> None:
        failure: BaseException | None = None
        try:
            async for item in iterator:
                queue.put_nowait((index, item, None))
        except Exception as exc:
            failure = exc
        queue.put_nowait((index, None, failure))

    tasks = [asyncio.create_task(pump(i, it)) for i, it in enumerate(iterators)]
    running = len(tasks)
    try:
        while running:
            index, item, failure = await queue.get()
            if failure is not None:
                raise failure
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class StartedStream(Generic[T]):
    """An async generator that has run up to its first item.

    What goes wrong before any output (a bad parameter, a dead engine) then still gets its own
    HTTP status, even where the answer is a stream.
    """

    def __init__(self, stream: AsyncGenerator[T, None], first: T | None) -> None:
        self._stream = stream
        self._first = first

    @classmethod
    async def start(cls, stream: AsyncGenerator[T, None]) -> StartedStream[T]:
        """Wait for the first item; raises what the stream raises."""
        return cls(stream, await anext(stream, None))

    async def __aiter__(self) -> AsyncIterator[T]:
        if self._first is None:
            return
        yield self._first
        async for item in self._stream:
            yield item

    async def aclose(self) -> None:
        """End the stream; the engine drops the requests behind it."""
        await self._stream.aclose()


class EventStream:
    """Server-sent events made from a started stream; closing closes both."""

    def __init__(self, events: AsyncGenerator[str, None], source: StartedStream) -> None:
        self._events = events
        self._source = source

    def __aiter__(self) -> AsyncIterator[str]:
        return self._events

    async def aclose(self) -> None:
        """Stop the events and what they are made from."""
        await self._events.aclose()
        await self._source.aclose()


class EventStreamResponse(StreamingResponse):
    """An SSE answer that closes its stream however it ends, also when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, stream: EventStream) -> None:
        super().__init__(stream, headers={"Cache-Control": "no-cache"})
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            with anyio.CancelScope(shield=True):
                await self._stream.aclose()


def sse(chunk: BaseModel) -> str:
    """One server-sent event; fields that were not set are left out."""
    return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"


SSE_DONE = "data: [DONE]\n\n"


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def run_unless_disconnected(
    request: Request, work: Callable[[], Awaitable[Response]]
) -> Response:
    """Await `work()`, cancelling it when the client leaves first.

    The body must have been read: later messages of the request are thrown away.
    """
    handler = asyncio.ensure_future(work())
    watcher = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait((handler, watcher), return_when=asyncio.FIRST_COMPLETED)
        if handler.done():
            return handler.result()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        handler.cancel()
        watcher.cancel()
        await asyncio.gather(handler, watcher, return_exceptions=True)

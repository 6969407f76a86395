# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/benchmarks/serve.py @ v0.25.0
"""`vllmx bench serve`: load on a running OpenAI-compatible server, ours or upstream's.

bench.num_prompts completions of random token ids, streamed, at most bench.max_concurrency at a
time, arriving at bench.request_rate. The result has upstream's keys.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from vllmx.config import BenchConfig, RunConfig
from vllmx.exceptions import UserError
from vllmx.tasks.chat import connect
from vllmx.tasks.http_client import Client

LOWEST_TOKEN_ID, HIGHEST_TOKEN_ID = 100, 1000
"""Of the prompts: none of the first ids, which tend to be special, and none that a small vocabulary
lacks."""
DONE = b"[DONE]"


@dataclass
class Outcome:
    """What one request came to; seconds since it was sent."""

    input_len: int
    output_tokens: int = 0
    arrivals: list[float] = field(default_factory=list)
    latency: float = 0.0
    error: str = ""

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.arrivals[0]

    @property
    def tpot(self) -> float:
        """Time for each token after the first."""
        return (self.latency - self.ttft) / max(self.output_tokens - 1, 1)


class Stream(asyncio.Protocol):
    """One request over one connection; events are told apart in the raw bytes, since the client
    must not be slower than the server."""

    def __init__(self, request: bytes, outcome: Outcome) -> None:
        self.request, self.outcome = request, outcome
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rest = b""
        self._has_head = False
        self._refused = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._sent = time.perf_counter()
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        """Note when each event came."""
        now = time.perf_counter() - self._sent
        buffer = self._rest + data
        if not self._has_head:
            head, separator, buffer_after = buffer.partition(b"\r\n\r\n")
            if not separator:
                self._rest = buffer
                return
            status = head.split(b"\r\n", 1)[0]
            self._has_head, buffer = True, buffer_after
            if b" 200 " not in status + b" ":
                self._refused = status
        if self._refused:
            # The reason comes after it; the end of the connection ends it.
            self._rest = buffer
            return
        *events, self._rest = buffer.split(b"\n\n")
        for event in events:
            start = event.find(b"data: ")
            if start < 0:
                continue
            body = event[start + 6 :]
            if body.startswith(DONE):
                self.outcome.latency = now
                self._transport.close()
                return
            self._take(body, now)

    def _take(self, body: bytes, now: float) -> None:
        if b'"error"' in body:
            self.outcome.error = body.decode("utf-8", "replace")
            self._transport.close()
        elif b'"usage":{' in body.replace(b" ", b""):
            told = json.loads(body)
            self.outcome.output_tokens = told["usage"]["completion_tokens"]
            if told["choices"]:
                self.outcome.arrivals.append(now)
        else:
            self.outcome.arrivals.append(now)

    def connection_lost(self, error: Exception | None) -> None:
        """The end, in one way or another."""
        if self._refused:
            words = b" ".join((self._refused, self._rest)).decode("utf-8", "replace")
            self.outcome.error = " ".join(words.split())
        if not self.outcome.latency and not self.outcome.error:
            self.outcome.error = f"the answer broke off: {error or 'the connection was closed'}"
        if not self.ended.done():
            self.ended.set_result(None)


def measure_serve(config: RunConfig) -> dict[str, Any]:
    """Load the server at server.url; a table on stderr, upstream's keys in the result."""
    bench = config.bench
    if config.server.url is None:
        raise UserError("bench serve needs a running server: --url http://HOST:PORT.")
    client = connect(config)
    requests = [_request(client, prompt, bench) for prompt in _prompts(bench, config.model.seed)]
    asyncio.run(_all(client, requests[: bench.num_iters_warmup], bench.input_len))
    start = time.perf_counter()
    load = bench.max_concurrency, bench.request_rate, config.model.seed
    outcomes = asyncio.run(_all(client, requests, bench.input_len, *load))
    result = summary(outcomes, time.perf_counter() - start)
    result = {
        "backend": "openai",
        "model_id": client.model,
        "num_prompts": bench.num_prompts,
        "request_rate": bench.request_rate or "inf",
        "max_concurrency": bench.max_concurrency,
        **result,
    }
    if not result["completed"]:
        raise UserError(f"bench serve: no request succeeded, the first: {outcomes[0].error[:300]}")
    print(table(result), file=sys.stderr)
    return result


def _prompts(bench: BenchConfig, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    shape = (bench.num_prompts, bench.input_len)
    return rng.integers(LOWEST_TOKEN_ID, HIGHEST_TOKEN_ID, size=shape).tolist()


def _request(client: Client, prompt: list[int], bench: BenchConfig) -> bytes:
    """The bytes of a request to /v1/completions."""
    body = json.dumps(
        {
            "model": client.model,
            "prompt": prompt,
            "max_tokens": bench.output_len,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    parts = urlsplit(client.base)
    headers = {"Host": parts.netloc, "Content-Length": len(body), "Connection": "close"}
    lines = [f"{name}: {value}" for name, value in {**client.headers, **headers}.items()]
    head = "\r\n".join([f"POST {parts.path}/completions HTTP/1.1", *lines])
    return head.encode() + b"\r\n\r\n" + body


async def _all(
    client: Client,
    requests: list[bytes],
    input_len: int,
    concurrency: int | None = None,
    rate: float | None = None,
    seed: int = 0,
) -> list[Outcome]:
    """Send the requests as they arrive: at once, or in a Poisson process of `rate` a second."""
    parts = urlsplit(client.base)
    loop = asyncio.get_running_loop()
    port = parts.port or (443 if parts.scheme == "https" else 80)
    room = asyncio.Semaphore(concurrency or max(len(requests), 1))
    waits = np.zeros(len(requests))
    if rate is not None:
        waits = np.random.default_rng(seed).exponential(1.0 / rate, len(requests))

    async def one(request: bytes, outcome: Outcome) -> None:
        async with room:
            try:
                _, stream = await loop.create_connection(
                    lambda: Stream(request, outcome),
                    parts.hostname or "localhost",
                    port,
                    ssl=parts.scheme == "https" or None,
                )
                await stream.ended
            except OSError as error:
                outcome.error = str(error)

    outcomes = [Outcome(input_len) for _ in requests]
    tasks = []
    for request, outcome, wait in zip(requests, outcomes, waits.tolist(), strict=True):
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.ensure_future(one(request, outcome)))
    await asyncio.gather(*tasks)
    return outcomes


def summary(outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    """Upstream's figures of a run that took `seconds`; times in milliseconds."""
    good = [outcome for outcome in outcomes if not outcome.error and outcome.arrivals]
    output = sum(outcome.output_tokens for outcome in good)
    total = output + sum(outcome.input_len for outcome in good)
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": total - output,
        "total_output_tokens": output,
        "request_throughput": len(good) / seconds,
        "output_throughput": output / seconds,
        "total_token_throughput": total / seconds,
    }
    gaps = [b - a for outcome in good for a, b in zip(outcome.arrivals, outcome.arrivals[1:])]
    for name, values in {
        "ttft": [outcome.ttft for outcome in good],
        "tpot": [outcome.tpot for outcome in good if outcome.output_tokens > 1],
        "itl": gaps,
        "e2el": [outcome.latency for outcome in good],
    }.items():
        times = [1e3 * value for value in values] or [0.0]
        result[f"mean_{name}_ms"] = statistics.fmean(times)
        result[f"median_{name}_ms"] = statistics.median(times)
        result[f"std_{name}_ms"] = statistics.pstdev(times)
        result[f"p99_{name}_ms"] = float(np.percentile(times, 99))
    return result


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [
        f"{result['completed']} of {result['num_prompts']} requests in {result['duration']:.2f} s"
    ]
    lines.append(
        f"{result['request_throughput']:.2f} requests/s, "
        f"{result['output_throughput']:.1f} output tok/s, "
        f"{result['total_token_throughput']:.1f} total tok/s"
    )
    for name, meaning in {
        "ttft": "time to first token",
        "tpot": "time per output token",
        "itl": "inter-token latency",
        "e2el": "end-to-end latency",
    }.items():
        mean, median, p99 = (result[f"{kind}_{name}_ms"] for kind in ("mean", "median", "p99"))
        lines.append(f"{meaning:22s} mean {mean:9.2f}  median {median:9.2f}  p99 {p99:9.2f} ms")
    return "\n".join(lines)

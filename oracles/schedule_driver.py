# SPDX-License-Identifier: Apache-2.0
"""Plays a request trace against a scheduler with upstream's interface and writes down what it did.

Plain Python that imports neither upstream nor vllmx, so the oracle that records and the replay that
compares run the very same loop. A spec is JSON: `name`, `seed`, `config`, `requests`, `reset`, as
`parity/schedule_traces.py` makes them. Prompts and sampled tokens are functions of the seed.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

FORMAT = 1
EOS_TOKEN_ID = 2
LAST_STEP = 3000  # a trace that is not done by then hangs
_MASK = (1 << 64) - 1


def draw(seed: int, stream: int, index: int, count: int) -> int:
    """An integer in [0, count), a function of its arguments alone (two rounds of splitmix64)."""
    value = (seed * 0x9E3779B97F4A7C15 + stream * 0xD1B54A32D192ED03 + index + 1) & _MASK
    for _ in range(2):
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value % count


def sampled_token(seed: int, request: int, position: int) -> int:
    """The token that the scripted model samples for `position`; 1 in 64 is the end of sequence."""
    return EOS_TOKEN_ID + draw(seed, 1000 + request, position, 64)


def prompt_token_ids(spec: dict[str, Any], row: dict[str, Any]) -> list[int]:
    """Prompt of a request: a shared prefix or an earlier conversation, then tokens of its own."""
    seed = spec["seed"]
    tokens: list[int] = []
    if row["prefix"] is not None:
        stream, length = row["prefix"]
        tokens += [100 + draw(seed, stream, i, 400) for i in range(length)]
    if row["follows"] is not None:
        earlier, answer = row["follows"]
        tokens += prompt_token_ids(spec, spec["requests"][earlier])
        tokens += [sampled_token(seed, earlier, len(tokens) + i) for i in range(answer)]
    own = (100 + draw(seed, 100 + row["id"], i, 400) for i in range(row["own"]))
    return [*tokens, *own]


@dataclass
class Side:
    """One of the two: a scheduler and how to make what goes into it."""

    scheduler: Any
    # (id, prompt tokens, row of the spec) -> Request
    make_request: Callable[[str, list[int], dict[str, Any]], Any]
    # (request ids, sampled tokens by request) -> ModelRunnerOutput
    make_output: Callable[[list[str], list[list[int]]], Any]
    aborted: Any  # RequestStatus.FINISHED_ABORTED


def request_maker(request: Any, sampling_params: Any, hasher: Any) -> Callable[..., Any]:
    """`Side.make_request` with the classes of either side; hasher: of a request's blocks."""

    def make(name: str, prompt: list[int], row: dict[str, Any]) -> Any:
        params = sampling_params(**row["sampling"])
        params.update_from_generation_config({}, EOS_TOKEN_ID)
        return request(
            name,
            prompt,
            params,
            None,
            arrival_time=row["arrival"],
            priority=row["priority"],
            cache_salt=row["salt"],
            block_hasher=hasher,
        )

    return make


@dataclass
class Player:
    """The engine loop around a scheduler, with a scripted model. `run` once."""

    spec: dict[str, Any]
    side: Side
    events: list[dict[str, Any]] = field(default_factory=list)
    # What the trace did that vllmx does otherwise on purpose; such a trace must not be recorded.
    deviations: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = self.side.scheduler
        self.requests: dict[str, Any] = {}
        # id -> [tokens computed, tokens known] as the runner sees them.
        self.progress: dict[str, list[int]] = {}
        self.first_cached: dict[str, int] = {}
        self.in_flight: deque[tuple[Any, Any]] = deque()
        self.arriving: dict[int, list[dict[str, Any]]] = {}
        self.aborting: dict[tuple[int, bool], list[str]] = {}
        for row in self.spec["requests"]:
            self.arriving.setdefault(row["at"], []).append(row)
            if row["abort"] is not None:
                step, late = row["abort"]
                self.aborting.setdefault((step, late), []).append(f"r{row['id']}")

    def run(self) -> dict[str, Any]:
        """All events, and what is left when the last request has ended."""
        depth = 2 if self.spec["config"]["async_scheduling"] else 1
        rows = self.spec["requests"]
        last = max([row["at"] for row in rows] + [self.spec["reset"] or 0])
        step = 0
        while step <= last or self.scheduler.has_requests() or self.in_flight:
            if step > LAST_STEP:
                self.deviations.append("the trace never ends")
                break
            self._arrivals(step)
            self._aborts(step, late=False)
            if step == self.spec["reset"]:
                done = self.scheduler.reset_prefix_cache(reset_running_requests=True)
                self.events.append({"step": step, "reset": bool(done)})
            if self.scheduler.has_requests():
                self._schedule(step)
            self._aborts(step, late=True)
            full = len(self.in_flight) >= depth
            if self.in_flight and (full or not self.scheduler.has_requests()):
                self._update(step)
            step += 1
        return {"events": self.events, "end": self._end(step)}

    def _arrivals(self, step: int) -> None:
        for row in self.arriving.get(step, ()):
            name = f"r{row['id']}"
            request = self.side.make_request(name, prompt_token_ids(self.spec, row), row)
            self.requests[name] = request
            self.scheduler.add_request(request)

    def _aborts(self, step: int, late: bool) -> None:
        for name in self.aborting.get((step, late), ()):
            self.scheduler.finish_requests([name], self.side.aborted)

    def _schedule(self, step: int) -> None:
        output = self.scheduler.schedule()
        cached = output.scheduled_cached_reqs
        event = {
            "step": step,
            "scheduled": [[_id(r), n] for r, n in output.num_scheduled_tokens.items()],
            "total": output.total_num_scheduled_tokens,
            "new": [
                [_id(n.req_id), _blocks(n.block_ids), n.num_computed_tokens, *_digest(n)]
                for n in output.scheduled_new_reqs
            ],
            "cached": [
                [_id(name), _blocks(new_blocks), num_computed, num_output]
                for name, new_blocks, num_computed, num_output in zip(
                    cached.req_ids,
                    cached.new_block_ids,
                    cached.num_computed_tokens,
                    cached.num_output_tokens,
                    strict=True,
                )
            ],
            "resumed": _ids(cached.resumed_req_ids),
            "preempted": _ids(output.preempted_req_ids),
            "finished": _ids(output.finished_req_ids),
            "common": list(output.num_common_prefix_blocks),
            "zero": output.new_block_ids_to_zero,
            "running": [_id(request.request_id) for request in self.scheduler.running],
            "free": self._num_free_blocks(),
        }
        self.events.append(event)
        self._note_deviations(output, step)
        names = list(output.num_scheduled_tokens)
        self.in_flight.append((output, self.side.make_output(names, self._sample(output))))

    def _sample(self, output: Any) -> list[list[int]]:
        """A token of every request whose known tokens are all computed."""
        for new in output.scheduled_new_reqs:
            self.progress[new.req_id] = [new.num_computed_tokens, len(new.prefill_token_ids)]
        sampled: list[list[int]] = []
        for name, num_tokens in output.num_scheduled_tokens.items():
            progress = self.progress[name]
            progress[0] += num_tokens
            done = progress[0] >= progress[1]
            row: list[int] = []
            if done:
                row = [sampled_token(self.spec["seed"], _id(name), progress[1])]
                progress[1] += 1
            sampled.append(row)
        return sampled

    def _update(self, step: int) -> None:
        for client, told in self.scheduler.update_from_output(*self.in_flight.popleft()).items():
            assert client == 0
            stats = told.scheduler_stats
            cache = stats.prefix_cache_stats
            self.events.append(
                {
                    "step": step,
                    "outputs": [_output(output) for output in told.outputs],
                    "requests": [
                        stats.num_running_reqs,
                        stats.num_waiting_reqs,
                        stats.num_skipped_waiting_reqs,
                    ],
                    "cache": [
                        *[cache.requests, cache.queries, cache.hits],
                        *[cache.preempted_requests, cache.preempted_queries, cache.preempted_hits],
                        int(cache.reset),
                    ],
                    "free": self._num_free_blocks(),
                }
            )

    def _note_deviations(self, output: Any, step: int) -> None:
        config = self.spec["config"]
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            first = self.first_cached.setdefault(new.req_id, new.num_computed_tokens)
            stats = self.requests[new.req_id].prefill_stats
            if stats is not None and first != new.num_computed_tokens:
                self.deviations.append(f"step {step}: {new.req_id} is admitted anew before a token")
        if config["policy"] != "priority" or not output.preempted_req_ids:
            return
        budget = config["max_num_scheduled_tokens"] or config["max_num_batched_tokens"]
        left_out = [r for r in self.scheduler.running if r.request_id not in scheduled]
        if left_out and output.total_num_scheduled_tokens < budget:
            self.deviations.append(f"step {step}: a request evicts itself before others ran")

    def _num_free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def _end(self, step: int) -> dict[str, Any]:
        hashes = []
        for name, request in self.requests.items():
            blocks = list(request.block_hashes)
            digest = hashlib.sha256(b"".join(blocks)).hexdigest()[:16]
            hashes.append([_id(name), len(blocks), digest, request.num_preemptions])
        reset = bool(self.scheduler.reset_prefix_cache())
        return {
            "steps": step,
            "free": self._num_free_blocks(),
            "reset": reset,
            "hashes": hashes,
            "unfinished": self.scheduler.get_num_unfinished_requests(),
        }


def _id(name: str) -> int:
    return int(name[1:])


def _ids(names: Any) -> list[int]:
    return sorted(_id(name) for name in names or ())


def _blocks(groups: Any) -> list[list[int]] | None:
    return None if groups is None else [list(group) for group in groups]


def _digest(new: Any) -> Iterator[int]:
    """Length and CRC-32 of the tokens sent to the runner, which the seed gives."""
    tokens = list(new.prefill_token_ids)
    yield len(tokens)
    yield zlib.crc32(json.dumps(tokens).encode())


def _output(output: Any) -> list[Any]:
    finish = None if output.finish_reason is None else str(output.finish_reason)
    events = [int(event.type) for event in output.events or ()]
    prefill = output.prefill_stats
    told = None if prefill is None else [prefill.num_prompt_tokens, prefill.num_cached_tokens]
    tokens = list(output.new_token_ids)
    return [_id(output.request_id), tokens, finish, output.stop_reason, events, told]


def pack(golden: dict[str, Any]) -> bytes:
    """Bytes of a golden: canonical JSON with `sha256` of the rest in it, zlib level 9."""
    body = {key: value for key, value in golden.items() if key != "sha256"}
    sha256 = hashlib.sha256(_canonical(body)).hexdigest()
    return zlib.compress(_canonical({**body, "sha256": sha256}), 9)


def unpack(data: bytes) -> dict[str, Any]:
    """The golden in `data`; ValueError if it is damaged, of another format, or not what it says."""
    try:
        text = zlib.decompress(data)
        golden = json.loads(text)
        sha256 = str(golden.get("sha256"))
    except (zlib.error, UnicodeDecodeError, ValueError, AttributeError) as error:
        raise ValueError(f"not a golden: {error}") from error
    # The text is canonical, so without its hash it is the text that was hashed.
    if hashlib.sha256(text.replace(_entry(sha256), b"", 1)).hexdigest() != sha256:
        raise ValueError("its sha256 is not that of its content")
    if golden.get("format") != FORMAT:
        raise ValueError(f"format {golden.get('format')}, not {FORMAT}")
    return golden


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _entry(sha256: str) -> bytes:
    return f'"sha256":"{sha256}",'.encode()

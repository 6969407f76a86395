# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/distributed/kv_events.py @ v0.25.0
"""Sends the events of the prefix cache to whoever listens, over ZeroMQ.

A message has three frames: the topic, the batch's number (8 bytes, big-endian, from 0) and the
batch in msgpack. A subscriber that finds a gap in the numbers asks the replay socket: its DEALER
socket sends an empty frame and the number to start from, and gets the batches that are kept from
there on, each as an empty frame, number and batch, with number -1 and an empty batch behind the
last. A REQ socket may ask as well, but takes the first answer only.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import zmq

from vllmx.core.kv_events import EventBatch, KVEventBatch
from vllmx.exceptions import UserError

if TYPE_CHECKING:
    from vllmx.config import KVEventsConfig, VllmConfig
    from vllmx.core.kv_cache_manager import KVCacheManager

logger = logging.getLogger(__name__)

REBIND_SECONDS = 0.5
"""How long an address may be in use: ZeroMQ frees that of a closed socket a little later."""
REPLAY_POLL_SECONDS = 0.1
"""How long a replay request may wait while nothing is published."""


class EventPublisher(ABC):
    """Takes the batches of one engine, in order.

    With data parallelism each engine has its own, which marks the batches with its rank.
    """

    def __init__(self, data_parallel_rank: int = 0) -> None:
        self._data_parallel_rank = data_parallel_rank

    @abstractmethod
    def publish(self, events: EventBatch) -> None:
        """Send a batch; returns before it is sent."""

    @abstractmethod
    def shutdown(self) -> None:
        """Send what waits and stop."""


class NullEventPublisher(EventPublisher):
    """Publishes nothing."""

    def publish(self, events: EventBatch) -> None:
        """Drop the batch."""

    def shutdown(self) -> None:
        """Nothing to stop."""


class ZmqEventPublisher(EventPublisher):
    """A PUB socket, and a ROUTER socket for replays, served by a thread of its own.

    See `KVEventsConfig` for the arguments. Rank n > 0 uses the port n higher, or adds `_dpn` to
    the name of an inproc endpoint.
    """

    SHUTDOWN_TIMEOUT: ClassVar[float] = 1.0
    """Seconds that `shutdown` waits for the batches in the queue."""
    END_SEQ: ClassVar[bytes] = (-1).to_bytes(8, "big", signed=True)
    """Number of the last answer to a replay request."""

    def __init__(
        self,
        data_parallel_rank: int,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        topic: str = "",
    ) -> None:
        super().__init__(data_parallel_rank)
        self._queue: queue.Queue[EventBatch | None] = queue.Queue(max_queue_size)
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_steps)
        self._numbers = count()
        self._topic = topic.encode()
        self._endpoint = self.offset_endpoint_port(endpoint, data_parallel_rank)
        self._replay_endpoint = self.offset_endpoint_port(replay_endpoint, data_parallel_rank)
        # inproc endpoints join sockets of one context only, so it must be the common one.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._pub = self._context.socket(zmq.PUB)
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._pub.set_hwm(hwm)
            self._open(self._pub, self._endpoint, "kv_events.endpoint")
            if self._replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._bind(self._replay, self._replay_endpoint, "kv_events.replay_endpoint")
        except UserError:
            self._close()
            raise
        self._running = True
        self._thread = threading.Thread(target=self._serve, daemon=True, name="zmq-publisher")
        self._thread.start()

    def _open(self, socket: zmq.Socket[bytes], endpoint: str | None, key: str) -> None:
        """Bind where the endpoint stands for this machine, else connect."""
        if endpoint is None:
            return
        own = ("*" in endpoint, "::" in endpoint, endpoint.startswith(("ipc://", "inproc://")))
        if any(own):
            self._bind(socket, endpoint, key)
            return
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise UserError(f"{key}={endpoint}: {error}") from error

    @staticmethod
    def _bind(socket: zmq.Socket[bytes], endpoint: str, key: str) -> None:
        deadline = time.monotonic() + REBIND_SECONDS
        while True:
            try:
                socket.bind(endpoint)
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                    raise UserError(f"{key}={endpoint}: {error}; set another address.") from error
                time.sleep(0.02)

    def publish(self, events: EventBatch) -> None:
        """Queue a batch; waits only while `max_queue_size` batches are unsent."""
        if not self._running:
            raise RuntimeError("Publisher is closed")
        if events.data_parallel_rank is None:
            events.data_parallel_rank = self._data_parallel_rank
        self._queue.put(events)

    def shutdown(self) -> None:
        """Send what waits, for SHUTDOWN_TIMEOUT seconds at most, and close the sockets."""
        if not self._running:
            return
        self._running = False
        try:
            self._queue.put(None, timeout=self.SHUTDOWN_TIMEOUT)
        except queue.Full:
            logger.warning("KV events: the queue stays full.")
        self._thread.join(self.SHUTDOWN_TIMEOUT)
        if self._thread.is_alive():
            logger.warning("KV events: %d batches were not sent in time.", self._queue.qsize())
            return  # it closes the sockets itself: no other thread may while it uses them

    def _close(self) -> None:
        self._pub.close(linger=0)
        if self._replay is not None:
            self._replay.close(linger=0)

    def _serve(self) -> None:
        """Publish what comes until `shutdown`; the sockets are this thread's alone."""
        encoder = msgspec.msgpack.Encoder()
        wait = None if self._replay is None else REPLAY_POLL_SECONDS
        try:
            while True:
                if self._replay is not None and self._replay.poll(0):
                    self._answer_replay(self._replay)
                try:
                    events = self._queue.get(timeout=wait)
                except queue.Empty:
                    continue
                if events is None:
                    return
                self._send(encoder, events)
        finally:
            self._close()

    def _send(self, encoder: msgspec.msgpack.Encoder, events: EventBatch) -> None:
        number = next(self._numbers).to_bytes(8, "big")
        try:
            payload = encoder.encode(events)
            self._pub.send_multipart((self._topic, number, payload))
            self._kept.append((number, payload))
        except Exception:
            # Subscribers see the gap in the numbers.
            logger.exception("KV events: a batch could not be published.")

    def _answer_replay(self, replay: zmq.Socket[bytes]) -> None:
        frames = replay.recv_multipart()
        if len(frames) != 3:
            logger.warning("KV events: invalid replay request: %s", frames)
            return
        client, _, start = frames
        try:
            for number, payload in self._kept:
                if int.from_bytes(number, "big") >= int.from_bytes(start, "big"):
                    replay.send_multipart((client, b"", number, payload))
            replay.send_multipart((client, b"", self.END_SEQ, b""))
        except zmq.ZMQError:
            logger.exception("KV events: a replay could not be sent.")

    @staticmethod
    def offset_endpoint_port(endpoint: str | None, data_parallel_rank: int) -> str | None:
        """`endpoint` for one of several engines; ValueError unless it is tcp or inproc."""
        if not endpoint or data_parallel_rank == 0:
            return endpoint
        if "inproc" in endpoint:
            return f"{endpoint}_dp{data_parallel_rank}"
        if "tcp" not in endpoint:
            raise ValueError("Invalid endpoint: must contain 'inproc' or 'tcp'")
        address, colon, port = endpoint.rpartition(":")
        return f"{address}{colon}{int(port) + data_parallel_rank}"


class KVEventPublishing:
    """Mixed into the scheduler, which asks only if `takes_kv_events`."""

    vllm_config: VllmConfig
    kv_cache_manager: KVCacheManager
    connector: Any | None
    takes_kv_events = False

    def _init_kv_events(self, publisher: EventPublisher | None) -> None:
        """Make the publisher, or go on with that of an earlier scheduler."""
        config = self.vllm_config.kv_events_config
        rank = self.vllm_config.parallel_config.data_parallel_index
        self.kv_event_publisher = publisher or EventPublisherFactory.create(config, rank)
        # A connector's events must be taken even if nobody listens.
        self.takes_kv_events = self.connector is not None or (
            config is not None and config.enable_kv_cache_events
        )

    def _publish_kv_events(self) -> None:
        """Pass on what happened to the prefix cache, and to a connector's own cache, since the
        last step."""
        events: list[Any] = self.kv_cache_manager.take_events()
        if self.connector is not None:
            events = [*events, *self.connector.take_events()]
        if events:
            self.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=events))


class EventPublisherFactory:
    """Makes the publisher that the config names."""

    _registry: ClassVar[dict[str, Callable[..., EventPublisher]]] = {
        "null": NullEventPublisher,
        "zmq": ZmqEventPublisher,
    }

    @classmethod
    def register_publisher(cls, name: str, ctor: Callable[..., EventPublisher]) -> None:
        """Add a publisher, which gets `data_parallel_rank` and the config's other fields."""
        if name in cls._registry:
            raise KeyError(f"publisher {name!r} already registered")
        cls._registry[name] = ctor

    @classmethod
    def create(cls, config: KVEventsConfig | None, data_parallel_rank: int = 0) -> EventPublisher:
        """The publisher of `config`; NullEventPublisher unless events are enabled."""
        if config is None or not config.enable_kv_cache_events or config.publisher == "null":
            return NullEventPublisher()
        kind = config.publisher or "zmq"
        if kind not in cls._registry:
            raise ValueError(f"Unknown event publisher {kind!r}")
        return cls._registry[kind](
            data_parallel_rank=data_parallel_rank,
            endpoint=config.endpoint,
            replay_endpoint=config.replay_endpoint,
            buffer_steps=config.buffer_steps,
            hwm=config.hwm,
            max_queue_size=config.max_queue_size,
            topic=config.topic,
        )

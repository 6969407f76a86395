# SPDX-License-Identifier: Apache-2.0
"""Events of the prefix cache, as a subscriber of the ZeroMQ sockets gets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq
from engine_helpers import make_config, make_core, make_engine_request

from vllmx.config import KVEventsConfig, RunConfig, finalize
from vllmx.core.block_hash import maybe_convert_block_hash
from vllmx.core.kv_event_publisher import (
    EventPublisherFactory,
    NullEventPublisher,
    ZmqEventPublisher,
)
from vllmx.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllmx.exceptions import UserError

WAIT_MS = 5000


class Subscriber:
    """A SUB socket, and a DEALER socket for what it missed."""

    def __init__(self, endpoint: str, topic: str = "", replay: str | None = None) -> None:
        context = zmq.Context.instance()
        self.sub = context.socket(zmq.SUB)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.sub.rcvtimeo = WAIT_MS
        # Bound, so that it needs no name of a port that somebody else may take first.
        self.replay = None
        if endpoint.endswith(":0"):
            self.sub.bind(endpoint)
            self.endpoint = self.sub.getsockopt_string(zmq.LAST_ENDPOINT)
        else:
            self.sub.connect(endpoint)
            self.endpoint = endpoint
        if replay is not None:
            self.replay = context.socket(zmq.DEALER)
            self.replay.rcvtimeo = WAIT_MS
            self.replay.connect(replay)

    def receive(self) -> tuple[bytes, int, KVEventBatch]:
        topic, number, payload = self.sub.recv_multipart()
        return topic, int.from_bytes(number, "big"), decode(payload)

    def is_silent(self) -> bool:
        return not self.sub.poll(200)

    def ask_from(self, number: int) -> list[tuple[int, KVEventBatch]]:
        assert self.replay is not None
        self.replay.send_multipart((b"", number.to_bytes(8, "big")))
        found = []
        while True:
            delimiter, number_frame, payload = self.replay.recv_multipart()
            assert delimiter == b""
            if number_frame == ZmqEventPublisher.END_SEQ:
                assert payload == b""
                return found
            found.append((int.from_bytes(number_frame, "big"), decode(payload)))

    def close(self) -> None:
        self.sub.close(linger=0)
        if self.replay is not None:
            self.replay.close(linger=0)


def decode(payload: bytes) -> KVEventBatch:
    return msgspec.msgpack.decode(payload, type=KVEventBatch)


def stored(*hashes: int) -> BlockStored:
    return BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=None,
        token_ids=[1, 2],
        block_size=2,
        lora_id=None,
        medium="GPU",
        lora_name=None,
    )


def batch(*hashes: int) -> KVEventBatch:
    return KVEventBatch(ts=1.5, events=[stored(*hashes)])


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    """Registers a thing to be shut down or closed at the end."""
    opened: list[Any] = []

    def register(thing: Any) -> Any:
        opened.append(thing)
        return thing

    yield register
    for thing in reversed(opened):
        (thing.shutdown if hasattr(thing, "shutdown") else thing.close)()


def inproc(name: str, **settings: Any) -> KVEventsConfig:
    return KVEventsConfig(
        enable_kv_cache_events=True, endpoint=f"inproc://kv-events-{name}", **settings
    )


# ---------------------------------------------------------------- the publisher


def test_a_subscriber_gets_topic_number_and_batch(closing) -> None:
    config = inproc("basic", topic="kv")
    publisher = closing(EventPublisherFactory.create(config, 0))
    subscriber = closing(Subscriber(config.endpoint, "kv"))
    other = closing(Subscriber(config.endpoint, "else"))
    for i in range(3):
        publisher.publish(batch(i))
    for i in range(3):
        topic, number, received = subscriber.receive()
        assert (topic, number) == (b"kv", i)
        assert received.data_parallel_rank == 0 and received.ts == 1.5
        assert received.events == [stored(i)]
    assert other.is_silent()


def test_the_wire_format_is_upstreams() -> None:
    """Bytes that upstream 0.25.0 makes of the same batch."""
    events = [
        stored(1, 2**63),
        BlockRemoved(block_hashes=[5], medium="GPU", group_idx=1),
        AllBlocksCleared(),
    ]
    encoded = msgspec.msgpack.encode(KVEventBatch(ts=1.5, events=events, data_parallel_rank=0))
    assert msgspec.msgpack.decode(encoded) == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [1, 2**63],
                "parent_block_hash": None,
                "token_ids": [1, 2],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            },
            {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU", "group_idx": 1},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]
    assert encoded.hex() == (
        "93cb3ff800000000000093"
        "88a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739201cf8000000000000000"
        "b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473920102aa626c6f636b5f73697a6502"
        "a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0"
        "84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739105"
        "a66d656469756da3475055a967726f75705f69647801"
        "81a474797065b0416c6c426c6f636b73436c656172656400"
    )


def test_missed_batches_are_replayed_from_a_number_on(closing) -> None:
    config = inproc("replay", replay_endpoint="inproc://kv-events-replay-2", buffer_steps=4)
    publisher = closing(EventPublisherFactory.create(config, 0))
    subscriber = closing(Subscriber(config.endpoint, replay=config.replay_endpoint))
    for i in range(6):
        publisher.publish(batch(i))
    for _ in range(6):
        subscriber.receive()
    first = subscriber.ask_from(4)
    assert [number for number, _ in first] == [4, 5]
    assert first[0][1].events == [stored(4)]
    # Only the last four are kept.
    assert [number for number, _ in subscriber.ask_from(0)] == [2, 3, 4, 5]
    assert subscriber.ask_from(6) == []


def test_a_malformed_replay_request_is_dropped_and_the_next_one_answered(closing) -> None:
    config = inproc("malformed", replay_endpoint="inproc://kv-events-malformed-2")
    publisher = closing(EventPublisherFactory.create(config, 0))
    bad = closing(zmq.Context.instance().socket(zmq.DEALER))
    bad.connect(config.replay_endpoint)
    bad.send(b"no delimiter")
    subscriber = closing(Subscriber(config.endpoint, replay=config.replay_endpoint))
    publisher.publish(batch(1))
    subscriber.receive()
    assert [number for number, _ in subscriber.ask_from(0)] == [0]


def test_shutdown_sends_what_waits_and_frees_the_address(closing) -> None:
    config = inproc("shutdown")
    publisher = EventPublisherFactory.create(config, 0)
    subscriber = closing(Subscriber(config.endpoint))
    for i in range(50):
        publisher.publish(batch(i))
    publisher.shutdown()
    publisher.shutdown()
    assert [subscriber.receive()[1] for _ in range(50)] == list(range(50))
    with pytest.raises(RuntimeError, match="closed"):
        publisher.publish(batch(1))
    closing(EventPublisherFactory.create(config, 0))


def test_a_batch_that_cannot_be_encoded_leaves_a_gap_and_no_more(closing, caplog) -> None:
    config = inproc("gap")
    publisher = closing(EventPublisherFactory.create(config, 0))
    subscriber = closing(Subscriber(config.endpoint))
    publisher.publish(KVEventBatch(ts=0.0, events=[object()]))
    publisher.publish(batch(1))
    assert subscriber.receive()[1] == 1
    assert "could not be published" in caplog.text


def test_an_endpoint_without_a_star_is_connected_to(closing) -> None:
    subscriber = closing(Subscriber("tcp://127.0.0.1:0"))
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=subscriber.endpoint)
    publisher = closing(EventPublisherFactory.create(config, 0))
    # A connection takes a moment, and PUB drops what is sent before it stands.
    for _ in range(50):
        publisher.publish(batch(1))
        if subscriber.sub.poll(100):
            break
    assert subscriber.receive()[2].events == [stored(1)]


@pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
def test_an_address_in_use_is_an_error_with_the_setting(key, closing) -> None:
    first = closing(EventPublisherFactory.create(inproc("used"), 0))
    settings = {"endpoint": "inproc://kv-events-free"} | {key: "inproc://kv-events-used"}
    config = KVEventsConfig(enable_kv_cache_events=True, **settings)
    with pytest.raises(UserError, match=f"kv_events.{key}=inproc://kv-events-used: "):
        EventPublisherFactory.create(config, 0)
    assert isinstance(first, ZmqEventPublisher)


def test_further_ranks_have_addresses_of_their_own() -> None:
    offset = ZmqEventPublisher.offset_endpoint_port
    assert offset("tcp://*:5557", 0) == "tcp://*:5557"
    assert offset("tcp://*:5557", 2) == "tcp://*:5559"
    assert offset("inproc://cache", 1) == "inproc://cache_dp1"
    assert offset(None, 1) is None
    with pytest.raises(ValueError, match="must contain 'inproc' or 'tcp'"):
        offset("ipc:///socket", 1)


def test_the_factory_goes_by_the_config(closing) -> None:
    create = EventPublisherFactory.create
    assert isinstance(create(None), NullEventPublisher)
    assert isinstance(create(KVEventsConfig(publisher="zmq")), NullEventPublisher)
    off = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    assert isinstance(create(off), NullEventPublisher)
    assert isinstance(closing(create(inproc("factory"))), ZmqEventPublisher)
    unknown = KVEventsConfig(enable_kv_cache_events=True, publisher="pigeon")
    with pytest.raises(ValueError, match="Unknown event publisher 'pigeon'"):
        create(unknown)
    with pytest.raises(KeyError, match="already registered"):
        EventPublisherFactory.register_publisher("zmq", ZmqEventPublisher)


# ---------------------------------------------------------------- config


def test_events_are_off_unless_they_are_enabled(caplog) -> None:
    run = RunConfig()
    assert finalize(run).kv_events_config is None
    run.kv_events.publisher = "zmq"
    assert finalize(run).kv_events_config is None
    assert "kv_events.enable_kv_cache_events=true" in caplog.text
    run.kv_events.enable_kv_cache_events = True
    assert finalize(run).kv_events_config == run.kv_events
    run.kv_events.publisher = "pigeon"
    with pytest.raises(UserError, match=r"kv_events\.publisher='pigeon': choose one of null, zmq"):
        finalize(run)


def test_events_without_prefix_caching_are_warned_of(caplog) -> None:
    run = RunConfig()
    run.kv_events.enable_kv_cache_events = True
    run.cache.enable_prefix_caching = False
    finalize(run)
    assert "prefix caching is not enabled" in caplog.text


# ---------------------------------------------------------------- the engine core


def run_to_end(core) -> None:
    for _ in range(200):
        core.step()
        if not core.scheduler.has_requests():
            return
    raise AssertionError("still busy")


def core_with_events(name: str, **limits: Any):
    config = make_config(**limits)
    config.kv_events_config = inproc(name)
    return make_core(config), config.kv_events_config


def test_the_engine_publishes_what_it_stores_evicts_and_clears(closing) -> None:
    core, config = core_with_events("engine", num_blocks=5, max_model_len=16)
    closing(core)
    subscriber = closing(Subscriber(config.endpoint))
    first = make_engine_request("a", list(range(8)), max_tokens=1)
    request, _ = core.preprocess_add_request(first)
    core.add_request(request)
    run_to_end(core)
    _, number, received = subscriber.receive()
    (event,) = received.events
    hashes = [maybe_convert_block_hash(block_hash) for block_hash in request.block_hashes]
    assert number == 0
    assert event == BlockStored(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=list(range(8)),
        block_size=4,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[None, None],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )
    # Four usable blocks: the second request needs all of them.
    other, _ = core.preprocess_add_request(make_engine_request("b", list(range(100, 115)), 1))
    core.add_request(other)
    run_to_end(core)
    _, number, received = subscriber.receive()
    removed = [event for event in received.events if isinstance(event, BlockRemoved)]
    assert number == 1
    assert {h for event in removed for h in event.block_hashes} == set(hashes)
    assert isinstance(received.events[-1], BlockStored)
    assert core.reset_prefix_cache()
    core.add_request(core.preprocess_add_request(make_engine_request("c", 4, 1))[0])
    run_to_end(core)
    assert isinstance(subscriber.receive()[2].events[0], AllBlocksCleared)


def test_an_engine_that_starts_over_goes_on_counting_and_tells_of_the_empty_cache(closing) -> None:
    core, config = core_with_events("again")
    closing(core)
    subscriber = closing(Subscriber(config.endpoint))
    core.add_request(core.preprocess_add_request(make_engine_request("a", 8, 2))[0])
    core.step()
    assert subscriber.receive()[1] == 0
    core.start_over()
    core.add_request(core.preprocess_add_request(make_engine_request("b", 8, 1))[0])
    run_to_end(core)
    _, number, received = subscriber.receive()
    assert number == 1
    assert isinstance(received.events[0], AllBlocksCleared)
    assert isinstance(received.events[1], BlockStored)


def test_without_a_config_nothing_is_collected() -> None:
    core = make_core(make_config())
    assert isinstance(core.scheduler.kv_event_publisher, NullEventPublisher)
    assert not core.scheduler.takes_kv_events
    core.add_request(core.preprocess_add_request(make_engine_request("a", 8, 1))[0])
    run_to_end(core)
    assert core.scheduler.kv_cache_manager.take_events() == []

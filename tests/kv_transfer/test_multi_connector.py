# SPDX-License-Identifier: Apache-2.0
"""Several connectors as one; and the reports of several workers as one."""

from types import SimpleNamespace

import pytest

from vllmx.config import KVTransferConfig, VllmConfig
from vllmx.core.kv_cache_interface import KVCacheConfig
from vllmx.core.kv_cache_manager import KVCacheBlocks
from vllmx.core.kv_events import BlockRemoved, KVConnectorKVEvents, KVEventAggregator
from vllmx.core.output import KVConnectorOutput, ModelRunnerOutput
from vllmx.exceptions import UserError
from vllmx.kv_transfer.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllmx.kv_transfer.factory import KVConnectorFactory
from vllmx.kv_transfer.metrics import KVConnectorLogging, KVConnectorStats
from vllmx.kv_transfer.multi_connector import (
    MultiConnector,
    MultiKVConnectorStats,
    MultiKVConnectorWorkerMetadata,
)
from vllmx.kv_transfer.utils import KVOutputAggregator

REQUEST = SimpleNamespace(request_id="a")


class Sum(KVConnectorStats):
    def reset(self):
        self.data = {"n": 0}

    def aggregate(self, other):
        return Sum({"n": self.data["n"] + other.data["n"]})

    def reduce(self):
        return {"n": self.data["n"]}

    def is_empty(self):
        return not self.data["n"]


class Told(KVConnectorWorkerMetadata):
    def __init__(self, *names):
        self.names = names

    def aggregate(self, other):
        return Told(*self.names, *other.names)


class Child(KVConnectorBase_V1):
    """Answers what its extra config says and notes what it is told."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.answers = self._kv_transfer_config.kv_connector_extra_config
        self.calls = []

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return self.answers.get("match", (0, False))

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.calls.append((blocks.blocks, num_external_tokens))

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

    def request_finished(self, request, block_ids):
        return self.answers.get("finished", (False, None))

    def get_finished(self, finished_req_ids):
        return self.answers.get("sent"), self.answers.get("received")

    def get_block_ids_with_load_errors(self):
        return set(self.answers.get("bad", ()))

    def build_connector_worker_meta(self):
        return self.answers.get("told")

    def update_connector_output(self, connector_output):
        self.calls.append(connector_output.kv_connector_worker_meta)

    def get_kv_connector_stats(self):
        n = self.answers.get("n")
        return None if n is None else Sum({"n": n})

    @classmethod
    def build_kv_connector_stats(cls, data=None):
        return Sum(data or {"n": 0})

    def reset_cache(self):
        return self.answers.get("reset")

    def shutdown(self):
        self.calls.append("shutdown")
        if "error" in self.answers:
            raise RuntimeError(self.answers["error"])

    def start_load_kv(self, forward_context, **kwargs):
        self.calls.append("load")

    def wait_for_layer_load(self, layer_name):
        self.calls.append(f"wait {layer_name}")

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        self.calls.append(f"save {layer_name}")

    def wait_for_save(self):
        self.calls.append("saved")


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(KVConnectorFactory._registry, "Child", lambda: Child)


def multi(*answers, role=KVConnectorRole.SCHEDULER):
    connectors = [
        {"kv_connector": "Child", "kv_role": "kv_both", "kv_connector_extra_config": answer}
        for answer in answers
    ]
    config = VllmConfig(
        kv_transfer_config=KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"connectors": connectors},
        )
    )
    return KVConnectorFactory.create_connector(config, role, KVCacheConfig(1, [], []))


def test_every_method_of_the_base_is_passed_on():
    exempt = {"role", "_get_connector_metadata", "has_connector_metadata", "__init__"}
    methods = {
        n for n, v in vars(KVConnectorBase_V1).items() if callable(v) or "property" in str(v)
    }
    own = {name for name in methods if not name.startswith("__")} - exempt
    missing = own - set(vars(MultiConnector))
    assert missing <= {"get_kv_connector_kv_cache_events"}


def test_children_keep_the_engines_name_unless_they_have_their_own():
    connector = multi({}, {})
    ids = {config.engine_id for config in connector._ktc_kv_transfer_config}
    assert ids == {connector._kv_transfer_config.engine_id}
    with pytest.raises(UserError, match="list the connectors' own configs"):
        multi()


@pytest.mark.parametrize(
    ("answers", "expected", "chosen"),
    [
        ([(0, False), (8, True), (16, False)], (8, True), 1),
        ([(0, False), (0, False)], (0, False), None),
        ([(8, False), (None, False)], (None, False), None),
    ],
)
def test_the_first_that_has_the_prompt_loads_it(answers, expected, chosen):
    connector = multi(*[{"match": answer} for answer in answers])
    assert connector.get_num_new_matched_tokens(REQUEST, 0) == expected
    if expected[0] is None:
        return
    blocks = KVCacheBlocks(([SimpleNamespace(block_id=3)],))
    connector.update_state_after_alloc(REQUEST, blocks, expected[0])
    for i, child in enumerate(connector._connectors):
        assert child.calls == [(blocks.blocks, expected[0]) if i == chosen else (((),), 0)]


def test_blocks_stay_until_the_last_connector_has_sent_them():
    scheduler = multi(
        {"finished": (True, {"a": 1})}, {"finished": (False, {"b": 2})}, {"finished": (True, None)}
    )
    assert scheduler.request_finished(REQUEST, [1]) == (True, {"a": 1, "b": 2})
    metadata = scheduler.build_connector_meta(None)
    assert metadata.extra_async_saves == {"a": 1}
    assert scheduler.build_connector_meta(None).extra_async_saves is None

    worker = multi({}, {}, {}, role=KVConnectorRole.WORKER)
    worker.bind_connector_metadata(metadata)
    assert worker.has_connector_metadata()
    assert all(child.has_connector_metadata() for child in worker._connectors)
    worker._connectors[0].answers["sent"] = {"a"}
    assert worker.get_finished(set()) == (None, None)
    worker._connectors[0].answers.clear()
    worker._connectors[2].answers.update(sent={"a"}, received={"b"})
    assert worker.get_finished(set()) == ({"a"}, {"b"})
    worker.clear_connector_metadata()
    assert not worker._connectors[1].has_connector_metadata()


def test_parameters_of_one_name_clash():
    scheduler = multi({"finished": (False, {"host": 1})}, {"finished": (False, {"host": 2})})
    with pytest.raises(RuntimeError, match="host"):
        scheduler.request_finished_all_groups(REQUEST, ([1],))


def test_a_step_reaches_every_worker():
    worker = multi({"bad": [1]}, {"bad": [2, 3]}, role=KVConnectorRole.WORKER)
    worker.start_load_kv(None)
    worker.wait_for_layer_load("l0")
    worker.save_kv_layer("l0", None, None)
    worker.wait_for_save()
    assert [child.calls for child in worker._connectors] == [
        ["load", "wait l0", "save l0", "saved"]
    ] * 2
    assert worker.get_block_ids_with_load_errors() == {1, 2, 3}


def test_each_scheduler_gets_what_its_own_worker_told():
    told = Told("x")
    assert multi({}, {}).build_connector_worker_meta() is None
    whole = multi({}, {"told": told}).build_connector_worker_meta()
    assert whole.metadata == (None, told)
    scheduler = multi({}, {})
    output = KVConnectorOutput(kv_connector_worker_meta=whole)
    scheduler.update_connector_output(output)
    assert [child.calls for child in scheduler._connectors] == [[None], [told]]
    assert output.kv_connector_worker_meta is whole
    other = MultiKVConnectorWorkerMetadata((Told("y"), Told("z")))
    first, second = whole.aggregate(other).metadata
    assert (first.names, second.names) == (("y",), ("x", "z"))


def test_statistics_are_kept_by_class_and_come_back_from_another_process():
    assert multi({}).get_kv_connector_stats() is None
    stats = multi({"n": 2}, {"n": 3}, {}).get_kv_connector_stats()
    assert stats["Child"].data == {"n": 5} and not stats.is_empty()
    again = MultiConnector.build_kv_connector_stats({"Child": {"data": {"n": 1}}})
    assert again.aggregate(stats).reduce() == {"Child": {"n": 6}}
    again.reset()
    assert again.is_empty()
    assert MultiConnector.build_kv_connector_stats({"Child": Sum({"n": 4})})["Child"].data["n"] == 4
    assert MultiConnector.build_kv_connector_stats(None) == MultiKVConnectorStats()
    # Connectors without statistics of their own are left out.
    assert not MultiConnector.build_kv_connector_stats({"ExampleConnector": {"data": {}}}).data
    with pytest.raises(AssertionError, match="Expected a dict with a 'data' field"):
        MultiConnector.build_kv_connector_stats({"Child": {"n": 1}})
    with pytest.raises(ValueError, match="'Unknown' is not registered"):
        MultiConnector.build_kv_connector_stats({"Unknown": {"data": {}}})


def test_the_log_shows_what_was_gathered_since_the_last_line(caplog):
    log = KVConnectorLogging(KVTransferConfig(kv_connector="Child", kv_role="kv_both"))
    lines = []
    for n in (1, 2):
        log.observe({"n": n})
    log.log(lambda text, *args: lines.append(text % args))
    log.log(lambda text, *args: lines.append(text % args))
    assert lines == ["KV Transfer metrics: n=3"]
    silent = KVConnectorLogging(
        KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    )
    for _ in range(2):
        silent.observe({"n": 1})
    assert caplog.text.count("has no build_kv_connector_stats") == 1


def test_a_reset_reaches_all_and_fails_if_one_fails():
    assert multi({"reset": None}, {"reset": True}).reset_cache()
    assert not multi({"reset": False}, {"reset": True}).reset_cache()


def test_all_are_shut_down_even_if_one_fails():
    connector = multi({"error": "broken"}, {})
    with pytest.raises(RuntimeError, match="broken"):
        connector.shutdown()
    assert connector._connectors[1].calls == ["shutdown"]


# ---------------------------------------------------------------- several workers


def report(**kwargs):
    return ModelRunnerOutput([], {}, kv_connector_output=KVConnectorOutput(**kwargs))


def test_a_transfer_has_ended_when_all_workers_have_said_so():
    aggregator = KVOutputAggregator(2)
    first = report(finished_sending={"a"}, finished_recving={"b"}, invalid_block_ids={1})
    merged = aggregator.aggregate([first, report(invalid_block_ids={2})])
    assert merged is first
    merged = merged.kv_connector_output
    assert (merged.finished_sending, merged.finished_recving) == (None, None)
    assert merged.invalid_block_ids == {1, 2}
    merged = aggregator.aggregate(
        [ModelRunnerOutput([], {}), report(finished_sending={"a"}, finished_recving={"b"})]
    ).kv_connector_output
    assert (merged.finished_sending, merged.finished_recving) == ({"a"}, {"b"})
    assert aggregator.aggregate([None, report()]) is None


def test_workers_may_lower_the_number_that_is_waited_for():
    aggregator = KVOutputAggregator.from_connector(multi({}), world_size=4)
    output = report(finished_recving={"a"}, expected_finished_count=2)
    merged = aggregator.aggregate([output, report(finished_recving={"a"})]).kv_connector_output
    assert merged.finished_recving == {"a"} and merged.expected_finished_count == 2


class Events(KVConnectorKVEvents):
    def __init__(self, events):
        self.aggregator = KVEventAggregator(1)
        self.aggregator.add_events(events)

    def add_events(self, events):
        self.aggregator.add_events(events)

    def aggregate(self):
        common = self.aggregator.get_common_events()
        self.aggregator.clear_events()
        self.aggregator.add_events(common)
        self.aggregator.reset_workers()
        return self

    def increment_workers(self, count=1):
        self.aggregator.increment_workers(count)

    def get_all_events(self):
        return self.aggregator.get_all_events()

    def get_number_of_workers(self):
        return self.aggregator.get_number_of_workers()

    def clear_events(self):
        self.aggregator.clear_events()


def test_reports_of_all_workers_are_merged():
    event = BlockRemoved([b"hash"], "GPU")
    outputs = [
        report(
            kv_connector_stats=Sum({"n": 1}),
            kv_connector_worker_meta=Told("x"),
            kv_cache_events=Events([event]),
        ),
        report(),
        report(
            kv_connector_stats=Sum({"n": 2}),
            kv_connector_worker_meta=Told("y"),
            kv_cache_events=Events([event]),
        ),
    ]
    merged = KVOutputAggregator(3).aggregate(outputs).kv_connector_output
    assert merged.kv_connector_stats.data == {"n": 3}
    assert merged.kv_connector_worker_meta.names == ("x", "y")
    assert merged.kv_cache_events.get_all_events() == [event, event]
    assert merged.kv_cache_events.get_number_of_workers() == 2
    assert merged.kv_cache_events.aggregate().get_all_events() == [event]


def test_event_counts_refuse_what_is_no_count():
    with pytest.raises(ValueError, match="greater than zero"):
        KVEventAggregator(0)
    aggregator = KVEventAggregator(1)
    with pytest.raises(ValueError, match="positive"):
        aggregator.increment_workers(0)
    with pytest.raises(TypeError, match="list of KVCacheEvent"):
        aggregator.add_events(())

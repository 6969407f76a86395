# SPDX-License-Identifier: Apache-2.0
"""Which connector a config means, and what it says of mistakes."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from vllmx.config import KVTransferConfig, RunConfig, VllmConfig, finalize
from vllmx.core.kv_cache_interface import KVCacheConfig
from vllmx.engine.arg_utils import engine_args_to_config
from vllmx.exceptions import UserError
from vllmx.kv_transfer.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA, supports_hma
from vllmx.kv_transfer.example_connector import ExampleConnector
from vllmx.kv_transfer.factory import NOT_BUILT, KVConnectorFactory
from vllmx.kv_transfer.multi_connector import MultiConnector


def transfer(name="ExampleConnector", **kwargs):
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", **kwargs)


class Hybrid(ExampleConnector, SupportsHMA):
    def request_finished_all_groups(self, request, block_ids):
        return False, None


class OldStyle:
    def __init__(self, vllm_config, role): ...


def test_built_in_connectors_are_found_by_name():
    assert KVConnectorFactory.get_connector_class(transfer()) is ExampleConnector
    assert KVConnectorFactory.get_connector_class(transfer("MultiConnector")) is MultiConnector
    assert KVConnectorFactory.get_connector_class_by_name("ExampleConnector") is ExampleConnector


@pytest.mark.parametrize("name", NOT_BUILT)
def test_upstreams_other_connectors_are_refused_by_name(name):
    with pytest.raises(UserError, match=f"{name} is not built into vllmx: choose one of .*Multi"):
        KVConnectorFactory.get_connector_class(transfer(name))


def test_an_unknown_connector_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="Unsupported connector type: Nix; known are Example"):
        KVConnectorFactory.get_connector_class(transfer("Nix"))
    with pytest.raises(ValueError, match="Connector 'Nix' is not registered"):
        KVConnectorFactory.get_connector_class_by_name("Nix")
    with pytest.raises(ValueError, match="Connector name is not set"):
        KVConnectorFactory.get_connector_class(KVTransferConfig())
    with pytest.raises(ValueError, match="already registered"):
        KVConnectorFactory.register_connector("ExampleConnector", "a", "b")


def test_a_class_of_ones_own_module_goes_before_the_built_in_one(monkeypatch):
    module = ModuleType("my_connectors")
    module.ExampleConnector, module.OldStyle = Hybrid, OldStyle
    monkeypatch.setitem(sys.modules, "my_connectors", module)

    def find(name, path="my_connectors"):
        return KVConnectorFactory.get_connector_class(transfer(name, kv_connector_module_path=path))

    assert find("ExampleConnector") is Hybrid
    with pytest.raises(AttributeError, match="Class Missing not found in my_connectors"):
        find("Missing")
    with pytest.raises(ValueError, match="cannot be an empty string"):
        find("ExampleConnector", "")
    with pytest.raises(ValueError, match="deprecated constructor with two arguments"):
        find("OldStyle")


def test_support_of_several_groups_depends_on_every_connector(monkeypatch):
    monkeypatch.setitem(KVConnectorFactory._registry, "Hybrid", lambda: Hybrid)
    assert not supports_hma(ExampleConnector) and supports_hma(Hybrid)

    def multi(*names):
        connectors = [{"kv_connector": name, "kv_role": "kv_both"} for name in names]
        return transfer("MultiConnector", kv_connector_extra_config={"connectors": connectors})

    assert KVConnectorFactory.supports_hma_config(multi("Hybrid", "Hybrid"))
    assert not KVConnectorFactory.supports_hma_config(multi("Hybrid", "ExampleConnector"))
    assert not KVConnectorFactory.supports_hma_config(multi())
    assert not KVConnectorFactory.supports_hma_config(transfer())


def test_a_connector_without_support_for_groups_turns_them_off():
    config = VllmConfig(kv_transfer_config=transfer())
    assert config.scheduler_config.disable_hybrid_kv_cache_manager is True
    assert VllmConfig().scheduler_config.disable_hybrid_kv_cache_manager is False
    run = RunConfig()
    run.kv_transfer = transfer()
    run.scheduler.disable_hybrid_kv_cache_manager = False
    with pytest.raises(UserError, match="ExampleConnector can't serve a cache with several groups"):
        finalize(run)


def test_roles_say_who_gives_and_who_takes():
    both, producer, none = transfer(), transfer(), KVTransferConfig()
    producer.kv_role = "kv_producer"
    assert (both.is_kv_producer, both.is_kv_consumer) == (True, True)
    assert (producer.is_kv_producer, producer.is_kv_consumer) == (True, False)
    assert not (none.is_kv_producer or none.is_kv_consumer or none.is_kv_transfer_instance)
    assert transfer().engine_id != transfer().engine_id
    with pytest.raises(UserError, match="Please specify kv_role"):
        KVTransferConfig(kv_connector="ExampleConnector")
    with pytest.raises(UserError, match="Unsupported kv_role: giver"):
        KVTransferConfig(kv_role="giver")


def test_the_config_comes_as_an_object_a_mapping_or_an_override():
    extra = {"shared_storage_path": "store", "depth": 3}
    wanted = transfer(kv_connector_extra_config=extra, engine_id="one")
    as_mapping = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "engine_id": "one",
        "kv_connector_extra_config": extra,
    }
    for given in (wanted, as_mapping):
        made = finalize(engine_args_to_config(kv_transfer_config=given)).kv_transfer_config
        assert made == wanted
        assert made.get_from_extra_config("depth", 0) == 3
    assert finalize(RunConfig()).kv_transfer_config is None
    run = engine_args_to_config(kv_transfer_config={"kv_connector": "ExampleConnector"})
    with pytest.raises(UserError, match="Please specify kv_role"):
        finalize(run)
    with pytest.raises(UserError, match=r"kv_connectr.* Did you mean kv_connector"):
        engine_args_to_config(kv_transfer_config={"kv_connectr": "ExampleConnector"})


def test_a_connector_needs_a_config():
    empty = KVCacheConfig(1, [], [])
    with pytest.raises(ValueError, match="kv_transfer_config must be set"):
        KVConnectorFactory.create_connector(VllmConfig(), KVConnectorRole.WORKER, empty)
    with pytest.raises(ValueError, match="kv_transfer_config must be set"):
        ExampleConnector(VllmConfig(), KVConnectorRole.WORKER, empty)


def test_what_a_connector_need_not_have():
    config = VllmConfig(kv_transfer_config=transfer())
    config.cache_config.block_size = 16
    connector = KVConnectorFactory.create_connector(
        config, KVConnectorRole.SCHEDULER, KVCacheConfig(1, [], [])
    )
    assert connector.role is KVConnectorRole.SCHEDULER
    assert connector.get_finished({"a"}) == (None, None)
    assert connector.reset_cache() is None and connector.get_finished_count() is None
    assert connector.get_required_kvcache_layout(config) is None
    assert not connector.requires_piecewise_for_cudagraph({})
    with pytest.raises(TypeError, match="abstract base class"):
        KVConnectorBase_V1.get_required_kvcache_layout(config)
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): SimpleNamespace()})
    with pytest.raises(ValueError, match="pipeline stages"):
        connector.set_xfer_handshake_metadata_pp_aware({(1, 0): SimpleNamespace()})

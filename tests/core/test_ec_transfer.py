# SPDX-License-Identifier: Apache-2.0
"""Encoder-cache connectors: found by name, and the one that keeps outputs in a folder."""

import os

import pytest
import torch

from vllmx.config import ECTransferConfig, VllmConfig
from vllmx.ec_transfer.base import ECConnectorBase, ECConnectorRole
from vllmx.ec_transfer.example_connector import ECExampleConnector, ECExampleConnectorMetadata
from vllmx.ec_transfer.factory import ECConnectorFactory
from vllmx.exceptions import UserError
from vllmx.multimodal import MultiModalFeatureSpec, PlaceholderRange
from vllmx.request import Request
from vllmx.sampling_params import SamplingParams


def config(folder="unused", role="ec_both", name="ECExampleConnector", **kwargs):
    transfer = ECTransferConfig(
        ec_connector=name,
        ec_role=role,
        ec_connector_extra_config={"shared_storage_path": str(folder)},
        **kwargs,
    )
    return VllmConfig(ec_transfer_config=transfer)


def connector(folder, role="ec_both", half=ECConnectorRole.WORKER):
    made = ECConnectorFactory.create_connector(config(folder, role), half)
    assert isinstance(made, ECExampleConnector)
    return made


def request(**items):
    features, offset = [], 0
    for name, size in items.items():
        position = PlaceholderRange(offset, size)
        features.append(MultiModalFeatureSpec(None, "image", name, position))
        offset += size
    return Request("r", [0] * (offset + 1), SamplingParams(), None, mm_features=features)


def test_what_a_producer_saves_a_consumer_loads(tmp_path):
    outputs = {"a": torch.randn(4, 3), "b": torch.randn(2, 3).bfloat16()}
    producer = connector(tmp_path, "ec_producer")
    for name in outputs:
        producer.save_caches(outputs, name)

    scheduling = connector(tmp_path, "ec_consumer", ECConnectorRole.SCHEDULER)
    made = request(a=4, c=5, b=2)
    assert [scheduling.has_cache_item(f.identifier) for f in made.mm_features] == [
        True,
        False,
        True,
    ]
    for index in range(3):
        scheduling.update_state_after_alloc(made, index)
    metadata = scheduling.build_connector_meta(None)
    assert [(m.mm_hash, m.num_token) for m in metadata.mm_datas] == [("a", 4), ("b", 2)]
    assert scheduling.build_connector_meta(None).mm_datas == []

    loading = connector(tmp_path, "ec_consumer")
    loading.bind_connector_metadata(metadata)
    own = torch.zeros(1)
    cache = {"a": own}
    loading.start_load_caches(cache)
    assert cache["a"] is own  # it was there already
    assert torch.equal(cache["b"], outputs["b"])
    loading.clear_connector_metadata()
    with pytest.raises(AssertionError):
        loading.start_load_caches(cache)


def test_each_role_does_its_part_only(tmp_path):
    connector(tmp_path, "ec_consumer").save_caches({"a": torch.zeros(1)}, "a")
    assert not connector(tmp_path).has_cache_item("a")
    connector(tmp_path, "ec_both").save_caches({"a": torch.zeros(1)}, "a")
    producer = connector(tmp_path, "ec_producer", ECConnectorRole.SCHEDULER)
    producer.update_state_after_alloc(request(a=1), 0)
    assert producer.build_connector_meta(None).mm_datas == []
    assert producer.is_producer and not producer.is_consumer


def test_looking_for_an_output_creates_nothing(tmp_path):
    assert not connector(tmp_path).has_cache_item("a")
    assert list(tmp_path.iterdir()) == []


def test_a_saved_output_is_complete_and_alone_in_its_folder(tmp_path):
    connector(tmp_path).save_caches({"a": torch.zeros(2, 2).t()}, "a")
    assert os.listdir(tmp_path / "a") == ["encoder_cache.safetensors"]


@pytest.mark.parametrize("name", ["../../up", "/abs", "..", ".", "a/b", "a\\b", "", "ü", "x" * 300])
def test_a_name_does_not_lead_out_of_the_folder(tmp_path, name):
    folder = tmp_path / "storage"
    made = connector(folder)
    made.save_caches({name: torch.zeros(1)}, name)
    assert made.has_cache_item(name)
    assert [path.name for path in tmp_path.iterdir()] == ["storage"]
    (place,) = folder.iterdir()
    assert len(place.name) == 64


def test_an_output_that_is_gone_is_an_error(tmp_path):
    made = connector(tmp_path)
    metadata = ECExampleConnectorMetadata()
    metadata.add_mm_data(type("M", (), {"mm_hash": "gone"})())
    made.bind_connector_metadata(metadata)
    with pytest.raises(FileNotFoundError):
        made.start_load_caches({})


class OwnConnector(ECExampleConnector):
    """Found by module path."""


def test_a_connector_of_ones_own_is_found_by_its_module():
    made = config(name="OwnConnector", ec_connector_module_path=__name__)
    assert type(ECConnectorFactory.create_connector(made, ECConnectorRole.WORKER)) is OwnConnector


def test_unknown_connectors_are_refused_by_name():
    with pytest.raises(UserError, match=r"Unsupported connector type: Nope\. There are ECExample"):
        ECConnectorFactory.create_connector(config(name="Nope"), ECConnectorRole.WORKER)
    wrong = config(name="Nope", ec_connector_module_path=__name__)
    with pytest.raises(UserError, match="has no class Nope"):
        ECConnectorFactory.create_connector(wrong, ECConnectorRole.WORKER)
    with pytest.raises(ValueError, match="already registered"):
        ECConnectorFactory.register_connector("ECExampleConnector", "m", "c")
    for create in (ECConnectorFactory.create_connector, ECExampleConnector):
        with pytest.raises(ValueError, match="ec_transfer_config must be set"):
            create(VllmConfig(), ECConnectorRole.WORKER)


def test_a_connector_needs_a_role():
    with pytest.raises(UserError, match="Please specify ec_role"):
        ECTransferConfig(ec_connector="ECExampleConnector")
    with pytest.raises(UserError, match="Unsupported ec_role: both"):
        ECTransferConfig(ec_connector="ECExampleConnector", ec_role="both")
    assert not ECTransferConfig().is_ec_transfer_instance
    assert config(role="ec_both").ec_transfer_config.is_ec_producer
    assert issubclass(ECExampleConnector, ECConnectorBase)

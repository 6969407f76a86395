# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/distributed/kv_transfer/kv_connector/factory.py @ v0.25.0
"""Connectors by name: those that are built in, and any class of a module you name."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from vllmx.exceptions import UserError
from vllmx.kv_transfer.base import supports_hma

if TYPE_CHECKING:
    from vllmx.config import KVTransferConfig, VllmConfig
    from vllmx.core.kv_cache_interface import KVCacheConfig
    from vllmx.kv_transfer.base import KVConnectorBase_V1, KVConnectorRole

logger = logging.getLogger(__name__)

NOT_BUILT = (
    *("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector"),
    *("MooncakeStoreConnector", "LMCacheConnectorV1", "LMCacheMPConnector", "MoRIIOConnector"),
    *("OffloadingConnector", "SimpleCPUOffloadConnector", "FlexKVConnectorV1", "HF3FSKVConnector"),
    *("DecodeBenchConnector", "ExampleHiddenStatesConnector"),
)
"""Upstream's other connectors."""


class KVConnectorFactory:
    """Finds connector classes; a module is imported when its connector is first asked for."""

    _registry: ClassVar[dict[str, Callable[[], type[KVConnectorBase_V1]]]] = {}

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Make `class_name` of `module_path` known as `name`; ValueError if the name is taken."""
        if name in cls._registry:
            raise ValueError(f"Connector '{name}' is already registered.")
        cls._registry[name] = lambda: getattr(importlib.import_module(module_path), class_name)

    @classmethod
    def create_connector(
        cls, config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> KVConnectorBase_V1:
        """The configured connector for one side of the engine; ValueError if it can't serve it."""
        transfer = config.kv_transfer_config
        if transfer is None:
            raise ValueError("kv_transfer_config must be set to create a connector")
        connector_cls = cls.get_connector_class(transfer)
        if len(kv_cache_config.kv_cache_groups) > 1 and not cls.supports_hma_config(transfer):
            raise UserError(
                f"Connector {connector_cls.__name__} does not support HMA, the KV cache with "
                "several groups that this model has: set "
                "scheduler.disable_hybrid_kv_cache_manager=true."
            )
        logger.info("KV connector %s, engine %s", connector_cls.__name__, transfer.engine_id)
        return connector_cls(config, role, kv_cache_config)

    @classmethod
    def get_connector_class_by_name(cls, connector_name: str) -> type[KVConnectorBase_V1]:
        """The class known as `connector_name`; ValueError if there is none."""
        if connector_name not in cls._registry:
            raise ValueError(f"Connector '{connector_name}' is not registered.")
        return cls._registry[connector_name]()

    @classmethod
    def get_connector_class(cls, kv_transfer_config: KVTransferConfig) -> type[KVConnectorBase_V1]:
        """The class that a config names; ValueError if it can't be had."""
        name = kv_transfer_config.kv_connector
        if name is None:
            raise ValueError("Connector name is not set in KVTransferConfig")
        module_path = kv_transfer_config.kv_connector_module_path
        if module_path is not None:
            return _class_in_module(name, module_path)
        if name in cls._registry:
            return cls._registry[name]()
        known = ", ".join(sorted(cls._registry))
        if name in NOT_BUILT:
            raise UserError(
                f"kv_transfer.kv_connector={name} is not built into vllmx: choose one of {known}, "
                "or name a module that has one in kv_transfer.kv_connector_module_path."
            )
        raise UserError(f"Unsupported connector type: {name}; known are {known}.")

    @classmethod
    def supports_hma_config(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Whether the connector serves several KV groups; of several, whether each does."""
        connector_cls: Any = cls.get_connector_class(kv_transfer_config)
        if kv_transfer_config.kv_connector == "MultiConnector":
            return connector_cls.all_children_support_hma(kv_transfer_config)
        return supports_hma(connector_cls)


def _class_in_module(name: str, module_path: str) -> type[KVConnectorBase_V1]:
    if not module_path:
        raise ValueError("kv_connector_module_path cannot be an empty string.")
    module = importlib.import_module(module_path)
    connector_cls = getattr(module, name, None)
    if connector_cls is None:
        raise AttributeError(f"Class {name} not found in {module_path}")
    parameters = inspect.signature(connector_cls).parameters.values()
    if not any(p.name == "kv_cache_config" or p.kind is p.VAR_KEYWORD for p in parameters):
        raise ValueError(
            f"Connector {name} has the deprecated constructor with two arguments: take "
            "kv_cache_config as the third and pass it on to super().__init__()."
        )
    return connector_cls


KVConnectorFactory.register_connector(
    "ExampleConnector", "vllmx.kv_transfer.example_connector", "ExampleConnector"
)
KVConnectorFactory.register_connector(
    "MultiConnector", "vllmx.kv_transfer.multi_connector", "MultiConnector"
)

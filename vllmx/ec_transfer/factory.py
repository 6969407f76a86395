# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/distributed/ec_transfer/ec_connector/factory.py @ v0.25.0
"""Encoder-cache connectors by name. A connector's module is imported when it is asked for."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, ClassVar

from vllmx.ec_transfer.base import ECConnectorBase, ECConnectorRole
from vllmx.exceptions import UserError

if TYPE_CHECKING:
    from vllmx.config import ECTransferConfig, VllmConfig

logger = logging.getLogger(__name__)


class ECConnectorFactory:
    """Makes the connector that a config names."""

    _registry: ClassVar[dict[str, tuple[str, str]]] = {
        "ECExampleConnector": ("vllmx.ec_transfer.example_connector", "ECExampleConnector"),
    }

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Let `name` stand for a class of a module; ValueError if it stands for one already."""
        if name in cls._registry:
            raise ValueError(f"Connector '{name}' is already registered.")
        cls._registry[name] = (module_path, class_name)

    @classmethod
    def create_connector(cls, config: VllmConfig, role: ECConnectorRole) -> ECConnectorBase:
        """One half of the connector of `config.ec_transfer_config`."""
        if config.ec_transfer_config is None:
            raise ValueError("ec_transfer_config must be set to create a connector")
        connector_cls = cls.get_connector_class(config.ec_transfer_config)
        logger.info(
            "Encoder-cache connector %s, engine %s.",
            connector_cls.__name__,
            config.ec_transfer_config.engine_id,
        )
        return connector_cls(config, role)

    @classmethod
    def get_connector_class(cls, ec_transfer_config: ECTransferConfig) -> type[ECConnectorBase]:
        """The class of `ec_connector`, which is registered or in `ec_connector_module_path`."""
        name = ec_transfer_config.ec_connector
        if name is None:
            raise UserError("ec_transfer: ec_connector is not set; name a connector.")
        module_path, class_name = cls._registry.get(
            name, (ec_transfer_config.ec_connector_module_path, name)
        )
        if module_path is None:
            raise UserError(
                f"Unsupported connector type: {name}. There are {', '.join(sorted(cls._registry))};"
                " for a class of your own set ec_connector_module_path too."
            )
        connector_cls = getattr(importlib.import_module(module_path), class_name, None)
        if connector_cls is None:
            raise UserError(f"ec_transfer: module {module_path} has no class {class_name}.")
        return connector_cls

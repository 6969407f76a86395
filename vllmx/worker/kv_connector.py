# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/kv_connector.py @ v0.25.0
"""The worker's side of a KV connector, and where in a step it has its turns."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vllmx.config import VllmConfig
from vllmx.core.kv_cache_interface import KVCacheConfig
from vllmx.core.output import KVConnectorOutput, ModelRunnerOutput, SchedulerOutput
from vllmx.forward_context import ForwardContext, get_forward_context
from vllmx.kv_transfer.base import KVConnectorBase_V1, KVConnectorRole
from vllmx.kv_transfer.factory import KVConnectorFactory
from vllmx.layers.attention import Attention


class ActiveKVConnector:
    """What a model runner asks of the connector; without a connector there is no such object.

    The attention layers call the connector through hooks, which only exist with a connector too.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        layers: dict[str, Attention],
    ) -> None:
        """`layers` have their caches by now."""
        self.kv_connector: KVConnectorBase_V1 = KVConnectorFactory.create_connector(
            vllm_config, KVConnectorRole.WORKER, kv_cache_config
        )
        self.layers = layers
        self.kv_connector.register_kv_caches(
            {name: layer.kv_cache for name, layer in layers.items()}
        )
        for layer in layers.values():
            layer.register_forward_pre_hook(self._before_layer)
            layer.register_forward_hook(self._after_layer)

    def _before_layer(self, layer: nn.Module, inputs: Any) -> None:
        assert isinstance(layer, Attention)
        self.kv_connector.wait_for_layer_load(layer.layer_name)

    def _after_layer(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        assert isinstance(layer, Attention)
        metadata = get_forward_context().attn_metadata[layer.layer_name]
        self.kv_connector.save_kv_layer(layer.layer_name, layer.kv_cache, metadata)

    def pre_forward(
        self, scheduler_output: SchedulerOutput, forward_context: ForwardContext
    ) -> None:
        """Before the model: learn what is to be done, and begin to load."""
        metadata = scheduler_output.kv_connector_metadata
        assert metadata is not None, "the scheduler has no KV connector"
        self.kv_connector.handle_preemptions(metadata)
        self.kv_connector.bind_connector_metadata(metadata)
        forward_context.no_compile_layers = self.layers
        self.kv_connector.start_load_kv(forward_context)

    def post_forward(
        self, finished_req_ids: set[str], wait_for_save: bool = True
    ) -> KVConnectorOutput:
        """After the model: wait until the caches may be overwritten, and gather the reports."""
        connector = self.kv_connector
        if wait_for_save:
            connector.wait_for_save()
        sent, received = connector.get_finished(finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=sent,
            finished_recving=received,
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_cache_events=connector.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
        )
        connector.clear_connector_metadata()
        return output

    def no_forward(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """A step without tokens: transfers go on."""
        self.pre_forward(scheduler_output, ForwardContext())
        output = self.post_forward(scheduler_output.finished_req_ids, wait_for_save=False)
        return ModelRunnerOutput.with_kv_conn_output_only(output)

    def shutdown(self) -> None:
        """Finish what is under way."""
        self.kv_connector.shutdown()

# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu_worker.py @ v0.25.0
"""The worker: one device, its memory, and the model runner on it."""

from __future__ import annotations

import logging
import weakref

import torch

from vllmx.config import VllmConfig
from vllmx.core.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllmx.core.output import (
    AsyncModelRunnerOutput,
    GrammarOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from vllmx.exceptions import UserError
from vllmx.gc_utils import freeze_gc_heap, unfreeze_gc_heap
from vllmx.kv_transfer.base import KVConnectorHandshakeMetadata
from vllmx.platform import available_memory, num_threads, resolve_device, resolve_dtype
from vllmx.worker.model_runner import GPUModelRunner

logger = logging.getLogger(__name__)

CPU_CACHE_BYTES = 4 << 30
"""Most that the cache takes on a CPU unless cache.kv_cache_memory_bytes says otherwise."""


class Worker:
    """Owns the device. The executor calls it; it calls the runner."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.device: str
        self.model_runner: GPUModelRunner
        # For engines that nobody shuts down, too: Python does not tear down what is frozen when it
        # ends, and libraries that count their objects then print pages of leaks.
        self._unfreeze = weakref.finalize(self, unfreeze_gc_heap)

    def init_device(self) -> None:
        """Choose device and dtype, and set the number of threads on a CPU."""
        self.device = resolve_device(self.vllm_config.device_config)
        if self.device == "cpu":
            torch.set_num_threads(num_threads(self.vllm_config.device_config))
        scheduler_config = self.vllm_config.scheduler_config
        if scheduler_config.async_scheduling is None and scheduler_config.scheduler_cls is None:
            # A CPU runs the model on the very cores that would schedule meanwhile.
            scheduler_config.async_scheduling = self.device == "cuda"
        dtype = resolve_dtype(self.vllm_config, self.device)
        self.model_runner = GPUModelRunner(self.vllm_config, self.device, dtype)
        logger.info("device %s, activations in %s", self.device, dtype)

    def load_model(self) -> None:
        """Load the weights."""
        self.model_runner.load_model()
        if self.vllm_config.kernel_config.default_priority:
            ops = self.model_runner.ops
            serving = ", ".join(sorted({choice.provider for choice in ops.choices.values()}))
            for provider, reason in ops.idle_providers().items():
                logger.warning(
                    "kernel.default_priority: %s serves no op: %s. Served by: %s; kernel=auto "
                    "takes the best for each op.",
                    *(provider, reason, serving),
                )

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """What each layer keeps, by layer name."""
        return self.model_runner.get_kv_cache_spec()

    def determine_available_memory(self) -> int:
        """Bytes for the cache: as configured, else what the device has left."""
        config = self.vllm_config.cache_config
        if config.kv_cache_memory_bytes is not None:
            return config.kv_cache_memory_bytes
        free = available_memory(self.device)
        share = int(free * config.gpu_memory_utilization)
        if self.device == "cpu":
            return min(share, CPU_CACHE_BYTES)
        used = torch.cuda.memory_reserved()
        share = int((free + used) * config.gpu_memory_utilization) - used
        if share <= 0:
            raise UserError(
                f"cache.gpu_memory_utilization={config.gpu_memory_utilization} leaves no memory "
                "for the cache after the weights: raise it or take a smaller model."
            )
        return share

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the cache."""
        self.model_runner.initialize_kv_cache(kv_cache_config)

    def compile_or_warm_up_model(self) -> None:
        """Capture CUDA graphs on a GPU; there is nothing to compile on a CPU."""
        self.model_runner.capture_model()
        freeze_gc_heap()

    def get_kv_connector_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What other engines' workers must know of this one to exchange KV entries."""
        if self.model_runner.kv_connector is None:
            return None
        return self.model_runner.kv_connector.kv_connector.get_handshake_metadata()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """See GPUModelRunner.execute_model."""
        return self.model_runner.execute_model(scheduler_output)

    def sample_tokens(
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """See GPUModelRunner.sample_tokens."""
        return self.model_runner.sample_tokens(grammar_output)

    def forget_requests(self) -> None:
        """Drop all requests, after an interrupted step."""
        self.model_runner.forget_requests()

    def shutdown(self) -> None:
        """Let go of weights and cache."""
        if self.model_runner.kv_connector is not None:
            self.model_runner.kv_connector.shutdown()
        self.model_runner.model = None
        self._unfreeze()

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
from vllmx.gc_utils import freeze_gc_heap, unfreeze_gc_heap
from vllmx.kv_transfer.base import KVConnectorHandshakeMetadata
from vllmx.platform import available_memory, has, num_threads, resolve_device, resolve_dtype
from vllmx.worker.device_memory import (
    CudaMemory,
    DeviceMemory,
    MemoryProfile,
    MemorySnapshot,
    check_profile,
    explained,
    request_memory,
)
from vllmx.worker.model_runner import GPUModelRunner
from vllmx.worker.profile_run import compile_kernels, profile_run

logger = logging.getLogger(__name__)

CPU_CACHE_BYTES = 4 << 30
"""Most that the cache takes on a CPU unless cache.kv_cache_memory_bytes says otherwise."""


class Worker:
    """Owns the device. The executor calls it; it calls the runner."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.device: str
        self.model_runner: GPUModelRunner
        # Of a GPU: where its readings come from, and those before anything was loaded.
        self.memory: DeviceMemory | None = None
        self.init_snapshot: MemorySnapshot
        self.requested_memory = 0
        self.weights_memory = 0
        self.memory_profile: MemoryProfile | None = None
        self.graphs_memory = 0
        # For engines that nobody shuts down, too: Python does not tear down what is frozen when it
        # ends, and libraries that count their objects then print pages of leaks.
        self._unfreeze = weakref.finalize(self, unfreeze_gc_heap)

    def init_device(self) -> None:
        """Choose device and dtype, and set the number of threads on a CPU."""
        self.device = resolve_device(self.vllm_config.device_config)
        if self.device == "cpu":
            torch.set_num_threads(num_threads(self.vllm_config.device_config))
        else:
            self.start_measuring(CudaMemory())
        scheduler_config = self.vllm_config.scheduler_config
        if scheduler_config.async_scheduling is None and scheduler_config.scheduler_cls is None:
            # A CPU runs the model on the very cores that would schedule meanwhile.
            scheduler_config.async_scheduling = self.device == "cuda"
        dtype = resolve_dtype(self.vllm_config, self.device)
        self.model_runner = GPUModelRunner(self.vllm_config, self.device, dtype)
        logger.info("device %s, activations in %s", self.device, dtype)

    def start_measuring(self, memory: DeviceMemory) -> None:
        """Note what the device has before anything is loaded; UserError if that is too little."""
        self.memory = memory
        memory.release()
        self.init_snapshot = memory.snapshot()
        config = self.vllm_config.cache_config
        if config.kv_cache_memory_bytes is None:
            self.requested_memory = request_memory(
                memory, self.init_snapshot, config.gpu_memory_utilization
            )

    def load_model(self) -> None:
        """Load the weights."""
        with explained("loading the weights", self.vllm_config, self.memory):
            self.model_runner.load_model()
        if self.memory is not None:
            self.weights_memory = self.memory.snapshot().allocated - self.init_snapshot.allocated
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
        """Bytes for the cache: as configured, else what the device has left.

        On a GPU the largest step is run first, by what it takes: see `profile_memory`.
        """
        config = self.vllm_config.cache_config
        if self.memory is not None:
            self.memory_profile = self.profile_memory(self.memory)
        if config.kv_cache_memory_bytes is not None:
            return config.kv_cache_memory_bytes
        if self.memory is None:
            share = int(available_memory(self.device) * config.gpu_memory_utilization)
            return min(share, CPU_CACHE_BYTES)
        assert self.memory_profile is not None
        return check_profile(self.memory_profile, self.memory, self.vllm_config)

    def profile_memory(self, memory: DeviceMemory) -> MemoryProfile:
        """Run the largest step, capture a few CUDA graphs, and say where the memory went."""
        runner, start = self.model_runner, self.init_snapshot
        if self.device == "cuda" and has("triton"):
            with explained("compiling kernels", self.vllm_config, memory):
                compile_kernels(runner, num_threads(self.vllm_config.device_config))
        memory.release()
        memory.reset_peak()
        before = memory.snapshot()
        with explained("running the largest step", self.vllm_config, memory):
            profile_run(runner)
            peak = memory.snapshot().torch_peak
        with explained("capturing CUDA graphs", self.vllm_config, memory):
            graphs = runner.profile_cudagraph_memory()
        runner.release_kv_cache()
        memory.release()
        after = memory.snapshot()
        return MemoryProfile(
            requested=self.requested_memory,
            weights=self.weights_memory,
            activations=peak - before.allocated,
            non_torch=max(after.non_torch_memory - start.non_torch_memory, 0),
            graphs=graphs,
            free_before=start.free_memory,
            free_after=after.free_memory,
            is_unified=memory.is_unified,
        )

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the cache."""
        with explained("allocating the KV cache", self.vllm_config, self.memory):
            self.model_runner.initialize_kv_cache(kv_cache_config)

    def compile_or_warm_up_model(self) -> None:
        """Capture CUDA graphs on a GPU; there is nothing to compile on a CPU."""
        with explained("capturing CUDA graphs", self.vllm_config, self.memory):
            self.graphs_memory = self.model_runner.capture_model()
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

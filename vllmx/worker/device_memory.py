# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/utils/mem_utils.py, vllm/v1/worker/utils.py (request_memory) @ v0.25.0
"""What a GPU's memory is read as, and what follows from it: how much of it is the KV cache's.

Everything that asks the device is in `CudaMemory`; the rest is arithmetic on its readings.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Protocol

import torch

from vllmx.config import VllmConfig
from vllmx.exceptions import UserError
from vllmx.platform import available_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemorySnapshot:
    """Bytes at one moment. free, total: of the device, whoever uses it; torch_memory: what torch
    has taken from the device; allocated: what of that is in use; torch_peak: the most that was
    in use since the last `reset_peak`."""

    free_memory: int
    total_memory: int
    torch_memory: int = 0
    allocated: int = 0
    torch_peak: int = 0

    @property
    def non_torch_memory(self) -> int:
        """What is in use beside torch's: other processes, contexts, libraries, graphs."""
        return self.total_memory - self.free_memory - self.torch_memory


class DeviceMemory(Protocol):
    """Where readings come from. is_unified: the device's memory is the system's."""

    name: str
    is_unified: bool

    def snapshot(self) -> MemorySnapshot:
        """The readings of now."""

    def reset_peak(self) -> None:
        """Begin to measure torch's peak anew."""

    def release(self) -> None:
        """Give back what torch holds and nobody uses."""


class CudaMemory:
    """The readings of the current CUDA device."""

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.name = properties.name
        self.is_unified = bool(getattr(properties, "is_integrated", False))

    def snapshot(self) -> MemorySnapshot:
        """See DeviceMemory.snapshot."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        if self.is_unified:
            # The driver counts the system's caches of files as used; they can be dropped.
            free = available_memory("cpu")
        stats = torch.cuda.memory_stats()
        return MemorySnapshot(
            free_memory=free,
            total_memory=total,
            torch_memory=torch.cuda.memory_reserved(),
            allocated=stats.get("allocated_bytes.all.current", 0),
            torch_peak=stats.get("allocated_bytes.all.peak", 0),
        )

    def reset_peak(self) -> None:
        """See DeviceMemory.reset_peak."""
        torch.cuda.reset_peak_memory_stats()

    def release(self) -> None:
        """See DeviceMemory.release."""
        gc.collect()
        torch.cuda.empty_cache()


def format_gib(num_bytes: float) -> str:
    """Bytes in GiB, as in messages."""
    return f"{num_bytes / 2**30:.2f}"


def request_memory(memory: DeviceMemory, start: MemorySnapshot, utilization: float) -> int:
    """Bytes that the engine may use at all; UserError if the device has less than that to give.

    start: the readings before anything was loaded. A share of the device's memory or, where that
    is the system's, of what is free of it: what others use there can't be pushed out.
    """
    if memory.is_unified:
        return int(start.free_memory * utilization)
    requested = math.ceil(start.total_memory * utilization)
    if start.free_memory < requested:
        raise UserError(
            f"Free memory on device {memory.name} ({format_gib(start.free_memory)}/"
            f"{format_gib(start.total_memory)} GiB) on startup is less than desired GPU memory "
            f"utilization (cache.gpu_memory_utilization={utilization}, {format_gib(requested)} "
            "GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
        )
    return requested


@dataclass(frozen=True)
class MemoryProfile:
    """Where the memory of a GPU goes, in bytes.

    requested: what the engine may use; weights; activations: the most that the largest step
    takes beside them, with the runner's own tables; non_torch: libraries and contexts since the
    start; graphs: what the CUDA graphs will take; free_after: what the device has left after the
    largest step, of free_before at the start.
    """

    requested: int
    weights: int
    activations: int
    non_torch: int
    graphs: int
    free_before: int
    free_after: int
    is_unified: bool = False

    @property
    def kv_cache(self) -> int:
        """What is left for the KV cache; may be negative."""
        used = self.weights + self.activations + self.non_torch + self.graphs
        left = self.requested - used
        if not self.is_unified:
            return left
        # Others may have taken memory meanwhile, and what they need is the system's, too.
        spared = self.free_before - self.requested
        return min(left, self.free_after - self.activations - self.graphs - spared)

    def __str__(self) -> str:
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        del parts["is_unified"]
        named = ", ".join(f"{name} {format_gib(size)}" for name, size in parts.items())
        return f"{named}, kv_cache {format_gib(self.kv_cache)} GiB"


def check_profile(profile: MemoryProfile, memory: DeviceMemory, vllm_config: VllmConfig) -> int:
    """Bytes for the KV cache; UserError if there are none, with what may be lowered."""
    if not memory.is_unified and profile.free_after > profile.free_before:
        raise UserError(
            f"The free memory of {memory.name} grew from {format_gib(profile.free_before)} to "
            f"{format_gib(profile.free_after)} GiB while the engine measured its own use, so "
            "another process gave memory back: start again when it has ended, or set "
            "cache.kv_cache_memory_bytes."
        )
    if profile.kv_cache <= 0:
        raise UserError(
            "No memory is left for the KV cache: of "
            f"{format_gib(profile.requested)} GiB (cache.gpu_memory_utilization="
            f"{vllm_config.cache_config.gpu_memory_utilization} of {memory.name}) the weights "
            f"take {format_gib(profile.weights)}, the largest step "
            f"{format_gib(profile.activations)}, CUDA graphs {format_gib(profile.graphs)} and "
            f"libraries {format_gib(profile.non_torch)}. {what_to_lower(vllm_config)} Or raise "
            "cache.gpu_memory_utilization."
        )
    logger.info("GPU memory in GiB: %s", profile)
    return profile.kv_cache


def what_to_lower(vllm_config: VllmConfig) -> str:
    """The settings that make a step smaller, with their values."""
    scheduler = vllm_config.scheduler_config
    return (
        f"Lower scheduler.max_num_batched_tokens (now {scheduler.max_num_batched_tokens}), "
        f"scheduler.max_num_seqs ({scheduler.max_num_seqs}) or model.max_model_len "
        f"({vllm_config.model_config.max_model_len})."
    )


CURES = {
    "loading the weights": (
        "Free memory that other processes use, or take a smaller or quantised model."
    ),
    "compiling kernels": "{lower}",
    "running the largest step": "{lower}",
    "allocating the KV cache": (
        "Lower cache.gpu_memory_utilization (now {utilization}), or cache.kv_cache_memory_bytes "
        "({kv_cache_memory_bytes}) if that is set."
    ),
    "capturing CUDA graphs": (
        "Lower cache.gpu_memory_utilization (now {utilization}) or scheduler.max_num_seqs "
        "({max_num_seqs}), or set compilation.cudagraph_mode=NONE."
    ),
}
"""What a start may run out of memory at, and what helps."""


@contextmanager
def explained(stage: str, vllm_config: VllmConfig, memory: DeviceMemory | None) -> Iterator[None]:
    """Turn torch's out-of-memory error of `stage`, one of CURES, into a UserError with figures."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        cache = vllm_config.cache_config
        cure = CURES[stage].format(
            lower=what_to_lower(vllm_config),
            utilization=cache.gpu_memory_utilization,
            kv_cache_memory_bytes=cache.kv_cache_memory_bytes,
            max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        )
        figures = ""
        if memory is not None:
            now = memory.snapshot()
            figures = (
                f" {memory.name} has {format_gib(now.free_memory)} of "
                f"{format_gib(now.total_memory)} GiB free, torch uses {format_gib(now.allocated)}."
            )
        raise UserError(f"Out of GPU memory while {stage}.{figures} {cure}") from error

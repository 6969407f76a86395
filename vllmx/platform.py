# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/platforms/{cpu,cuda}.py @ v0.25.0
"""What the process finds outside itself: devices, memory, packages, environment variables."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from vllmx import cgroup
from vllmx.exceptions import UserError

if TYPE_CHECKING:
    import torch

    from vllmx.config import DeviceConfig, VllmConfig


def hash_seed() -> str | None:
    """PYTHONHASHSEED as it was set, or None."""
    return os.environ.get("PYTHONHASHSEED")


def plugins_of_upstream() -> str | None:
    """VLLM_PLUGINS, upstream's list of plugins, as it was set, or None; it is only warned of."""
    return os.environ.get("VLLM_PLUGINS")


KERNEL_CACHE = "~/.cache/vllmx/kernels"
"""Where measured times of kernels are kept unless kernel.cache_dir says otherwise."""


def kernel_cache_dir(cache_dir: str | None) -> Path:
    """The folder of measured times, for `kernel.cache_dir`."""
    return Path(cache_dir or KERNEL_CACHE).expanduser()


def has(package: str) -> bool:
    """Whether `package` can be imported; it is not."""
    return importlib.util.find_spec(package) is not None


def has_nvcc() -> bool:
    """Whether CUDA's compiler is there: on the PATH or in CUDA_HOME."""
    home = os.environ.get("CUDA_HOME")
    return bool(shutil.which("nvcc") or (home and (Path(home) / "bin" / "nvcc").is_file()))


def resolve_device(device_config: DeviceConfig) -> str:
    """The device type to run on; UserError where a GPU is asked for and there is none."""
    import torch

    if device_config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device_config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device.device=cuda: torch finds no GPU here; use device=cpu.")
    return device_config.device


def num_threads(device_config: DeviceConfig, root: Path = cgroup.ROOT) -> int:
    """Threads for CPU ops: as configured, else the cores that this process may use.

    `root`: where /proc and /sys are looked for.
    """
    if device_config.num_threads is not None:
        return device_config.num_threads
    cores = len(os.sched_getaffinity(0))
    limit = cgroup.cpu_limit(root)
    return cores if limit is None else min(cores, limit)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name`, such as "float32"."""
    import torch

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


FP8_CACHE_DTYPES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def resolve_kv_cache_dtype(cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype that keys and values are stored in, for `cache.cache_dtype` and activations."""
    if cache_dtype == "auto":
        return dtype
    return torch_dtype(FP8_CACHE_DTYPES.get(cache_dtype, cache_dtype))


def resolve_dtype(vllm_config: VllmConfig, device: str) -> torch.dtype:
    """The activation dtype: as configured; auto is float32 on a CPU, else the checkpoint's.

    A CPU without AVX-512 multiplies bfloat16 far slower than float32. float32 checkpoints run in
    bfloat16 on a GPU, as upstream does.
    """
    model_config = vllm_config.model_config
    if model_config.dtype != "auto":
        return torch_dtype(model_config.dtype)
    if device == "cpu":
        return torch_dtype("float32")
    stored = model_config.hf_text_config.dtype or "bfloat16"
    return torch_dtype("bfloat16" if stored == "float32" else stored)


def available_memory(device: str, root: Path = cgroup.ROOT) -> int:
    """Bytes that a process could still take on `device`.

    `root`: where /proc and /sys are looked for.
    """
    if device == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0]
    with open(root / "proc/meminfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
                limit = cgroup.free_memory(root)
                return available if limit is None else min(available, limit)
    raise UserError(
        "This system does not say how much memory is free: set cache.kv_cache_memory_bytes."
    )


def child_environment(**variables: str) -> dict[str, str]:
    """The environment of a process that is started from here, with some variables set anew."""
    return {**os.environ, **variables}

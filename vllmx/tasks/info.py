# SPDX-License-Identifier: Apache-2.0
"""`vllmx info [MODEL]`: versions, device, memory, how the weights lie in memory, op providers."""

from __future__ import annotations

import platform as system
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from vllmx.config import RunConfig, VllmConfig, finalize

if TYPE_CHECKING:
    from vllmx.ir.select import OpChoice

PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "hydra-core", "fastapi", "triton")


def run(config: RunConfig, started: float) -> int:
    """Print what this installation, and the engine of `config` if it names a model, would use."""
    vllm_config = finalize(config)
    for line in versions():
        print(line)
    if config.model.model or config.model.source is not None:
        choices = _show_model(vllm_config)
    else:
        choices = {}
        _show_device(vllm_config)
        print("ops of a dense layer whose weights each provider holds; a model's: vllmx info MODEL")
    invariant = vllm_config.kernel_config.batch_invariant
    print(f"batch_invariant: {'on' if invariant else 'off'} (kernel.batch_invariant)")
    for choice in _all_choices(vllm_config, choices):
        print(f"op {choice.op}: {choice.provider}")
        print(f"    by {choice.because}")
        for provider, reason in choice.refused.items():
            print(f"    not {provider}: {reason}")
    print(f"sampler: {_sampler_provider(vllm_config)}")
    return 0


def _sampler_provider(vllm_config: VllmConfig) -> str:
    from vllmx.platform import resolve_device
    from vllmx.sample.ops import get_sampler_ops

    device, kernels = resolve_device(vllm_config.device_config), vllm_config.kernel_config
    priority = kernels.default_priority
    return get_sampler_ops(device, kernels.batch_invariant, priority=priority).provider


def versions() -> Iterator[str]:
    """A line for vllmx, Python and each package that matters."""
    yield f"vllmx {version('vllmx')}"
    yield f"python {system.python_version()} on {system.system()} {system.machine()}"
    for package in PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            yield f"{package}: not installed"


def _show_device(vllm_config: VllmConfig) -> None:
    from vllmx.platform import available_memory, num_threads, resolve_device

    device = resolve_device(vllm_config.device_config)
    words = f"device {device}"
    if device == "cpu":
        words += f", {num_threads(vllm_config.device_config)} threads"
    else:
        import torch

        words += f", {torch.cuda.get_device_name()}"
    print(f"{words}, {available_memory(device) / 2**30:.1f} GiB free")


def _show_model(vllm_config: VllmConfig) -> dict[str, OpChoice]:
    """Load the weights, say how they lie in memory, and return the providers the model bound."""
    from vllmx.layers.vocab_parallel_embedding import weight_formats
    from vllmx.model_loader.resolve import resolve_model
    from vllmx.worker.gpu_worker import Worker

    resolve_model(vllm_config)
    _show_device(vllm_config)
    worker = Worker(vllm_config)
    worker.init_device()
    runner = worker.model_runner
    try:
        worker.load_model()
        formats = weight_formats(runner.model)
    finally:
        worker.shutdown()
    config = vllm_config.model_config
    print(f"model {config.model}")
    print(f"    architecture {', '.join(config.hf_config.architectures)}")
    print(f"    max_model_len {config.max_model_len}, activations in {runner.ops.dtype}")
    for name, (layers, nbytes) in formats.items():
        print(f"    weights of {layers} layers: {name}, {nbytes / 2**20:.1f} MiB")
    return runner.ops.choices


def _all_choices(vllm_config: VllmConfig, bound: dict[str, OpChoice]) -> list[OpChoice]:
    """The choice for every op: those of the model, and what a dense float layer would get."""
    from vllmx.ir.select import explain
    from vllmx.platform import resolve_device, torch_dtype

    device = resolve_device(vllm_config.device_config)
    name = vllm_config.model_config.dtype
    if name == "auto":
        name = "float32" if device == "cpu" else "bfloat16"
    dtype = torch_dtype({"half": "float16", "float": "float32"}.get(name, name))
    return [bound.get(c.op, c) for c in explain(vllm_config.kernel_config, device, dtype)]

# SPDX-License-Identifier: Apache-2.0
"""A GPU's way through the model runner where there is no GPU: its kernels are interpreted, and a
graph runs its step again."""

import torch
from checkpoints import build_engine

from vllmx import LLM
from vllmx.worker import cudagraph_utils, gpu_steps


class Event:
    """Everything has happened by the time it is asked for."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class ReplayedStep:
    """A graph that runs its step again."""

    def __init__(self, manager: cudagraph_utils.ModelCudaGraphManager, size: int) -> None:
        self.manager, self.size = manager, size
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        with torch.inference_mode():
            self.manager.hidden_states[self.size] = self.manager.decode_step(self.size)


def runner_of(llm: LLM):
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner


def on_a_gpu(monkeypatch, folder, sizes: list[int], **kwargs) -> LLM:
    """An engine whose runner takes the GPU's way, with a 'graph' for each of `sizes`."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    # It reads its lengths when it runs, as a kernel does.
    llm = build_engine(folder, attention_backend="torch", **kwargs)
    runner = runner_of(llm)
    runner.gpu_steps = steps = gpu_steps.GPUSteps(runner)
    manager = steps.cudagraph_manager
    manager.sizes = sizes
    manager.graphs = {size: ReplayedStep(manager, size) for size in sizes}
    return llm

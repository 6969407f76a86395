# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/executor/abstract.py, vllm/v1/executor/uniproc_executor.py @ v0.25.0
"""How the engine core reaches the workers that hold the model."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllmx.exceptions import UserError
from vllmx.kernels.native_library import start_build

if TYPE_CHECKING:
    from vllmx.config import VllmConfig
    from vllmx.core.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllmx.core.output import (
        DraftTokenIds,
        GrammarOutput,
        ModelRunnerOutput,
        SchedulerOutput,
    )

DEFAULT_WORKER_CLS = "vllmx.worker.gpu_worker.Worker"


def resolve_obj_by_qualname(qualname: str, option: str) -> Any:
    """Import `package.module.Name`; UserError naming `option`, where it was given, if it can't be.

    Follows upstream vllm/utils/import_utils.py.
    """
    module_name, _, name = qualname.rpartition(".")
    if not module_name:
        raise UserError(f"{option}={qualname!r}: give the dotted name, package.module.Class.")
    try:
        return getattr(importlib.import_module(module_name), name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise  # a dependency of that module is missing
        raise UserError(f"{option}={qualname!r}: there is no module {error.name}.") from error
    except AttributeError as error:
        raise UserError(f"{option}={qualname!r}: {module_name} has no {name}.") from error


def check_worker(worker: Any, vllm_config: VllmConfig) -> None:
    """UserError for a setting that `worker` has no method to follow."""
    name = type(worker).__name__
    if vllm_config.speculative_config is not None and not hasattr(worker, "take_draft_token_ids"):
        raise UserError(
            f"speculative.num_speculative_tokens={vllm_config.num_speculative_tokens}: {name} "
            "cannot draft tokens; leave speculative_config unset."
        )
    if vllm_config.lora_config is not None and not hasattr(worker, "add_lora"):
        raise UserError(f"lora.enable_lora=true: {name} cannot apply adapters; leave it unset.")


class Executor(ABC):
    """Runs the model on one device or many; hides which from the engine core."""

    @staticmethod
    def get_class(vllm_config: VllmConfig) -> type[Executor]:
        """The executor that `parallel_config.distributed_executor_backend` asks for."""
        backend = vllm_config.parallel_config.distributed_executor_backend
        if backend in (None, "uni"):
            return UniProcExecutor
        raise UserError(f"parallel.distributed_executor_backend={backend!r}: only uni is built.")

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Start the workers and load the model."""
        self.vllm_config = vllm_config
        self._init_executor()

    @abstractmethod
    def _init_executor(self) -> None: ...

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker by name, or a function on every worker; all results."""

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """What each worker's layers keep in the KV cache, by layer name."""
        return self.collective_rpc("get_kv_cache_spec")

    def determine_available_memory(self) -> list[int]:
        """Bytes that each worker has left for the KV cache."""
        return self.collective_rpc("determine_available_memory")

    @abstractmethod
    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Allocate the KV cache, one config a worker, and warm the model up."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the model on one step; None if `sample_tokens` has to follow."""
        return self.collective_rpc("execute_model", args=(scheduler_output,))[0]

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample the tokens of the step that was executed last."""
        return self.collective_rpc("sample_tokens", args=(grammar_output,))[0]

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The drafts that followed the step that was sampled last; None if there are none."""
        return self.collective_rpc("take_draft_token_ids")[0]

    def check_health(self) -> None:
        """Raise if a worker cannot serve any more."""
        self.collective_rpc("check_health")

    def shutdown(self) -> None:
        """Stop the workers and free what they hold."""
        self.collective_rpc("shutdown")


class UniProcExecutor(Executor):
    """One worker in this process: its methods are called directly, with no hop between."""

    def _init_executor(self) -> None:
        worker_cls: Any = self.vllm_config.parallel_config.worker_cls
        if isinstance(worker_cls, str):
            name = DEFAULT_WORKER_CLS if worker_cls == "auto" else worker_cls
            if name == DEFAULT_WORKER_CLS and self.vllm_config.device_config.device != "cuda":
                start_build()  # beside the import of torch, which takes longer
            worker_cls = resolve_obj_by_qualname(name, "parallel.worker_cls")
        self.driver_worker = worker_cls(self.vllm_config)
        check_worker(self.driver_worker, self.vllm_config)
        self.driver_worker.init_device()
        self.driver_worker.load_model()
        self.execute_model = self.driver_worker.execute_model  # type: ignore[method-assign]
        self.sample_tokens = self.driver_worker.sample_tokens  # type: ignore[method-assign]

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call the worker; `timeout` is for executors that wait for another process."""
        if isinstance(method, str):
            return [getattr(self.driver_worker, method)(*args, **(kwargs or {}))]
        return [method(self.driver_worker, *args, **(kwargs or {}))]

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Allocate the KV cache and warm the model up."""
        self.driver_worker.initialize_from_config(kv_cache_configs[0])
        self.driver_worker.compile_or_warm_up_model()

    def check_health(self) -> None:
        """Nothing to check: a fault of this worker is raised by the call that meets it."""

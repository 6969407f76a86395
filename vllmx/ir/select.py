# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/ir/op.py (priorities) @ v0.25.0
"""Choose a provider for each op once, when the engine is built, and say why."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vllmx import kernels
from vllmx.attention.selector import all_backends
from vllmx.config import KernelConfig
from vllmx.exceptions import UserError
from vllmx.ir import measured
from vllmx.ir import ops as ir_ops
from vllmx.ir.op import REFERENCE, IrOp, IrOpImpl, OpContext
from vllmx.platform import kernel_cache_dir

DEVICE_PRIORITY = {
    "cpu": ["native", "fbgemm", "cpu", "sdpa", REFERENCE],
    "cuda": ["triton", "sdpa", REFERENCE],
}
"""Providers tried where the config names none."""
INVARIANT_PRIORITY = {
    "cpu": ["native", "fbgemm", REFERENCE],
    "cuda": ["triton", "triton_fixed", REFERENCE],
}
"""The same with kernel.batch_invariant."""


NOBODY = "none"
"""The provider of an op that none takes."""


@dataclass
class OpChoice:
    """The provider chosen for an op, NOBODY if none, and why each other one was passed over.

    because: what it was chosen by, in words.
    """

    op: str
    provider: str
    refused: dict[str, str] = field(default_factory=dict)
    because: str = ""


def load_ops() -> dict[str, IrOp]:
    """Import every op, provider and backend; one that lacks its library registers a reason."""
    for package in (ir_ops, kernels):
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
    all_backends()
    return IrOp.registry


class OpTable:
    """Binds ops for one engine: one kernel config, one device, one activation dtype."""

    def __init__(self, kernel_config: KernelConfig, device: str, dtype: torch.dtype) -> None:
        self.registry = load_ops()
        self.device = device
        self.dtype = dtype
        self.explicit = kernel_config.ir_op_priority
        self.batch_invariant = kernel_config.batch_invariant
        priority = INVARIANT_PRIORITY if self.batch_invariant else DEVICE_PRIORITY
        self.default = kernel_config.default_priority or priority[device]
        by_times = not kernel_config.default_priority and not self.batch_invariant
        self.measured = measured.Measured()
        if by_times:
            self.measured = measured.load(device, kernel_cache_dir(kernel_config.cache_dir))
        self._listed_by = "kernel.default_priority"
        if not kernel_config.default_priority:
            self._listed_by = f"the list for {device}; `vllmx bench kernels` measures"
        self.choices: dict[str, OpChoice] = {}
        self.shared: dict[Any, Any] = {}
        """Tables that several layers use, such as rotary angles, by what they depend on."""
        self._check_names()

    def bind(self, op_name: str, **facts: Any) -> Callable[..., Any]:
        """The chosen function of an op without static arguments; raises as `choose` does."""
        return self.choose(op_name, **facts).fn

    def choose(self, op_name: str, **facts: Any) -> IrOpImpl:
        """The chosen provider of `op_name` for calls with these static facts.

        A provider named for this op in `kernel.ir_op_priority` that refuses raises UserError; one
        of the default list is passed over and its reason kept in `choices`.
        """
        op = self.registry[op_name]
        context = OpContext(self.device, self.dtype, facts)
        refused: dict[str, str] = {}
        chosen: IrOpImpl | None = None
        wanted = self.explicit.get(op_name)
        scores = self.measured.scores(op_name, self.dtype, facts)
        for provider in wanted or self._in_order(scores):
            impl = op.impls.get(provider)
            if impl is None or provider in refused:
                continue
            reason = self._refusal(impl, context)
            if reason is None:
                chosen = impl
                break
            if wanted:
                raise UserError(
                    f"kernel.ir_op_priority.{op_name}: provider {provider} cannot be used: {reason}"
                )
            refused[provider] = reason
        name = NOBODY if chosen is None else chosen.provider
        for provider, impl in op.impls.items():
            if provider != name and provider not in refused:
                reason = self._refusal(impl, context)
                refused[provider] = reason or "not first in the priority list"
        because = self._listed_by
        if wanted:
            because = f"kernel.ir_op_priority.{op_name}"
        elif scores:
            because = f"measured for {measured.shape_class(facts)}: {measured.in_words(scores)}"
        self.choices.setdefault(op_name, OpChoice(op_name, name, refused, because))
        if chosen is None:
            reasons = "; ".join(f"{provider}: {why}" for provider, why in refused.items())
            raise UserError(f"op {op_name}: no provider takes it on {self.device}: {reasons}.")
        return self._in_this_mode(chosen)

    def _in_order(self, scores: dict[str, float]) -> list[str]:
        """Providers to try, the device's or the config's list put in order by their times."""
        return measured.in_order(list(dict.fromkeys([*self.default, REFERENCE])), scores)

    def reference(self, op_name: str) -> IrOpImpl:
        """The op's own definition, in the form that it has with kernel.batch_invariant if set."""
        return self._in_this_mode(self.registry[op_name].impls[REFERENCE])

    def _in_this_mode(self, impl: IrOpImpl) -> IrOpImpl:
        if not self.batch_invariant or impl.invariant_fn is None:
            return impl
        return replace(impl, fn=impl.invariant_fn)

    def _refusal(self, impl: IrOpImpl, context: OpContext) -> str | None:
        reason = impl.refusal(context)
        if reason is None and self.batch_invariant and self.device not in impl.batch_invariant:
            return (
                "what it gives for a row depends on the other rows, which kernel.batch_invariant "
                "rules out"
            )
        return reason

    def choose_attention(self, backend: str | None, **facts: Any) -> IrOpImpl:
        """The provider of `paged_attention` for a layer; `backend` names it, if given."""
        impls = self.registry["paged_attention"].impls
        if backend is None:
            return self.choose("paged_attention", **facts)
        if backend not in impls:
            raise UserError(f"attention.backend={backend!r}: choose one of {', '.join(impls)}.")
        reason = self._refusal(impls[backend], OpContext(self.device, self.dtype, facts))
        if reason is not None:
            raise UserError(f"attention.backend={backend}: it cannot be used: {reason}.")
        others = {name: f"attention.backend={backend}" for name in impls if name != backend}
        choice = OpChoice("paged_attention", backend, others, f"attention.backend={backend}")
        self.choices.setdefault("paged_attention", choice)
        return self._in_this_mode(impls[backend])

    def idle_providers(self) -> dict[str, str]:
        """Providers that the config's default list puts first but no op could use, and why."""
        serving = {choice.provider for choice in self.choices.values()}
        idle: dict[str, str] = {}
        for choice in self.choices.values():
            for provider in self.default:
                if provider not in serving and provider in choice.refused:
                    idle.setdefault(provider, choice.refused[provider])
        return idle

    def _check_names(self) -> None:
        known = {provider for op in self.registry.values() for provider in op.impls}
        for op_name, providers in self.explicit.items():
            if op_name not in self.registry:
                raise UserError(
                    f"kernel.ir_op_priority.{op_name}: no such op; "
                    f"the ops are {', '.join(sorted(self.registry))}."
                )
            for provider in providers:
                if provider not in self.registry[op_name].impls:
                    raise UserError(
                        f"kernel.ir_op_priority.{op_name}: no provider {provider!r}; "
                        f"it has {', '.join(self.registry[op_name].impls)}."
                    )
        for provider in self.default:
            if provider not in known | set(DEVICE_PRIORITY[self.device]):
                raise UserError(
                    f"kernel.default_priority: no op has a provider {provider!r}; "
                    f"there are {', '.join(sorted(known))}."
                )


def explain(kernel_config: KernelConfig, device: str, dtype: torch.dtype) -> list[OpChoice]:
    """For each op, the provider that a dense layer of `dtype` on `device` would get, and why."""
    table = OpTable(kernel_config, device, dtype)
    for op_name in sorted(table.registry):
        try:
            table.choose(op_name)
        except UserError:
            # With kernel.batch_invariant some joined ops are done without.
            if op_name not in table.choices:
                raise
    return [table.choices[op_name] for op_name in sorted(table.choices)]

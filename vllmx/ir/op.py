# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/ir/op.py @ v0.25.0
"""An op is one torch function that is at once its meaning, its fallback and its reference.

Providers register other ways to compute it, each with the reasons for which it may refuse. They
are chosen and bound when the engine is built (vllmx/ir/select.py); nothing is looked up later.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

REFERENCE = "torch"
"""Name of the provider that every op has: its own torch definition."""
ANY_DEVICE = ("cpu", "cuda")
"""Where an op is batch invariant that moves numbers, or works on each of them alone."""


@dataclass(frozen=True)
class OpContext:
    """What is known of a call when it is bound: device type, activation dtype, static facts.

    `facts` are the op's own (head_size, weight kind, ...); a provider must not read anything else.
    """

    device: str
    dtype: torch.dtype
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Tolerance:
    """How far a provider may be from the reference: |got - want| <= atol + rtol * |want|."""

    atol: float
    rtol: float


DEFAULT_TOLERANCES = {
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float16: Tolerance(1e-3, 1e-3),
    torch.bfloat16: Tolerance(1e-2, 1.6e-2),
}


@dataclass
class IrOpImpl:
    """One provider of an op.

    supported: True, or why the provider cannot run in this installation at all.
    supports: called with the OpContext; True, or why it refuses such calls.
    prepare: turns the op's static arguments (weights) into what `fn` takes in their place;
    prepared_format, prepared_bytes: what that is, in words, and its bytes a weight.
    batch_invariant: the devices on which a row's result depends on nothing but the row, bit by bit;
    invariant_fn: what has that property in the place of `fn`, which then need not have it.
    """

    op: IrOp
    provider: str
    fn: Callable[..., Any]
    supported: bool | str = True
    supports: Callable[[OpContext], bool | str] | None = None
    prepare: Callable[..., Any] | None = None
    prepared_format: str = "prepared"
    prepared_bytes: float = 4
    batch_invariant: tuple[str, ...] = ()
    invariant_fn: Callable[..., Any] | None = None

    def prepared(self, argument: Any) -> Any:
        """The op's one static argument as `fn` takes it: prepared, or as it is."""
        return argument if self.prepare is None else self.prepare(argument)

    def refusal(self, context: OpContext) -> str | None:
        """Why this provider cannot take calls of `context`, or None if it can."""
        if self.supported is not True:
            return str(self.supported)
        if self.supports is None:
            return None
        answer = self.supports(context)
        return None if answer is True else str(answer or "refuses such calls")


def float32_on_cpu(context: OpContext) -> bool | str:
    """A `supports` for providers that compute in float32 on a CPU and nothing else."""
    if context.device != "cpu":
        return f"runs on a CPU only, not on {context.device}"
    if context.dtype != torch.float32:
        return f"computes in float32 only, not in {context.dtype}"
    return True


class IrOp:
    """A named op with its reference, its test inputs, its tolerances and its providers."""

    registry: ClassVar[dict[str, IrOp]] = {}

    def __init__(self, fn: Callable[..., Any], static_args: tuple[str, ...] = ()) -> None:
        self.name = fn.__name__
        self.fn = fn
        self.signature = inspect.signature(fn)
        self.static_args = static_args
        self.impls: dict[str, IrOpImpl] = {REFERENCE: IrOpImpl(self, REFERENCE, fn)}
        self.generate_inputs: Callable[..., dict[str, Any]] | None = None
        self.facts_of: Callable[..., dict[str, Any]] = lambda **inputs: {}
        self.canonical: Callable[[Any], Any] = lambda outputs: outputs
        self.tolerances: dict[torch.dtype, Tolerance] = dict(DEFAULT_TOLERANCES)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the reference. Engine code calls what `OpTable.bind` returned instead."""
        return self.fn(*args, **kwargs)

    def register_impl(
        self,
        provider: str,
        *,
        supported: bool | str = True,
        supports: Callable[[OpContext], bool | str] | None = None,
        prepare: Callable[..., Any] | None = None,
        prepared_format: str = "prepared",
        prepared_bytes: float = 4,
        batch_invariant: tuple[str, ...] = (),
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator that adds a provider; its parameters must be named as the reference's.

        Static arguments that `prepare` replaces are exempt. Raises ValueError on a mismatch.
        """

        def register(fn: Callable[..., Any]) -> Callable[..., Any]:
            self._check_signature(provider, fn, prepared=prepare is not None)
            if provider in self.impls:
                raise ValueError(f"op {self.name} already has a provider {provider}")
            self.impls[provider] = IrOpImpl(
                self, provider, fn, supported, supports, prepare, prepared_format, prepared_bytes
            )
            self.impls[provider].batch_invariant = batch_invariant
            return fn

        return register

    def set_batch_invariant(
        self, provider: str, devices: tuple[str, ...], fn: Callable[..., Any] | None = None
    ) -> None:
        """Say on which devices `provider`, or `fn` in its place, is batch invariant."""
        self.impls[provider].batch_invariant = devices
        self.impls[provider].invariant_fn = fn

    def register_inputs(self, fn: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
        """Decorator: `fn(case_index, dtype, device, generator)` returns the op's arguments."""
        self.generate_inputs = fn
        return fn

    def register_facts(self, fn: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
        """Decorator: `fn(**inputs)` derives the static facts that `bind` would be told."""
        self.facts_of = fn
        return fn

    def register_canonical(self, fn: Callable[[Any], Any]) -> Callable[..., Any]:
        """Decorator: `fn(outputs)` brings what a provider may lay out its own way to one form."""
        self.canonical = fn
        return fn

    def set_tolerance(self, dtype: torch.dtype, atol: float, rtol: float, why: str) -> None:
        """Replace a default tolerance; `why` must say what was measured."""
        if not why:
            raise ValueError(f"a tolerance of {self.name} needs its reason")
        self.tolerances[dtype] = Tolerance(atol, rtol)

    def _check_signature(self, provider: str, fn: Callable[..., Any], prepared: bool) -> None:
        skip = set(self.static_args) if prepared else set()
        want = [name for name in self.signature.parameters if name not in skip]
        got = [name for name in inspect.signature(fn).parameters if name != "prepared"]
        if got != want:
            raise ValueError(f"{self.name}[{provider}] takes {got}, the op takes {want}")


def register_op(fn: Callable[..., Any] | None = None, *, static_args: tuple[str, ...] = ()) -> Any:
    """Decorator that makes an op out of its torch definition. Raises ValueError on a name twice."""

    def register(definition: Callable[..., Any]) -> IrOp:
        if definition.__name__ in IrOp.registry:
            raise ValueError(f"op {definition.__name__} is registered twice")
        op = IrOp(definition, static_args)
        op.__doc__ = definition.__doc__
        IrOp.registry[op.name] = op
        return op

    return register if fn is None else register(fn)

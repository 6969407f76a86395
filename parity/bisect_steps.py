# SPDX-License-Identifier: Apache-2.0
"""Within the layer that a bisect blames: which of its steps goes wrong, and which op that is.

transformers computes the layer in float64 from the float32 stream that reaches it, and ours is
given the same stream, so the first step that is out of line brought the error in. Steps have the
names of our modules. What an op does in one with its neighbours is never laid down in memory: such
steps are not compared, and the next one that is names them as hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

JUMP = 3.0
"""Times the largest error before it at which a step has an error of its own."""
STEP_OPS = {
    "layernorm": ("rms_norm", "fused_add_rms_norm"),
    "_norm": ("rms_norm",),
    "qkv_proj": ("linear",),
    "o_proj": ("linear",),
    "gate_up_proj": ("linear",),
    "down_proj": ("linear",),
    "rotary_emb": ("rotary_embedding",),
    "attn": ("paged_attention", "reshape_and_cache"),
    "act_fn": ("silu_and_mul", "gelu_and_mul"),
    "residual": ("fused_add_rms_norm",),
}
"""The end of a step's name -> the ops that it may be."""
JOINED = {
    "qk_norm_rope_cache": ("self_attn.q_norm", "self_attn.k_norm", "self_attn.rotary_emb"),
    "qk_norm_rope_decode": ("self_attn.q_norm", "self_attn.k_norm", "self_attn.rotary_emb"),
    "fused_qk_rmsnorm_rope_gate": (
        "self_attn.q_norm",
        "self_attn.k_norm",
        "self_attn.rotary_emb",
    ),
    "linear_add": ("self_attn.o_proj", "mlp.down_proj"),
    "rms_norm_linear": ("input_layernorm",),
    "rms_norm_gated_linear": ("post_attention_layernorm", "mlp.gate_up_proj"),
}
"""Op -> steps that it doesn't lay down: the fusions that a provider may make."""
SUMS = ("post_attention_layernorm", "pre_feedforward_layernorm")
"""Norms whose second output is the stream between attention and MLP."""


@dataclass(frozen=True)
class StepError:
    """One step: its relative error and transformers' own in float32, and where it is largest."""

    name: str
    ops: tuple[str, ...]
    error: float
    floor: float
    token: int
    channel: int
    hidden: tuple[str, ...] = ()
    rows: tuple[float, ...] = ()
    """The relative error of each token."""

    @property
    def words(self) -> str:
        """The step, its op, and what is hidden in it."""
        told = self.name + (f" ({', '.join(self.ops)})" if self.ops else "")
        return told + (f", with {', '.join(self.hidden)} hidden in it" if self.hidden else "")


@contextmanager
def recorded(layer: torch.nn.Module, tokens: int) -> Iterator[dict[str, np.ndarray]]:
    """Collects the steps of one of our layers, [tokens, width], while it is called."""
    steps: dict[str, np.ndarray] = {}
    inside = [False]  # a rotation may be shared among layers

    def note(name: str, *values: Any) -> None:
        parts = [value for value in values if value is not None]
        if inside[0] and all(len(part) == tokens for part in parts):
            rows = [part.detach().reshape(tokens, -1).double().cpu().numpy() for part in parts]
            steps[name] = np.concatenate(rows, axis=1)

    def after(name: str) -> Any:
        def hook(module: Any, args: tuple[Any, ...], output: Any) -> None:
            several = isinstance(output, tuple)
            if several and name in SUMS:
                note("residual", output[1])
            if name.endswith("rotary_emb") and several:
                note(name, *output)
            else:
                note(name, output[0] if several else output)

        return hook

    modules = {name: module for name, module in layer.named_modules() if name}
    handles = [layer.register_forward_pre_hook(lambda *_: inside.__setitem__(0, True))]
    handles += [layer.register_forward_hook(lambda *_: inside.__setitem__(0, False))]
    handles += [module.register_forward_hook(after(n)) for n, module in modules.items()]
    if "mlp.down_proj" in modules:
        before = lambda module, args: note("mlp.act_fn", args[0])  # noqa: E731
        handles.append(modules["mlp.down_proj"].register_forward_pre_hook(before))
    try:
        yield steps
    finally:
        for handle in handles:
            handle.remove()


def compare(
    order: Sequence[str],
    told: Mapping[str, np.ndarray],
    ours: Mapping[str, np.ndarray],
    choices: Mapping[str, str],
) -> list[StepError]:
    """The errors of the steps that both have, in the order of transformers.

    told: `tap.f32.STEP` and `tap.f64.STEP` of the oracle; choices: op -> provider of our engine.
    """
    found: list[StepError] = []
    hidden: list[str] = []
    for name in order:
        want, got = told[f"tap.f64.{name}"], ours.get(name)
        if got is None or got.shape != want.shape:
            # Parts of what ours does as one are no steps of ours.
            hidden += [name] if any(name in steps for steps in JOINED.values()) else []
            continue
        apart = np.abs(got - want)
        token, channel = np.unravel_index(int(np.nan_to_num(apart, nan=np.inf).argmax()), got.shape)
        found.append(
            StepError(
                name,
                _ops(name, hidden, choices),
                relative(want, got),
                relative(want, told[f"tap.f32.{name}"]),
                int(token),
                int(channel),
                tuple(hidden),
                tuple(by_row(want, got).tolist()),
            )
        )
        hidden = []
    return found


def blame(errors: Sequence[StepError], smallest: float) -> StepError | None:
    """The first step above `smallest` and twice its floor whose error no step before it explains;
    where several steps share in it, the one at which it grows most."""
    before, grown = 0.0, (0.0, None)
    for step in errors:
        if not np.isfinite(step.error):
            return step
        if step.error > max(smallest, 2 * step.floor):
            growth = step.error / max(before, smallest / 100)
            if growth > JUMP:
                return step
            grown = max(grown, (growth, step), key=lambda pair: pair[0])
        before = max(before, step.error)
    return grown[1]


def onset(rows: Sequence[float], smallest: float) -> str:
    """From which token on the error is there: "every token", "tokens from 64 on", "token 3"."""
    wrong = np.flatnonzero(~(np.asarray(rows) <= smallest))
    if not len(wrong):
        return "no token by itself"
    first, last, n = int(wrong[0]), int(wrong[-1]), len(rows)
    if first == last:
        return f"token {first}"
    if len(wrong) >= 0.9 * n:
        return "every token"
    if len(wrong) >= 0.9 * (n - first):
        return f"tokens from {first} on"
    return f"{len(wrong)} of {n} tokens, {first} to {last}"


def relative(want: np.ndarray, got: np.ndarray) -> float:
    """|got - want| / |want|."""
    return float(np.linalg.norm(got - want) / max(float(np.linalg.norm(want)), 1e-12))


def by_row(want: np.ndarray, got: np.ndarray) -> np.ndarray:
    """The same of each row, of the typical row's size where its own is less."""
    size = np.linalg.norm(want, axis=1)
    return np.linalg.norm(got - want, axis=1) / np.maximum(size, max(np.median(size), 1e-12))


def _ops(name: str, hidden: Sequence[str], choices: Mapping[str, str]) -> tuple[str, ...]:
    joined = [op for op, steps in JOINED.items() if op in choices and set(steps) & set(hidden)]
    ops = next((ops for end, ops in STEP_OPS.items() if name.endswith(end)), ())
    return tuple(f"{op}[{choices[op]}]" for op in (*joined, *ops) if op in choices)

# SPDX-License-Identifier: Apache-2.0
"""What transformers computes within one decoder layer, step by step, in float32 and in float64.

Used by hf_model.py. Steps have the names of vllmx's modules, relative to the layer, in the order in
which transformers comes to them; `self_attn.rotary_emb` has queries and keys beside each other,
`self_attn.attn` is what attention returns, `mlp.act_fn` the gated product, `residual` the stream
between attention and MLP. transformers itself takes norms and softmax through float32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

Steps = dict[str, torch.Tensor]
PARTS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Steps that are several modules of transformers."""
BEFORE = {
    "self_attn.o_proj": "self_attn.attn",
    "mlp.down_proj": "mlp.act_fn",
    "pre_feedforward_layernorm": "residual",
}
"""Modules whose input is a step."""
ROTATION = "apply_rotary_pos_emb"


def taps(model: Any, index: int, sequence: list[int]) -> dict[str, np.ndarray]:
    """`f32.STEP` and `f64.STEP`, [tokens, width], of layer `index` given the model's own float32
    stream; a step that has another number of rows is left out."""
    layer = model.model.layers[index]
    given: dict[str, Any] = {}

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.update(args=args, kwargs=kwargs)

    handle = layer.register_forward_pre_hook(before, with_kwargs=True)
    with recorded(layer, len(sequence)) as narrow:
        model(torch.tensor([sequence]), use_cache=False)
    handle.remove()
    # The same input, not the one that float64 layers before it would have made.
    layer.double()
    try:
        with recorded(layer, len(sequence)) as wide:
            layer(*_widened(given["args"]), **_widened(given["kwargs"]))
    finally:
        layer.float()
    found = {f"f32.{name}": rows for name, rows in narrow.items()}
    found |= {f"f64.{name}": rows for name, rows in wide.items()}
    return {name: rows.double().numpy() for name, rows in found.items()}


@contextmanager
def recorded(layer: Any, tokens: int) -> Iterator[Steps]:
    """Collects the steps of a layer while it is called."""
    steps: Steps = {}
    # transformers has modules of its own by these names, which are parts of the step.
    own = {"", "self_attn.attn", "mlp.act_fn", "self_attn.rotary_emb"}
    modules = {name: module for name, module in layer.named_modules() if name not in own}
    second = "pre_feedforward_layernorm" in modules
    inputs = BEFORE if second else {**BEFORE, "post_attention_layernorm": "residual"}

    inside = [False]  # the rotation is that of every layer
    opened = layer.register_forward_pre_hook(lambda *_: inside.__setitem__(0, True))

    def note(name: str, value: Any) -> None:
        rows = by_token(value, tokens) if inside[0] else None
        if rows is not None:
            steps[name] = rows

    def before(name: str) -> Callable[..., None]:
        return lambda module, args: note(inputs[name], args[0])

    def after(name: str) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], output: Any) -> None:
            note(name, output[0] if isinstance(output, tuple) else output)
            for whole, parts in PARTS.items():
                if name == parts[-1] and all(part in steps for part in parts):
                    steps[whole] = torch.cat([steps.pop(part) for part in parts], dim=-1)

        return hook

    handles = [opened, layer.register_forward_hook(lambda *_: inside.__setitem__(0, False))]
    handles += [modules[n].register_forward_pre_hook(before(n)) for n in inputs if n in modules]
    handles += [module.register_forward_hook(after(n)) for n, module in modules.items()]
    with _rotations(modules.get("self_attn"), lambda q, k: note("self_attn.rotary_emb", (q, k))):
        yield steps
    for handle in handles:
        handle.remove()


def by_token(value: Any, tokens: int) -> torch.Tensor | None:
    """[tokens, width] of what a step made, heads beside each other; None if it is not by token."""
    if isinstance(value, tuple):
        parts = [by_token(part, tokens) for part in value]
        return None if any(part is None for part in parts) else torch.cat(parts, dim=-1)
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return None
    value = value.detach().clone()
    if value.dim() == 4 and value.shape[2] == tokens:  # [1, heads, tokens, head]
        value = value.transpose(1, 2)
    return value.reshape(tokens, -1) if value.shape[:2] == (1, tokens) else None


@contextmanager
def _rotations(attention: Any, seen: Callable[[Any, Any], None]) -> Iterator[None]:
    """Tells of what the model's rotation returns: a function of its file, no module."""
    file = sys.modules[type(attention).__module__] if attention is not None else None
    inner = getattr(file, ROTATION, None)
    if inner is None:
        yield
        return

    def rotate(*args: Any, **kwargs: Any) -> Any:
        query, key = inner(*args, **kwargs)
        seen(query, key)
        return query, key

    setattr(file, ROTATION, rotate)
    try:
        yield
    finally:
        setattr(file, ROTATION, inner)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_widened(part) for part in value)
    if isinstance(value, dict):
        return {name: _widened(part) for name, part in value.items()}
    return value if isinstance(value, (bool, int, float, str)) else None

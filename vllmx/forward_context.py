# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/forward_context.py @ v0.25.0
"""The one ambient object: what the layers of a forward pass need beside their inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ForwardContext:
    """attn_metadata: layer name -> the metadata its backend built for this batch.

    no_compile_layers: the attention layers by name, set for KV connectors only.
    """

    attn_metadata: dict[str, Any] = field(default_factory=dict)
    no_compile_layers: dict[str, Any] | None = None


_current: ForwardContext | None = None


def get_forward_context() -> ForwardContext:
    """The context of the running forward pass; an error outside one."""
    assert _current is not None, "no forward pass is running: use set_forward_context"
    return _current


@contextmanager
def set_forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` the current one for the length of a forward pass."""
    global _current
    previous, _current = _current, context
    try:
        yield
    finally:
        _current = previous

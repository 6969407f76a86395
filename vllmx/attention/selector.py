# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/attention/selector.py @ v0.25.0
"""Find the attention backend of a layer; backends are found by their file."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

from vllmx.attention import backends
from vllmx.attention.backend import AttentionBackend, AttentionMetadataBuilder
from vllmx.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllmx.attention.batch_invariant import VARIANTS
from vllmx.exceptions import UnsupportedError, UserError
from vllmx.ir.op import IrOpImpl
from vllmx.ir.ops.attention import paged_attention


def all_backends() -> dict[str, type[AttentionBackend]]:
    """Every backend by name; each is also registered as a provider of `paged_attention`."""
    found: dict[str, type[AttentionBackend]] = {}
    for module_info in pkgutil.iter_modules(backends.__path__):
        module = importlib.import_module(f"{backends.__name__}.{module_info.name}")
        for value in vars(module).values():
            if (
                inspect.isclass(value)
                and issubclass(value, AttentionBackend)
                and value.__module__ == module.__name__
            ):
                found[value.name] = value
    for name, backend in found.items():
        if name not in paged_attention.impls:
            paged_attention.register_impl(name, supports=backend.refusal)(backend.op_call)
        if name in VARIANTS:
            variant, devices = VARIANTS[name]
            paged_attention.set_batch_invariant(name, devices, variant.op_call)
    return found


def get_attn_backend(impl: IrOpImpl, batch_invariant: bool = False) -> type[AttentionBackend]:
    """The backend class behind a chosen provider of `paged_attention`.

    batch_invariant: the one of its classes whose results do not depend on the batch.
    """
    known = all_backends()
    if impl.provider not in known:
        raise UserError(
            f"attention backend {impl.provider!r} is unknown; choose one of {', '.join(known)}."
        )
    return VARIANTS[impl.provider][0] if batch_invariant else known[impl.provider]


MAMBA_BUILDERS: dict[str, type[AttentionMetadataBuilder]] = {
    "gdn_attention": GDNAttentionMetadataBuilder
}
"""Builder of the metadata that recurrent layers read, by their mamba_type."""


def get_mamba_builder_cls(mamba_type: str) -> type[AttentionMetadataBuilder]:
    """The class that builds the metadata of recurrent layers of `mamba_type`."""
    if mamba_type not in MAMBA_BUILDERS:
        raise UnsupportedError(
            f"recurrent layers of type {mamba_type!r} have no metadata builder; there is one for "
            f"{', '.join(MAMBA_BUILDERS)}."
        )
    return MAMBA_BUILDERS[mamba_type]

# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/model_loader/{base,default,dummy}_loader.py @ v0.25.0
"""Builds the model and fills it with weights."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vllmx.config import VllmConfig
from vllmx.exceptions import CheckpointError, UserError
from vllmx.ir.select import OpTable
from vllmx.layers.parameter import WeightHolder
from vllmx.model_loader.weights import GGUFTensor, iterate_weights, with_file
from vllmx.platform import torch_dtype
from vllmx.plugins import load_general_plugins
from vllmx.registry import get_model_cls


def load_model(vllm_config: VllmConfig, ops: OpTable) -> nn.Module:
    """The model of `vllm_config` with its weights packed; CheckpointError, with the file, where
    the config asks for what is not served or the weights don't fit."""
    load_general_plugins(vllm_config.load_config.plugins)  # in the engine's own process, too
    hf_config = vllm_config.model_config.hf_config
    cls = get_model_cls(hf_config)
    check_interface(cls)
    try:
        model = cls(vllm_config=vllm_config, ops=ops)
    except CheckpointError as error:
        if vllm_config.model_config.model in str(error):
            raise
        raise CheckpointError(f"{hf_config.origin}: {error}") from error
    if vllm_config.load_config.load_format == "dummy":
        load_dummy_weights(model, vllm_config)
    else:
        try:
            model.load_weights(_with_chosen_expansion(iterate_weights(vllm_config), ops))
        except CheckpointError as error:
            raise with_file(error, vllm_config) from error
        check_filled(model)
    return model.eval()


def check_interface(cls: type) -> None:
    """UserError where a model's class is not built, called or filled as those of vllmx are."""
    lacks = [name for name in ("compute_logits", "load_weights") if not hasattr(cls, name)]
    taken = inspect.signature(cls).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        wanted = {"vllm_config", "ops"} - set(taken)
        lacks += [f"constructor argument {name}" for name in sorted(wanted)]
    if lacks:
        raise UserError(
            f"{cls.__module__}.{cls.__qualname__} has no {', no '.join(lacks)}. As those of "
            "vllmx/models a model is built by (*, vllm_config, ops) and has forward(input_ids, "
            "positions), compute_logits(hidden_states) and load_weights(weights)."
        )


def check_filled(model: nn.Module) -> None:
    """UserError where `load_weights` has left layers without weights and has not said so."""
    holders = (m for m in model.named_modules() if isinstance(m[1], WeightHolder))
    empty = [name for name, holder in holders if not holder.is_loaded]
    if empty:
        more = f" and {len(empty) - 5} more" if len(empty) > 5 else ""
        raise UserError(
            f"{type(model).__name__}.load_weights left {', '.join(empty[:5])}{more} without "
            "weights; it is to give all of them to AutoWeightsLoader of vllmx/models/utils.py."
        )


def _with_chosen_expansion(
    weights: Iterable[tuple[str, Any]], ops: OpTable
) -> Iterator[tuple[str, Any]]:
    for name, weight in weights:
        if isinstance(weight, GGUFTensor):
            weight.expand = ops.bind("dequantize_gguf", qtype=weight.qtype.name)
        yield name, weight


def load_dummy_weights(model: Any, vllm_config: VllmConfig) -> None:
    """Fill `model` with random weights that depend on model.seed and each weight's name only.

    Matrices are scaled by 1 / sqrt(fan in), norms are near one, so logits are not degenerate. They
    have the values of the config's dtype, as a checkpoint's have: providers may go by that.
    """
    stored = torch_dtype(vllm_config.model_config.hf_text_config.dtype or "bfloat16")
    mapper = model.hf_to_vllm_mapper
    sources = {(ours, shard): part for part, (ours, shard) in mapper.stacked.items()}

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, module in model.named_modules():
            if not isinstance(module, WeightHolder):
                continue
            for (param, shard), shape in module.expected_weights().items():
                source = f"{name}.{param}"
                if shard is not None:
                    ours = f".{name.rpartition('.')[2]}."
                    source = source.replace(ours, sources[(ours, shard)])
                weight = dummy_weight(source, shape, vllm_config.model_config.seed)
                yield source, weight.to(stored).to(torch.float32)

    # These are called as our layers are: a name of ours may be another layer's in a checkpoint.
    model.hf_to_vllm_mapper = replace(mapper, renamed={})
    try:
        model.load_weights(weights())
    finally:
        del model.hf_to_vllm_mapper


def dummy_weight(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """A random float32 tensor of `shape`, the same for the same name and seed."""
    # A generator of the CPU takes 32 bits of what it is given.
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), seed))
    values = torch.randn(shape, generator=generator)
    if len(shape) <= 1:
        return values * 0.02 + (0.0 if name.endswith(".bias") else 1.0)
    return values * shape[-1] ** -0.5

# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/rotary_embedding/ @ v0.25.0
"""Rotary embeddings: the table of angles for each kind of scaling, applied by an op."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from vllmx.exceptions import CheckpointError
from vllmx.ir.select import OpTable


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by a table of cosines and sines.

    cos_sin_cache: float32 [max_position, rotary_dim], cosines then sines, or what the chosen
    provider prepared from it.
    """

    def __init__(
        self,
        head_size: int,
        inv_freq: Tensor,
        max_position: int,
        is_neox_style: bool,
        attention_factor: float,
        ops: OpTable,
    ) -> None:
        super().__init__()
        self.head_size = head_size
        self.rotary_dim = 2 * len(inv_freq)
        self.is_neox_style = is_neox_style
        table = table_of(inv_freq, max_position, attention_factor)
        impl = ops.choose(
            "rotary_embedding",
            head_size=head_size,
            rotary_dim=self.rotary_dim,
            is_neox_style=is_neox_style,
        )
        self.cos_sin_cache = impl.prepared(table.to(ops.device))
        self._rotary_embedding = impl.fn

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """positions: int64 [num_tokens]; query, key: [num_tokens, heads * head_size]."""
        return self._rotary_embedding(
            positions, query, key, self.head_size, self.cos_sin_cache, self.is_neox_style
        )


class MRotaryEmbedding(RotaryEmbedding):
    """Rotates text as RotaryEmbedding does, and tokens that have three positions by each of them.

    mrope_section: how many angles go by time, by height and by width; interleaved: in turns.
    """

    def __init__(
        self,
        head_size: int,
        inv_freq: Tensor,
        max_position: int,
        is_neox_style: bool,
        attention_factor: float,
        ops: OpTable,
        *,
        mrope_section: list[int],
        mrope_interleaved: bool,
    ) -> None:
        super().__init__(head_size, inv_freq, max_position, is_neox_style, attention_factor, ops)
        if len(mrope_section) != 3 or sum(mrope_section) != len(inv_freq):
            raise CheckpointError(
                f"rope parameters: mrope_section is {mrope_section}; three numbers are wanted that "
                f"add up to {len(inv_freq)}."
            )
        self.mrope_section = mrope_section
        self.mrope_interleaved = mrope_interleaved
        self.table = table_of(inv_freq, max_position, attention_factor).to(ops.device)
        self._mrotary_embedding = ops.bind("mrotary_embedding")

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """positions: int64 [num_tokens], or [3, num_tokens], time, height and width."""
        if positions.dim() == 1:
            return super().forward(positions, query, key)
        return self._mrotary_embedding(
            positions,
            query,
            key,
            self.head_size,
            self.table,
            self.mrope_section,
            self.mrope_interleaved,
            self.is_neox_style,
        )


def table_of(inv_freq: Tensor, max_position: int, attention_factor: float) -> Tensor:
    """Cosines, then sines, float32 [max_position, 2 * len(inv_freq)], times the factor."""
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inv_freq)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor


def get_rope(
    head_size: int,
    max_position: int,
    rope_parameters: dict[str, Any],
    ops: OpTable,
    is_neox_style: bool = True,
    *,
    max_model_len: int | None,
) -> RotaryEmbedding:
    """The rotary embedding for a config's rope parameters; layers that agree on them share it.

    rope_parameters has rope_type, rope_theta and what the type needs. A type without a formula
    here raises CheckpointError: plain rotation would be right for short prompts only.
    max_position: the config's length, which formulas go by.
    max_model_len: the longest sequence that the engine takes, of which every position has a row in
    the table; null is max_position. LongRoPE has factors of its own for engines beyond the original
    context. With mrope_section tokens may have three positions each.
    """
    if "rope_type" not in rope_parameters:
        raise CheckpointError(
            f"rope parameters: no 'rope_type' among {', '.join(rope_parameters) or 'them'}; where "
            "each kind of layer has its own, all kinds of layer_types must be there."
        )
    rows = max(max_position, max_model_len or 0)
    if rope_parameters["rope_type"] == "longrope":
        longest = max_position if max_model_len is None else max_model_len
        rope_parameters = {**rope_parameters, "max_model_len": longest}
    told = repr(sorted(rope_parameters.items()))
    key = ("rope", head_size, max_position, rows, is_neox_style, told)
    if key not in ops.shared:
        inv_freq, attention_factor = compute_inv_freq(head_size, max_position, rope_parameters)
        how = (head_size, inv_freq, rows, is_neox_style, attention_factor, ops)
        if (section := rope_parameters.get("mrope_section")) is None:
            ops.shared[key] = RotaryEmbedding(*how)
        else:
            turns = bool(rope_parameters.get("mrope_interleaved", False))
            ops.shared[key] = MRotaryEmbedding(*how, mrope_section=section, mrope_interleaved=turns)
    return ops.shared[key]


def compute_inv_freq(
    head_size: int, max_position: int, rope_parameters: dict[str, Any]
) -> tuple[Tensor, float]:
    """Inverse frequencies, float32 [rotary_dim / 2], and the factor on cosines and sines."""
    rope_type = rope_parameters["rope_type"]
    if rope_type not in SCALINGS:
        raise CheckpointError(
            f"rope_type {rope_type!r} is not supported; {', '.join(SCALINGS)} are."
        )
    _check_parameters(rope_parameters)
    rotary_dim = rotary_dim_of(head_size, rope_parameters)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    inv_freq = 1.0 / (rope_parameters["rope_theta"] ** exponents)
    if (factors := rope_parameters.get("freq_factors")) is not None:
        # GGUF ships the scaled frequencies as divisors, and no other parameters.
        return inv_freq / torch.as_tensor(factors, dtype=torch.float32), 1.0
    return SCALINGS[rope_type](inv_freq, rope_parameters, max_position)


def _check_parameters(parameters: dict[str, Any]) -> None:
    """CheckpointError where a number that the type's formula needs is missing or is none."""
    rope_type = parameters["rope_type"]
    needed = () if "freq_factors" in parameters else NEEDED.get(rope_type, ())
    lists = ("short_factor", "long_factor")
    for key in (
        "rope_theta",
        *needed,
        *(key for key in NUMBERS if parameters.get(key) is not None),
    ):
        if key not in parameters:
            raise CheckpointError(f"rope parameters: rope_type {rope_type!r} needs {key!r}.")
        value = parameters[key]
        numbers = value if key in lists and isinstance(value, list) else [value]
        if not all(type(number) in (int, float) and number > 0 for number in numbers):
            raise CheckpointError(
                f"rope parameters: {key} is {value!r}; a number above zero is wanted"
                f"{' for each frequency' if key in lists else ''}."
            )


def rotary_dim_of(head_size: int, rope_parameters: dict[str, Any]) -> int:
    """How many elements of a head are rotated; CheckpointError for none, or more than there are."""
    factor = rope_parameters.get("partial_rotary_factor", 1.0)
    if type(factor) not in (int, float):
        raise CheckpointError(f"rope parameters: partial_rotary_factor is {factor!r}, no number.")
    dim = rope_parameters.get("rope_dim") or int(head_size * factor)
    if not 0 < dim <= head_size or dim % 2:
        raise CheckpointError(
            f"rope parameters rotate {dim} of {head_size} elements of a head; it must be an even "
            "number of them, and at least two."
        )
    return dim


def _default(inv_freq: Tensor, parameters: dict[str, Any], _: int) -> tuple[Tensor, float]:
    return inv_freq, 1.0


def _linear(inv_freq: Tensor, parameters: dict[str, Any], _: int) -> tuple[Tensor, float]:
    return inv_freq / parameters["factor"], 1.0


def _llama3(inv_freq: Tensor, parameters: dict[str, Any], _: int) -> tuple[Tensor, float]:
    """Slow waves are stretched by `factor`, fast ones kept, those between blended."""
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = original * inv_freq / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * inv_freq / factor + blend * inv_freq, 1.0


def _yarn(inv_freq: Tensor, parameters: dict[str, Any], max_position: int) -> tuple[Tensor, float]:
    """Interpolate the waves that do not fit the original context, keep the fast ones."""
    factor = parameters["factor"]
    original = parameters.get("original_max_position_embeddings") or max_position
    dim, base = 2 * len(inv_freq), parameters["rope_theta"]

    def dimension_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = dimension_of(parameters.get("beta_fast") or 32)
    high = dimension_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = max(high - low, 0.001)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    kept = (1 - ramp) * parameters.get("extrapolation_factor", 1.0)
    scaled = inv_freq / factor * (1 - kept) + inv_freq * kept
    return scaled, _yarn_attention_factor(parameters, factor)


def _yarn_attention_factor(parameters: dict[str, Any], factor: float) -> float:
    if parameters.get("attention_factor") is not None:
        return parameters["attention_factor"]

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    told = parameters.get("attn_factor", 1.0)
    if not parameters.get("apply_yarn_scaling", True):
        return told
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return mscale(parameters["mscale"]) / mscale(parameters["mscale_all_dim"])
    return mscale(1.0) * told


def _longrope(
    inv_freq: Tensor, parameters: dict[str, Any], max_position: int
) -> tuple[Tensor, float]:
    """A factor for each frequency: the long ones where the engine takes sequences longer than the
    original context, so that a sequence that passes it keeps what it has cached."""
    original = parameters["original_max_position_embeddings"]
    kind = "long" if parameters.get("max_model_len", max_position) > original else "short"
    factors = torch.tensor(parameters[f"{kind}_factor"], dtype=torch.float32)
    if factors.shape != inv_freq.shape:
        raise CheckpointError(
            f"rope parameters: {kind}_factor has {len(factors)} numbers, not {len(inv_freq)}."
        )
    stretch = max_position / original
    scale = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    told = parameters.get(f"{kind}_mscale") or parameters.get("attention_factor")
    return inv_freq / factors, scale if told is None else told


def _dynamic(
    inv_freq: Tensor, parameters: dict[str, Any], max_position: int
) -> tuple[Tensor, float]:
    """A larger base: by `alpha` (HunYuan), or by `factor` for what lies beyond the trained length,
    which unless `max_trained_positions` says otherwise is all of it."""
    dim = 2 * len(inv_freq)
    if parameters.get("alpha") is not None:
        grown = parameters["alpha"]
    elif parameters.get("factor") is not None:
        factor = parameters["factor"]
        trained = parameters.get("max_trained_positions", max_position)
        grown = factor * max_position / trained - (factor - 1)
    else:
        raise CheckpointError("rope_type 'dynamic' needs 'alpha' or 'factor'.")
    return _with_base(parameters["rope_theta"] * grown ** (dim / (dim - 2)), dim), 1.0


def _ntk(inv_freq: Tensor, parameters: dict[str, Any], _: int) -> tuple[Tensor, float]:
    """The base times `factor`, or, with `mixed_b`, each frequency less than the one before it."""
    factor, dim = parameters["factor"], 2 * len(inv_freq)
    if (power := parameters.get("mixed_b")) is None:
        return _with_base(parameters["rope_theta"] * factor, dim) / factor ** (2 / dim), 1.0
    places = torch.arange(1, dim // 2 + 1, dtype=torch.float32)
    return inv_freq / torch.exp(math.log(factor) * (places / (dim / 2)) ** power), 1.0


def _with_base(base: float, dim: int) -> Tensor:
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


SCALINGS = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "dynamic": _dynamic,
    "ntk": _ntk,
}
NEEDED = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor",),
    "longrope": ("original_max_position_embeddings", "short_factor", "long_factor"),
    "ntk": ("factor",),
}
"""Type -> what its formula can't do without."""
NUMBERS = (
    "factor",
    "alpha",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
)
"""What has to be a number wherever it is said."""

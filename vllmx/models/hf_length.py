# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/config/model.py @ v0.25.0
"""How long a sequence a config.json lets a model take. Imports no torch."""

from __future__ import annotations

from typing import Any

from vllmx.exceptions import CheckpointError
from vllmx.models.hf_config import HFConfig

LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""What families call the length; where a config has several, the smallest counts."""
ALREADY_SCALED = ("llama3", "longrope")
"""Rotations whose factor is already in max_position_embeddings."""


def longest_sequence(config: HFConfig, disable_sliding_window: bool) -> tuple[int, str]:
    """(number of tokens that the model takes, how that is told in its text config `config`).

    As in upstream, a rope scaling's factor multiplies what the config tells, which for YaRN is the
    length before it. Raises CheckpointError where a length or a factor is no number above zero.
    """
    config.read("max_position_embeddings", int)
    told = {key: config.read(key, (int, type(None)), None) for key in LENGTH_KEYS}
    lengths = {key: length for key, length in told.items() if length is not None}
    key = min(lengths, key=lengths.__getitem__)
    length = lengths[key]
    if own := config.read("model_max_length", (int, type(None)), None):  # Command-R's counts alone
        key, length = "model_max_length", own
    window = config.read("sliding_window", (int, type(None)), None)
    if disable_sliding_window and window is not None and window < length:
        key, length = "sliding_window", window
    if "gemma3" in config.read("model_type", str, ""):  # its length is the scaled one
        return length, key
    factor = 1.0
    for rope in ropes_of(config):
        if rope["rope_type"] in ALREADY_SCALED:
            continue
        factor = _factor_of(rope, config, factor)
        if rope["rope_type"] == "yarn":
            key = "original_max_position_embeddings"
            length = rope[key]
            if type(length) is not int:
                raise CheckpointError(f"{config.origin}: {key} is {length!r}, not of type int.")
    return int(length * factor), key if factor == 1.0 else f"{key} times the rope factor {factor}"


def usual_length(config: HFConfig, longest: int) -> int:
    """The length that an engine takes unless it is told another: `longest`, but for LongRoPE the
    one before scaling, where the config has that beside the rope parameters: up to there its short
    factors hold, and short prompts are answered best by them."""
    key = "original_max_position_embeddings"
    scaled = [rope for rope in ropes_of(config) if rope["rope_type"] == "longrope"]
    if not scaled:
        return longest
    if config.read("model_type", str, "") == "phimoe":  # it takes that of the rope parameters
        return scaled[0][key]
    return config.read(key, (int, type(None)), None) or longest


def ropes_of(config: HFConfig) -> list[dict[str, Any]]:
    """The rope parameters of each kind of layer, or the one set of them."""
    rope = config.rope_parameters
    return [rope] if "rope_type" in rope else list(rope.values())


def _factor_of(rope: dict[str, Any], config: HFConfig, default: float) -> float:
    """The factor that `rope` names; null is 1, as in upstream."""
    factor = rope.get("factor", default)
    if factor is None:
        return 1.0
    if type(factor) not in (int, float) or not 0 < factor < float("inf"):
        raise CheckpointError(
            f"{config.origin}: rope parameters: factor is {factor!r}; a number above zero is "
            "wanted."
        )
    return float(factor)

# SPDX-License-Identifier: Apache-2.0
"""`vllmx parity bisect select=MODEL [provider=...]`: the first layer whose own error is too large.

transformers computes the stream of one sequence in full. Ours is run over the same sequence twice:
as it is, which shows how far errors have come, and with every layer given transformers' input,
which shows what each adds itself. A layer is blamed for its own error only. Exit code 1 if one is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllmx.config import RunConfig
from vllmx.exceptions import UserError

from . import policy
from .checkpoints import oracle_folder
from .model_golden import ask
from .model_table import FLOOR_LANE, MODELS, ModelEntry

FACTOR = 10.0
"""Times the median layer's own error at which a layer is out of line."""


@dataclass(frozen=True)
class LayerError:
    """Relative errors of the stream after a layer, and where its own is largest."""

    layer: int
    propagated: float
    local: float
    worst_token: int
    worst_channel: int


def relative(want: np.ndarray, got: np.ndarray) -> float:
    """|got - want| / |want|."""
    return float(np.linalg.norm(got - want) / max(float(np.linalg.norm(want)), 1e-12))


def compare(
    want: np.ndarray, propagated: list[np.ndarray], local: list[np.ndarray]
) -> list[LayerError]:
    """Errors of each layer; all are [layers + 1] streams of [tokens, hidden], embedding first."""
    found = []
    for layer in range(len(want) - 1):
        apart = np.abs(local[layer + 1] - want[layer + 1])
        token, channel = np.unravel_index(int(apart.argmax()), apart.shape)
        found.append(
            LayerError(
                layer,
                relative(want[layer + 1], propagated[layer + 1]),
                relative(want[layer + 1], local[layer + 1]),
                int(token),
                int(channel),
            )
        )
    return found


def blame(errors: list[LayerError], smallest: float) -> int | None:
    """The first layer whose own error is above `smallest` and out of line with the others."""
    median = float(np.median([error.local for error in errors]))
    for error in errors:
        if error.local > max(smallest, FACTOR * median) or not np.isfinite(error.local):
            return error.layer
    # Where every layer is wrong alike, none is out of line, and the first is where it begins.
    return 0 if median > 100 * smallest else None


def bisect(entry: ModelEntry, provider: str) -> tuple[list[LayerError], int | None]:
    """(errors by layer, the one to blame or None) of a model; OracleBlocked without an oracle."""
    from .model_engine import build, streams

    sequence = entry.forced()[-1]
    job = {**entry.job(str(oracle_folder(entry))), "prompts": [], "forced": [sequence]}
    answer, _ = ask(FLOOR_LANE, {**job, "full": True})
    want = answer["stream.full"]
    llm = build(entry, provider, "cpu", chunked=False)
    try:
        errors = compare(want, streams(llm, sequence), streams(llm, sequence, graft=want))
    finally:
        llm.shutdown()
    return errors, blame(errors, policy.load().models[provider].stream)


def run(config: RunConfig) -> int:
    """The verb."""
    name = (config.parity.select or "").removeprefix("model.")
    if name not in MODELS:
        raise UserError(f"parity bisect select={name}: choose one of {', '.join(MODELS)}.")
    errors, layer = bisect(MODELS[name], config.parity.provider or "torch")
    print("layer  propagated       local  worst token, channel")
    for error in errors:
        mark = "  <- first out of line" if error.layer == layer else ""
        place = f"{error.worst_token}, {error.worst_channel}"
        print(f"{error.layer:5d}  {error.propagated:10.3g}  {error.local:10.3g}  {place}{mark}")
    if layer is None:
        print(f"{name}: no layer is out of line")
        return 0
    print(f"{name}: look at layer {layer}")
    return 1

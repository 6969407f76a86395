# SPDX-License-Identifier: Apache-2.0
"""`vllmx parity bisect select=MODEL [provider=...]`: the layer and the op that an error comes from.

transformers computes the stream of one sequence in full. Ours is run over the same sequence twice:
as it is, which shows how far errors have come, and with every layer given transformers' input,
which shows what each adds itself. The first layer whose stream is out of its floor, and that adds
more than reached it, is blamed, and looked into step by step (bisect_steps.py). Exit code 1 if one
is; 2 where looking changes what is computed, as then nothing that was seen is of the model itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllmx.cli_args import did_you_mean
from vllmx.config import RunConfig
from vllmx.exceptions import UserError

from . import bisect_steps, policy
from .bisect_steps import StepError, by_row, onset, relative
from .checkpoints import oracle_folder
from .golden import GoldenError
from .model_gate import stream_errors
from .model_golden import ask, load
from .model_table import FLOOR_LANE, MODELS, PROVIDERS, ModelEntry

EMBEDDING = -1
"""What stands before the first layer, as a layer."""


@dataclass(frozen=True)
class LayerError:
    """Relative errors of the stream after a layer, its floor, and where its own is largest.

    layer: EMBEDDING for what the first one is given; rows: its own error at each token.
    """

    layer: int
    propagated: float
    local: float
    worst_token: int
    worst_channel: int
    floor: float = 0.0
    rows: tuple[float, ...] = ()


@dataclass(frozen=True)
class Bisected:
    """What came of a bisect."""

    errors: list[LayerError]
    layer: int | None
    steps: list[StepError]
    step: StepError | None
    intrusive: bool
    smallest: float


def compare(
    want: np.ndarray,
    propagated: Sequence[np.ndarray],
    local: Sequence[np.ndarray],
    floors: Sequence[float] = (),
) -> list[LayerError]:
    """Errors of the embedding and of each layer; all are [layers + 1] streams of [tokens, hidden],
    embedding first. floors: how far two oracles are from each other after each layer."""
    found = []
    for index, true in enumerate(want):
        # What is in front of the first layer has had no other input.
        own = propagated[0] if index == 0 else local[index]
        apart = np.nan_to_num(np.abs(own - true), nan=np.inf)
        token, channel = np.unravel_index(int(apart.argmax()), apart.shape)
        found.append(
            LayerError(
                index - 1,
                relative(true, propagated[index]),
                relative(true, own),
                int(token),
                int(channel),
                float(floors[index - 1]) if index and len(floors) else 0.0,
                tuple(by_row(true, own).tolist()),
            )
        )
    return found


def blame(errors: Sequence[LayerError], smallest: float) -> int | None:
    """The first layer whose stream is off by more than `smallest` and twice its floor, and that
    adds more by itself than had reached it. Where errors creep up and no layer does, the one of
    those so far that adds most."""
    before = 0.0
    for place, error in enumerate(errors):
        if not (np.isfinite(error.propagated) and np.isfinite(error.local)):
            return error.layer
        limit = max(smallest, 2 * error.floor)
        if error.propagated > limit:
            if error.local > before:
                return error.layer
            return max(errors[: place + 1], key=lambda e: e.local).layer
        before = error.propagated
    return None


def bisect(entry: ModelEntry, provider: str) -> Bisected:
    """What a model's errors come from; OracleBlocked without transformers, UserError for a provider
    that models are not replayed with."""
    from .model_engine import build

    if provider not in PROVIDERS:
        hint = did_you_mean(provider, list(PROVIDERS))
        raise UserError(
            f"parity.provider={provider}: models run with {' or '.join(PROVIDERS)}.{hint}"
        )

    sequence = entry.forced()[-1]
    job = {**entry.job(str(oracle_folder(entry))), "prompts": [], "forced": [sequence]}
    answer, _ = ask(FLOOR_LANE, {**job, "full": True})
    llm = build(entry, provider, "cpu", chunked=False)
    smallest = policy.load().models[provider].stream
    try:
        return look(llm, sequence, answer["stream.full"], floors_of(entry), smallest, job)
    finally:
        llm.shutdown()


def look(
    llm: Any,
    sequence: list[int],
    want: np.ndarray,
    floors: Sequence[float],
    smallest: float,
    job: dict[str, Any],
) -> Bisected:
    """The same of an engine and of transformers' stream `want`; `job` asks for more of it."""
    from .model_engine import provider_of, streams

    plain = last_logits(llm, sequence)
    propagated, watched = streams(llm, sequence), last_logits(llm, sequence, tap=True)
    errors = compare(want, propagated, streams(llm, sequence, graft=want), floors)
    layer, steps = blame(errors, smallest), []
    if layer is not None and layer != EMBEDDING:
        told, oracle = ask(FLOOR_LANE, {**job, "full": True, "layer": layer})
        ours = layer_steps(llm, sequence, layer, want)
        steps = bisect_steps.compare(oracle["steps"], told, ours, provider_of(llm))
    step = bisect_steps.blame(steps, smallest)
    return Bisected(errors, layer, steps, step, plain != watched, smallest)


def last_logits(llm: Any, sequence: list[int], tap: bool = False) -> bytes:
    """The bytes of the logits after a sequence, with its layers watched or not."""
    from .model_engine import SamplingParams, generate, model_of, tapped

    model, seen = model_of(llm), []
    inner = model.compute_logits

    def compute_logits(hidden_states: Any) -> Any:
        logits = inner(hidden_states)
        seen.append(logits.float().cpu().numpy().tobytes())
        return logits

    model.compute_logits = compute_logits
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    try:
        with tapped(llm) if tap else nullcontext():
            generate(llm, [sequence], params)
    finally:
        del model.compute_logits
    return b"".join(seen)


def layer_steps(
    llm: Any, sequence: list[int], layer: int, graft: np.ndarray
) -> dict[str, np.ndarray]:
    """The steps of a layer (bisect_steps.py), every layer given its input of `graft`."""
    from .model_engine import model_of, streams

    module = model_of(llm).model.layers[layer]
    with bisect_steps.recorded(module, len(sequence)) as steps:
        streams(llm, sequence, graft)
    return steps


def floors_of(entry: ModelEntry) -> list[float]:
    """How far the oracles' streams are from each other after each layer; none without goldens."""
    try:
        want, floor = load(entry)
    except GoldenError as error:
        print(f"no floor: {error}")
        return []
    return [float(value) for value in stream_errors(want.stream, floor.stream)]


def told(name: str, found: Bisected) -> str:
    """The report of a bisect."""
    lines = ["layer  propagated       floor       local  worst token, channel"]
    for error in found.errors:
        mark = "  <- first out of line" if error.layer == found.layer else ""
        layer = "embed" if error.layer == EMBEDDING else f"{error.layer:5d}"
        figures = f"{error.propagated:10.3g}  {error.floor:10.3g}  {error.local:10.3g}"
        lines.append(f"{layer}  {figures}  {error.worst_token}, {error.worst_channel}{mark}")
    if found.steps:
        width = max(len(step.name) for step in found.steps)
        lines.append(f"\n{'step':{width}}       error       floor  worst token, channel")
        for step in found.steps:
            mark = "  <- first out of line" if step is found.step else ""
            figures = f"{step.error:10.3g}  {step.floor:10.3g}  {step.token}, {step.channel}"
            lines.append(f"{step.name:{width}}  {figures}{mark}")
    if found.intrusive:
        lines.append("INTRUSIVE: with its layers watched the model computes other logits")
    lines.append(f"{name}: {verdict(found)}")
    return "\n".join(lines)


def verdict(found: Bisected) -> str:
    """Where to look, in words."""
    if found.layer is None:
        return "no layer is out of line"
    if found.layer == EMBEDDING:
        return f"look at the embedding, {onset(found.errors[0].rows, found.smallest)}"
    where = next(e for e in found.errors if e.layer == found.layer)
    if found.step is None:
        return (
            f"look at layer {found.layer}, {onset(where.rows, found.smallest)}; none of its steps "
            "is out of line by itself"
        )
    place = onset(found.step.rows, found.smallest)
    return f"look at layer {found.layer}, {found.step.words}: {found.step.error:.3g}, {place}"


def run(config: RunConfig) -> int:
    """The verb."""
    name = (config.parity.select or "").removeprefix("model.")
    if name not in MODELS:
        raise UserError(f"parity bisect select={name}: choose one of {', '.join(MODELS)}.")
    found = bisect(MODELS[name], config.parity.provider or "torch")
    print(told(name, found))
    if found.intrusive:
        return 2
    return 0 if found.layer is None else 1

# SPDX-License-Identifier: Apache-2.0
"""`vllmx fetch NAME`: a named model's file into the cache folder, checked."""

from __future__ import annotations

from vllmx import compose
from vllmx.cli_args import did_you_mean
from vllmx.config import RunConfig
from vllmx.exceptions import UserError
from vllmx.model_loader.fetch import fetch


def run(config: RunConfig, started: float) -> int:
    """Fetch the model and print its path; what is in the cache already is only checked by size."""
    names = compose.choices("model")
    model = config.model
    if model.source is None:
        what = f"{model.model!r} is not a named model" if model.model else "no model is given"
        hint = did_you_mean(model.model, names) if model.model else ""
        raise UserError(f"{what}: choose one of {', '.join(names)}.{hint}")
    if config.load.offline:
        raise UserError("load.offline=true forbids what `vllmx fetch` is for.")
    print(
        fetch(model.source, config.load.download_dir, config.load.use_tqdm_on_load, name=model.name)
    )
    return 0

# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/engine/arg_utils.py @ v0.25.0
"""Keyword arguments of `LLM` become a RunConfig, through the same table as the command line."""

from __future__ import annotations

from typing import Any

from vllmx.cli_args import assign, check_value, did_you_mean, engine_flags
from vllmx.compose import choices, compose_run
from vllmx.config import RunConfig


def engine_args_to_config(**kwargs: Any) -> RunConfig:
    """The config of an engine built with upstream's EngineArgs names (`model`, `dtype`, ...).

    `model` is a name in conf/model or a path, as on the command line. An unknown name is a
    TypeError, a value of the wrong type a UserError; both name the argument and what fits.
    """
    table = engine_flags()
    for name in kwargs:
        if name not in table:
            raise TypeError(
                f"LLM() got an unexpected keyword argument {name!r}.{did_you_mean(name, table)}"
            )
    model = kwargs.get("model")
    named = isinstance(model, str) and model in choices("model")
    run = compose_run([f"model={model}"] if named else [])
    for name, value in kwargs.items():
        if name == "model" and named:
            continue
        flag = table[name]
        value = check_value(flag.field, name, value)
        assign(run, flag.field.key, not value if flag.inverted else value)
    return run

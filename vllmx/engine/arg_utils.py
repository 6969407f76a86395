# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/engine/arg_utils.py @ v0.25.0
"""Arguments of an engine, in upstream's names, become a config: those of `LLM`, `EngineArgs` and
an argparse parser go through the same table as the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from vllmx.cli_args import (
    SHORT,
    Field,
    Flag,
    assign,
    check_value,
    did_you_mean,
    engine_flags,
    fit_max_num_seqs,
    parse_text,
)
from vllmx.compose import choices, compose_run
from vllmx.config import RunConfig, finalize
from vllmx.exceptions import UserError
from vllmx.upstream_flags import not_built

if TYPE_CHECKING:
    from vllmx.config import VllmConfig


def engine_args_to_config(**kwargs: Any) -> RunConfig:
    """The config of an engine built with upstream's EngineArgs names (`model`, `dtype`, ...).

    `model` is a name in conf/model or a path, as on the command line. An unknown name is a
    TypeError, a value of the wrong type a UserError; both name the argument and what fits.
    """
    _check_names("LLM", kwargs)
    table = engine_flags()
    model = kwargs.get("model")
    named = isinstance(model, str) and model in choices("model")
    run = compose_run([f"model={model}"] if named else [])
    for name, value in kwargs.items():
        if name == "model" and named:
            continue
        flag = table[name]
        if name == "logits_processors" and isinstance(value, (list, tuple)):
            # Only here may they be classes as well, which no file and no command line can hold.
            names = [item for item in value if not isinstance(item, type)]
            check_value(flag.field, name, names)
            assign(run, flag.field.key, list(value))
            continue
        value = check_value(flag.field, name, value)
        assign(run, flag.field.key, not value if flag.inverted else value)
    if kwargs.get("max_num_seqs") is None:
        fit_max_num_seqs(run)
    return run


def _check_names(caller: str, kwargs: dict[str, Any]) -> None:
    table = engine_flags()
    for name in kwargs:
        if name not in table:
            raise TypeError(
                f"{caller}() got an unexpected keyword argument {name!r}."
                f"{not_built(name) or did_you_mean(name, table)}"
            )


def _default(flag: Flag) -> Any:
    """What the argument is when it is not given; None where the model or the device decides."""
    default, kind = flag.field.default, flag.field.kind
    if isinstance(default, (bool, int, float, str)):
        return not default if flag.inverted else default
    if flag.field.optional:
        return None
    return [] if kind.startswith("list") else {}


def _add_flag(parser: argparse.ArgumentParser, flag: Flag, short: str | None) -> None:
    spec = flag.field
    how: dict[str, Any] = {}
    if spec.kind == "bool":
        how["action"] = argparse.BooleanOptionalAction
    else:
        how["type"] = _reader(flag.option, spec)
        if spec.choices:
            how["choices"] = [value for value in spec.choices if value is not None]
        if spec.kind.startswith("list"):
            how["nargs"] = "+"
    parser.add_argument(
        *(option for option in (flag.option, short) if option),
        dest=flag.name,
        default=_default(flag),
        help=spec.doc.replace("%", "%%"),
        **how,
    )


def _reader(option: str, spec: Field) -> Callable[[str], Any]:
    """Reads the text after `option`, one item of it where the argument is a list."""
    kind = spec.kind.removeprefix("list[").removesuffix("]")

    def read(text: str) -> Any:
        try:
            return parse_text(replace(spec, kind=kind), option, text)
        except UserError as error:
            # argparse names the option itself.
            raise argparse.ArgumentTypeError(str(error).removeprefix(f"{option}: ")) from None

    return read


class EngineArgs:
    """What an engine may be told; an attribute for every engine flag of the command line.

    >>> args = EngineArgs("smollm2-135m", max_num_seqs=8)
    >>> engine = LLMEngine.from_engine_args(args)

    Attributes may be changed until `create_engine_config`. One that was not given reads as its
    default, and leaves what the model's own file in conf/model says as it is.
    """

    # Arguments that are none of the config.
    _OWN: tuple[str, ...] = ()

    def __init__(self, model: str | None = None, **kwargs: Any) -> None:
        """TypeError for a name that is no engine flag."""
        if model is not None:
            kwargs["model"] = model
        self.__dict__.update(kwargs)
        _check_names(type(self).__name__, self._engine_kwargs())

    def _engine_kwargs(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in self._OWN}

    def __getattr__(self, name: str) -> Any:
        flag = None if name.startswith("__") else engine_flags().get(name)
        if flag is None:
            raise AttributeError(f"{type(self).__name__!r} has no argument {name!r}")
        return _default(flag)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({given})"

    def create_engine_config(self, usage_context: Any = None, headless: bool = False) -> VllmConfig:
        """The checked config, with what the model's metadata says if a model is named.

        Raises as `engine_args_to_config` does, and UserError for a model that is not there. The
        defaults do not depend on `usage_context`; `headless` belongs to several hosts.
        """
        if headless:
            raise UserError("EngineArgs: headless engines, for several hosts, are not built.")
        config = finalize(engine_args_to_config(**self._engine_kwargs()))
        if config.model_config.model or config.model_config.source is not None:
            from vllmx.model_loader.resolve import resolve_model

            resolve_model(config)
        return config

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Give `parser` a flag for every engine argument; returns it."""
        short = {name: option for option, name in SHORT.items()}
        for name, flag in engine_flags().items():
            _add_flag(parser, flag, short.get(name))
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The arguments that `args` sets to something else than their default.

        Names of `args` that are no engine arguments are passed over.
        """
        given = vars(args)
        return cls(
            **{
                name: given[name]
                for name, flag in engine_flags().items()
                if name in given and given[name] != _default(flag)
            }
        )


class AsyncEngineArgs(EngineArgs):
    """The same for `AsyncLLM`, which may log when a request comes and goes."""

    _OWN = ("enable_log_requests",)
    enable_log_requests = False

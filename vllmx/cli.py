# SPDX-License-Identifier: Apache-2.0
"""`vllmx <command> [MODEL] [flags] [Hydra overrides] [-m]`.

The argument loop gathers flags, overrides and the model; vllmx/compose.py makes a RunConfig of
them; the command's module in vllmx/tasks runs it. A user's mistake is one line and exit code 2.
Nothing here imports torch, and Hydra is imported only when there is something to compose.
"""

from __future__ import annotations

import gc
import itertools
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from vllmx.cli_args import (
    MAX_NUM_SEQS,
    SHORT,
    Flag,
    assign,
    check_value,
    did_you_mean,
    fields,
    fit_max_num_seqs,
    flags,
    parse_text,
)
from vllmx.config import RunConfig
from vllmx.exceptions import UserError, VLLMValidationError
from vllmx.upstream_flags import not_built

COMMANDS = {
    "generate": "answer one prompt, or every prompt of a file",
    "chat": "talk to a model, here or on a server",
    "complete": "continue texts line by line, here or on a server",
    "serve": "start the OpenAI-compatible server",
    "bench": "measure latency, throughput, a server, start-up, kernels, or beside upstream",
    "fetch": "download a named model and check its hash",
    "info": "show versions, device, weight formats and the provider of each op",
    "checkpoint": "write a tiny model with seeded weights, or a dense one cut into experts",
    "parity": "compare with the references (from a checkout)",
}
# Commands whose first word after the command is a choice, and the key it sets.
VERBS = {"bench": "bench.kind", "checkpoint": "checkpoint.kind", "parity": "parity.verb"}
# Weaker than a config file: what upstream's command sets differently from the engine's default.
COMMAND_DEFAULTS: dict[str, dict[str, Any]] = {
    "bench": {"cache.enable_prefix_caching": False},
    "serve": {"debug.log_level": "info"},
}


# Exit codes of a sweep's runs: done, blocked (it showed nothing), invalid, failed. The last of them
# that occurs is the sweep's: a failure is not to hide behind a run that could not be made.
FROM_BEST_TO_WORST = (0, 3, 2, 1)


def _gravity(code: int) -> int:
    """Place of an exit code; any other, as of a server that a signal ended, is graver than all."""
    known = code in FROM_BEST_TO_WORST
    return FROM_BEST_TO_WORST.index(code) if known else len(FROM_BEST_TO_WORST)


@dataclass
class Arguments:
    """A command line, sorted; values are checked but nothing is composed yet."""

    command: str
    overrides: list[str] = field(default_factory=list)
    """`key=value` in the order given; those of `model` are in `model`."""
    values: dict[str, Any] = field(default_factory=dict)
    """Key -> value of the flags."""
    sweeps: dict[str, list[Any]] = field(default_factory=dict)
    """Key -> values of the flags that -m sweeps over."""
    model: str | None = None
    """The model as given by position, --model or model=."""
    config_file: str | None = None
    multirun: bool = False
    show_config: bool = False
    help: str | None = None
    """None: not asked for; otherwise what to search, empty for everything."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (None: sys.argv) and return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        code = run_command(argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our stdout has gone; nothing is left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        user = isinstance(error, (UserError, VLLMValidationError, OSError))
        message = " ".join(str(error).split()) or type(error).__name__
        if not user:
            message = f"{type(error).__name__}: {message} (debug.traceback=true shows where)"
        print(f"vllmx: error: {message}", file=sys.stderr)
        return 2 if user else 1


def run_command(argv: list[str]) -> int:
    """Parse `argv` and run its command; raises UserError for a mistake in it."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        from vllmx.cli_help import overview

        print(overview(COMMANDS), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0] in ("--version", "-V"):
        from importlib.metadata import version

        print(version("vllmx"))
        return 0
    args = parse(argv)
    if args.help is not None:
        from vllmx.cli_help import command_help

        print(command_help(args.command, COMMANDS[args.command], args.help))
        return 0
    with _traceback_if(_asks_for_traceback(args)), _without_gc():
        runs = list(compose_runs(args))
        if args.show_config:
            show(runs)
            return 0
    return execute(args.command, runs)


@contextmanager
def _traceback_if(wanted: bool) -> Iterator[None]:
    """Print the traceback of an error that passes, above the line that `main` makes of it."""
    try:
        yield
    except Exception as error:
        if wanted and not isinstance(error, BrokenPipeError):
            import traceback

            traceback.print_exc()
        raise


def _asks_for_traceback(args: Arguments) -> bool:
    """What debug.traceback is to be, as long as there is no config yet to ask."""
    asked = False
    for override in args.overrides:
        key, _, value = override.partition("=")
        if key == "debug":
            asked = value == "full"
        elif key == "debug.traceback":
            asked = value.strip("'\"").lower() in ("true", "yes", "on", "1")
    return asked


@contextmanager
def _without_gc() -> Iterator[None]:
    """Imports and composing make many objects and no garbage: a seventh of the time to answer."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def parse(argv: list[str]) -> Arguments:
    """Sort the arguments of a command line; raises UserError naming the one that is wrong."""
    if argv[0] not in COMMANDS:
        listed = ", ".join(COMMANDS)
        raise UserError(
            f"no command {argv[0]!r}: choose one of {listed}.{did_you_mean(argv[0], COMMANDS)}"
        )
    args = Arguments(argv[0])
    rest = argv[1:]
    position = 0
    while position < len(rest):
        position = _take(args, rest, position)
    for override in args.overrides:
        key, _, path = override.partition("=")
        if key == "model.model" and args.model is not None:
            _set_model(args, path)
    return args


def _take(args: Arguments, rest: list[str], at: int) -> int:
    """Sort the argument at index `at` and what belongs to it; returns the index after them."""
    word = rest[at]
    if word in ("-m", "--multirun"):
        args.multirun = True
    elif word in ("-h", "--help") or word.startswith("--help="):
        args.help = word.partition("=")[2]
    elif word in ("--cfg", "--config") or word.startswith(("--cfg=", "--config=")):
        option, equals, value = word.partition("=")
        if not equals:
            at += 1
            value = rest[at] if at < len(rest) else ""
        _take_config(args, option, value)
    elif word.startswith("-") and len(word) > 1:
        return _take_flag(args, rest, at)
    elif _is_override(word):
        _take_override(args, word)
    else:
        _take_word(args, word)
    return at + 1


def _take_config(args: Arguments, option: str, value: str) -> None:
    if option == "--config":
        if not value:
            raise UserError("--config needs a YAML file of flags.")
        args.config_file = value
    elif value != "job":
        raise UserError(f"--cfg {value}: only `--cfg job` exists; it prints the run's config.")
    else:
        args.show_config = True


def _is_override(word: str) -> bool:
    return re.match(r"[+~]|[A-Za-z_][\w.@:]*=", word) is not None


def _take_override(args: Arguments, word: str) -> None:
    key = word.partition("=")[0]
    if args.command in ("checkpoint", "parity"):
        full = _full_key(args.command, key)
        key, word = full, full + word.removeprefix(key)
    if key == "model":
        _set_model(args, word.partition("=")[2])
    else:
        args.values.pop(key, None)
        args.sweeps.pop(key, None)
        args.overrides.append(word)


def _full_key(node: str, key: str) -> str:
    """`parity.select` for `select`: a key of the command's node alone, under its name or flag's."""
    if f"{node}.{key}" in fields():
        return f"{node}.{key}"
    flag = flags().get(key)
    if flag is not None and flag.field.key.startswith(f"{node}."):
        return flag.field.key
    return key


def _take_word(args: Arguments, word: str) -> None:
    verb = VERBS.get(args.command)
    if verb is not None and verb not in args.values:
        kinds = fields()[verb].choices
        if not kinds or word in kinds:
            args.values[verb] = word
            return
        from vllmx.compose import choices

        if args.model is None and word not in choices("model") and not Path(word).exists():
            parse_text(fields()[verb], f"{args.command} {word}", word)
    if args.command == "parity" and verb in args.values:
        args.values["parity.select"] = word
        return
    _set_model(args, word)


def _set_model(args: Arguments, model: str) -> None:
    if args.model is not None and args.model != model:
        raise UserError(f"the model is given twice: {args.model!r} and {model!r}.")
    if not model:
        raise UserError("the model is empty: give a name of conf/model or a path.")
    args.model = model


def _take_flag(args: Arguments, rest: list[str], at: int) -> int:
    option, equals, text = rest[at].partition("=")
    flag, negated, inner = find_flag(option, args.command)
    spec = flag.field
    if spec.kind == "bool":
        value = parse_text(spec, option, text) if equals else True
        _set(args, flag, value != negated)
        return at + 1
    if negated:
        raise UserError(f"{option}: {flag.option} is not a switch and takes a value.")
    if spec.kind.startswith("list"):
        texts, at = ([text], at + 1) if equals else _values_after(rest, at + 1)
        if not texts:
            raise UserError(f"{option} needs a value.")
        items = [int(t) if _is_int(spec.kind, t) else t for t in texts]
        _set(args, flag, check_value(spec, option, items))
        return at
    if not equals:
        at += 1
        if at == len(rest) or (spec.kind != "str" and rest[at].startswith("--")):
            raise UserError(f"{option} needs a value.")
        text = rest[at]
    _set_text(args, flag, option, inner, text)
    return at + 1


def _set_text(args: Arguments, flag: Flag, option: str, inner: list[str], text: str) -> None:
    """Set `flag` from one text: a sweep under -m, an entry of a JSON object, or a plain value."""
    spec = flag.field
    if spec.key == "model.model":
        _set_model(args, text)
    elif inner:
        target = args.values.setdefault(spec.key, {})
        for name in inner[:-1]:
            target = target.setdefault(name, {})
        target[inner[-1]] = _json_or_text(text)
        check_value(spec, option, args.values[spec.key])
    elif "," in text and (spec.kind in ("int", "float") or spec.choices):
        args.sweeps[spec.key] = [parse_text(spec, option, part) for part in text.split(",")]
        args.values.pop(spec.key, None)
    else:
        _set(args, flag, parse_text(spec, option, text))


def _set(args: Arguments, flag: Flag, value: Any) -> None:
    args.sweeps.pop(flag.field.key, None)
    args.values[flag.field.key] = (not value) if flag.inverted else value


def _is_int(kind: str, text: str) -> bool:
    return kind == "list[int]" and re.fullmatch(r"-?\d+", text) is not None


def _json_or_text(text: str) -> Any:
    import json

    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _values_after(rest: list[str], at: int) -> tuple[list[str], int]:
    """The arguments from `at` on that can be list items, and the index after them."""
    end = at
    while end < len(rest) and not rest[end].startswith("-") and not _is_known_override(rest[end]):
        end += 1
    return rest[at:end], end


def _is_known_override(word: str) -> bool:
    key, equals, _ = word.partition("=")
    return bool(equals) and (key in fields() or key == "model")


def find_flag(option: str, command: str) -> tuple[Flag, bool, list[str]]:
    """(flag, whether --no- was said, names after the first dot) of `option` for `command`."""
    head, *inner = option.split(".")
    name = SHORT.get(head, head.lstrip("-").replace("-", "_"))
    table = flags()
    negated = name not in table and name.startswith("no_") and name[3:] in table
    flag = table.get(name[3:] if negated else name)
    if (head.startswith("--") or head in SHORT) and flag is not None:
        if command not in flag.commands:
            commands = ", ".join(sorted(flag.commands))
            raise UserError(f"{option} is a flag of {commands}, not of {command}.")
        if not inner or flag.field.kind in ("dict", "node"):
            return flag, negated, inner
    known = [f.option for f in table.values() if command in f.commands]
    hint = not_built(head) or did_you_mean(head, known)
    raise UserError(f"no flag {option} for {command}.{hint}")


def read_config_file(path: str, command: str) -> tuple[dict[str, Any], str | None]:
    """(key -> value, model) of a YAML file of flags, as upstream's --config takes it."""
    import yaml

    if not path.endswith((".yaml", ".yml")):
        raise UserError(f"--config {path}: needs a .yaml or .yml file.")
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: not readable as YAML: {error}") from None
    if not isinstance(content or {}, dict):
        raise UserError(f"--config {path}: needs `flag: value` lines.")
    values: dict[str, Any] = {}
    for name, value in (content or {}).items():
        try:
            flag, negated, _ = find_flag("--" + str(name).lstrip("-"), command)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        value = check_value(flag.field, f"{path}: {name}", value)
        values[flag.field.key] = (not value) if flag.inverted != negated else value
    return values, values.pop("model.model", None)


def compose_runs(args: Arguments) -> Iterator[tuple[str, RunConfig]]:
    """(label, config) of each run that the arguments ask for: one, or under -m the whole sweep."""
    from vllmx import compose

    base = dict(COMMAND_DEFAULTS.get(args.command, {}))
    model = args.model
    if args.config_file is not None:
        from_file, file_model = read_config_file(args.config_file, args.command)
        base.update(from_file)
        if not any(o.startswith("model.model=") for o in args.overrides):
            model = model or file_model
    overrides = [compose.check_override(text) for text in args.overrides]
    models, runs = [model], [overrides]
    if args.multirun:
        models, runs = _split_models(model), compose.split_sweep(overrides)
    elif args.sweeps:
        raise UserError(f"{next(iter(args.sweeps))}: several values; add -m to run each.")
    else:
        compose.refuse_sweep(overrides)
    axes = [[(key, value) for value in values] for key, values in args.sweeps.items()]
    for model, run_overrides, *swept in itertools.product(models, runs, *axes):
        label = [f"model={model}"] if len(models) > 1 else []
        label += [o for o in run_overrides if not all(o in other for other in runs)]
        label += [f"{key}={value}" for key, value in swept]
        yield " ".join(label), _build(model, run_overrides, base, {**args.values, **dict(swept)})


def _split_models(model: str | None) -> list[str | None]:
    """The models of a sweep: `a,b` is two if each part is a name or a path and the whole is not."""
    from vllmx import compose

    if model is None or Path(model).exists():
        return [model]
    parts = model.split(",")
    known = all(part in compose.choices("model") or Path(part).exists() for part in parts)
    return list(parts) if known else [model]


def _build(
    model: str | None, overrides: list[str], base: dict[str, Any], values: dict[str, Any]
) -> RunConfig:
    """Compose one run and check it. `values` win over `overrides`, those over `base`."""
    from vllmx import compose
    from vllmx.config import finalize

    given: set[str] = set()
    for text in overrides:
        key, _, value = text.lstrip("+").partition("=")
        given |= compose.keys_set_by(key, value) if key in compose.groups() else {key}
    weaker = {
        key: value
        for key, value in base.items()
        if not any(g == key or g.startswith(key + ".") for g in given)
    }
    if model is not None and model in compose.choices("model"):
        overrides = [*overrides, f"model={model}"]
    elif model is not None:
        values = {"model.model": model, **values}
    run = compose.compose_run(overrides)
    for key, value in {**weaker, **values}.items():
        assign(run, key, value)
    if MAX_NUM_SEQS not in given | weaker.keys() | values.keys():
        fit_max_num_seqs(run)
    finalize(run)
    return run


def show(runs: list[tuple[str, RunConfig]]) -> None:
    """Print the composed config of each run as YAML."""
    import dataclasses

    import yaml

    texts = [
        (f"# {label}\n" if label else "")
        + yaml.safe_dump(dataclasses.asdict(run), sort_keys=False, allow_unicode=True)
        for label, run in runs
    ]
    print("---\n".join(texts), end="")


def execute(command: str, runs: list[tuple[str, RunConfig]]) -> int:
    """Run the command on each config in this process; returns the worst exit code."""
    import logging

    from vllmx.tasks.clock import process_start

    level = runs[0][1].debug.log_level.upper()
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    task = import_module(f"vllmx.tasks.{command}")
    worst, started = 0, process_start()
    for number, (label, run) in enumerate(runs, 1):
        if len(runs) > 1:
            sys.stdout.flush()
            print(f"vllmx: run {number}/{len(runs)}: {label}", file=sys.stderr, flush=True)
        with _traceback_if(run.debug.traceback):
            worst = max(worst, task.run(run, started), key=_gravity)
        started = time.monotonic()
    return worst

# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/engine/arg_utils.py, vllm/utils/argparse_utils.py @ v0.25.0
"""The one table of flags, made out of the config dataclasses.

A flag `--max-model-len` stands for a key `model.max_model_len`. The same table serves the command
line, `--config FILE.yaml` and the keyword arguments of `LLM`. Neither Hydra nor torch is imported.
"""

from __future__ import annotations

import ast
import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from vllmx import config as schema
from vllmx.config import ENGINE_NODES, RunConfig
from vllmx.exceptions import UserError

logger = logging.getLogger(__name__)

MAX_NUM_SEQS = "scheduler.max_num_seqs"
# Where the flag is not the field's own name.
RENAMED = {
    "model.model": "model",
    "cache.cache_dtype": "kv_cache_dtype",
    "scheduler.policy": "scheduling_policy",
    "attention.backend": "attention_backend",
    "kernel.cache_dir": "kernel_cache_dir",
    "sampling.seed": "sampling_seed",
    "server.disable_access_log": "disable_uvicorn_access_log",
    "parity.from_version": "from",
    "parity.to_version": "to",
    "checkpoint.output_dir": "checkpoint_dir",
}
# A flag that says the opposite of its field.
INVERTED = {"observability.log_stats": "disable_log_stats"}
# Whole nodes that upstream takes as one JSON object.
NODES = {
    "compilation": "compilation_config",
    "attention": "attention_config",
    "kernel": "kernel_config",
    "speculative": "speculative_config",
    "reasoning": "reasoning_config",
    "structured_outputs": "structured_outputs_config",
    "kv_transfer": "kv_transfer_config",
    "kv_events": "kv_events_config",
}
WITHOUT_FLAG = {"model.name", "model.source"}
# Nodes whose fields have no flag each.
FIELDS_WITHOUT_FLAG = (
    *("model.source.", "kv_transfer.", "kv_events.", "speculative.", "reasoning."),
    *("structured_outputs.backend", "structured_outputs.disable_", "structured_outputs.enable_"),
)
SHORT = {
    "-q": "quantization",
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-cc": "compilation_config",
    "-sc": "speculative_config",
    "-ac": "attention_config",
}
# Numbers that may be written 1k (1000), 1K (1024), 25.6k, 2M, ...
HUMAN_READABLE = {
    "model.max_model_len",
    "scheduler.max_num_batched_tokens",
    "cache.kv_cache_memory_bytes",
    "server.max_request_bytes",
}
# Text that stays text even if it reads "None".
VERBATIM = {"prompt", "prompt_file", "messages"}

GENERATING = frozenset({"generate", "chat", "complete", "bench"})
ENGINE_COMMANDS = GENERATING | {"serve", "fetch", "info"}
# Commands that know the flags of a node; a node not named here belongs to every engine command.
NODE_COMMANDS = {
    "sampling": GENERATING,
    "server": frozenset({"serve"}),
    "bench": frozenset({"bench"}),
    "parity": frozenset({"parity"}),
    "checkpoint": frozenset({"checkpoint"}),
    "debug": frozenset(),
}
KEY_COMMANDS = {
    "server.url": frozenset({"chat", "complete", "bench"}),
    "server.api_key": frozenset({"serve", "chat", "complete", "bench"}),
    "bench.kind": frozenset(),
    "parity.verb": frozenset(),
    "checkpoint.kind": frozenset(),
    "prompt": frozenset({"generate", "chat", "complete"}),
    "prompt_file": frozenset({"generate"}),
    "messages": frozenset({"chat"}),
    "output": frozenset({"generate"}),
}


@dataclass(frozen=True)
class Field:
    """A leaf of RunConfig."""

    key: str
    """Dotted key, such as `scheduler.max_num_seqs`."""
    kind: str
    """int, float, bool, str, list[int], list[str], dict or node."""
    optional: bool
    choices: tuple[str, ...] = ()
    default: Any = None
    doc: str = ""


@dataclass(frozen=True)
class Flag:
    """One flag; `field.key` is what it sets."""

    name: str
    """Without dashes and with underscores, which is also the keyword argument of `LLM`."""
    field: Field
    commands: frozenset[str]
    inverted: bool = False

    @property
    def option(self) -> str:
        """The flag as it is typed."""
        return "--" + self.name.replace("_", "-")


def _kind(hint: Any) -> tuple[str, bool, type | None]:
    """(kind, optional, dataclass) of a resolved annotation of vllmx.config."""
    optional = False
    if get_origin(hint) is Union:
        (hint,) = [part for part in get_args(hint) if part is not type(None)]
        optional = True
    origin = get_origin(hint)
    if origin is list:
        return f"list[{get_args(hint)[0].__name__}]", optional, None
    if origin is dict:
        return "dict", optional, None
    if hasattr(hint, "__dataclass_fields__"):
        return "node", optional, hint
    return hint.__name__, optional, None


@cache
def field_docs() -> dict[str, dict[str, str]]:
    """Class -> field -> the docstring under it, read from the text of vllmx/config.py."""
    tree = ast.parse(Path(schema.__file__).read_text(encoding="utf-8"))
    docs: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            docs[node.name] = dict(_docs_in(node))
    return docs


def _docs_in(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement, following in zip(node.body, node.body[1:]):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            yield statement.target.id, " ".join(str(following.value.value).split())


@cache
def fields() -> dict[str, Field]:
    """Every key of RunConfig, nodes included, in the order of the dataclasses."""
    found: dict[str, Field] = {}

    def walk(cls: Any, prefix: str) -> None:
        hints = get_type_hints(cls)
        for name, spec in cls.__dataclass_fields__.items():
            kind, optional, node = _kind(hints[name])
            key = prefix + name
            doc = field_docs()[cls.__name__].get(name, "")
            choices = tuple(dict.fromkeys(spec.metadata.get("choices", ())))
            found[key] = Field(key, kind, optional, choices, spec.default, doc)
            if node is not None:
                walk(node, key + ".")

    walk(RunConfig, "")
    return found


def leaf_keys() -> list[str]:
    """The keys that hold a value."""
    return [key for key, spec in fields().items() if spec.kind != "node"]


@cache
def flags() -> dict[str, Flag]:
    """The table: name with underscores -> Flag. Two flags of one name are an assertion error."""
    table: dict[str, Flag] = {}
    for key, spec in fields().items():
        node = key.split(".")[0]
        if key in WITHOUT_FLAG or key.startswith(FIELDS_WITHOUT_FLAG):
            continue
        if spec.kind == "node":
            name = NODES.get(key)
        else:
            name = INVERTED.get(key) or RENAMED.get(key) or key.split(".")[-1]
        commands = KEY_COMMANDS.get(key, NODE_COMMANDS.get(node, ENGINE_COMMANDS))
        if name is None or not commands:
            continue
        assert name not in table, f"--{name} would mean {table[name].field.key} and {key}"
        table[name] = Flag(name, spec, commands, key in INVERTED)
    return table


def engine_flags() -> dict[str, Flag]:
    """The flags that are keyword arguments of `LLM` too."""
    return {n: f for n, f in flags().items() if f.field.key.split(".")[0] in ENGINE_NODES}


def human_readable_int(text: str) -> int:
    """`4096`, `4k` = 4000, `4K` = 4096, `25.6k` = 25600; k, m, g and t in either case."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text.strip())
    if match is None:
        return int(text)
    digits, suffix = match.groups()
    power = "kmgt".index(suffix.lower()) + 1
    if suffix.islower():
        return int(round(float(digits) * 1000**power, 6))
    if "." in digits:
        raise ValueError(
            f"{suffix} counts in 1024s and takes whole numbers; {digits}{suffix.lower()}?"
        )
    return int(digits) * 1024**power


def parse_text(spec: Field, where: str, text: str) -> Any:
    """The value of key `spec` written as `text`; `where` is how the error names it."""
    if spec.key not in VERBATIM and spec.optional and text == "None":
        return None
    try:
        if spec.kind == "int":
            if spec.key == "model.max_model_len" and text.strip().lower() == "auto":
                return -1
            return human_readable_int(text) if spec.key in HUMAN_READABLE else int(text)
        if spec.kind == "float":
            return float(text)
        if spec.kind == "bool":
            return {"true": True, "false": False}[text.lower()]
        if spec.kind in ("dict", "node"):
            return check_value(spec, where, json.loads(text))
    except UserError:
        raise  # it names the field within the JSON
    except (ValueError, KeyError) as error:
        raise UserError(
            f"{where}: {_needs(spec)}, got {text!r}. {_detail(error)}".strip()
        ) from None
    return check_choice(spec, where, text)


def check_value(spec: Field, where: str, value: Any) -> Any:
    """`value` from YAML, JSON or Python in the type of key `spec`, else UserError."""
    if value is None:
        if spec.optional:
            return None
        raise UserError(f"{where}: {_needs(spec)}, got null.")
    if spec.kind == "str" and not isinstance(value, str):
        value = _as_text(value)
    if spec.kind == "node" and is_dataclass(value):  # KVTransferConfig(...) and its like
        value = {name: getattr(value, name) for name in value.__dataclass_fields__}
    item_kind = {"list[int]": int, "list[str]": str, "list[List]": list}.get(spec.kind)
    if item_kind is not None:
        items = [value] if isinstance(value, (str, int)) else value
        if isinstance(items, (list, tuple)) and all(type(item) is item_kind for item in items):
            return list(items)
    elif spec.kind in ("dict", "node") and isinstance(value, Mapping):
        return _check_node(spec, where, value) if spec.kind == "node" else dict(value)
    elif isinstance(value, str) and spec.kind in ("int", "float"):
        return parse_text(spec, where, value)
    elif spec.kind == "float" and type(value) is int:
        return float(value)
    elif spec.kind == type(value).__name__:
        return check_choice(spec, where, value) if spec.kind == "str" else value
    raise UserError(f"{where}: {_needs(spec)}, got {value!r}.")


def check_choice(spec: Field, where: str, value: str) -> str:
    """`value` if the field allows it, else UserError with the choices and the nearest one."""
    if not spec.choices or value in spec.choices:
        return value
    listed = ", ".join(str(choice) for choice in spec.choices if choice is not None)
    raise UserError(
        f"{where}: {value!r} is not one of {listed}.{did_you_mean(value, spec.choices)}"
    )


def _check_node(spec: Field, where: str, value: Mapping[str, Any]) -> dict[str, Any]:
    known = {key.split(".")[-1]: f for key, f in fields().items() if key.startswith(spec.key + ".")}
    for name in value:
        if name not in known:
            raise UserError(f"{where}: no field {name!r}.{did_you_mean(str(name), known)}")
    return {name: check_value(known[name], f"{where}.{name}", v) for name, v in value.items()}


def _as_text(value: Any) -> Any:
    """Paths and torch dtypes as text; upstream takes both where it takes strings."""
    if isinstance(value, PathLike):
        return fspath(value)
    if type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    return value


def _needs(spec: Field) -> str:
    words = {
        "int": "needs a whole number",
        "float": "needs a number",
        "bool": "needs true or false",
        "str": "needs a string",
        "list[int]": "needs a list of whole numbers",
        "list[str]": "needs a list of strings",
        "list[List]": "needs a list of lists",
    }
    return words.get(spec.kind, "needs a JSON object")


def _detail(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}."
    return str(error) if "counts in" in str(error) else ""


def fit_max_num_seqs(run: RunConfig) -> None:
    """Lower max_num_seqs, which nobody gave, to a token budget that is less, as upstream does:
    each running request needs a token of the step."""
    scheduler = run.scheduler
    budget = scheduler.max_num_batched_tokens
    if budget is not None and budget < scheduler.max_num_seqs:
        logger.warning(
            "%s is %s, not %s, as scheduler.max_num_batched_tokens is.",
            *(MAX_NUM_SEQS, budget, scheduler.max_num_seqs),
        )
        scheduler.max_num_seqs = budget


def did_you_mean(word: str, known: Any) -> str:
    """` Did you mean X?` with the nearest of `known`, or an empty string."""
    import difflib

    if word.lstrip("-").replace("-", "_").startswith("guided_decoding"):
        return (
            " It is a field of --structured-outputs-config (structured_outputs_config) now: "
            "backend, disable_any_whitespace or disable_additional_properties."
        )
    names = [str(name) for name in known if name is not None]
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if not near:  # a key is often given without its node: max_num_seqs for scheduler.max_num_seqs
        tails = {name.split(".")[-1]: name for name in names}
        near = [tails[n] for n in difflib.get_close_matches(word.split(".")[-1], tails, 1, 0.6)]
    return f" Did you mean {near[0]}?" if near else ""


def assign(run: RunConfig, key: str, value: Any) -> None:
    """Set dotted `key` of `run`; a node takes a dict of its fields."""
    *path, name = key.split(".")
    target: Any = run
    for part in path:
        target = getattr(target, part)
    if fields()[key].kind == "node":
        for field_name, field_value in value.items():
            setattr(getattr(target, name), field_name, field_value)
    else:
        setattr(target, name, value)

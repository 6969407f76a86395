# SPDX-License-Identifier: Apache-2.0
"""conf/ and overrides become a RunConfig: the only file that imports Hydra and OmegaConf."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from vllmx.cli_args import did_you_mean, fields, leaf_keys
from vllmx.config import ModelConfig, RunConfig
from vllmx.exceptions import UserError


@cache
def conf_dir() -> Path:
    """The folder of YAML files: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise UserError(f"No conf/config.yaml in {package} or {package.parent}: reinstall vllmx.")


def groups() -> list[str]:
    """The config groups: the folders of conf/."""
    return sorted(path.name for path in conf_dir().iterdir() if path.is_dir())


def choices(group: str) -> list[str]:
    """The files of a group, without `.yaml`."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def keys_set_by(group: str, choice: str) -> set[str]:
    """The dotted keys that conf/`group`/`choice`.yaml gives a value."""
    import yaml

    text = (conf_dir() / group / f"{choice}.yaml").read_text(encoding="utf-8")
    prefix = "" if "# @package _global_" in text else f"{group}."
    found: set[str] = set()

    def walk(node: dict[str, Any], prefix: str) -> None:
        for name, value in node.items():
            key = prefix + name
            if isinstance(value, dict) and fields().get(key) and fields()[key].kind == "node":
                walk(value, key + ".")
            else:
                found.add(key)

    walk(yaml.safe_load(text) or {}, prefix)
    return found


def check_override(text: str) -> str:
    """A Hydra override whose key exists, in the form that compose takes; else UserError."""
    key, _, value = text.partition("=")
    if key[:1] in "+~":
        raise UserError(
            f"{text}: the config has a fixed set of keys, so {key[:1]} can't add or remove one; "
            f"write key=value.{did_you_mean(key.lstrip('+~'), fields())}"
        )
    if key in groups():
        if not value or re.fullmatch(r"[\w.-]+", value):
            _check_choice(key, value)
        return text
    if key in fields():
        return text
    for parent, spec in fields().items():
        if spec.kind == "dict" and key.startswith(parent + "."):
            return f"++{text}"  # an open mapping: OmegaConf's struct flag wants the key added
    raise UserError(f"{text}: no key {key!r}.{did_you_mean(key, [*leaf_keys(), *groups()])}")


def _check_choice(group: str, value: str) -> None:
    if value not in choices(group):
        raise UserError(
            f"{group}={value}: choose one of {', '.join(choices(group))}."
            f"{did_you_mean(value, choices(group))}"
        )


def split_sweep(overrides: list[str]) -> list[list[str]]:
    """The runs that sweep values in `overrides` span, each a list of plain overrides."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    (runs,) = BasicSweeper.split_arguments(_parse(overrides), max_batch_size=None)
    return runs


def refuse_sweep(overrides: list[str]) -> None:
    """UserError if an override has several values."""
    for override in _parse(overrides):
        if override.is_sweep_override():
            raise UserError(
                f"{override.input_line}: several values; add -m to run each, or quote the value "
                "if it is one text."
            )


def _parse(overrides: list[str]) -> list[Any]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            parsed.append(parser.parse_override(text))
        except HydraException as error:
            reason = str(error).split("\n")[0]
            hint = _grammar_hint(text.split("=")[0].lstrip("+"))
            raise UserError(
                f"{text}: not an override that Hydra can read ({reason}). {hint}"
            ) from None
    return parsed


def _grammar_hint(key: str) -> str:
    if key in ("prompt", "prompt_file", "messages"):
        return f"--{key.replace('_', '-')} takes any text as it is."
    return "Quote the value: 'key=\"...\"'."


def compose_run(overrides: list[str]) -> RunConfig:
    """Compose conf/ with checked `overrides` and convert it; UserError if that fails."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with _no_hydra_around(), initialize_config_dir(str(conf_dir()), version_base="1.3"):
            run = OmegaConf.to_object(compose("config", overrides))
    except (HydraException, OmegaConfBaseException, ValueError, AssertionError) as error:
        raise UserError(_reason(error)) from error
    assert isinstance(run, RunConfig) and isinstance(run.model, ModelConfig)
    return run


@contextmanager
def _no_hydra_around() -> Iterator[None]:
    """Set the Hydra of a program that uses vllmx as a library aside for a while.

    Ours knows the schema, and of its own config groups (launchers, logging, ...) none: nothing
    here uses them, and to compose them takes a third of the time.
    """
    from hydra.conf import HydraConf
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.plugins import Plugins

    Plugins.instance()  # so that those of Hydra itself are stored outside, once
    store = ConfigStore.instance()
    outer, outer_nodes = GlobalHydra.instance().hydra, store.repo
    GlobalHydra.instance().clear()
    store.repo = {}
    store.store(name="vllmx_schema", node=RunConfig)
    store.store(name="config", group="hydra", node=HydraConf(defaults=[]), provider="hydra")
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = outer
        store.repo = outer_nodes


def _reason(error: Exception) -> str:
    """`key=value: why` in one line, from Hydra's exception and its cause."""
    what = str(error).split("\n")[0].removeprefix("Error merging override ").removeprefix("++")
    lines = str(error.__cause__ or "").split("\n")
    if error.__cause__ is not None and lines[0]:
        return f"{what}: {lines[0]}."
    place = [line.strip() for line in str(error).split("\n")[1:] if "full_key:" in line]
    return f"{what} ({place[0]})." if place else f"{what}."

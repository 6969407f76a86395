# SPDX-License-Identifier: Apache-2.0
"""conf/ composes in every combination and fits the schema."""

import itertools
from pathlib import Path

import pytest
import yaml

from vllmx.cli_args import fields
from vllmx.compose import choices, compose_run, conf_dir, groups, keys_set_by
from vllmx.config import ENGINE_NODES, RunConfig, finalize

PAIRS = [(group, choice) for group in groups() for choice in choices(group)]
GROUPS_OF_THE_SCHEMA = {
    *("model", "quant", "kernel", "scheduler", "cache", "sampling", "server"),
    *("device", "parity", "debug"),
}


def test_groups_are_nodes_of_the_schema_and_experiment() -> None:
    assert set(groups()) - {"local"} == GROUPS_OF_THE_SCHEMA | {"experiment"}
    assert set(RunConfig.__dataclass_fields__) >= GROUPS_OF_THE_SCHEMA
    assert set(ENGINE_NODES) <= set(RunConfig.__dataclass_fields__)


@pytest.mark.parametrize(("group", "choice"), PAIRS, ids=lambda v: v)
def test_choice_composes_and_is_valid(group: str, choice: str) -> None:
    finalize(compose_run([f"{group}={choice}"]))


@pytest.mark.parametrize("experiment", choices("experiment"))
def test_experiment_composes_with_every_choice(experiment: str) -> None:
    for group, choice in PAIRS:
        if group != "experiment":
            finalize(compose_run([f"{group}={choice}", f"experiment={experiment}"]))


def test_groups_write_to_their_own_node_only_so_combinations_cannot_clash() -> None:
    for group, choice in PAIRS:
        if group not in ("experiment", "local"):
            assert all(key.startswith(group + ".") for key in keys_set_by(group, choice))


def test_every_group_is_chosen_at_once_in_turn() -> None:
    longest = max(len(choices(group)) for group in groups())
    for turn in range(longest):
        chosen = [f"{g}={choices(g)[turn % len(choices(g))]}" for g in groups()]
        finalize(compose_run(chosen))


def test_yaml_values_are_known_keys() -> None:
    for group, choice in PAIRS:
        assert keys_set_by(group, choice) <= set(fields())


def test_defaults_list_names_every_group() -> None:
    config = yaml.safe_load((conf_dir() / "config.yaml").read_text())
    listed = {
        key.removeprefix("optional ")
        for entry in config["defaults"]
        if entry != "vllmx_schema"
        for key in (entry if isinstance(entry, dict) else {})
    }
    assert listed == GROUPS_OF_THE_SCHEMA | {"experiment", "local"}


def test_defaults_are_the_dataclass_defaults() -> None:
    assert compose_run([]) == RunConfig()


def test_named_models_are_pinned() -> None:
    for name in choices("model"):
        model = compose_run([f"model={name}"]).model
        assert model.name == name and model.source is not None
        assert all("==" in package for package in model.source.packages)
        assert len(model.source.sha256) == 64 and model.source.license


def test_composing_leaves_a_surrounding_hydra_alone(tmp_path: Path) -> None:
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore

    (tmp_path / "config.yaml").write_text("defaults: [outer_schema, _self_]\nsize: 3\n")
    ConfigStore.instance().store(name="outer_schema", node={"size": 1, "name": "outer"})
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert compose_run(["scheduler=latency"]).scheduler.max_num_seqs == 8
        composed = compose("config", ["hydra.verbose=true"], return_hydra_config=True)
    assert (composed.size, composed.name) == (3, "outer")
    assert composed.hydra.launcher._target_.endswith("BasicLauncher")


def test_precedence_of_groups_is_stable() -> None:
    for a, b in itertools.islice(
        itertools.permutations(["scheduler=latency", "cache=no_prefix"]), 2
    ):
        run = compose_run([a, b])
        assert run.scheduler.max_num_seqs == 8 and not run.cache.enable_prefix_caching

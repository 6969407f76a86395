# SPDX-License-Identifier: Apache-2.0
"""A setting either does something or is refused, and checking it changes nothing."""

import ast
import copy
import dataclasses
from pathlib import Path

import pytest

import vllmx
from vllmx.cli_args import fields
from vllmx.config import DEFAULT_BLOCK_SIZE, ENGINE_NODES, NOT_BUILT, RunConfig, finalize
from vllmx.exceptions import UserError
from vllmx.upstream_backends import LACKING, OURS

# Refused by finalize in words of their own.
ACCEPTED = {
    "model.trust_remote_code",
    "parallel.tensor_parallel_size",
    "parallel.pipeline_parallel_size",
}
# Built in part: some of its values are refused, the others are read; or filled in at start-up.
IN_PART = {"compilation.cudagraph_mode", "cache.mamba_block_size"}
# The schema itself makes another setting of it.
RESOLVED = {"speculative.synthetic_acceptance_length"}
# Read by what a user brings: a connector gets its node whole; the worker of vllmx refuses adapters
# and drafts by name.
BROUGHT = {
    *(f"kv_transfer.kv_{name}" for name in ("ip", "port", "rank", "role")),
    *(f"kv_transfer.kv_{name}" for name in ("buffer_device", "buffer_size", "parallel_size")),
    "kv_transfer.enable_permute_local_kv",
    "lora.enable_lora",
    "lora.max_cpu_loras",
    "lora.max_lora_rank",
    "speculative.prompt_lookup_max",
    "speculative.prompt_lookup_min",
}
OTHER = {
    "scheduler.prefill_schedule_interval": 2,
    "cache.mamba_block_size": 16,
    "compilation.cudagraph_mode": "PIECEWISE",
}


def run_with(key: str, value: object) -> RunConfig:
    run = RunConfig()
    node, _, name = key.partition(".")
    setattr(getattr(run, node), name, value)
    return run


def names_read() -> set[str]:
    """Every name after a dot in vllmx, but for the schema itself."""
    package = Path(vllmx.__file__).parent
    names: set[str] = set()
    for path in package.rglob("*.py"):
        if path != package / "config.py":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return names


def test_every_setting_of_the_engine_is_read_or_refused() -> None:
    read = names_read()
    settings = [key for key in fields() if key.partition(".")[0] in ENGINE_NODES and "." in key]
    unread = {key for key in settings if key.rpartition(".")[2] not in read}
    assert unread == ACCEPTED | BROUGHT | RESOLVED | set(NOT_BUILT) - IN_PART


def test_what_is_not_built_is_refused_by_name_with_the_cure() -> None:
    assert set(OTHER) == set(NOT_BUILT)
    for key, value in OTHER.items():
        with pytest.raises(UserError, match=f"{key}=.* is not built yet; leave it unset"):
            finalize(run_with(key, value))
        for without in NOT_BUILT[key]:
            finalize(run_with(key, without))


def test_defaults_are_values_that_need_nothing_unbuilt() -> None:
    finalize(RunConfig())
    assert all(
        getattr(getattr(RunConfig(), key.partition(".")[0]), key.partition(".")[2]) in values
        for key, values in NOT_BUILT.items()
    )


def test_eager_is_accepted_as_that_is_all_there_is() -> None:
    assert finalize(run_with("model.enforce_eager", True)).model_config.enforce_eager


def test_finalize_leaves_the_run_alone_and_shares_nothing_with_it() -> None:
    run = RunConfig()
    run.model.hf_overrides = {"a": {"b": 1}}
    before = copy.deepcopy(run)
    first, second = finalize(run), finalize(run)
    assert run == before
    assert first.cache_config.block_size == DEFAULT_BLOCK_SIZE
    first.model_config.hf_overrides["a"]["b"] = 2
    for name in ENGINE_NODES.values():
        node = getattr(first, name)
        for field in dataclasses.fields(node) if node is not None else ():
            setattr(node, field.name, "changed")
    assert run == before
    assert second.model_config.hf_overrides == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("told", "backend"),
    [("TRITON_ATTN", "triton"), ("torch_sdpa", "sdpa"), ("CPU_ATTN", "native"), ("torch", "torch")],
)
def test_an_attention_backend_may_be_called_as_upstream_calls_it(told, backend) -> None:
    run = RunConfig()
    run.attention.backend = told
    assert finalize(run).attention_config.backend == backend
    assert run.attention.backend == told


def test_an_attention_backend_that_only_upstream_has_is_refused_with_those_there_are() -> None:
    run = RunConfig()
    run.attention.backend = "FLASH_ATTN"
    with pytest.raises(UserError, match=r"backend=FLASH_ATTN: .*one of torch, native \(upstream's"):
        finalize(run)


def test_upstreams_names_of_backends_lead_to_backends() -> None:
    from vllmx.attention.selector import all_backends

    assert set(OURS.values()) | {"torch"} == set(all_backends())
    assert not OURS.keys() & LACKING

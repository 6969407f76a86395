# SPDX-License-Identifier: Apache-2.0
"""What recurrent layers ask of the cache: modes, blocks as long as a state, and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_model import HEAD, WIDTH, Recurrence, hybrid_engine, registered, save_hybrid

from vllmx import LLM
from vllmx.attention.selector import get_mamba_builder_cls
from vllmx.config import KernelConfig, SpeculativeConfig, VllmConfig
from vllmx.exceptions import UnsupportedError, UserError
from vllmx.ir.select import OpTable
from vllmx.layers.attention import Attention
from vllmx.worker.mamba_config import verify_and_update_config

STATE = 2 * 2 + WIDTH * WIDTH * 4
"""Bytes of the states of a layer."""
TOKEN = 2 * HEAD * 4
"""Bytes of a token in a layer of attention."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with registered():
        yield save_hybrid(tmp_path_factory.mktemp("hybrid"), "SSA")


def cache_of(llm: LLM) -> Any:
    return llm.llm_engine.vllm_config.cache_config


def specs_of(llm: LLM) -> dict[str, Any]:
    groups = llm.llm_engine.engine_core.engine_core.kv_cache_config.kv_cache_groups
    return {name: group.kv_cache_spec for group in groups for name in group.layer_names}


@pytest.mark.parametrize(("block_size", "grown"), [(1, 6), (2, 6), (4, 8), (16, 16), (5, 10)])
def test_blocks_grow_by_whole_ones_until_they_hold_a_state(folder, block_size, grown) -> None:
    llm = hybrid_engine(folder, block_size=block_size)
    specs = specs_of(llm)
    assert specs["layers.2"].block_size == grown
    assert {spec.page_size_bytes for spec in specs.values()} == {grown * TOKEN}
    assert grown * TOKEN >= STATE > (grown - block_size) * TOKEN
    # One state a request, of all its tokens.
    assert specs["layers.0"].block_size == 256
    assert specs["layers.0"].mamba_cache_mode == "none"


class Shaped(Recurrence):
    """A layer with the states of a gated delta net of 16 key heads, all heads of 128."""

    value_heads = 48

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return ((2 * 16 * 128 + self.value_heads * 128, 3), (self.value_heads, 128, 128))

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("value_heads", "kv_heads", "upstream"), [(48, 4, 784), (32, 2, 1056)], ids=["27b", "35b-a3b"]
)
def test_blocks_of_qwen3_5_are_as_long_as_upstreams(value_heads, kv_heads, upstream) -> None:
    """Upstream 0.25.0 logs these sizes for the models in bfloat16."""
    config = VllmConfig()
    config.cache_config.block_size, config.model_config.max_model_len = 16, 4096
    ops = OpTable(KernelConfig(), "cpu", torch.bfloat16)
    attention = Attention(8, 256, 1.0, kv_heads, vllm_config=config, ops=ops, prefix="a")
    states = Shaped("s")
    states.value_heads = value_heads
    verify_and_update_config(config, {"a": attention}, {"s": states})
    assert config.cache_config.block_size == upstream
    pages = {layer.get_kv_cache_spec(config).page_size_bytes for layer in (attention, states)}
    assert pages == {upstream * 2 * kv_heads * 256 * 2}


def test_states_lie_in_the_pages_that_attention_uses(folder) -> None:
    llm = hybrid_engine(folder)
    core = llm.llm_engine.engine_core.engine_core
    layers = core.model_executor.driver_worker.model_runner.model.layers
    (tensor,) = core.kv_cache_config.kv_cache_tensors
    assert tensor.size == 200 * 8 * TOKEN and sorted(tensor.shared_by) == [
        f"layers.{i}" for i in (0, 1, 2)
    ]
    first = layers[2].attn.kv_cache
    for layer in layers[:2]:
        conv, state = layer.kv_cache
        assert conv.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        assert conv.shape == (200, 1, 2) and state.shape == (200, 1, WIDTH, WIDTH)
        assert conv[7].data_ptr() == first[7].data_ptr()
        assert state[7].data_ptr() == first[7].data_ptr() + 4
        assert not first.any()
        conv[3], state[3] = 1, 2
        assert not first[2].any() and not first[4].any()
        conv[3], state[3] = 0, 0


@pytest.mark.parametrize(
    ("asked", "mode", "caching", "warned"),
    [
        ({}, "none", False, False),
        ({"enable_prefix_caching": True}, "align", True, False),
        ({"enable_prefix_caching": False}, "none", False, False),
        ({"enable_prefix_caching": True, "mamba_cache_mode": "align"}, "align", True, False),
        ({"enable_prefix_caching": True, "mamba_cache_mode": "all"}, "align", True, True),
        ({"enable_prefix_caching": False, "mamba_cache_mode": "align"}, "none", False, True),
        ({"mamba_cache_mode": "align"}, "none", False, True),
    ],
    ids=str,
)
def test_modes_follow_prefix_caching(folder, caplog, asked, mode, caching, warned) -> None:
    with caplog.at_level(logging.WARNING, "vllmx.worker.mamba_config"):
        llm = hybrid_engine(folder, **asked)
    assert (cache_of(llm).mamba_cache_mode, cache_of(llm).enable_prefix_caching) == (mode, caching)
    assert ("cache.mamba_cache_mode=" in caplog.text) is warned
    spec = specs_of(llm)["layers.0"]
    assert spec.mamba_cache_mode == mode
    assert spec.block_size == (8 if mode == "align" else 256)


def test_a_model_of_states_alone_keeps_its_blocks(tmp_path) -> None:
    with registered():
        folder = save_hybrid(tmp_path, "SS")
        specs = specs_of(hybrid_engine(folder))
        assert {spec.page_size_bytes for spec in specs.values()} == {STATE}
        specs = specs_of(hybrid_engine(folder, enable_prefix_caching=True))
        assert {spec.block_size for spec in specs.values()} == {4}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"disable_hybrid_kv_cache_manager": True},
            "scheduler.disable_hybrid_kv_cache_manager=true: recurrent states need groups",
        ),
        (
            {"enable_prefix_caching": True, "enable_chunked_prefill": False},
            "cache.mamba_cache_mode=align needs scheduler.enable_chunked_prefill=true",
        ),
        (
            {"enable_prefix_caching": True, "max_num_batched_tokens": 7, "max_num_seqs": 2},
            "scheduler.max_num_batched_tokens=7 must be at least cache.block_size=8",
        ),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "kv_transfer.kv_connector=ExampleConnector: no connector moves recurrent states",
        ),
    ],
)
def test_what_recurrent_layers_cannot_do_is_refused(folder: Path, settings, message) -> None:
    with pytest.raises(UserError) as error:
        hybrid_engine(folder, **settings)
    assert message in str(error.value)


def test_drafts_are_refused() -> None:
    config = VllmConfig(
        speculative_config=SpeculativeConfig(num_speculative_tokens=3, method="ngram")
    )
    with pytest.raises(UserError, match=r"num_speculative_tokens=3: .*\(layer layers\.0\)"):
        verify_and_update_config(config, {}, {"layers.0": Recurrence("layers.0")})


def test_an_unknown_kind_of_state_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"'mamba2'.*gdn_attention"):
        get_mamba_builder_cls("mamba2")

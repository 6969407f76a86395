# SPDX-License-Identifier: Apache-2.0
"""From a KV cache config to the layers' views: packed and padded blocks, and shared caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllmx.attention.backend import CommonAttentionMetadata
from vllmx.config import KernelConfig, VllmConfig
from vllmx.core.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllmx.core.kv_cache_packing import packed_tensors
from vllmx.exceptions import UnsupportedError
from vllmx.forward_context import ForwardContext, set_forward_context
from vllmx.ir.select import OpTable
from vllmx.layers.attention import Attention
from vllmx.worker.attn_utils import (
    AttnMetadataBuilders,
    add_kv_sharing_layers_to_kv_cache_groups,
    init_kv_cache,
    shared_kv_cache_layers,
    zero_blocks,
)

BLOCKS, BLOCK, HEADS, SIZE = 6, 4, 2, 8
PAGE = BLOCK * 2 * HEADS * SIZE * 4


def layer(name: str, backend: str = "torch", **settings: Any) -> Attention:
    config = VllmConfig()
    config.cache_config.block_size = BLOCK
    config.cache_config.cache_dtype = settings.pop("cache_dtype", "auto")
    config.attention_config.backend = backend
    made = Attention(
        4,
        SIZE,
        SIZE**-0.5,
        HEADS,
        vllm_config=config,
        ops=OpTable(KernelConfig(), "cpu", torch.float32),
        prefix=name,
        **settings,
    )
    made.spec = made.get_kv_cache_spec(config)
    return made


def named(*layers: Attention) -> dict[str, Attention]:
    return {made.layer_name: made for made in layers}


def step(num_tokens: int, blocks: list[int]) -> CommonAttentionMetadata:
    """One request of `num_tokens` new tokens in `blocks`."""
    starts = torch.tensor([0, num_tokens], dtype=torch.int32)
    lengths = torch.tensor([num_tokens], dtype=torch.int32)
    table = torch.tensor([blocks], dtype=torch.int32)
    slots = [blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(num_tokens)]
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_np=starts.numpy(),
        seq_lens=lengths,
        seq_lens_np=lengths.numpy(),
        num_reqs=1,
        num_actual_tokens=num_tokens,
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots),
    )


def attend(made: Attention, key: Any, value: Any, query: torch.Tensor, blocks: list[int]) -> Any:
    common = step(query.shape[0], blocks)
    metadata = made.backend.get_builder_cls()(BLOCK, torch.device("cpu")).build(common)
    with set_forward_context(ForwardContext({made.layer_name: metadata})):
        return made(query, key, value)


def inputs(num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(num_tokens, 4 * SIZE, generator=generator)
    key, value = torch.randn(2, num_tokens, HEADS * SIZE, generator=generator)
    return key, value, query


def plain(made: Attention) -> Attention:
    """The layer on an allocation of its own."""
    tensor = KVCacheTensor(PAGE * BLOCKS, [made.layer_name])
    group = KVCacheGroupSpec([made.layer_name], made.spec)
    init_kv_cache(KVCacheConfig(BLOCKS, [tensor], [group]), named(made), "cpu")
    return made


# ---------------------------------------------------------------- packed and padded blocks


def test_packed_layers_are_views_of_one_allocation_and_do_not_disturb_each_other():
    layers = named(*[layer(name) for name in ("a", "b", "w")])
    groups = [
        KVCacheGroupSpec(["a", "b"], layers["a"].spec),
        KVCacheGroupSpec(["w"], layers["w"].spec),
    ]
    config = KVCacheConfig(BLOCKS, packed_tensors(groups, BLOCKS), groups)
    init_kv_cache(config, layers, "cpu")
    assert layers["a"].kv_cache.stride(0) * 4 == 2 * PAGE
    one = {made.kv_cache.untyped_storage().data_ptr() for made in layers.values()}
    assert len(one) == 1
    # w shares its place with a, and uses other blocks.
    blocks = {"a": [1, 4], "b": [1, 4], "w": [2, 5]}
    outs = {n: attend(layers[n], *inputs(7, i), blocks[n]) for i, n in enumerate(layers)}
    for i, name in enumerate(layers):
        alone = attend(plain(layer(name)), *inputs(7, i), blocks[name])
        torch.testing.assert_close(outs[name], alone, rtol=0, atol=0)
    for i, name in enumerate(layers):
        key = inputs(7, i)[0].view(7, HEADS, SIZE)
        stored = layers[name].key_cache[torch.tensor(blocks[name])].flatten(0, 1)[:7]
        assert torch.equal(stored, key)


def test_a_padded_page_is_read_with_its_stride():
    made = layer("a")
    tensor = KVCacheTensor((PAGE + 64) * BLOCKS, ["a"])
    group = KVCacheGroupSpec(["a"], made.spec)
    init_kv_cache(KVCacheConfig(BLOCKS, [tensor], [group]), named(made), "cpu")
    padded = attend(made, *inputs(6), [3, 1])
    assert torch.equal(padded, attend(plain(layer("a")), *inputs(6), [3, 1]))


@pytest.mark.parametrize("backend", ["sdpa", "native"])
def test_a_backend_that_needs_even_slots_refuses_packed_blocks(backend):
    made = layer("a", backend)
    assert not made.spec.indexes_kv_by_block_stride
    tensor = KVCacheTensor(2 * PAGE * BLOCKS, ["a"], 0, 2 * PAGE)
    group = KVCacheGroupSpec(["a"], made.spec)
    with pytest.raises(UnsupportedError, match=f"backend {backend} cannot read"):
        init_kv_cache(KVCacheConfig(BLOCKS, [tensor], [group]), named(made), "cpu")


def test_a_backend_that_reads_them_gets_an_op_that_writes_them():
    made = layer("a", "torch")
    assert made.spec.indexes_kv_by_block_stride
    table = OpTable(KernelConfig(), "cpu", torch.float32)
    facts = {"head_size": SIZE, "strided_blocks": True}
    table.bind("reshape_and_cache", **facts)
    assert table.choices["reshape_and_cache"].provider == "torch"
    assert "evenly spaced slots" in table.choices["reshape_and_cache"].refused["cpu"]


# ---------------------------------------------------------------- fp8


@pytest.mark.parametrize(
    ("cache_dtype", "dtype", "largest"),
    [
        ("fp8", torch.float8_e4m3fn, 448.0),
        ("fp8_e4m3", torch.float8_e4m3fn, 448.0),
        ("fp8_e5m2", torch.float8_e5m2, 57344.0),
    ],
)
def test_fp8_stores_a_byte_an_element_and_saturates(cache_dtype, dtype, largest):
    made = layer("a", "sdpa", cache_dtype=cache_dtype)
    assert made.spec.page_size_bytes == PAGE // 4
    assert made.spec.kv_quant_mode.name == "FP8_PER_TENSOR"
    tensor = KVCacheTensor(PAGE // 4 * BLOCKS, ["a"])
    group = KVCacheGroupSpec(["a"], made.spec)
    init_kv_cache(KVCacheConfig(BLOCKS, [tensor], [group]), named(made), "cpu")
    key, value, query = inputs(3)
    key[0, 0], value[1, 1] = 1e9, -1e9
    out = attend(made, key, value, query, [2])
    assert made.key_cache.dtype == dtype
    assert made.key_cache[2, 0, 0, 0].float() == largest
    assert made.value_cache[2, 1, 0, 1].float() == -largest
    assert out.isfinite().all()
    rounded = key.to(dtype).float()[1:]
    assert torch.equal(made.key_cache[2, 1:3].float().flatten(1), rounded)


# ---------------------------------------------------------------- blocks used again


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_zeroed_blocks_are_clean_and_others_untouched(cache_dtype):
    made = layer("a", "sdpa", cache_dtype=cache_dtype)
    size = made.spec.page_size_bytes * BLOCKS
    group = KVCacheGroupSpec(["a"], made.spec)
    init_kv_cache(KVCacheConfig(BLOCKS, [KVCacheTensor(size, ["a"])], [group]), named(made), "cpu")
    made.kv_cache.fill_(float("nan"))
    zero_blocks([made], [1, 3], "cpu")
    values = made.kv_cache.float()
    assert (values[[1, 3]] == 0).all()
    assert values[[0, 2, 4, 5]].isnan().all()


# ---------------------------------------------------------------- layers that share a cache


def test_a_sharing_layer_reads_what_its_target_wrote():
    target = layer("model.layers.0")
    sharing = layer("model.layers.2", kv_sharing_target_layer_name="model.layers.0")
    layers = named(target, sharing)
    group = KVCacheGroupSpec(["model.layers.0"], target.spec)
    init_kv_cache(
        KVCacheConfig(BLOCKS, [KVCacheTensor(PAGE * BLOCKS, ["model.layers.0"])], [group]),
        layers,
        "cpu",
    )
    assert sharing.kv_cache is target.kv_cache
    key, value, query = inputs(5)
    want = attend(target, key, value, query, [1, 2])
    before = target.kv_cache.clone()
    assert torch.equal(attend(sharing, None, None, query, [1, 2]), want)
    assert torch.equal(target.kv_cache, before)


def test_a_sharing_layer_gets_the_metadata_of_its_targets_group():
    layers = named(
        layer("l0"),
        layer("l1", per_layer_sliding_window=8),
        layer("l2", kv_sharing_target_layer_name="l0"),
        layer("l3", per_layer_sliding_window=8, kv_sharing_target_layer_name="l1"),
    )
    shared = shared_kv_cache_layers(layers)
    assert shared == {"l2": "l0", "l3": "l1"}
    groups = [
        KVCacheGroupSpec(["l0"], layers["l0"].spec),
        KVCacheGroupSpec(["l1"], layers["l1"].spec),
    ]
    names: set[str] = set()
    add_kv_sharing_layers_to_kv_cache_groups(shared, groups, names)
    assert [group.layer_names for group in groups] == [["l0", "l2"], ["l1", "l3"]]
    assert names == {"l2", "l3"}
    builders = AttnMetadataBuilders(KVCacheConfig(BLOCKS, [], groups), layers, "cpu")
    assert [[names for _, names in group] for group in builders.groups] == [
        [["l0", "l2"]],
        [["l1", "l3"]],
    ]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([("l0", None, "l1"), ("l1", None, None)], "which is no earlier layer"),
        ([("l0", None, None), ("l1", 8, "l0")], "of another kind"),
    ],
)
def test_a_target_must_be_an_earlier_layer_of_the_same_kind(layers, message):
    made = named(
        *[
            layer(name, per_layer_sliding_window=window, kv_sharing_target_layer_name=target)
            for name, window, target in layers
        ]
    )
    with pytest.raises(AssertionError, match=message):
        shared_kv_cache_layers(made)

# SPDX-License-Identifier: Apache-2.0
"""Start-up sizing: groups, blocks, tensors, the longest request that fits."""

import pytest
from kv_helpers import chunked, full, make_kv_request, make_manager, mamba, window

from vllmx.config import VllmConfig
from vllmx.core.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, UniformTypeKVCacheSpecs
from vllmx.core.kv_cache_utils import (
    check_enough_kv_cache_memory,
    estimate_max_model_len,
    generate_scheduler_kv_cache_config,
    get_kv_cache_capacity,
    get_kv_cache_configs,
    get_kv_cache_groups,
    get_max_concurrency_for_kv_cache_config,
    is_kv_cache_page_size_uniform,
    is_kv_cache_spec_uniform,
    resolve_kv_cache_block_sizes,
    unify_hybrid_kv_cache_specs,
    unify_kv_cache_spec_page_size,
)
from vllmx.exceptions import UserError

PAGE = 2 * 4 * 4  # bytes of a layer's block of 4 tokens: keys and values of one float32


def config(max_model_len=16, pinned=True, **cache):
    vllm_config = VllmConfig()
    vllm_config.model_config.max_model_len = max_model_len
    vllm_config.model_config.max_model_len_pinned = pinned
    vllm_config.scheduler_config.max_num_batched_tokens = 32
    vllm_config.cache_config.block_size = 4
    for name, value in cache.items():
        assert hasattr(vllm_config.cache_config, name)
        setattr(vllm_config.cache_config, name, value)
    return vllm_config


def layers(*specs):
    return {f"l{i}": spec for i, spec in enumerate(specs)}


def groups_of(specs, **scheduler):
    vllm_config = config()
    for name, value in scheduler.items():
        setattr(vllm_config.scheduler_config, name, value)
    return get_kv_cache_groups(vllm_config, specs)


# ---------------------------------------------------------------- groups


def test_equal_layers_are_one_group_with_a_tensor_each():
    (result,) = get_kv_cache_configs(config(), [layers(full(4), full(4))], [2 * PAGE * 10 + 7])
    assert result.num_blocks == 10
    assert [(t.size, t.shared_by) for t in result.kv_cache_tensors] == [
        (10 * PAGE, ["l0"]),
        (10 * PAGE, ["l1"]),
    ]
    assert result.kv_cache_groups == [KVCacheGroupSpec(["l0", "l1"], full(4))]


def test_hybrid_groups_have_the_size_of_the_rarer_kind_and_share_tensors():
    # Gemma's pattern: one full layer to five with a window.
    specs = layers(*([window(4, 8)] * 5 + [full(4)]) * 2)
    (result,) = get_kv_cache_configs(config(), [specs], [2 * PAGE * 100])
    names = [group.layer_names for group in result.kv_cache_groups]
    assert names == [
        ["l0", "l6"],
        ["l1", "l7"],
        ["l2", "l8"],
        ["l3", "l9"],
        ["l4", "l10"],
        ["l5", "l11"],
    ]
    assert result.num_blocks == 100
    assert [t.shared_by for t in result.kv_cache_tensors] == [
        [group[0] for group in names],
        [group[1] for group in names],
    ]


def test_kinds_of_similar_size_are_one_group_each():
    groups = groups_of(layers(*[window(4, 8)] * 12, *[full(4)] * 13))
    assert [len(group.layer_names) for group in groups] == [12, 13]


def test_padding_is_announced(caplog):
    groups = groups_of(layers(full(4), full(4), *[window(4, 8)] * 5))
    assert [len(group.layer_names) for group in groups] == [2, 2, 2, 1]
    assert "Add 1 padding layers, may waste at most 20.00% KV cache memory" in caplog.text


def test_layers_of_one_type_and_several_sizes_share_a_table_with_own_tensors():
    specs = layers(full(4), full(4, num_kv_heads=3))
    (result,) = get_kv_cache_configs(config(), [specs], [4 * PAGE * 10])
    (group,) = result.kv_cache_groups
    assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
    assert [t.size for t in result.kv_cache_tensors] == [10 * PAGE, 30 * PAGE]
    scheduler_config = generate_scheduler_kv_cache_config([result])
    assert scheduler_config.kv_cache_groups[0].kv_cache_spec == full(4)
    assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)  # the worker's is untouched


def test_smaller_pages_get_more_tokens():
    groups = groups_of(layers(full(4, num_kv_heads=2), window(4, 8)))
    assert [g.kv_cache_spec.block_size for g in groups] == [4, 8]
    assert len({g.kv_cache_spec.page_size_bytes for g in groups}) == 1


def test_pages_that_do_not_divide_are_padded_where_the_backend_can_read_them():
    specs = layers(full(4, head_size=3), window(4, 8, head_size=2, indexes_kv_by_block_stride=True))
    assert not is_kv_cache_page_size_uniform(specs)
    unified = unify_kv_cache_spec_page_size(specs)
    assert is_kv_cache_page_size_uniform(unified)
    assert unified["l1"].page_size_padded == 3 * PAGE and unified["l1"].block_size == 4
    specs["l1"] = window(4, 8, head_size=2)
    with pytest.raises(UserError, match=r"Layer l1: .*64 bytes .* 96 bytes.*attention.backend"):
        unify_kv_cache_spec_page_size(specs)


def test_hybrid_manager_off_keeps_the_whole_context():
    specs = layers(full(4), window(4, 8), window(4, 8))
    (group,) = groups_of(specs, disable_hybrid_kv_cache_manager=True)
    assert group.kv_cache_spec == full(4, sliding_window=8)
    specs = layers(full(4), chunked(4, 8))
    unify_hybrid_kv_cache_specs(specs)
    assert specs["l1"] == full(4, attention_chunk_size=8)


def test_hybrid_manager_off_with_several_windows_is_still_one_group():
    specs = layers(full(4), window(4, 8), window(4, 16))
    (group,) = groups_of(specs, disable_hybrid_kv_cache_manager=True)
    assert group.layer_names == ["l0", "l1", "l2"]


def test_hybrid_manager_off_is_refused_for_recurrent_layers():
    with pytest.raises(UserError, match="disable_hybrid_kv_cache_manager"):
        unify_hybrid_kv_cache_specs(layers(full(4), mamba(4)))


def test_uniformity():
    assert is_kv_cache_spec_uniform({})
    assert is_kv_cache_spec_uniform(layers(full(4), full(4, sliding_window=8)))
    assert not is_kv_cache_spec_uniform(layers(full(4), window(4, 8)))
    assert not is_kv_cache_spec_uniform(
        layers(full(4, sliding_window=4), full(4, sliding_window=8))
    )


def test_model_without_attention_has_the_null_block_only():
    (result,) = get_kv_cache_configs(config(), [{}], [0])
    assert result == KVCacheConfig(1, [], [])


# ---------------------------------------------------------------- several workers


def test_all_workers_get_the_blocks_of_the_smallest():
    specs = layers(full(4), full(4))
    results = get_kv_cache_configs(config(), [specs, specs], [2 * PAGE * 10, 2 * PAGE * 20])
    assert [r.num_blocks for r in results] == [10, 10]
    assert all(t.size == 10 * PAGE for r in results for t in r.kv_cache_tensors)
    assert generate_scheduler_kv_cache_config(results).num_blocks == 10


def test_pipeline_stages_see_their_layers_of_every_group():
    first = {"l0": full(4), "l1": window(4, 8), "l2": window(4, 8)}
    second = {"l3": full(4), "l4": window(4, 8), "l5": window(4, 8)}
    results = get_kv_cache_configs(config(), [first, second], [PAGE * 50, PAGE * 40])
    assert [[g.layer_names for g in r.kv_cache_groups] for r in results] == [
        [["l0"], ["l1"], ["l2"]],
        [["l3"], ["l4"], ["l5"]],
    ]
    assert [r.num_blocks for r in results] == [40, 40]


def test_stages_of_uniform_type_keep_their_own_layer_specs():
    first, second = {"a": full(4)}, {"b": full(4, num_kv_heads=2)}
    results = get_kv_cache_configs(config(), [first, second], [PAGE * 30, 2 * PAGE * 30])
    assert [list(r.kv_cache_groups[0].kv_cache_spec.kv_cache_specs) for r in results] == [
        ["a"],
        ["b"],
    ]


def test_a_layer_must_be_the_same_on_all_workers():
    with pytest.raises(AssertionError, match="Layer l0"):
        get_kv_cache_configs(config(), [layers(full(4)), layers(full(8))], [10**6, 10**6])


# ---------------------------------------------------------------- max_model_len


def test_pinned_length_that_does_not_fit_is_refused_with_what_does():
    # Ten blocks of four tokens; the null block comes on top.
    with pytest.raises(UserError) as error:
        get_kv_cache_configs(config(100), [layers(full(4))], [10 * PAGE])
    message = str(error.value)
    assert "max seq len (100)" in message
    assert "estimated maximum model length is 40" in message
    assert "model.max_model_len=40" in message
    assert "cache.gpu_memory_utilization (0.92)" in message
    (result,) = get_kv_cache_configs(config(40), [layers(full(4))], [10 * PAGE])
    assert result.num_blocks == 11
    (result,) = get_kv_cache_configs(config(36), [layers(full(4))], [10 * PAGE])
    assert result.num_blocks == 10


@pytest.mark.parametrize(
    ("cache", "cure"),
    [
        ({"kv_cache_memory_bytes": 320}, "cache.kv_cache_memory_bytes (320)"),
        ({"num_gpu_blocks_override": 10}, "cache.num_gpu_blocks_override (10)"),
    ],
)
def test_refusal_names_the_setting_that_made_the_pool_small(cache, cure):
    with pytest.raises(UserError) as error:
        get_kv_cache_configs(config(100, **cache), [layers(full(4))], [10 * PAGE])
    assert f"Try increasing {cure}." in str(error.value)


def test_length_that_is_not_pinned_is_fitted(caplog):
    vllm_config = config(100, pinned=False)
    (result,) = get_kv_cache_configs(vllm_config, [layers(full(4))], [10 * PAGE])
    assert vllm_config.model_config.max_model_len == 40 and result.num_blocks == 11
    assert "lowered from 100 to 40" in caplog.text
    vllm_config = config(100, pinned=False)
    get_kv_cache_configs(vllm_config, [layers(full(4))], [26 * PAGE])
    assert vllm_config.model_config.max_model_len == 100


def test_fitting_minds_the_smallest_worker_and_the_override():
    vllm_config = config(100, pinned=False)
    specs = [layers(full(4)), layers(full(4))]
    get_kv_cache_configs(vllm_config, specs, [20 * PAGE, 7 * PAGE])
    assert vllm_config.model_config.max_model_len == 28
    vllm_config = config(100, pinned=False, num_gpu_blocks_override=5)
    get_kv_cache_configs(vllm_config, specs, [20 * PAGE, 20 * PAGE])
    assert vllm_config.model_config.max_model_len == 16


def test_fitting_of_a_hybrid_counts_states_and_windows():
    vllm_config = config(1000, pinned=False)
    spec = mamba(4, num_speculative_blocks=2)
    attention = full(4, page_size_padded=None)
    assert attention.page_size_bytes == spec.page_size_bytes == PAGE
    # Three states, the rest attention.
    get_kv_cache_configs(vllm_config, [layers(attention, spec)], [(3 + 7) * PAGE])
    assert vllm_config.model_config.max_model_len == 28
    vllm_config = config(1000, pinned=False)
    # Window 8 and 32 tokens a step need 11 blocks at most.
    get_kv_cache_configs(vllm_config, [layers(full(4), window(4, 8))], [(11 + 20) * PAGE])
    assert vllm_config.model_config.max_model_len == 80


def test_no_room_for_a_single_token_is_refused_either_way():
    for memory in (0, -5):
        with pytest.raises(UserError, match="No available memory for the cache blocks"):
            get_kv_cache_configs(config(16), [layers(full(4))], [memory])
    with pytest.raises(UserError, match="Not even one token fits"):
        get_kv_cache_configs(config(16), [layers(full(4))], [PAGE - 1])
    with pytest.raises(UserError, match="Cannot auto-fit max_model_len"):
        get_kv_cache_configs(config(16, pinned=False), [layers(full(4))], [PAGE - 1])


@pytest.mark.parametrize("specs", [[full(4)], [full(4), window(4, 6)], [full(4), chunked(4, 8)]])
@pytest.mark.parametrize("num_blocks", [13, 22, 40])
def test_a_request_of_the_fitted_length_can_always_run(specs, num_blocks):
    """What start-up accepts, admission accepts: no request waits for ever."""
    vllm_config = config(10_000, pinned=False)
    vllm_config.scheduler_config.max_num_batched_tokens = 8
    (result,) = get_kv_cache_configs(vllm_config, [layers(*specs)], [num_blocks * PAGE])
    longest = vllm_config.model_config.max_model_len
    manager = make_manager(
        specs,
        result.num_blocks,
        max_model_len=longest,
        max_num_batched_tokens=8,
        enable_caching=False,
    )
    request = make_kv_request("a", [1] * longest)
    while request.num_computed_tokens < longest:
        num_new = min(8, longest - request.num_computed_tokens)
        first = request.num_computed_tokens == 0
        assert manager.allocate_slots(request, num_new, full_sequence_must_fit=first) is not None
        request.num_computed_tokens += num_new


def test_estimate_and_check_of_plain_specs():
    vllm_config = config(100)
    specs = layers(full(4), full(4))
    assert estimate_max_model_len(vllm_config, specs, 2 * PAGE * 10) == 40
    assert estimate_max_model_len(vllm_config, specs, 2 * PAGE * 1000) == 100
    assert estimate_max_model_len(vllm_config, specs, 2 * PAGE - 1) == 0
    assert vllm_config.model_config.max_model_len == 100
    check_enough_kv_cache_memory(vllm_config, specs, 2 * PAGE * 25)
    check_enough_kv_cache_memory(vllm_config, {}, 0)
    with pytest.raises(UserError, match="estimated maximum model length is 96"):
        check_enough_kv_cache_memory(vllm_config, specs, 2 * PAGE * 25 - 1)


def test_override_sets_the_number_of_blocks():
    vllm_config = config(16, num_gpu_blocks_override=7)
    (result,) = get_kv_cache_configs(vllm_config, [layers(full(4))], [100 * PAGE])
    assert result.num_blocks == 7 and result.kv_cache_tensors[0].size == 7 * PAGE


def test_capacity_counts_what_a_request_holds_in_all_groups():
    vllm_config = config(100)
    groups = [KVCacheGroupSpec(["a"], full(4)), KVCacheGroupSpec(["b"], window(4, 8))]
    # 25 blocks of full attention, 11 of the window.
    kv_config = KVCacheConfig(3 * 36, [], groups)
    assert get_max_concurrency_for_kv_cache_config(vllm_config, kv_config) == 3.0
    assert get_kv_cache_capacity(vllm_config, kv_config) == (300, 3.0)


# ---------------------------------------------------------------- block sizes


def block_sizes(specs, **cache):
    groups = [KVCacheGroupSpec([], spec) for spec in specs]
    return resolve_kv_cache_block_sizes(KVCacheConfig(9, [], groups), config(**cache))


def test_block_sizes_of_scheduler_and_hashes():
    assert block_sizes([full(4)]) == (4, 4)
    assert block_sizes([]) == (4, 4)
    assert block_sizes([full(4), window(6, 8)]) == (12, 2)
    assert block_sizes([full(4), window(8, 8)], hash_block_size=4) == (8, 4)
    assert block_sizes([full(4), window(8, 8)], enable_prefix_caching=False) == (8, 8)
    assert block_sizes([full(4), mamba(4)]) == (4, 4)
    assert block_sizes([full(4), mamba(12)]) == (12, 12)


def test_hash_block_size_must_divide_all_block_sizes():
    with pytest.raises(UserError, match=r"Invalid hash_block_size=3: .*\[4, 8\]"):
        block_sizes([full(4), window(8, 8)], hash_block_size=3)

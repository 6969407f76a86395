# SPDX-License-Identifier: Apache-2.0
"""Scales of the KV cache: the names that checkpoints use for them, and what becomes of them."""

import logging
from types import SimpleNamespace

import pytest
import torch

from vllmx.exceptions import CheckpointError
from vllmx.layers.kv_scales import KVScales, maybe_remap_kv_scale_name

NAMES = {
    f"model.layers.0.{part}.attn.{which}_scale"
    for part in ("self_attn", "mixer")
    for which in ("q", "k", "v", "prob")
}


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("self_attn.attn.k_scale", "self_attn.attn.k_scale"),
        ("self_attn.attn.prob_scale", "self_attn.attn.prob_scale"),
        ("self_attn.kv_scale", "self_attn.attn.k_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.attn.k_scale"),
        ("self_attn.v_proj.v_scale", "self_attn.attn.v_scale"),
        ("self_attn.qkv_proj.k_scale", "self_attn.attn.k_scale"),
        ("self_attn.qkqkv_proj.v_scale", "self_attn.attn.v_scale"),
        ("mixer.k_proj.k_scale", "mixer.attn.k_scale"),
        ("mixer.v_proj.v_scale", "mixer.attn.v_scale"),
        ("self_attn.q.scale", "self_attn.attn.q_scale"),
        ("self_attn.k_cache.scale", "self_attn.attn.k_scale"),
        ("self_attn.v_scale", "self_attn.attn.v_scale"),
        ("self_attn.q_scale", "self_attn.attn.q_scale"),
        ("self_attn.k_zero_point", None),
        ("cross_attn.k_scale", None),
        ("self_attn.k_proj.weight", "self_attn.k_proj.weight"),
        ("mlp.up_proj.weight_scale", "mlp.up_proj.weight_scale"),
        ("self_attn.o_proj.input_scale", "self_attn.o_proj.input_scale"),
    ],
)
def test_names_of_upstream(name: str, ours: str | None) -> None:
    prefix = "model.layers.0."
    found = maybe_remap_kv_scale_name(prefix + name, NAMES)
    assert found == (None if ours is None else prefix + ours)


def layer(dtype: torch.dtype = torch.float8_e4m3fn, target: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        kv_cache_dtype=dtype, kv_sharing_target_layer_name=target, k_scale=1.0, v_scale=1.0
    )


def settled(weights: dict[str, object], **layers: SimpleNamespace) -> dict[str, tuple]:
    scales = KVScales({f"{name}.attn": each for name, each in layers.items()})
    for name, value in weights.items():
        assert scales.take(name, torch.tensor(value)), name
    scales.finish()
    return {name: (each.k_scale, each.v_scale) for name, each in layers.items()}


def test_scales_of_either_form_of_a_scalar_and_the_defaults(caplog) -> None:
    found = settled(
        {"a.k_scale": 0.5, "a.v_scale": [0.25], "b.kv_scale": 2.0, "c.k_scale": 3.0},
        **{name: layer() for name in "abc"},
    )
    assert found == {"a": (0.5, 0.25), "b": (2.0, 2.0), "c": (3.0, 3.0)}
    assert "b.kv_scale is deprecated" in caplog.text
    assert "scaling factors of 1.0" not in caplog.text


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_checkpoint_without_scales_warns_where_the_range_is_narrow(dtype, caplog) -> None:
    assert settled({}, a=layer(dtype), b=layer(dtype)) == {"a": (1.0, 1.0), "b": (1.0, 1.0)}
    narrow = dtype == torch.float8_e4m3fn
    assert caplog.text.count("scaling factors of 1.0") == narrow


def test_a_cache_that_is_not_quantised_has_no_scales(caplog) -> None:
    assert settled({"a.k_scale": 0.5}, a=layer(torch.bfloat16)) == {"a": (1.0, 1.0)}
    assert not caplog.records


def test_a_layer_that_reads_anothers_cache_takes_its_scales() -> None:
    found = settled({"a.k_scale": 0.5}, a=layer(), b=layer(target="a.attn"))
    assert found["b"] == (0.5, 0.5)


def test_what_has_no_place_is_named_once_a_kind(caplog) -> None:
    caplog.set_level(logging.WARNING)
    scales = KVScales({"a.attn": layer()})
    for name in ("a.k_zero_point", "b.k_zero_point", "b.k_scale", "c.k_scale"):
        assert scales.take(name, torch.tensor(1.0))
    assert [r.args[0] for r in caplog.records] == ["a.k_zero_point", "b.k_scale"]
    assert not scales.take("a.k_proj.weight", torch.zeros(2, 2))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a.k_scale": [1.0, 2.0]}, r"a\.k_scale has shape \[2\]: only one scale"),
        ({"a.k_scale": 0.0}, "a.k_scale is 0: a scale is a positive number"),
        ({"a.v_scale": -1.0}, "a.v_scale is -1"),
        ({"a.q_scale": float("nan")}, "a.q_scale is nan"),
        ({"a.k_scale": float("inf")}, "a.k_scale is inf"),
        ({"a.v_scale": 1.0}, r"layer a\.attn: the checkpoint has its v_scale but no k_scale"),
        ({"a.k_scale": 1.0, "a.attn.k_scale": 1.0}, r"gives a\.attn\.k_scale twice"),
    ],
)
def test_wrong_scales_are_named(weights: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        settled(weights, a=layer())

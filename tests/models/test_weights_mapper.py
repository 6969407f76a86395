# SPDX-License-Identifier: Apache-2.0
"""Which names of a checkpoint a mapper leaves out, and what the others become."""

import logging
from dataclasses import replace

import torch
from torch import nn

from vllmx.models.utils import (
    LLAMA_MAPPER,
    ROTARY_BUFFERS,
    AutoWeightsLoader,
    WeightsMapper,
    headless_starts,
)

DRAFTED = replace(LLAMA_MAPPER, skip=(".masked_bias",), skip_starts=("mtp.", "model.mtp_"))


def test_skip_starts_leaves_out_names_that_begin_so_and_no_other() -> None:
    assert DRAFTED.map_name("mtp.layers.0.norm.weight") is None
    assert DRAFTED.map_name("model.mtp_emb_norm.0.weight") is None
    for kept in ("model.mtp.norm.weight", "lm_head.mtp.weight", "mtpe.weight"):
        assert DRAFTED.map_name(kept) == (kept, None)


def test_parts_and_rotary_buffers_are_left_out_wherever_they_stand() -> None:
    for part in (".masked_bias", *ROTARY_BUFFERS):
        assert DRAFTED.map_name(f"model.layers.0.attn{part}") is None
    derived = replace(DRAFTED, skip=())  # what is joined once is joined anew
    assert derived.map_name("model.attn.masked_bias") == ("model.attn.masked_bias", None)


def test_scales_of_a_layer_that_is_left_out_are_not_told_of(caplog) -> None:
    scales = {f"mtp.layers.0.self_attn.{x}_proj.{x}_scale": torch.ones(()) for x in "kv"}
    with caplog.at_level(logging.WARNING):
        AutoWeightsLoader(nn.Module()).load_weights(scales.items(), DRAFTED)
    assert not caplog.records


def test_a_model_without_its_head_begins_its_names_otherwise() -> None:
    mapper = WeightsMapper(starts=headless_starts("transformer.", "wte.", "h."))
    assert mapper.map_name("h.0.ln.weight") == ("transformer.h.0.ln.weight", None)
    assert mapper.map_name("transformer.h.0.ln.weight") == ("transformer.h.0.ln.weight", None)
    assert mapper.headless("transformer.wte.weight") == "wte.weight"

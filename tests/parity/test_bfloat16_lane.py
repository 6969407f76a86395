# SPDX-License-Identifier: Apache-2.0
"""Hybrids in bfloat16 against upstream as it is: green, and red with a fault in any part."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from parity import golden, model_golden, policy
from parity.model_engine import build, decoded, model_of, scored
from parity.model_gate import judge
from parity.model_replay import limits_name
from parity.model_table import BFLOAT16, MODELS, ModelCell, expected
from vllmx.ir.ops import gated_delta_rule
from vllmx.tiny.configs import HYBRIDS
from vllmx.tiny.margins import SUFFIX

NAMES = [name + SUFFIX for name in HYBRIDS]


@pytest.fixture(scope="module", params=NAMES)
def judged(request) -> Iterator[tuple[Any, Callable[[], set[str]]]]:
    """A model's layers, and what asks it as it is now for the rules that it breaks."""
    entry = MODELS[request.param]
    want, floor = model_golden.load(entry)
    limits = policy.load().models["auto"]
    llm = build(entry, "torch", "cpu", chunked=False)

    def broken() -> set[str]:
        found = judge(want, floor, scored(llm, want, one_by_one=True).ours, limits)
        after = decoded(llm, want, entry.prompts(), entry.max_tokens).ours
        found |= {f"decode.{k}": check for k, check in judge(want, floor, after, limits).items()}
        return {name for name, check in found.items() if not check.ok}

    yield model_of(llm).model.layers, broken
    llm.shutdown()


@pytest.mark.parametrize("name", NAMES)
def test_the_golden_is_upstream_unmodified_and_its_floor_what_bfloat16_costs(name: str) -> None:
    entry = MODELS[name]
    assert entry.lanes == BFLOAT16 == ("vllm-cpu-bf16", "hf-cpu-bf16", "hf-cpu-f32")
    for lane in entry.lanes:
        facts = golden.read(golden.MODELS / entry.golden(lane)).facts
        assert facts["oracle"]["lane"] == lane, "no lane is called what it is not"
    config = json.loads((model_golden.oracle_folder(entry) / "config.json").read_text())
    assert config.get("text_config", config)["mamba_ssm_dtype"] == "float32"
    want, floor = model_golden.load(entry)
    assert floor.base is not None
    assert (floor.top != floor.base.top).mean() < 0.01
    assert (want.top != floor.base.top).mean() < 0.01


def test_a_model_in_bfloat16_has_the_limits_of_16_bit_numbers() -> None:
    cells = [cell for name in NAMES for cell in expected(f"model.{name}/")]
    assert len(cells) == 24 and {limits_name(cell) for cell in cells} == {"auto"}
    assert limits_name(ModelCell(MODELS["tiny-qwen3_5"], "torch", "bs1")) == "torch"


def test_it_is_green_as_it_is_and_red_with_a_layer_off_by_a_tenth(judged) -> None:
    layers, broken = judged
    assert broken() == set()
    for holder in (layers[0].linear_attn.out_proj, layers[3].mlp):
        original = holder.forward
        holder.forward = lambda *args, run=original: run(*args) * 1.1
        found = broken()
        del holder.forward
        assert {"mean", "p99", "exceedance"} <= found


def test_it_is_red_where_attention_turns_no_queries(judged) -> None:
    layers, broken = judged
    attention = layers[2].self_attn
    original = attention.forward
    attention.forward = lambda positions, *args: original(torch.zeros_like(positions), *args)
    found = broken()
    del attention.forward
    assert found & {"mean", "p99", "exceedance"}


def test_it_is_red_where_a_chunk_forgets_the_one_before(judged, monkeypatch) -> None:
    """Of prompts of more than 64 tokens, which bfloat16 alone takes in chunks."""
    _, broken = judged
    original = gated_delta_rule._chunks

    def forgetful(state: torch.Tensor, *parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outs = []
        for pieces in zip(*(part.split(64) for part in parts), strict=True):
            after, out = original(torch.zeros_like(state), *pieces)
            outs.append(out)
        return after, torch.cat(outs)

    monkeypatch.setattr(gated_delta_rule, "_chunks", forgetful)
    assert "exceedance" in broken()


def test_it_is_red_where_experts_are_not_those_that_were_chosen(judged) -> None:
    layers, broken = judged
    if not hasattr(layers[3].mlp, "experts"):
        assert "experts" not in dict(layers.named_modules())
        return
    experts = layers[3].mlp.experts
    original = experts._route
    faults = {
        "the next ones": lambda weights, ids: (weights, (ids + 1) % experts.num_experts),
        "each with the other's weight": lambda weights, ids: (weights.flip(1), ids),
        "all alike": lambda weights, ids: (torch.full_like(weights, 0.5), ids),
    }
    for name, fault in faults.items():
        experts._route = lambda logits, fault=fault: fault(*original(logits))
        assert {"mean", "exceedance", "decode.mean"} <= broken(), name
    experts._route = original

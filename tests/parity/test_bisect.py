# SPDX-License-Identifier: Apache-2.0
"""Bisect: a fault planted in a step of a layer is found there, whatever comes after it."""

from functools import cache
from unittest import mock

import numpy as np
import pytest
import torch

from parity import bisect, bisect_steps, policy
from parity.bisect import EMBEDDING, LayerError, last_logits, layer_steps
from parity.bisect_steps import StepError, onset
from parity.checkpoints import oracle_folder
from parity.model_engine import build, model_of, provider_of
from parity.model_golden import ask
from parity.model_table import FLOOR_LANE, MODELS
from vllmx.config import RunConfig

SMALLEST = policy.load().models["torch"].stream


class Looked:
    """A tiny model of ours with transformers' stream of a sequence, to plant faults in."""

    def __init__(self, name: str) -> None:
        self.entry = MODELS[name]
        self.sequence = self.entry.forced()[-1][:80]
        folder = str(oracle_folder(self.entry))
        self.job = {**self.entry.job(folder), "prompts": [], "forced": [self.sequence]}
        self.want = ask(FLOOR_LANE, {**self.job, "full": True})[0]["stream.full"]
        self.llm = build(self.entry, "torch", "cpu", chunked=False)
        self.layers = model_of(self.llm).model.layers

    @cache  # noqa: B019
    def steps_of(self, layer: int):
        """What transformers says of a layer; it doesn't know of our faults."""
        return ask(FLOOR_LANE, {**self.job, "full": True, "layer": layer})

    def look(self) -> bisect.Bisected:
        floors = bisect.floors_of(self.entry)
        with mock.patch.object(bisect, "ask", lambda lane, job: self.steps_of(job["layer"])):
            return bisect.look(self.llm, self.sequence, self.want, floors, SMALLEST, self.job)


@pytest.fixture(scope="module")
def qwen():
    looked = Looked("tiny-qwen3")
    yield looked
    looked.llm.shutdown()


@pytest.fixture(scope="module")
def gemma():
    looked = Looked("tiny-gemma3")
    yield looked
    looked.llm.shutdown()


def plant(monkeypatch, module: torch.nn.Module, change) -> None:
    """`module` returns `change` of what it did."""
    inner = module.forward
    monkeypatch.setattr(module, "forward", lambda *a, **k: change(inner(*a, **k)))


def late(value: torch.Tensor, first: int, factor: float) -> torch.Tensor:
    """`value` with the rows from `first` on scaled."""
    rows = torch.arange(len(value)).unsqueeze(1) >= first
    return torch.where(rows, value * factor, value)


def test_a_sound_model_is_not_blamed(qwen, gemma):
    for looked in (qwen, gemma):
        found = looked.look()
        assert (found.layer, found.step, found.intrusive) == (None, None, False)
        assert [error.layer for error in found.errors] == [EMBEDDING, 0, 1, 2, 3]
        assert all(error.floor > 0 for error in found.errors[1:])
        assert "no layer is out of line" in bisect.told("m", found)


def test_the_steps_of_a_layer_are_those_of_transformers_in_float64(qwen, gemma):
    norms = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
    common = {"input_layernorm", "self_attn.qkv_proj", "self_attn.q_norm", "self_attn.k_norm"}
    common |= {"self_attn.rotary_emb", "self_attn.attn", "self_attn.o_proj", "residual"}
    common |= {"post_attention_layernorm", "mlp.gate_up_proj", "mlp.act_fn", "mlp.down_proj"}
    for looked, wanted in ((qwen, common), (gemma, common | norms)):
        told, oracle = looked.steps_of(1)
        ours = layer_steps(looked.llm, looked.sequence, 1, looked.want)
        choices = provider_of(looked.llm)
        steps = bisect_steps.compare(oracle["steps"], told, ours, choices)
        assert wanted <= {step.name for step in steps}
        for step in steps:
            assert step.error < SMALLEST and step.floor < SMALLEST and not step.hidden, step
        assert bisect_steps.blame(steps, SMALLEST) is None
        by_name = {step.name: step for step in steps}
        assert by_name["self_attn.rotary_emb"].ops == ("rotary_embedding[torch]",)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_fault_in_a_norm(qwen, monkeypatch, layer):
    module = qwen.layers[layer].post_attention_layernorm
    plant(monkeypatch, module, lambda out: (out[0] * 1.002, out[1]))
    found = qwen.look()
    assert found.layer == layer and found.step.name == "post_attention_layernorm"
    assert any(op.startswith("fused_add_rms_norm[") for op in found.step.ops)
    assert 1e-3 < found.step.error < 3e-3


def test_a_fault_in_the_norm_of_heads(gemma, monkeypatch):
    plant(monkeypatch, gemma.layers[1].self_attn.k_norm, lambda out: out * 1.01)
    found = gemma.look()
    assert (found.layer, found.step.name) == (1, "self_attn.k_norm")


def test_a_fault_in_the_rotation(qwen, monkeypatch):
    attention = qwen.layers[2].self_attn
    inner = attention.rotary_emb

    class Late(torch.nn.Module):
        def forward(self, positions, query, key=None):
            return inner((positions - 1).clamp(min=0), query, key)

    monkeypatch.setitem(attention._modules, "rotary_emb", Late())
    found = qwen.look()
    assert (found.layer, found.step.name) == (2, "self_attn.rotary_emb")
    assert found.step.ops == ("rotary_embedding[torch]",)
    # Place 0 is turned by nothing in either.
    assert onset(found.step.rows, SMALLEST) == "every token" and found.step.rows[0] < SMALLEST


@pytest.mark.parametrize("first", [16, 64])
def test_a_fault_in_attention_from_a_position_on(qwen, monkeypatch, first):
    """A page that is read wrong: what comes before it is sound."""
    plant(monkeypatch, qwen.layers[1].self_attn.attn, lambda out: late(out, first, 1.01))
    found = qwen.look()
    assert (found.layer, found.step.name) == (1, "self_attn.attn")
    words = bisect.verdict(found)
    assert f"tokens from {first} on" in words and "paged_attention[torch]" in words
    assert min(np.flatnonzero(np.array(found.errors[2].rows) > SMALLEST)) == first


@pytest.mark.parametrize("step, op", [("down_proj", "linear"), ("gate_up_proj", "linear")])
def test_a_fault_in_the_mlp_of_a_layer(gemma, monkeypatch, step, op):
    """No scale: the norm behind the MLP would take it back."""
    module = getattr(gemma.layers[3].mlp, step)
    plant(monkeypatch, module, lambda out: out + 0.003 * out.roll(1, dims=-1))
    found = gemma.look()
    assert (found.layer, found.step.name) == (3, f"mlp.{step}")
    assert found.step.ops == (f"{op}[torch]",)


def test_a_fault_in_the_activation_and_in_the_sum(gemma, qwen, monkeypatch):
    mlp = gemma.layers[0].mlp
    inner = mlp.act_fn
    monkeypatch.setattr(mlp, "act_fn", lambda x: inner(x) + 1e-3)
    found = gemma.look()
    assert (found.layer, found.step.name) == (0, "mlp.act_fn")
    assert found.step.ops == ("gelu_and_mul[torch]",)
    norm = qwen.layers[1].post_attention_layernorm
    plant(monkeypatch, norm, lambda out: (out[0], out[1] * 1.002))
    found = qwen.look()
    assert (found.layer, found.step.name) == (1, "residual")


def test_a_fault_in_the_embedding_and_one_in_every_layer(qwen, monkeypatch):
    with monkeypatch.context() as planted:
        embed = model_of(qwen.llm).model.embed_tokens
        plant(planted, embed, lambda out: late(out, 70, 1.01))
        found = qwen.look()
        assert found.layer == EMBEDDING and found.steps == []
        assert "look at the embedding, tokens from 70 on" in bisect.told("m", found)
    for layer in qwen.layers:
        plant(monkeypatch, layer.self_attn.o_proj, lambda out: out * 1.01)
    found = qwen.look()
    assert (found.layer, found.step.name) == (0, "self_attn.o_proj")


def test_a_model_that_watching_changes_is_told(qwen, monkeypatch, capsys):
    """A fused path that is left when hooks are there: what is seen is another computation."""
    model = model_of(qwen.llm)
    inner = model.forward

    def forward(*args, **kwargs):
        out = inner(*args, **kwargs)
        return out if qwen.layers[0]._forward_hooks else out + 1e-6

    monkeypatch.setattr(model, "forward", forward)
    assert last_logits(qwen.llm, qwen.sequence) == last_logits(qwen.llm, qwen.sequence)
    found = qwen.look()
    assert found.intrusive and found.layer is None
    monkeypatch.setattr(bisect, "bisect", lambda entry, provider: found)
    config = RunConfig()
    config.parity.select = "tiny-qwen3"
    assert bisect.run(config) == 2
    assert "INTRUSIVE" in capsys.readouterr().out


@pytest.mark.parametrize("joined", ["qk_norm_rope_cache", "fused_qk_rmsnorm_rope_gate"])
def test_steps_that_an_op_joins_are_hidden_in_the_next_that_is_laid_down(joined):
    order = ["self_attn.qkv_proj", "self_attn.q_norm", "self_attn.rotary_emb", "self_attn.attn"]
    want = {name: np.ones((4, 2)) for name in order}
    told = {f"tap.{kind}.{name}": rows for kind in ("f32", "f64") for name, rows in want.items()}
    ours = {"self_attn.qkv_proj": want[order[0]], "self_attn.attn": want[order[3]] * 1.5}
    choices = {joined: "native", "paged_attention": "sdpa", "linear": "torch"}
    steps = bisect_steps.compare(order, told, ours, choices)
    assert [step.name for step in steps] == ["self_attn.qkv_proj", "self_attn.attn"]
    blamed = bisect_steps.blame(steps, SMALLEST)
    assert blamed.hidden == ("self_attn.q_norm", "self_attn.rotary_emb")
    assert blamed.ops == (f"{joined}[native]", "paged_attention[sdpa]")
    assert "hidden in it" in blamed.words


# ------------------------------------------------------------------------------ the rules


def layers(*errors: tuple[float, float], floor: float = 1e-6) -> list[LayerError]:
    return [
        LayerError(index - 1, propagated, local, 0, 0, floor)
        for index, (propagated, local) in enumerate(errors)
    ]


def test_a_layer_is_blamed_for_what_it_adds_beyond_the_floor():
    small = 1e-5
    clean = [(0, 0), (1e-7, 1e-7), (1e-6, 1e-6)]
    assert bisect.blame(layers(*clean, (2e-6, 1e-6)), small) is None
    assert bisect.blame(layers(*clean, (1e-3, 1e-3), (2e-3, 1e-6)), small) == 2
    # Within twice the floor of the two oracles, whatever the smallest amount is.
    assert bisect.blame(layers(*clean, (1e-3, 1e-3), floor=6e-4), small) is None
    assert bisect.blame(layers(*clean, (1e-3, 1e-3), floor=4e-4), small) == 2
    # What had reached it is not its own.
    assert bisect.blame(layers(*clean, (9e-6, 8e-6), (1.1e-5, 2e-6)), small) == 2
    # A tenth of the layers is as much to blame as one: no median hides it.
    assert bisect.blame(layers((0, 0), *[(1e-3 * n, 1e-3) for n in (1, 2, 3)]), small) == 0
    assert bisect.blame(layers((1e-2, 1e-2), (1e-2, 1e-7)), small) == EMBEDDING
    assert bisect.blame(layers(*clean, (float("nan"), 1e-6)), small) == 2
    assert bisect.blame(layers(*clean, (1e-6, float("inf"))), small) == 2


def steps(*errors: float, floor: float = 1e-7) -> list[StepError]:
    return [StepError(str(n), (), error, floor, 0, 0) for n, error in enumerate(errors)]


def test_a_step_is_blamed_where_the_error_comes_in_not_where_it_is_largest():
    def blamed(found: list[StepError]) -> str | None:
        step = bisect_steps.blame(found, 1e-5)
        return None if step is None else step.name

    assert blamed(steps(1e-7, 1e-6, 2e-6)) is None
    assert blamed(steps(1e-7, 1e-3, 2e-3, 1e-6)) == "1"
    assert blamed(steps(1e-7, 1e-3, floor=6e-4)) is None
    assert blamed(steps(4e-6, 8e-6, 1.1e-5, 5e-5)) == "3", "a slope is not a jump"
    assert blamed(steps(5e-6, 2e-5, 1e-3)) == "1", "the first, not the steepest"
    assert blamed(steps(8e-6, 1.1e-5, 1.2e-5)) == "1", "where none jumps, the steepest"
    assert blamed(steps(1e-7, float("nan"))) == "1"


def test_the_onset_of_an_error_is_told_in_words():
    rows = np.zeros(100)
    assert onset(rows, 0.1) == "no token by itself"
    assert onset(rows + 1, 0.1) == "every token"
    assert onset(np.where(np.arange(100) >= 64, 1, 0), 0.1) == "tokens from 64 on"
    assert onset(np.where(np.arange(100) == 7, 1, 0), 0.1) == "token 7"
    assert onset(np.where(np.arange(100) % 16 == 0, 1, 0), 0.1) == "7 of 100 tokens, 0 to 96"
    assert onset([0.0, float("nan")], 0.1) == "token 1"

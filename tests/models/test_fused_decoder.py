# SPDX-License-Identifier: Apache-2.0
"""Small batches on a GPU's kernels, in Triton's interpreter: the same tokens as by definition."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import build_engine, save_tiny

from vllmx import SamplingParams
from vllmx.ir.op import OpContext
from vllmx.ir.select import OpTable
from vllmx.layers import fused_decoder, fused_qkv

PROMPTS = [[3, 9, 4], [5], [7, 8, 6, 12, 11, 30, 2, 9, 3, 4, 4, 4, 60, 61, 62, 63, 64]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def choose_as_on_a_gpu(table: OpTable, op_name: str, **facts):
    """Triton's provider wherever it would serve a GPU, else the definition."""
    impls = table.registry[op_name].impls
    triton = impls.get("triton")
    context = OpContext("cuda", table.dtype, facts)
    if triton is not None and triton.refusal(context) is None:
        return triton
    return impls["torch"]


def tokens(llm) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.fixture
def calls(monkeypatch) -> dict[str, int]:
    """How often the fused layers and the joined attention ran."""
    counted = {"layers": 0, "attention": 0}
    decode, run = fused_qkv.FusedQKV.attend, fused_decoder.FusedDecoder.__call__

    def attend(self, positions, qkv):
        metadata = fused_qkv.get_forward_context().attn_metadata[self.attn.layer_name]
        counted["attention"] += metadata.num_decodes == metadata.num_reqs
        return decode(self, positions, qkv)

    def layers(self, positions, hidden_states):
        counted["layers"] += 1
        return run(self, positions, hidden_states)

    monkeypatch.setattr(fused_qkv.FusedQKV, "attend", attend)
    monkeypatch.setattr(fused_decoder.FusedDecoder, "__call__", layers)
    return counted


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_fused_layers_give_the_tokens_of_the_definition(
    name: str, tmp_path: Path, monkeypatch, calls: dict[str, int]
) -> None:
    save_tiny(name, tmp_path)
    limits = {"max_model_len": 48, "max_num_seqs": 4, "block_size": 16, "dtype": "float32"}
    want = tokens(build_engine(tmp_path, default_priority=["torch"], **limits))
    assert calls == {"layers": 0, "attention": 0}
    monkeypatch.setattr(OpTable, "choose", choose_as_on_a_gpu)
    monkeypatch.setattr(
        OpTable,
        "choose_attention",
        lambda table, backend, **facts: table.choose("paged_attention", **facts),
    )
    llm = build_engine(tmp_path, **limits)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner
    assert runner.model.model.few_tokens is not None
    assert tokens(llm) == want
    assert calls["layers"] >= GREEDY.max_tokens - 1
    assert calls["attention"] >= 1


def test_larger_batches_take_the_models_own_way(
    tmp_path: Path, monkeypatch, calls: dict[str, int]
) -> None:
    save_tiny("llama", tmp_path)
    monkeypatch.setattr(OpTable, "choose", choose_as_on_a_gpu)
    monkeypatch.setattr("vllmx.models.llama.MAX_TOKENS", 2)
    llm = build_engine(tmp_path, max_model_len=48, max_num_seqs=4, dtype="float32")
    assert all(len(row) == GREEDY.max_tokens for row in tokens(llm))
    assert calls["layers"] == 0


def test_large_layers_are_left_to_the_library(tmp_path: Path, monkeypatch) -> None:
    save_tiny("llama", tmp_path)
    monkeypatch.setattr(OpTable, "choose", choose_as_on_a_gpu)
    monkeypatch.setattr(fused_decoder, "MAX_WEIGHT_BYTES", 64 * 2 * 96 * 4 - 1)  # gate and up
    llm = build_engine(tmp_path, max_model_len=48, max_num_seqs=4, dtype="float32")
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner
    assert runner.model.model.few_tokens is None


def test_layers_of_another_kind_are_not_fused(tmp_path: Path, monkeypatch) -> None:
    save_tiny("llama_untied_biased", tmp_path)
    monkeypatch.setattr(OpTable, "choose", choose_as_on_a_gpu)
    llm = build_engine(tmp_path, max_model_len=48, max_num_seqs=4, dtype="float32")
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner
    assert runner.model.model.few_tokens is None
    assert torch.isfinite(runner.model.compute_logits(torch.zeros(1, 64))).all()

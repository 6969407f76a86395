# SPDX-License-Identifier: Apache-2.0
"""cache.cache_dtype=fp8, fp8_e4m3, fp8_e5m2: a quarter of the memory, nearly the same answers."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import VOCAB, build_engine
from safetensors.torch import load_file, save_file

from vllmx import LLM, SamplingParams
from vllmx.exceptions import UserError
from vllmx.ir.select import OpTable

ONE_MIB = 1 << 20
# Most that the log-probability of a prompt token may move in a tiny random model. Two bits of
# mantissa round by up to 12 per cent, three by 6.
CLOSE = {"fp8": 0.25, "fp8_e4m3": 0.25, "fp8_e5m2": 0.5}


def prompt_logprobs(llm: LLM, prompt: list[int]) -> np.ndarray:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    rows = output.prompt_logprobs[1:]
    return np.array([row[token].logprob for row, token in zip(rows, prompt[1:], strict=True)])


def core_of(llm: LLM):
    return llm.llm_engine.engine_core.engine_core


one_model = pytest.mark.parametrize("tiny", ["llama"], indirect=True)


@pytest.mark.parametrize("tiny", ["llama", "gemma3"], indirect=True)
@pytest.mark.parametrize("cache_dtype", CLOSE)
def test_logprobs_stay_close_and_do_change(tiny, tiny_engine, cache_dtype: str) -> None:
    rng = random.Random(5)
    prompt = [rng.randrange(3, VOCAB) for _ in range(60)]
    tiny_engine.reset_prefix_cache()
    want = prompt_logprobs(tiny_engine, prompt)
    # Several steps, so that most keys are read back from the cache of an earlier one.
    got = prompt_logprobs(
        build_engine(
            tiny[0], kv_cache_dtype=cache_dtype, max_num_batched_tokens=16, max_num_seqs=4
        ),
        prompt,
    )
    assert 1e-4 < abs(got - want).max() < CLOSE[cache_dtype]


@one_model
def test_a_pool_of_the_same_bytes_has_four_times_the_blocks(tiny) -> None:
    blocks = {}
    for cache_dtype in ("float32", "float16", "fp8", "fp8_e5m2"):
        llm = build_engine(
            tiny[0], kv_cache_dtype=cache_dtype, kv_cache_memory_bytes=ONE_MIB, max_model_len=64
        )
        config = core_of(llm).kv_cache_config
        blocks[cache_dtype] = config.num_blocks
        assert sum(tensor.size for tensor in config.kv_cache_tensors) <= ONE_MIB
    assert blocks["float16"] // 2 == blocks["float32"]
    assert blocks["fp8"] // 4 == blocks["float32"]
    assert blocks["fp8_e5m2"] == blocks["fp8"]


@one_model
def test_a_provider_that_cannot_says_why(tiny) -> None:
    for settings, reason in (
        ({"attention_backend": "native"}, "reads a float32 cache only, not torch.float8_e4m3fn"),
        (
            {"ir_op_priority": {"reshape_and_cache": ["cpu"]}},
            "stores what it is given, and does not convert it to torch.float8_e4m3fn",
        ),
    ):
        with pytest.raises(UserError) as error:
            build_engine(tiny[0], kv_cache_dtype="fp8", **settings)
        assert reason in str(error.value)


@one_model
def test_the_same_tokens_are_hit_and_give_the_same_answer(tiny) -> None:
    llm = build_engine(tiny[0], kv_cache_dtype="fp8")
    prompt = list(range(3, 43))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    first, second = (
        llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0] for _ in range(2)
    )
    assert second.num_cached_tokens == 32
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


SMALL = 2.0**-12
"""What keys and values are scaled down by: below the smallest number of an fp8 cache."""


def scaled_down(folder: Path, copy: Path, scales: dict[str, float]) -> Path:
    """The same model with its keys and values times SMALL, its queries and outputs over it.

    scales: names below each layer's `self_attn`, and their value.
    """
    shutil.copytree(folder, copy)
    weights = load_file(copy / "model.safetensors")
    factors = {"k_proj": SMALL, "v_proj": SMALL, "q_proj": 1 / SMALL, "o_proj": 1 / SMALL}
    for name, weight in weights.items():
        for part, factor in factors.items():
            if f".{part}." in name:
                weight.mul_(factor)
    layers = {name.partition(".self_attn.")[0] for name in weights if ".self_attn." in name}
    for layer in layers:
        for name, value in scales.items():
            weights[f"{layer}.self_attn.{name}"] = torch.tensor(value)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@one_model
@pytest.mark.parametrize("backend", ["sdpa", "torch"])
@pytest.mark.parametrize("names", [("k_proj.k_scale", "v_proj.v_scale"), ("kv_scale",)], ids=str)
def test_scales_of_the_checkpoint_undo_what_it_scaled(tiny, tmp_path, backend, names) -> None:
    """With them the model is the one it was made from; without, its keys and values are zeros."""
    rng = random.Random(7)
    prompt = [rng.randrange(3, VOCAB) for _ in range(40)]
    # In float32: small weights are not of the kind that fp16 packing keeps.
    plainly = {"ir_op_priority": {"linear": ["torch"]}}
    settings = {
        "kv_cache_dtype": "fp8",
        "attention_backend": backend,
        **plainly,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
    }
    want = prompt_logprobs(build_engine(tiny[0], **settings), prompt)
    scaled = scaled_down(tiny[0], tmp_path / "scaled", dict.fromkeys(names, SMALL))
    got = prompt_logprobs(build_engine(scaled, **settings), prompt)
    np.testing.assert_allclose(got, want, atol=1e-4)
    bare = scaled_down(tiny[0], tmp_path / "bare", {})
    assert abs(prompt_logprobs(build_engine(bare, **settings), prompt) - want).max() > 0.1
    # A cache that is not quantised needs no scales, and heeds none.
    plain = (build_engine(folder, **plainly) for folder in (scaled, tiny[0]))
    np.testing.assert_allclose(*(prompt_logprobs(llm, prompt) for llm in plain), atol=1e-4)


@one_model
def test_kernels_of_a_gpu_get_the_scales_too(tiny, tmp_path, monkeypatch) -> None:
    """Whatever writes or reads the cache, joined ops as well, in Triton's interpreter."""
    scaled = scaled_down(tiny[0], tmp_path / "scaled", {"k_scale": SMALL, "v_scale": 2 * SMALL})
    seen: dict[str, list] = {}
    monkeypatch.setattr(OpTable, "choose", lambda table, name, **facts: spied(table, name, seen))
    monkeypatch.setattr(
        OpTable,
        "choose_attention",
        lambda table, backend, **facts: table.registry["paged_attention"].impls["triton"],
    )
    llm = build_engine(scaled, kv_cache_dtype="fp8", max_model_len=64, max_num_seqs=2)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [3, 9, 4]}], params, use_tqdm=False)
    assert set(seen) == {"qk_norm_rope_cache", "qk_norm_rope_decode"}
    assert all(call == (SMALL, 2 * SMALL) for calls in seen.values() for call in calls)


def spied(table: OpTable, name: str, seen: dict[str, list]):
    """Triton's provider, if there is one; of the ops that take scales, one that notes them."""
    impls = table.registry[name].impls
    impl = impls.get("triton", impls["torch"])
    if "k_scale" not in table.registry[name].signature.parameters or name == "paged_attention":
        return impl

    def run(*args, **kwargs):
        seen.setdefault(name, []).append(args[-2:])
        return impl.fn(*args, **kwargs)

    return replace(impl, fn=run)


def test_a_real_model_still_knows_the_capital() -> None:
    llm = LLM(
        model="smollm2-135m", max_model_len=64, kv_cache_dtype="fp8", kv_cache_memory_bytes=8 << 20
    )
    params = SamplingParams(temperature=0.0, max_tokens=2)
    (output,) = llm.generate(["The capital of France is"], params, use_tqdm=False)
    assert output.outputs[0].text == " Paris."

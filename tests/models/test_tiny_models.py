# SPDX-License-Identifier: Apache-2.0
"""Every architecture, tiny and random, against transformers in float32."""

import random
import re

import numpy as np
import pytest
import torch
from checkpoints import VOCAB, build_engine

from vllmx import SamplingParams
from vllmx.exceptions import CheckpointError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=5)
LENGTHS = (1, 3, 17, 40, 63)


def prompts(seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in LENGTHS]


def run(llm, token_prompts: list[list[int]], params: SamplingParams = GREEDY) -> list:
    inputs = [{"prompt_token_ids": p} for p in token_prompts]
    return llm.generate(inputs, params, use_tqdm=False)


def table(output) -> np.ndarray:
    """Log-probabilities of the chosen and the five best tokens, [positions, 6], by token id."""
    rows = []
    for chosen, position in zip(output.outputs[0].token_ids, output.outputs[0].logprobs):
        best = sorted((v.logprob for v in position.values()), reverse=True)[:5]
        rows.append([position[chosen].logprob, *best])
    return np.array(rows)


def assert_same(got: list, want: list, tolerance: float = 2e-4) -> None:
    for g, w in zip(got, want, strict=True):
        assert g.outputs[0].token_ids == w.outputs[0].token_ids
        np.testing.assert_allclose(table(g), table(w), atol=tolerance)


def assert_prompt_logprobs(output, prompt: list[int], twin, tolerance: float) -> None:
    with torch.inference_mode():
        want = twin(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    for position, entries in enumerate(output.prompt_logprobs[1:]):
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(float(want[position, token]), abs=tolerance)


def test_logprobs_of_whole_sequences_equal_transformers(tiny, tiny_engine) -> None:
    """All positions of prompt and answer, teacher-forced, whole vocabulary."""
    _, twin = tiny
    # fp16-packed weights round once; the dense provider must agree more closely (next test).
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=10)
    for prompt, output in zip(prompts()[1:], run(tiny_engine, prompts()[1:], params)):
        assert_prompt_logprobs(output, prompt, twin, 5e-3)


def test_dense_float32_weights_agree_to_rounding(tiny) -> None:
    folder, twin = tiny
    llm = build_engine(folder, ir_op_priority={"linear": ["torch"]})
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=10)
    for prompt, output in zip(prompts()[1:], run(llm, prompts()[1:], params)):
        assert_prompt_logprobs(output, prompt, twin, 5e-5)


def test_greedy_tokens_equal_transformers(tiny, tiny_engine) -> None:
    _, twin = tiny
    for prompt, output in zip(prompts(), run(tiny_engine, prompts())):
        tokens = list(output.outputs[0].token_ids)
        with torch.inference_mode():
            logits = twin(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens


def test_batch_equals_single(tiny_engine) -> None:
    together = run(tiny_engine, prompts(1))
    tiny_engine.reset_prefix_cache()
    assert_same([run(tiny_engine, [p])[0] for p in prompts(1)], together)


@pytest.mark.parametrize("budget", [5, 16, 33])
def test_chunked_prefill_equals_whole_prefill(tiny, tiny_engine, budget: int) -> None:
    tiny_engine.reset_prefix_cache()
    whole = run(tiny_engine, prompts(2))
    chunked = build_engine(tiny[0], max_num_batched_tokens=budget, max_num_seqs=4)
    assert_same(run(chunked, prompts(2)), whole)


def test_prefix_cache_hit_equals_a_cold_run(tiny_engine) -> None:
    tiny_engine.reset_prefix_cache()
    rng = random.Random(3)
    shared = [rng.randrange(3, VOCAB) for _ in range(50)]
    asked = [shared + [rng.randrange(3, VOCAB) for _ in range(n)] for n in (1, 9, 20)]
    cold = []
    for prompt in asked:
        tiny_engine.reset_prefix_cache()
        cold += run(tiny_engine, [prompt])
    tiny_engine.reset_prefix_cache()
    first = run(tiny_engine, asked[:1])
    warm = run(tiny_engine, asked[1:])
    assert first[0].num_cached_tokens == 0
    assert [w.num_cached_tokens for w in warm] == [48, 48]
    assert_same(first + warm, cold)


def test_preempted_requests_end_with_the_same_tokens(tiny, tiny_engine) -> None:
    tiny_engine.reset_prefix_cache()
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=5)
    roomy = run(tiny_engine, prompts(4), long)
    # Room for about one and a half of the longest requests; windowed layers have blocks too.
    blocks = 20 if tiny[0].name.startswith("gemma3") else 12
    tight = build_engine(tiny[0], num_gpu_blocks_override=blocks, max_model_len=112)
    scheduler = tight.llm_engine.engine_core.engine_core.scheduler
    preempted = []
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda *args: (preempted.append(args), preempt(*args))
    assert_same(run(tight, prompts(4), long), roomy)
    assert preempted


@pytest.mark.parametrize("cache_dtype", ["float16", "bfloat16"])
def test_a_half_precision_cache_changes_logprobs_a_little(tiny, tiny_engine, cache_dtype) -> None:
    tiny_engine.reset_prefix_cache()
    one = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=5)
    want = run(tiny_engine, prompts(6), one)
    halved = build_engine(tiny[0], kv_cache_dtype=cache_dtype)
    got = run(halved, prompts(6), one)
    assert_same(got, want, tolerance=0.1)
    assert any((table(g) != table(w)).any() for g, w in zip(got, want))


@pytest.mark.parametrize(
    "settings", [{"attention_backend": "torch"}, {"default_priority": ["torch"]}], ids=str
)
def test_reference_ops_agree_with_the_chosen_ones(tiny, tiny_engine, settings: dict) -> None:
    tiny_engine.reset_prefix_cache()
    want = run(tiny_engine, prompts(7))
    assert_same(run(build_engine(tiny[0], **settings), prompts(7)), want, tolerance=5e-3)


def test_prompt_logprobs_do_not_depend_on_chunks_or_cache(tiny, tiny_engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=3)
    asked = prompts(5)[2:]
    run(tiny_engine, asked)
    warm = run(tiny_engine, asked, params)
    chunked = run(build_engine(tiny[0], max_num_batched_tokens=7, max_num_seqs=4), asked, params)
    for prompt, a, b in zip(asked, warm, chunked):
        assert len(a.prompt_logprobs) == len(prompt) and a.prompt_logprobs[0] is None
        for x, y in zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:]):
            assert x.keys() == y.keys()
            for token in x:
                assert x[token].logprob == pytest.approx(y[token].logprob, abs=2e-4)


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape", "dtype"])
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(tiny, tmp_path, change: str) -> None:
    from safetensors.torch import load_file, save_file

    folder, _ = tiny
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    if change == "missing":
        del weights[name]
        expected = f"lacks {name}"
    elif change == "unexpected":
        weights["model.layers.0.self_attn.z_proj.weight"] = torch.zeros(3, 3)
        expected = "self_attn.z_proj.weight has no place"
    elif change == "dtype":
        weights[name] = weights[name].to(torch.int32)
        expected = f"{name} is of torch.int32"
    else:
        weights[name] = weights[name][:-1].contiguous()
        expected = f"{name} has shape"
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    file = re.escape(str(tmp_path / "model.safetensors"))
    with pytest.raises(CheckpointError, match=f"^{file}: .*{expected}"):
        build_engine(tmp_path)

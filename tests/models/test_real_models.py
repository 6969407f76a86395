# SPDX-License-Identifier: Apache-2.0
"""The real models against transformers on the same dequantised float32 values."""

import pytest
import torch
from checkpoints import build_engine, transformers_twin

from vllmx import SamplingParams

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
    "Water boils at",
    "List three uses of a paperclip:\n1.",
    "The quick brown fox",
    "In 1969, the first humans",
    "Q: What is 12 times 12?\nA:",
]
TOKENS = 64
NEAR_TIE = 0.02
"""Gap of logits below which two tokens tie: fp16-packed weights move a logit by less than that."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_greedy_tokens_equal_transformers(real_model: str, record_property) -> None:
    """8 prompts of 64 tokens, in the default configuration (weights packed to fp16).

    transformers scores our answer in one pass. Where each position's argmax is our token, its own
    greedy decoding is our answer, by induction. Where it isn't, the two must be a near tie.
    """
    llm = build_engine(real_model)
    outputs = llm.generate(
        PROMPTS,
        SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True),
        use_tqdm=False,
    )
    del llm
    twin = transformers_twin(real_model)
    ties = []
    for output in outputs:
        prompt, tokens = output.prompt_token_ids, list(output.outputs[0].token_ids)
        assert len(tokens) == TOKENS
        with torch.inference_mode():
            logits = twin(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        for position in (logits.argmax(-1) != torch.tensor(tokens)).nonzero().flatten().tolist():
            row = logits[position]
            gap = float(row.max() - row[tokens[position]])
            ties.append((output.prompt, position, gap))
            assert gap < NEAR_TIE, (output.prompt, position, gap)
    for prompt, position, gap in ties:
        print(f"near tie: {real_model}, {prompt!r}, token {position}, logit gap {gap:.4f}")
    record_property("near_ties", len(ties))
    assert len(ties) <= 4


@pytest.mark.slow
def test_smollm2_from_safetensors_answers_as_from_gguf(smollm2_folder) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    named = build_engine("smollm2-135m")
    prompt = named.get_tokenizer().encode(PROMPTS[0])
    from_gguf = named.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
    del named
    folder = build_engine(smollm2_folder)
    from_folder = folder.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
    assert from_folder.outputs[0].token_ids == from_gguf.outputs[0].token_ids

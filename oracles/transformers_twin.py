# SPDX-License-Identifier: Apache-2.0
"""What Hugging Face transformers computes in float32 from a folder: for hf_model.py, and for tests.

`python oracles/transformers_twin.py FOLDER PROMPTS OUT [--max-tokens N]`, in a process of its own.
FOLDER has config.json and safetensors; PROMPTS is a JSON list of lists of token ids. OUT (.npz)
gets for the i-th prompt `tokens_i`, int64 [T], the prompt and N greedy tokens, and `logits_i`,
float32 [T, V], of one pass over them. N is 0 by default. Nothing of vllmx is imported.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

EXACT = "bloom"
"""The family whose gelu is exact in upstream and a tanh in transformers: it is told upstream's."""
MASKS = (".attn.bias", ".attn.masked_bias")
"""Not weights: the causal mask, which checkpoints of GPT-2 from before 2023 hold as well."""


def load(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of `folder` in `dtype`; ValueError unless every weight is there and has its place.

    An output head may be missing: it is then the embedding's. Where the folder has a folder `twin`,
    that is the model: the same weights under the names of a family that transformers knows.
    """
    if (folder / "twin").is_dir():
        folder = folder / "twin"
    model, found = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="eager",
        local_files_only=True,
        output_loading_info=True,
    )
    missing = set(found["missing_keys"]) - {"lm_head.weight"}
    unexpected = [key for key in found["unexpected_keys"] if not key.endswith(MASKS)]
    if missing or unexpected or found["mismatched_keys"]:
        raise ValueError(f"{folder}: weights and config.json do not fit: {found}")
    if model.config.model_type == EXACT:
        for block in model.transformer.h:
            block.mlp.gelu_impl = torch.nn.GELU()
    return model.eval()


@torch.inference_mode()
def extend(model: PreTrainedModel, tokens: list[int], max_tokens: int) -> list[int]:
    """`tokens` and `max_tokens` more, each the argmax after a pass over all before it."""
    for _ in range(max_tokens):
        tokens = [*tokens, int(model(torch.tensor([tokens])).logits[0, -1].argmax())]
    return tokens


@torch.inference_mode()
def score(model: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    """Logits [T, V] of one pass over `tokens`."""
    return model(torch.tensor([tokens])).logits[0].float().numpy()


def main() -> None:
    """Answer the prompts of a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--max-tokens", type=int, default=0)
    args = parser.parse_args()
    model = load(args.folder)
    answers: dict[str, np.ndarray] = {}
    for number, prompt in enumerate(json.loads(args.prompts.read_text())):
        tokens = extend(model, prompt, args.max_tokens)
        answers[f"tokens_{number}"] = np.array(tokens)
        answers[f"logits_{number}"] = score(model, tokens)
    np.savez(args.out, **answers)


if __name__ == "__main__":
    main()

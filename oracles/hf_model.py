# SPDX-License-Identifier: Apache-2.0
"""Oracle: whole models in Hugging Face transformers on a CPU. The second lane.

`python -m oracles.hf_model JOB OUT`; the files are described in oracles/model_job.py.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from oracles.model_job import Answer, Job, main, stack_of


def available() -> Literal[True] | str:
    """True where transformers is installed, else the reason."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed here; it comes with `pip install vllmx[test]`"
    return True


def describe(job: Job) -> dict[str, Any]:
    """What computed the answer to `job`."""
    lane = {"float32": "hf-cpu-f32", "bfloat16": "hf-cpu-bf16"}[job.dtype]
    config = json.loads((Path(job.folder) / "config.json").read_text())
    if config.get("model_type") == "bloom":
        lane += "-gelu"  # see transformers_twin.py
    return {
        "name": "transformers",
        "version": importlib.metadata.version("transformers"),
        "lane": lane,
        "callable": "transformers.AutoModelForCausalLM",
        "torch": torch.__version__,
        "device": f"cpu {torch.backends.cpu.get_cpu_capability()}",
        "reps": 1,
    }


def prepare() -> None:
    """Import transformers."""
    from oracles import transformers_twin

    assert transformers_twin.load


@torch.inference_mode()
def compute(job: Job) -> Answer:
    """Continue and score the sequences of `job`."""
    from oracles.transformers_twin import extend, load

    model = load(Path(job.folder), getattr(torch, job.dtype))
    asked = None if job.ids is None else np.load(job.ids)
    answer = Answer([extend(model, ids, job.max_tokens) for ids in job.prompts] + job.forced)
    for sequence in answer.sequences:
        logits = model(torch.tensor([sequence])).logits[0, :-1].float()
        scores = logits.log_softmax(dim=-1)
        if asked is None:
            ids = scores.topk(job.top_k).indices
        else:
            first = len(answer.ids)
            ids = torch.from_numpy(asked[first : first + len(scores)]).long()
        values = scores.gather(1, ids).numpy()
        following = scores.gather(1, torch.tensor(sequence[1:]).unsqueeze(1)).flatten().tolist()
        best = scores.argmax(dim=-1).tolist()
        for row in range(len(scores)):
            answer.add(ids[row].numpy(), values[row], following[row], best[row])
    answer.stream = _stream(model, answer.sequences[-1])
    if job.layer is not None:
        from oracles.layer_taps import taps

        answer.taps = taps(model, job.layer, answer.sequences[-1])
    return answer


def _stream(model: Any, sequence: list[int]) -> list[np.ndarray]:
    """Hidden states before the first layer and after each, [tokens, hidden]."""
    seen: list[torch.Tensor] = []

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])

    def after(module: Any, args: tuple[Any, ...], output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    layers = stack_of(model)
    handles = [layers[0].register_forward_pre_hook(before, with_kwargs=True)]
    handles += [layer.register_forward_hook(after) for layer in layers]
    model(torch.tensor([sequence]))
    for handle in handles:
        handle.remove()
    return [rows.reshape(len(sequence), -1).float().numpy() for rows in seen]


if __name__ == "__main__":
    raise SystemExit(main("hf_model", available, describe, compute, prepare))

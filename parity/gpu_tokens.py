# SPDX-License-Identifier: Apache-2.0
"""Our log-probabilities on a GPU beside upstream's, with upstream's own noise as the measure.

    python -m parity.gpu_tokens --model FOLDER --lanes FILE.npz --prompts FILE.json --out FILE.json
    python -m parity.gpu_tokens --golden NAME [--model FOLDER] --out FILE.json

FILE.npz has, by run of upstream's, RUN_tok int32 [n, t], RUN_ids int32 [n, t, k] and RUN_lp float32
[n, t, k]: the tokens of free greedy runs of the same prompts, and the k likeliest with their
log-probabilities; the run `graph_b64` is what all are compared with. Ours is forced through its
tokens (every position has the same prefix) and also runs freely. Upstream's other runs can only be
compared up to the first token that differs, as they ran freely. A golden (gpu_models.py) has the
eager run forced through the graph run's tokens, so that both see the same everywhere; the exit code
is 1 where upstream's noise does not explain how far ours is. Without --model a golden's own
checkpoint is loaded.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoints import oracle_folder
from .model_table import MODELS

BASE = "graph_b64"
OTHER = "eager_b64"
LISTED = 64
LIKELIEST = 6
"""Tokens of a golden's position that are compared."""
ALLOWED = {"mean": (1.5, 0.02), "p99": (2.0, 0.05)}
"""Multiple of upstream's noise, and what is held against nobody, nat: as of `models` in
policy.yaml, whose caps are below the noise of bfloat16 on a GPU."""
UNLISTED = 0.001
LIMITS = {"mean": 0.053, "p99": 0.25}
"""Upstream's eager run against its graph run, mean and 99th percentile, nat."""


def figures(differences: np.ndarray) -> dict[str, float]:
    """Mean, 99th percentile and maximum of the absolute differences."""
    apart = np.abs(differences)
    return {
        "positions": len(apart),
        "mean": round(float(apart.mean()), 5),
        "p99": round(float(np.quantile(apart, 0.99)), 5),
        "max": round(float(apart.max()), 5),
    }


def upstream_noise(lanes: dict[str, np.ndarray], other: str) -> dict[str, float]:
    """How far another run of upstream's is from the base, where both saw the same."""
    found = []
    for row in range(len(lanes[f"{other}_tok"])):
        same = lanes[f"{BASE}_tok"][row] == lanes[f"{other}_tok"][row]
        until = len(same) if same.all() else int(np.argmin(same)) + 1
        for step in range(until):
            theirs = dict(zip(lanes[f"{other}_ids"][row, step], lanes[f"{other}_lp"][row, step]))
            base = zip(lanes[f"{BASE}_ids"][row, step], lanes[f"{BASE}_lp"][row, step])
            found += [
                theirs[token] - value
                for token, value in base
                if token in theirs and np.isfinite((value, theirs[token])).all()
            ]
    return figures(np.array(found, dtype=np.float64))


def forced(llm: Any, prompts: list[list[int]], lanes: dict[str, np.ndarray]) -> np.ndarray:
    """Ours less upstream's for every listed token of every position, forced."""
    from vllmx import SamplingParams

    tokens, ids, values = (lanes[f"{BASE}_{name}"] for name in ("tok", "ids", "lp"))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=LISTED, detokenize=False)
    given = [{"prompt_token_ids": [*p, *t.tolist()]} for p, t in zip(prompts, tokens)]
    found, missing = [], 0
    for row, output in enumerate(llm.generate(given, params, use_tqdm=False)):
        start = len(prompts[row])
        for step in range(tokens.shape[1]):
            ours = output.prompt_logprobs[start + step]
            for token, value in zip(ids[row, step].tolist(), values[row, step].tolist()):
                if not np.isfinite(value):
                    continue  # a list that was shorter
                if token in ours:
                    found.append(ours[token].logprob - value)
                else:
                    missing += 1
    if missing > len(found) // 1000:
        raise SystemExit(f"{missing} of upstream's likeliest tokens are not among our {LISTED}")
    return np.array(found, dtype=np.float64)


def flips(llm: Any, prompts: list[list[int]], lanes: dict[str, np.ndarray]) -> dict[str, Any]:
    """Where our free run first differs, and how near a tie that was on both sides."""
    from vllmx import SamplingParams

    tokens, ids, values = (lanes[f"{BASE}_{name}"] for name in ("tok", "ids", "lp"))
    params = SamplingParams(
        temperature=0,
        max_tokens=tokens.shape[1],
        logprobs=LISTED,
        detokenize=False,
        ignore_eos=True,
    )
    gaps, equal = [], 0
    given = [{"prompt_token_ids": p} for p in prompts]
    for row, output in enumerate(llm.generate(given, params, use_tqdm=False)):
        answer = output.outputs[0]
        same = np.array(answer.token_ids) == tokens[row]
        if same.all():
            equal += 1
            continue
        step = int(np.argmin(same))
        theirs = dict(zip(ids[row, step].tolist(), values[row, step].tolist()))
        ours = {token: entry.logprob for token, entry in answer.logprobs[step].items()}
        mine, base = answer.token_ids[step], int(tokens[row, step])
        gaps.append(
            {
                "row": row,
                "step": step,
                "ours": round(ours[mine] - ours.get(base, float("-inf")), 4),
                "upstream": round(theirs[base] - theirs.get(mine, float("-inf")), 4),
            }
        )
    return {"rows": len(prompts), "equal": equal, "first_flips": gaps}


def of_golden(llm: Any, name: str) -> dict[str, Any]:
    """Ours and upstream's eager run, both forced through the tokens of the golden's graph run."""
    from vllmx import SamplingParams

    from .gpu_models import EAGER, GRAPH, load

    lanes = load(name)
    base = {key: array.data for key, array in lanes[GRAPH].tensors.items()}
    eager = lanes[EAGER].tensors["lp.val"].data - base["lp.val"]
    bounds = list(pairwise(base["offsets"].tolist()))
    given = [{"prompt_token_ids": base["tokens"][a:b].tolist()} for a, b in bounds]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=LISTED, detokenize=False)
    found: list[float] = []
    position = 0
    for output in llm.generate(given, params, use_tqdm=False):
        for ours in output.prompt_logprobs[1:]:
            row = zip(base["lp.ids"][position, :LIKELIEST], base["lp.val"][position, :LIKELIEST])
            found += [ours[int(t)].logprob - float(v) for t, v in row if int(t) in ours]
            position += 1
    likeliest = eager[:, :LIKELIEST]
    noise = figures(likeliest[np.isfinite(likeliest)].astype(np.float64))
    ours = figures(np.array(found, dtype=np.float64))
    wanted = LIKELIEST * position
    return {
        "upstream's eager run": noise,
        "ours, forced": ours,
        "faults": faults(ours, noise, wanted),
    }


def faults(ours: dict[str, float], noise: dict[str, float], wanted: int) -> list[str]:
    """What of ours is further from upstream's graphs than upstream's own noise allows."""
    found = []
    for name, (factor, least) in ALLOWED.items():
        limit = max(factor * noise[name], least)
        if not ours[name] <= limit:
            found.append(f"{name} {ours[name]:.3g}, {limit:.3g} allowed")
    # Tokens that are not among our likeliest are further off than can be said.
    if ours["positions"] < (1 - UNLISTED) * wanted:
        found.append(f"{wanted - ours['positions']:.0f} of {wanted} tokens are not in our lists")
    return found


def main() -> int:
    """Measure, print and write; 1 where a golden's noise does not explain ours."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--golden", help="a model of goldens/models_gpu")
    parser.add_argument("--lanes", type=Path)
    parser.add_argument("--prompts", type=Path)
    options = parser.parse_args()
    if options.golden is None and None in (options.model, options.lanes, options.prompts):
        parser.error("give --golden, or --model, --lanes and --prompts")
    if options.golden not in (None, *MODELS):
        parser.error(f"no model is called {options.golden}; they are {', '.join(MODELS)}")
    folder = options.model or oracle_folder(MODELS[options.golden])
    from vllmx import LLM
    from vllmx.tasks.bench_side_by_side import environment

    llm = LLM(
        model=str(folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_logprobs=LISTED,
        max_num_seqs=64,
        max_model_len=1024,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=4 << 30,
    )
    told: dict[str, Any] = {"environment": environment(), "limits": LIMITS}
    if options.golden is not None:
        told |= of_golden(llm, options.golden)
    else:
        lanes = dict(np.load(options.lanes))
        prompts = json.loads(options.prompts.read_text())
        told["upstream's eager run"] = upstream_noise(lanes, OTHER)
        told["ours, forced"] = figures(forced(llm, prompts, lanes))
        told["ours, free"] = flips(llm, prompts, lanes)
    options.out.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(told, indent=1))
    return 1 if told.get("faults") else 0


if __name__ == "__main__":
    raise SystemExit(main())

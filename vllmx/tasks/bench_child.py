# SPDX-License-Identifier: Apache-2.0
"""One engine of a comparison: loads a model, answers with its first token, then times batches.

Run with any interpreter that has the engine, vllmx or upstream's vllm, and by its path, since the
other's interpreter has no vllmx:

    python bench_child.py vllmx|vllm OPTIONS

OPTIONS is JSON, the keyword arguments of `LLM`. Each line of stdin is JSON {"batch", "input_len",
"output_len", "seed", "vocab"}; each line of stdout is JSON: first {"ready": what there is}, then
{"seconds", "tokens"} for each line, where tokens are a list a request. Prompts are random ids, the
same for the same line.
"""

import importlib
import json
import os
import random
import sys
import time
from typing import Any


def prompts_of(work: dict[str, int]) -> list[Any]:
    """Prompts of random ids, none of the first, which tend to be special."""
    rng = random.Random(work["seed"])
    first, end = min(1000, work["vocab"] // 2), work["vocab"]
    return [
        {"prompt_token_ids": [rng.randrange(first, end) for _ in range(work["input_len"])]}
        for _ in range(work["batch"])
    ]


def main() -> None:
    """Load, generate one token, then serve stdin."""
    started = time.perf_counter()
    engine, options = sys.argv[1], json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # an engine's own prints must not mix with the answers
    package = importlib.import_module(engine)
    make = package.LLM  # which is what imports the most
    imported = time.perf_counter() - started
    llm = make(**options)
    built = time.perf_counter() - started

    def generate(prompts: list[Any], output_len: int) -> list[list[int]]:
        params = package.SamplingParams(
            temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    first = {"batch": 1, "input_len": 8, "seed": 0, "vocab": 64}
    generate(prompts_of(first), 1)
    told = {"import_s": imported, "engine_s": built, "first_token_s": time.perf_counter() - started}
    print(json.dumps({"ready": told}), file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        prompts = prompts_of(work)  # of 16,384 tokens 10 ms: as long as many a row takes
        begin = time.perf_counter()
        tokens = generate(prompts, work["output_len"])
        seconds = time.perf_counter() - begin
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers, flush=True)
    os._exit(0)  # an engine's own farewell can take longer than all of its work


if __name__ == "__main__":
    main()

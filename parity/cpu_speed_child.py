# SPDX-License-Identifier: Apache-2.0
"""One engine of the CPU speed comparison: loads a folder, then times what stdin asks for.

Run by parity/cpu_speed.py with the interpreter that has the engine:
    python cpu_speed_child.py vllmx|vllm|transformers FOLDER THREADS
Each line of stdin is `BATCH INPUT_LEN OUTPUT_LEN`; each answer is the seconds the call took.
"""

import random
import sys
import time
from collections.abc import Callable

Runner = Callable[[list[list[int]], int], None]


def vllmx_runner(model: str, threads: int) -> Runner:
    from vllmx import LLM, SamplingParams
    from vllmx.config import finalize
    from vllmx.engine.arg_utils import engine_args_to_config

    run = engine_args_to_config(
        model=model, enable_prefix_caching=False, max_model_len=2048, skip_tokenizer_init=True
    )
    run.device.num_threads = threads
    run.load.use_tqdm_on_load = False
    llm = LLM(config=finalize(run))

    def generate(prompts: list[list[int]], count: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == count for output in outputs)

    return generate


def vllm_runner(model: str, threads: int) -> Runner:
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=2048,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    torch.set_num_threads(threads)

    def generate(prompts: list[list[int]], count: int) -> None:
        params = SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == count for output in outputs)

    return generate


def transformers_runner(model: str, threads: int) -> Runner:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    llm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    @torch.inference_mode()
    def generate(prompts: list[list[int]], count: int) -> None:
        ids = torch.tensor(prompts)
        out = llm.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            pad_token_id=0,
        )
        assert out.shape == (len(prompts), ids.shape[1] + count)

    return generate


RUNNERS = {"vllmx": vllmx_runner, "vllm": vllm_runner, "transformers": transformers_runner}


def main() -> None:
    """Load, say `ready`, then serve stdin."""
    engine, model, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    answers = sys.stdout
    sys.stdout = sys.stderr  # an engine's own prints must not mix with the answers
    generate = RUNNERS[engine](model, threads)
    generate([[5, 6, 7, 8]] * 2, 4)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        batch, input_len, output_len = map(int, line.split())
        rng = random.Random(batch * 1000 + input_len)
        prompts = [[rng.randrange(100, 40000) for _ in range(input_len)] for _ in range(batch)]
        start = time.perf_counter()
        generate(prompts, output_len)
        print(time.perf_counter() - start, file=answers, flush=True)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""vllmx's side of the host-cost comparison; oracles/vllm_engine_overhead.py is upstream's.

Run by parity/engine_overhead.py: `python -m parity.engine_overhead_child FILE`. FILE is a model,
for its tokenizer. Each line of stdin is `NUM_RUNNING NUM_STEPS DETOKENIZE`; each answer is the
seconds that a step took: EngineCore.step on the null runner and OutputProcessor.process_outputs.
"""

from __future__ import annotations

import sys

from vllmx.config import RunConfig
from vllmx.engine.arg_utils import engine_args_to_config
from vllmx.tasks.bench_overhead import step_seconds, tokenizer_of

INPUT_LEN = 16


def run_config(file: str, num_running: int, num_steps: int) -> RunConfig:
    """What `vllmx bench overhead` would be told."""
    run = engine_args_to_config(model=file, block_size=16, enable_prefix_caching=True)
    run.bench.batch_size = num_running
    run.bench.input_len = INPUT_LEN
    run.bench.output_len = num_steps
    return run


def main() -> None:
    """Answer lines of stdin."""
    file = sys.argv[1]
    tokenizer = tokenizer_of(run_config(file, 1, 1))
    print("ready", flush=True)
    for line in sys.stdin:
        num_running, num_steps, detokenize = map(int, line.split())
        run = run_config(file, num_running, num_steps)
        print(step_seconds(run, tokenizer if detokenize else None), flush=True)


if __name__ == "__main__":
    main()

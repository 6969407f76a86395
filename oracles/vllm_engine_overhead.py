# SPDX-License-Identifier: Apache-2.0
"""Upstream's side of the host-cost comparison: a decode step without a model, timed.

Run by parity/engine_overhead.py in the environment of `nox -s oracle`:
    python -m oracles.vllm_engine_overhead FILE
FILE is a GGUF file, for its tokenizer. Each line of stdin is `NUM_RUNNING NUM_STEPS DETOKENIZE`;
each answer is the seconds that a step took: schedule, a scripted runner, update_from_output,
process_outputs.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from oracles import vllm_pin
from oracles.vllm_scheduler import SETTINGS, Upstream

INPUT_LEN = 16
BLOCK_SIZE = 16


def available() -> Literal[True] | str:
    """True, or the reason why nothing can be timed in this process."""
    return vllm_pin.available()


def config(num_running: int, num_steps: int) -> dict[str, Any]:
    """A spec's config with room for every request to run all steps."""
    length = INPUT_LEN + num_steps + 8 + num_running * (INPUT_LEN + 1) // 2048
    return {
        "max_num_seqs": num_running,
        "max_num_batched_tokens": max(2048, num_running),
        "max_model_len": length,
        "watermark": 0.0,
        "long_prefill_token_threshold": 0,
        "enable_chunked_prefill": True,
        "async_scheduling": False,
        "policy": "fcfs",
        "scheduler_reserve_full_isl": True,
        "max_num_scheduled_tokens": None,
        "block_size": BLOCK_SIZE,
        "enable_prefix_caching": True,
        "groups": [None],
        "num_blocks": num_running * (length // BLOCK_SIZE + 2) + 1,
    }


class Loop:
    """Upstream's scheduler and output processor around a scripted runner."""

    def __init__(self, side: Upstream, tokenizer: Any, num_running: int, num_steps: int) -> None:
        from vllm.v1.engine.output_processor import OutputProcessor

        spec = config(num_running, num_steps)
        self.scheduler = side.scheduler(spec)
        self.scheduler.log_stats = False
        self.processor = OutputProcessor(tokenizer, log_stats=False)
        self.known: dict[str, list[int]] = {}
        for number in range(num_running):
            self._add(side, number, spec["max_model_len"], tokenizer is not None)

    def _add(self, side: Upstream, number: int, length: int, detokenize: bool) -> None:
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.request import Request

        request = EngineCoreRequest(
            request_id=str(number),
            external_req_id=str(number),
            prompt_token_ids=[3 + (number * 31 + i) % 89 for i in range(INPUT_LEN)],
            mm_features=None,
            sampling_params=SamplingParams(
                temperature=0.0,
                ignore_eos=True,
                max_tokens=length,
                detokenize=detokenize,
                output_kind=RequestOutputKind.DELTA,
            ),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self.processor.add_request(request, prompt=None)
        hasher = get_request_block_hasher(BLOCK_SIZE, side.hash_function)
        self.scheduler.add_request(Request.from_engine_core_request(request, hasher))
        self.known[str(number)] = [0, INPUT_LEN]  # tokens computed, tokens known

    def step(self) -> None:
        """One step of the engine."""
        scheduled = self.scheduler.schedule()
        output = self._model_output(scheduled.num_scheduled_tokens)
        for told in self.scheduler.update_from_output(scheduled, output).values():
            self.processor.process_outputs(told.outputs, told.timestamp)

    def _model_output(self, scheduled: dict[str, int]) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        sampled = []
        for name, num_tokens in scheduled.items():
            known = self.known[name]
            known[0] += num_tokens
            if known[0] < known[1]:
                sampled.append([])
                continue
            sampled.append([3 + known[1] % 97])
            known[1] += 1
        names = list(scheduled)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def seconds(self, num_steps: int) -> float:
        """Mean of a step over `num_steps` steps in which all requests decode."""
        while any(state.is_prefilling for state in self.processor.request_states.values()):
            self.step()
        gc.collect()
        gc.freeze()
        start = time.perf_counter()
        for _ in range(num_steps):
            self.step()
        seconds = (time.perf_counter() - start) / num_steps
        gc.unfreeze()
        return seconds


def main() -> int:
    """Answer lines of stdin; 2 without upstream."""
    ready = available()
    if ready is not True:
        print(ready, file=sys.stderr)
        return 2
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    from vllm.tokenizers import get_tokenizer

    file = Path(sys.argv[1])
    tokenizer = get_tokenizer(str(file.parent), gguf_file=file.name)
    with tempfile.TemporaryDirectory() as folder:
        side = Upstream(Path(folder))
        print("ready", flush=True)
        for line in sys.stdin:
            num_running, num_steps, detokenize = map(int, line.split())
            loop = Loop(side, tokenizer if detokenize else None, num_running, num_steps)
            print(loop.seconds(num_steps), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

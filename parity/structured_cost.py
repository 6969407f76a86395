# SPDX-License-Identifier: Apache-2.0
"""What constrained requests add to the time of a decode step, beside free ones, in turn.

    python -m parity.structured_cost --out reports/structured_cost

Rounds of requests that decode together, under a JSON schema and free, take turns in one engine; a
step is timed from outside, from the second token on, when every grammar is compiled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from vllmx import LLM, SamplingParams
from vllmx.sampling_params import StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
}
PROMPT = "A JSON object that describes a person, with many tags:\n"
WANTED = 0.15
"""Most that a step may grow."""
BACKENDS = ("xgrammar", "guidance", "outlines", "lm-format-enforcer")
JUDGED = {"xgrammar", "guidance"}
"""Those that `auto` takes a schema to; the others are asked for by name."""


def step_ms(llm: LLM, params: SamplingParams, num_requests: int, num_steps: int) -> float:
    """Median milliseconds of a step in which all requests decode."""
    engine = llm.llm_engine
    for i in range(num_requests):
        engine.add_request(f"r{i}", f"{PROMPT}{i}: ", params)
    alive: dict[str, int] = {}
    times: list[float] = []
    while engine.has_unfinished_requests() and len(times) < num_steps:
        started = time.perf_counter()
        outputs = engine.step()
        took = (time.perf_counter() - started) * 1000
        decoding = sum(len(output.outputs[0].token_ids) > 1 for output in outputs)
        alive.update((output.request_id, 1) for output in outputs)
        if decoding == num_requests and not any(output.finished for output in outputs):
            times.append(took)
    engine.abort_request(list(alive))
    while engine.has_unfinished_requests():
        engine.step()
    assert times, "no step in which all requests decode"
    return statistics.median(times)


def measure(llm: LLM, num_requests: int, num_steps: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step, free and constrained, of each round; and what it grows by."""
    free = SamplingParams(temperature=0, max_tokens=num_steps + 8, ignore_eos=True)
    constraint = StructuredOutputsParams(json=SCHEMA)
    tied = SamplingParams(temperature=0, max_tokens=num_steps + 8, structured_outputs=constraint)
    step_ms(llm, tied, num_requests, 2)  # libraries and grammar
    found: dict[str, list[float]] = {"free": [], "constrained": []}
    for turn in range(rounds):
        for name in ("free", "constrained") if turn % 2 == 0 else ("constrained", "free"):
            params = free if name == "free" else tied
            found[name].append(step_ms(llm, params, num_requests, num_steps))
    growths = [
        tied_ms / free_ms - 1 for free_ms, tied_ms in zip(found["free"], found["constrained"])
    ]
    return {
        "step_ms": found,
        "growth": statistics.median(growths),
        "growths": growths,
    }


def render(found: dict[str, Any], model: str) -> str:
    """The report as Markdown: a row a backend."""
    lines = [
        "# Cost of structured output\n",
        f"Made by `{found['command']}`: {found['num_requests']} requests of {model} decode "
        "together, free and under one JSON schema, in turn in one engine a backend. Growth of a "
        f"step is the median over rounds of one beside the other (wanted: at most {WANTED:.0%}); "
        "milliseconds are of the fastest round and the median.\n",
        "| backend | growth | from | to | rounds | free, fastest | median | constrained | median |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, each in found["backends"].items():
        growths = each["growths"]
        times = [
            f"{value:.1f} ms"
            for listed in each["step_ms"].values()
            for value in (min(listed), statistics.median(listed))
        ]
        shares = (each["growth"], min(growths), max(growths))
        words = [name, *(f"{share:.1%}" for share in shares), str(len(growths)), *times]
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Measure; 1 if a step grows by more than is wanted under a backend that `auto` takes."""
    parser = argparse.ArgumentParser(prog="python -m parity.structured_cost", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="name in conf/model, or a folder")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="separated by commas")
    parser.add_argument("--requests", type=int, default=64, help="that decode together")
    parser.add_argument("--steps", type=int, default=24, help="of each round")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind")
    parser.add_argument("--num-threads", type=int, default=None, help="of the model")
    parser.add_argument("--out", type=Path, help="write NAME.md and NAME.json")
    args = parser.parse_args(argv)
    found: dict[str, Any] = {
        "command": " ".join(["python -m parity.structured_cost", *(argv or sys.argv[1:])]),
        "num_requests": args.requests,
        "backends": {},
    }
    for backend in args.backends.split(","):
        llm = LLM(
            model=args.model,
            max_model_len=256,
            max_num_seqs=args.requests,
            num_threads=args.num_threads,
            structured_outputs_config={"backend": backend},
        )
        found["backends"][backend] = measure(llm, args.requests, args.steps, args.rounds)
        llm.shutdown()
    text = render(found, args.model)
    print(text)
    if args.out is not None:
        args.out.with_suffix(".md").write_text(text, encoding="utf-8")
        args.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    judged = [each for name, each in found["backends"].items() if name in JUDGED]
    return int(any(each["growth"] > WANTED for each in judged))


if __name__ == "__main__":
    raise SystemExit(main())

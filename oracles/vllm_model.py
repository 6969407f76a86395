# SPDX-License-Identifier: Apache-2.0
"""Oracle: whole models in upstream vLLM on a CPU, eager.

`python -m oracles.vllm_model JOB OUT`, in upstream's environment (`nox -s oracle`); the files are
described in oracles/model_job.py. The wheel has no Triton, so the first model runner answers.

What a job asks for is float32, in which hybrid models need another recurrence (gdn_reference.py),
or bfloat16, in which upstream is as it is.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from oracles import gdn_reference, vllm_pin
from oracles.model_job import Answer, Job, main, stack_of

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_told: list[str] = []
"""Lanes of what upstream was told otherwise."""
LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite")
"""Families whose keys and values upstream keeps as latents, and as what comes of them if told so:
the golden names its lane `vllm-cpu-f32-mha`."""
WHOLE = {
    "CohereDecoderLayer",
    "Exaone4DecoderLayer",
    "HyperCLOVAXDecoderLayer",
    "Olmo2DecoderLayer",
    "PhiMoEDecoderLayer",
    "StablelmDecoderLayer",
}
"""Layers whose first output is the whole stream, although a second one comes with it."""


def available() -> Literal[True] | str:
    """True where the pinned upstream is installed, else the reason."""
    return vllm_pin.available()


def describe(job: Job) -> dict[str, Any]:
    """What computed the answer to `job`."""
    import torch

    return {
        "name": "vllm",
        "version": vllm_pin.VERSION,
        "lane": _told[-1] if _told else lane_of(job.dtype, gdn_reference.patched()),
        "callable": "vllm.LLM.generate",
        "torch": torch.__version__,
        "device": f"cpu {torch.backends.cpu.get_cpu_capability()}",
        "reps": 1,
    }


def lane_of(dtype: str, patched: bool) -> str:
    """The name of what computed in `dtype`, with upstream's kernels replaced or not."""
    if dtype == "bfloat16":
        return "vllm-cpu-bf16"
    return "vllm-cpu-f32-gdnref" if patched else "vllm-cpu-f32"


def prepare() -> None:
    """Import upstream."""
    os.environ.update(SETTINGS)
    from vllm import LLM
    from vllm.model_executor.models import registry

    assert LLM
    # Upstream looks at a model's class in a process that imports all of it again; a process that
    # was forked for one model may as well look itself.
    registry._run_in_subprocess = lambda look: look()


def compute(job: Job) -> Answer:
    """Continue and score the sequences of `job`."""
    os.environ.update(SETTINGS)
    config = json.loads((Path(job.folder) / "config.json").read_text())
    if config.get("model_type") == "gpt_oss":
        _give_sinks_as_bfloat16()
    if config.get("model_type") in ("ernie4_5_moe", "laguna", "minimax_m2"):
        _choose_experts_with_their_bias()
    if config.get("model_type") == "laguna":
        _find_biases_of_laguna()
    if config.get("hidden_act") == "xielu":
        _keep_xielu_in_float32()
    if config.get("model_type") == "dbrx":
        _find_experts_of_dbrx()
    if config.get("architectures") == ["TeleFLMForCausalLM"]:
        _multiply_what_teleflm_is_given()
    if config.get("architectures") == ["Rnj1ForCausalLM"]:
        _forget_chunks_of_rnj1()
    if config.get("kv_lora_rank") and config["model_type"] in LATENT:
        _keep_keys_and_values()
    if job.dtype == "float32" and gdn_reference.is_hybrid(Path(job.folder)):
        gdn_reference.patch()
    options = _options(config)
    if job.dtype == "bfloat16" and gdn_reference.is_hybrid(Path(job.folder)):
        # What Qwen3.5's config says, and Qwen3-Next's has no word for.
        options["mamba_ssm_cache_dtype"] = "float32"
    return answer_of(job, stream=True, dtype=job.dtype, enforce_eager=True, **options)


def _options(config: dict[str, Any]) -> dict[str, Any]:
    """What upstream has to be told to run a config: blocks that chunks of local attention are whole
    numbers of, and one rotation where its class reads one and transformers one for each kind."""
    options: dict[str, Any] = {}
    if config.get("attention_chunk_size"):
        options["block_size"] = 32
    rope = config.get("rope_parameters") or {}
    flat = {key: value for key, value in rope.items() if not isinstance(value, dict)}
    if flat and flat != rope:
        options["hf_overrides"] = {"rope_parameters": flat}
    if config.get("block_configs"):
        options["hf_overrides"] = _blocks_as_objects
    if config.get("architectures") == ["Param2MoEForCausalLM"]:
        # Its class reads what the family's own config has and that of transformers has not.
        options["hf_overrides"] = {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    return options


def _blocks_as_objects(config: Any) -> Any:
    """A config whose blocks, if it has any, have attributes, as those of DeciLM's own code have."""
    if not hasattr(config, "block_configs"):
        return config
    config.block_configs = [
        SimpleNamespace(**{part: SimpleNamespace(**said) for part, said in block.items()})
        for block in config.block_configs
    ]
    return config


def _choose_experts_with_their_bias() -> None:
    """Upstream's CPU heeds a router's bias for the choice, and scores by sigmoid, only where there
    are groups of experts, its GPU always: here all experts are one group. The golden names its
    lane `vllm-cpu-f32-onegroup`."""
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe

    choose = cpu_fused_moe.select_experts

    def select_experts(**args: Any) -> Any:
        if not args["use_grouped_topk"] and args.get("e_score_correction_bias") is not None:
            args |= {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1}
        return choose(**args)

    cpu_fused_moe.select_experts = select_experts
    _told.append("vllm-cpu-f32-onegroup")


def _keep_xielu_in_float32() -> None:
    """Upstream makes the numbers of this activation in bfloat16 unless it is told otherwise, also
    where a model is served in float32. The golden names its lane `vllm-cpu-f32-xielu32`."""
    import torch
    from vllm.model_executor.layers.activation import XIELU

    make = XIELU.__init__

    def in_float32(self: Any, *args: Any, **others: Any) -> None:
        make(self, *args, **{"dtype": torch.float32, **others})

    XIELU.__init__ = in_float32
    _told.append("vllm-cpu-f32-xielu32")


def _find_experts_of_dbrx() -> None:
    """Upstream's DBRX looks for the parameters of its experts where earlier releases had them, and
    so can't be loaded: it is shown them there. The golden names its lane `vllm-cpu-f32-dbrxnames`.
    """
    from vllm.model_executor.models.dbrx import DbrxModel

    inner, outer = ".experts.routed_experts.", ".experts."
    load = DbrxModel.load_weights

    def named_parameters(self: Any, *args: Any, **others: Any) -> Any:
        for name, parameter in super(DbrxModel, self).named_parameters(*args, **others):
            yield name.replace(inner, outer), parameter

    def load_weights(self: Any, weights: Any) -> set[str]:
        return {name.replace(outer, inner) for name in load(self, weights)}

    DbrxModel.named_parameters, DbrxModel.load_weights = named_parameters, load_weights
    _told.append("vllm-cpu-f32-dbrxnames")


def _multiply_what_teleflm_is_given() -> None:
    """Upstream has a model of Tele-FLM that multiplies the embedding as its config says, and makes
    Llama's instead. The golden names its lane `vllm-cpu-f32-inputmult`."""
    from vllm.model_executor.models.teleflm import TeleFLMForCausalLM, TeleFLMModel

    def init_model(self: Any, vllm_config: Any, prefix: str = "", **others: Any) -> Any:
        return TeleFLMModel(vllm_config=vllm_config, prefix=prefix)

    TeleFLMForCausalLM._init_model = init_model
    _told.append("vllm-cpu-f32-inputmult")


def _keep_keys_and_values() -> None:
    """Upstream's CPU has no attention over latents, and its kernel of the rotation takes the part
    of a head for all of it, as its GPU does not: keys and values are kept whole, and the rotation
    is upstream's definition. The golden names its lane `vllm-cpu-f32-mha`."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    os.environ["VLLM_MLA_DISABLE"] = "1"
    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native
    _told.append("vllm-cpu-f32-mha")


def _find_biases_of_laguna() -> None:
    """Upstream's Laguna leaves its routers' biases for the choice at zero, as they are not where it
    looks for them. The golden names its lane `vllm-cpu-f32-onegroup-bias`."""
    from vllm.model_executor.models.laguna import LagunaModel

    load = LagunaModel.load_weights

    def load_weights(self: Any, weights: Any) -> set[str]:
        found = ((n.replace(".experts.e_", ".experts.routed_experts.e_"), w) for n, w in weights)
        return load(self, found)

    LagunaModel.load_weights = load_weights
    _told.append("vllm-cpu-f32-onegroup-bias")


def _forget_chunks_of_rnj1() -> None:
    """Upstream's Rnj-1 says of layers without chunks that they look back at none, with a word that
    its attention on a CPU does not know. The golden names its lane `vllm-cpu-f32-nolookback`."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    make = CPUAttentionBackendImpl.__init__

    def without(self: Any, *args: Any, chunk_lookback: int = -1, **others: Any) -> None:
        assert chunk_lookback == -1, "chunks, which a CPU has not"
        make(self, *args, **others)

    CPUAttentionBackendImpl.__init__ = without
    _told.append("vllm-cpu-f32-nolookback")


def _give_sinks_as_bfloat16() -> None:
    """Upstream's CPU kernel takes attention sinks in bfloat16 alone, whatever the model is in: the
    same numbers are given so, and others than bfloat16 holds are refused. The golden names its lane
    `vllm-cpu-f32-sinks16`."""
    from vllm import _custom_ops as ops

    kernel = ops.cpu_attention_with_kv_cache

    def attention(*args: Any, s_aux: Any = None, **others: Any) -> Any:
        if s_aux is not None:
            rounded = s_aux.bfloat16()
            assert (rounded.to(s_aux.dtype) == s_aux).all(), "sinks that bfloat16 cannot hold"
            s_aux = rounded
        return kernel(*args, s_aux=s_aux, **others)

    ops.cpu_attention_with_kv_cache = attention
    _told.append("vllm-cpu-f32-sinks16")


def answer_of(job: Job, stream: bool, **options: Any) -> Answer:
    """What an engine with these options says; `stream`, which only one that runs eagerly has."""
    from vllm import LLM, SamplingParams

    if gdn_reference.is_nested(Path(job.folder)):
        options["language_model_only"] = True
    llm = LLM(
        model=job.folder,
        enable_prefix_caching=False,
        max_model_len=job.longest,
        max_logprobs=job.top_k,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        **options,
    )
    greedy = SamplingParams(
        temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True, detokenize=False
    )
    answers = _generate(llm, job.prompts, greedy)
    sequences = [
        [*prompt, *answer.outputs[0].token_ids] for prompt, answer in zip(job.prompts, answers)
    ]
    second = llm.llm_engine.vllm_config.use_v2_model_runner
    answer = Answer(sequences + job.forced, runner="v2" if second else "v1")
    scoring = SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=job.top_k, detokenize=False
    )
    for sequence, output in zip(answer.sequences, _generate(llm, answer.sequences, scoring)):
        for following, scored in zip(sequence[1:], output.prompt_logprobs[1:], strict=True):
            ranked = sorted(scored.items(), key=lambda item: item[1].rank)
            top = [(token, entry.logprob) for token, entry in ranked if entry.rank <= job.top_k]
            ids, values = zip(*top[: job.top_k])
            answer.add(np.array(ids), np.array(values), scored[following].logprob, ids[0])
    if stream:
        answer.stream = _stream(llm, answer.sequences[-1])
    return answer


def _generate(llm: Any, prompts: list[list[int]], params: Any) -> list[Any]:
    if not prompts:
        return []
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def _stream(llm: Any, sequence: list[int]) -> list[np.ndarray]:
    """Hidden state plus residual before the first layer and after each, [tokens, hidden]."""
    from vllm import SamplingParams

    seen: list[Any] = []

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*args, *kwargs.values()]  # beside the positions, which are whole numbers
        seen.append(next(x for x in given if x is not None and x.is_floating_point()).clone())

    def after(module: Any, args: tuple[Any, ...], output: Any) -> None:
        hidden, residual = output[:2] if isinstance(output, tuple) else (output, None)
        if residual is None or type(module).__name__ in WHOLE:
            seen.append(hidden.detach().clone())
        else:
            seen.append((hidden + residual).detach())

    def hook(model: Any) -> list[Any]:
        layers = stack_of(getattr(model, "language_model", model))
        return [layers[0].register_forward_pre_hook(before, with_kwargs=True)] + [
            layer.register_forward_hook(after) for layer in layers
        ]

    (handles,) = llm.apply_model(hook)
    _generate(llm, [sequence], SamplingParams(temperature=0.0, max_tokens=1, detokenize=False))
    for handle in handles:
        handle.remove()
    # Models of transformers that upstream runs have a dimension for the batch.
    rows = [found.reshape(-1, found.shape[-1])[: len(sequence)] for found in seen]
    return [found.float().cpu().numpy() for found in rows]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    raise SystemExit(main("vllm_model", available, describe, compute, prepare))

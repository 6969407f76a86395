# SPDX-License-Identifier: Apache-2.0
"""Checkpoints for tests: tiny random ones, and the real models as transformers sees them."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from vllmx.config import RunConfig, finalize
from vllmx.engine.arg_utils import engine_args_to_config
from vllmx.entrypoints.llm import LLM
from vllmx.layers.parameter import to_float
from vllmx.model_loader.resolve import resolve_model
from vllmx.model_loader.weights import iterate_weights

VOCAB = 200
TINY = {
    "llama": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "llama_untied_biased": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "gemma3": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
}
LINEAR = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
MROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
"""Rotation by sections, as checkpoints of models with eyes say it."""
HYBRID = {
    "qwen3next_dense": {**LINEAR, "mlp_only_layers": [0, 1, 2, 3], "tie_word_embeddings": False},
    "qwen3_5": {**LINEAR, "tie_word_embeddings": True, "rope_parameters": MROPE},
    "qwen3next": {**LINEAR, **EXPERTS, "mlp_only_layers": [1], "tie_word_embeddings": False},
    "qwen3_5_moe": {**LINEAR, **EXPERTS, "tie_word_embeddings": False},
}
"""Models with recurrent layers."""
SPARSE = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
FEW = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GLM4 = {
    **SPARSE,
    "head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 2.5,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
MOE = {
    "mixtral": {**SPARSE, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2},
    "mixtral_windowed": {**SPARSE, "num_local_experts": 4, "sliding_window": 16},
    "qwen2moe": {**SPARSE, **FEW, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]},
    "qwen3moe": {**SPARSE, **FEW, "head_dim": 32, "norm_topk_prob": True},
    "qwen3moe_everysecond": {**SPARSE, **FEW, "head_dim": 32, "decoder_sparse_step": 2},
    "glm4moe": {**GLM4, "attention_bias": True, "n_group": 4, "topk_group": 2},
    "glm4moe_normed": {**GLM4, "use_qk_norm": True, "n_shared_experts": 2},
    "granitemoe": {
        **SPARSE,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "olmoe": {**SPARSE, "num_experts": 8, "num_experts_per_tok": 4, "norm_topk_prob": False},
}
"""Models with experts, and attention in every layer."""
FAMILIES = {
    "mixtral": "Mixtral",
    "qwen2moe": "Qwen2Moe",
    "qwen3moe": "Qwen3Moe",
    "glm4moe": "Glm4Moe",
    "olmoe": "Olmoe",
    "granitemoe": "GraniteMoe",
    "llama": "Llama",
    "gemma3": "Gemma3",
    "qwen3": "Qwen3",
    "qwen3next_dense": "Qwen3Next",
    "qwen3next": "Qwen3Next",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
}
"""Name, or start of one, in TINY, HYBRID or MOE -> start of the names of transformers' classes."""
TEXT_CONFIG = ("Gemma3", "Qwen3_5", "Qwen3_5Moe")
"""Families whose config class has Text in its name."""
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def save_tiny(name: str, folder: Path, seed: int = 0) -> torch.nn.Module:
    """Write a tiny checkpoint without tokenizer into `folder`; returns transformers' model of it.

    Weights are larger than usual, so that attention is peaked and positions matter.
    """
    import transformers

    torch.manual_seed(seed)
    family = FAMILIES.get(name) or FAMILIES[name.partition("_")[0]]
    config_name = f"{family}{'Text' if family in TEXT_CONFIG else ''}Config"
    config_cls = getattr(transformers, config_name)
    model_cls = getattr(transformers, f"{family}ForCausalLM")
    config = config_cls(**{**COMMON, **(TINY | HYBRID | MOE)[name]})
    config._attn_implementation = "eager"
    model = model_cls(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * (0.3 if weight.dim() == 1 else 0.15))
        for name, weight in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                weight.copy_(torch.rand_like(weight) * 0.3)
    model.save_pretrained(folder)
    return model


POOL_BYTES = 32 << 20
"""KV cache of a tiny model's engine: most of a machine's memory is a pool of 350,000 blocks, a
second or two to make, to clear and to count for each engine."""


def build_engine(model: str | Path, **kwargs: object) -> LLM:
    """An engine for a folder without tokenizer or a named model; one thread.

    That of a folder has a KV cache of POOL_BYTES where nothing else is asked for.
    """
    priority = kwargs.pop("default_priority", [])
    backend = kwargs.pop("attention_backend", None)
    kwargs.setdefault("skip_tokenizer_init", Path(model).is_dir())
    if Path(model).is_dir() and kwargs.get("num_gpu_blocks_override") is None:
        kwargs.setdefault("kv_cache_memory_bytes", POOL_BYTES)
    run: RunConfig = engine_args_to_config(model=str(model), **kwargs)
    run.kernel.default_priority, run.attention.backend = priority, backend
    run.device.num_threads = 1
    run.load.use_tqdm_on_load = False
    return LLM(config=finalize(run))


def transformers_twin(name: str) -> torch.nn.Module:
    """transformers' model of a named GGUF model, filled with the very float32 values we load."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

    config, weights = float_weights(name)
    gemma = config.model_type == "gemma3_text"
    config_cls, model_cls = (
        (Gemma3TextConfig, Gemma3ForCausalLM) if gemma else (LlamaConfig, LlamaForCausalLM)
    )
    with torch.device("meta"):
        model = model_cls(config_cls(**config.to_dict()))
    model.to_empty(device="cpu")
    # Tables that are not in a checkpoint were left empty above.
    model.model.rotary_emb.__init__(model.config)
    if gemma:
        model.model.embed_tokens.embed_scale = torch.tensor(config.hidden_size**0.5)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model.eval()


def float_weights(name: str) -> tuple:
    """(config, {HF name: float32 tensor}) of a named model."""
    run = engine_args_to_config(model=name)
    run.load.use_tqdm_on_load = False
    vllm_config = finalize(run)
    resolve_model(vllm_config)
    weights = {key: to_float(tensor) for key, tensor in iterate_weights(vllm_config)}
    return vllm_config.model_config.hf_config, weights


def save_as_safetensors(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a named model as a HF folder of `dtype`, without tokenizer."""
    config, weights = float_weights(name)
    save_file(
        {key: tensor.to(dtype).contiguous() for key, tensor in weights.items()},
        folder / "model.safetensors",
    )
    values = config.to_dict()
    values["torch_dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(values))
    return folder

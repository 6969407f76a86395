# SPDX-License-Identifier: Apache-2.0
"""A strict view of a checkpoint's config.json, under transformers' key names.

GGUF metadata is translated to the same keys by vllmx/model_loader/gguf_config.py. What
transformers derives or defaults (head_dim, layer_types, rope parameters) is filled in here once,
so that models read plain attributes. Imports no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllmx.exceptions import CheckpointError
from vllmx.models.hf_dense import (
    ALIASES,
    DENSE_DEFAULTS,
    MINISTRAL3_DEFAULTS,
)
from vllmx.models.hf_latent import LATENT_ALIASES, LATENT_DEFAULTS
from vllmx.models.hf_layers import layer_types
from vllmx.models.hf_remote import REMOTE_ALIASES, REMOTE_DEFAULTS
from vllmx.models.hf_sparse import SPARSE_ALIASES, SPARSE_DEFAULTS

if TYPE_CHECKING:
    from vllmx.model_loader.gguf_reader import GGUFReader

REQUIRED: Final = object()

LLAMA_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10000.0,
}
GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
QWEN_DEFAULTS = LLAMA_DEFAULTS | {
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
QWEN3_NEXT_DEFAULTS = LLAMA_DEFAULTS | {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
MOE_DEFAULTS: dict[str, Any] = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    **DENSE_DEFAULTS,
    **REMOTE_DEFAULTS,
    **SPARSE_DEFAULTS,
    **LATENT_DEFAULTS,
    "llama": LLAMA_DEFAULTS,
    "mistral": LLAMA_DEFAULTS | {"max_position_embeddings": 131072, "sliding_window": 4096},
    "ministral3": MINISTRAL3_DEFAULTS,
    "qwen2": QWEN_DEFAULTS,
    "qwen3": QWEN_DEFAULTS | {"head_dim": 128},
    "qwen3_next": QWEN3_NEXT_DEFAULTS
    | MOE_DEFAULTS
    | {"num_experts": 512, "num_experts_per_tok": 10},
    "qwen3_5_text": QWEN3_NEXT_DEFAULTS,
    "qwen3_5_moe_text": QWEN3_NEXT_DEFAULTS
    | MOE_DEFAULTS
    | {"num_experts": 256, "num_experts_per_tok": 8},
    "gemma3_text": GEMMA3_DEFAULTS,
}
"""What transformers assumes, by model_type, for keys that a config.json may leave out."""
ALL_ALIASES = ALIASES | REMOTE_ALIASES | SPARSE_ALIASES | LATENT_ALIASES
LOCAL_BASES = {"gemma3_text": "rope_local_base_freq", "plamo3": "rope_local_theta"}
"""Where families that rotate each kind of layer in its own way keep the base of those with a
window."""


NEVER_NULL: dict[str, type] = {
    "hidden_act": str,
    "hidden_size": int,
    "layer_norm_eps": float,
    "logit_scale": float,
    "rms_norm_eps": float,
    "vocab_size": int,
}
"""Keys that have no meaning of another type, or of `null` where a family's default isn't that."""
PLAIN_ROPE = {
    *("rope_theta", "partial_rotary_factor", "rope_dim", "freq_factors"),
    *("mrope_section", "mrope_interleaved"),
}
"""What rope parameters may hold that don't say their type; all else belongs to one."""
ALSO_WORDS = ("gating",)
"""Keys that are yes, no or a word."""
DERIVED = ("head_dim", "layer_types", "num_key_value_heads")
"""Keys that are there wherever num_attention_heads is."""
ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")
"""Rotations that scale by the length that a model was trained with."""


class MissingKeyError(CheckpointError, AttributeError):
    """A key that the checkpoint's config lacks: an AttributeError for hasattr and getattr, and
    one line for the user where a model cannot do without it."""


class HFConfig:
    """The values of a config.json; keys are attributes, a missing one is a MissingKeyError.

    `origin` is the file the values came from and appears in errors. `text_config` is the language
    model's part: the config itself where it is not nested. Where that part has no model_type, it is
    of the outer one's family with "_text" behind it, if there is one. `raw` holds the values as
    read, and `gguf` the open reader of a GGUF checkpoint, so that it is parsed once.
    """

    def __init__(self, values: dict[str, Any], origin: str = "config.json") -> None:
        self.raw = dict(values)
        self.origin = origin
        self.gguf: GGUFReader | None = None
        self._values = dict(values)
        nested = self._values.get("text_config")
        if nested is not None and not isinstance(nested, dict):
            raise CheckpointError(f"{origin}: text_config is {nested!r}, not a JSON object.")
        if nested is not None:
            inner = dict(nested)
            for key in ("architectures", "tie_word_embeddings", "dtype", "torch_dtype"):
                if key in self._values:
                    inner.setdefault(key, self._values[key])
            if not inner.get("model_type") and (family := _text_family(self._values)):
                inner["model_type"] = family
            self._values["text_config"] = HFConfig(inner, f"{origin} (text_config)")
        else:
            self._values.pop("text_config", None)
            _normalise(self)

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):  # not yet constructed, or a protocol such as copy's
            raise AttributeError(key)
        if key in self._values:
            return self._values[key]
        if key == "text_config":
            return self
        raise MissingKeyError(f"{self.origin} has no {self._lacking(key)!r}.")

    def _lacking(self, key: str) -> str:
        """What the file lacks where `key` is asked for, as the file would call it."""
        values = self._values
        if key in DERIVED and "num_attention_heads" not in values:
            key = "num_attention_heads"
        return ALL_ALIASES.get(values.get("model_type", ""), {}).get(key, key)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __repr__(self) -> str:
        return f"HFConfig({self._values!r}, origin={self.origin!r})"

    def read(self, key: str, kind: type | tuple[type, ...], default: Any = REQUIRED) -> Any:
        """Return the value of `key`, which must be of type `kind` (an int passes for a float).

        Raises CheckpointError, naming the key and the file, when it is missing without a
        `default` or has another type.
        """
        value = self._values.get(key, default)
        if value is REQUIRED:
            raise CheckpointError(f"{self.origin}: {key!r} is missing.")
        if value is default:
            return value
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if float in kinds and type(value) is int:
            return float(value)
        if not isinstance(value, kinds) or (type(value) is bool and bool not in kinds):
            names = " or ".join(k.__name__ for k in kinds)
            raise CheckpointError(f"{self.origin}: {key!r} is {value!r}, not of type {names}.")
        return value

    def to_dict(self) -> dict[str, Any]:
        """All values, derived ones included, as a new dict."""
        return {k: v.to_dict() if isinstance(v, HFConfig) else v for k, v in self._values.items()}


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`; CheckpointError where it isn't one."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__}, not a JSON object.")
    return values


def _normalise(config: HFConfig) -> None:
    """Fill in defaults and derived values of a flat config, in place."""
    values = config._values
    config.read("architectures", list, [])
    config.read("model_type", str, "")
    family = values.get("model_type", "")
    for key, theirs in ALL_ALIASES.get(family, {}).items():
        if theirs in values and key in NEVER_NULL:
            config.read(theirs, NEVER_NULL[key])
        value = _value_at(values, theirs)
        if value is None:
            continue
        if values.get(key) not in (None, value):
            raise CheckpointError(
                f"{config.origin}: {key} is {values[key]!r} and {theirs} {value!r}, which are two "
                "names of one thing."
            )
        values[key] = value
    for key, value in DEFAULTS.get(family, {}).items():
        values.setdefault(key, value)
        if key == "rope_parameters" and values[key] is None:
            values[key] = value
    for key, kind in NEVER_NULL.items():
        if key in values and not _means_null(values, key):
            config.read(key, kind)
    _check_kinds(config, {"tie_word_embeddings": False, **DEFAULTS.get(family, {})})
    if values.get("sliding_window") == 0 or _leaves_window_unused(values):
        values["sliding_window"] = None
    values.setdefault("dtype", values.get("torch_dtype"))
    if "num_attention_heads" in values:
        _derive_attention(config)
    values["rope_parameters"] = _rope_parameters(config)


def _check_kinds(config: HFConfig, defaults: dict[str, Any]) -> None:
    """CheckpointError where a key is neither null nor of the kind of its default, if that is yes or
    no or a fraction: the word "false" is as true as any other."""
    for key, default in defaults.items():
        if key in ALSO_WORDS:
            continue
        if isinstance(default, (bool, float)) and config._values.get(key) is not None:
            config.read(key, type(default))


def _text_family(outer: dict[str, Any]) -> str | None:
    """The model_type of the language model in an `outer` config that doesn't say it; None where
    the outer model_type doesn't tell it."""
    family = f"{outer.get('model_type')}_text"
    return family if family in DEFAULTS else None


def _means_null(values: dict[str, Any], key: str) -> bool:
    """Whether `key` is null in a family that gives this a meaning, by having it as its default."""
    default = DEFAULTS.get(values.get("model_type", ""), {}).get(key, REQUIRED)
    return values[key] is None and default is None


def _leaves_window_unused(values: dict[str, Any]) -> bool:
    """Whether use_sliding_window, of a family that reads it, says that no layer has the window."""
    known = "use_sliding_window" in DEFAULTS.get(values.get("model_type", ""), {})
    return known and not values["use_sliding_window"]


def _value_at(values: dict[str, Any], path: str) -> Any:
    """The value of `path`, keys of dicts within dicts with dots between; None where one lacks."""
    found: Any = values
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _derive_attention(config: HFConfig) -> None:
    values = config._values
    heads = config.read("num_attention_heads", int)
    layers = config.read("num_hidden_layers", int)
    hidden = config.read("hidden_size", int)
    sizes = {"num_attention_heads": heads, "num_hidden_layers": layers, "hidden_size": hidden}
    for key, value in sizes.items():
        if value < 1:
            raise CheckpointError(f"{config.origin}: {key!r} is {value}, it must be positive.")
    if "multi_query" in DEFAULTS.get(values.get("model_type", ""), {}):
        _heads_by_multi_query(config, heads)
    if values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = heads
    kv_heads = config.read("num_key_value_heads", int)
    if kv_heads < 1 or heads % kv_heads:
        raise CheckpointError(
            f"{config.origin}: {heads} attention heads cannot share {kv_heads} key/value heads."
        )
    if values.get("head_dim") is None:
        values["head_dim"] = hidden // heads
    if "no_rope_layer_interval" in values and not values.get("no_rope_layers"):
        period = config.read("no_rope_layer_interval", int)
        values["no_rope_layers"] = [int((i + 1) % period != 0) for i in range(layers)]
    if values.get("layer_types") is None:
        values["layer_types"] = layer_types(config, values, layers)
    if len(values["layer_types"]) != layers:
        raise CheckpointError(
            f"{config.origin}: layer_types names {len(values['layer_types'])} layers, "
            f"num_hidden_layers is {layers}."
        )


def _heads_by_multi_query(config: HFConfig, heads: int) -> None:
    """One key head or as many as there are queries, but where Falcon's second generation tells
    their number; RefinedWeb of this hidden size is of that generation."""
    values = config._values
    if values["model_type"].startswith("RefinedWeb") and values["hidden_size"] == 8192:
        values["new_decoder_architecture"] = True
    if not values.get("new_decoder_architecture"):
        values["num_key_value_heads"] = 1 if config.read("multi_query", bool) else heads


def _rope_parameters(config: HFConfig) -> dict[str, Any]:
    """Rope settings in one form, whichever generation of keys the file uses.

    {"rope_type", "rope_theta", scaling keys...}; a model with two kinds of layers (Gemma 3) has
    such a dict for each kind. The older `rope_scaling` counts where both are there, as in
    transformers: what stands beside it may be no more than the family's default.
    """
    given = config.read("rope_scaling", dict, None) or config.read("rope_parameters", dict, None)
    local = LOCAL_BASES.get(config._values.get("model_type", ""))
    bases = {"full_attention": "rope_theta", "sliding_attention": local or "rope_theta"}
    if given and set(given) <= set(bases):
        kinds = bases if local else given
        return {
            kind: _one_rope(config, _of_kind(config, given, kind), bases[kind], True)
            for kind in kinds
        }
    if local is None:
        return _one_rope(config, given or {}, "rope_theta")
    return {
        "full_attention": _one_rope(config, given or {}, "rope_theta"),
        "sliding_attention": _one_rope(config, {}, local),
    }


def _of_kind(config: HFConfig, given: dict[str, Any], kind: str) -> dict[str, Any]:
    """The rope parameters of one kind of layers; none where they are null or left out."""
    found = given.get(kind)
    if found is not None and not isinstance(found, dict):
        raise CheckpointError(
            f"{config.origin}: the rope parameters of {kind!r} are {found!r}, not a JSON object."
        )
    return found or {}


def _one_rope(
    config: HFConfig, given: dict[str, Any], theta_key: str, of_kind: bool = False
) -> dict[str, Any]:
    """of_kind: it is of one kind of layers, and then more than the config's own keys counts."""
    result = dict(given)
    legacy = result.pop("type", None)
    odd = {key for key, value in result.items() if value is not None} - PLAIN_ROPE - {"rope_type"}
    if odd and result.get("rope_type") is None and legacy is None:
        raise CheckpointError(
            f"{config.origin}: the rope parameters have {', '.join(sorted(odd))} and no rope_type, "
            "without which they say nothing; name it, or leave them out."
        )
    rope_type = result.setdefault("rope_type", legacy or "default")
    if not isinstance(rope_type, str):
        raise CheckpointError(f"{config.origin}: rope_type is {rope_type!r}, not a name.")
    if rope_type == "su":  # the first name of longrope
        result["rope_type"] = "longrope"
    if rope_type == "mrope":  # the first name of plain rotation by sections
        result["rope_type"] = "default"
    if result.get("rope_theta") is None:
        result["rope_theta"] = config.read(theta_key, float, 10000.0)
    values = config._values
    if values.get("partial_rotary_factor") is not None:
        result.setdefault("partial_rotary_factor", values["partial_rotary_factor"])
    if result["rope_type"] in ORIGINAL_LENGTH:
        key = "original_max_position_embeddings"
        if values.get(key) is not None and not of_kind:
            result[key] = values[key]
        elif result.get(key) is None:
            result[key] = values.get(key) or config.read("max_position_embeddings", int)
    return result

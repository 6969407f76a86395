# SPDX-License-Identifier: Apache-2.0
"""Finds the checkpoint and fills in what only its metadata can tell. Imports no torch."""

from __future__ import annotations

import logging
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from vllmx.config import ModelConfig, ModelSource, VllmConfig
from vllmx.exceptions import CheckpointError, ModelNotFoundError, UserError
from vllmx.model_loader.fetch import cached_path, fetch, model_files
from vllmx.model_loader.gguf_config import generation_config_from_gguf, hf_config_from_gguf
from vllmx.model_loader.gguf_reader import MAGIC, GGUFReader
from vllmx.model_loader.pt_file import pt_file
from vllmx.models.hf_config import HFConfig, read_json
from vllmx.models.hf_length import longest_sequence, usual_length
from vllmx.plugins import load_general_plugins

logger = logging.getLogger(__name__)

MOST_NAMED = 5
"""Architectures that the refusal of another names."""
DTYPE_ALIASES = {"half": "float16", "float": "float32"}


def resolve_model(vllm_config: VllmConfig) -> None:
    """Find the model of `vllm_config` and fill in its model_config, in place.

    Sets served_model_name, model (absolute path), hf_config, generation_config_dict,
    max_model_len with max_model_len_pinned, and replaces aliases of dtype. Fetches a named model
    that is not in the cache unless load.offline is set. Reads metadata only, no weights. Raises
    UserError.
    """
    load_general_plugins(vllm_config.load_config.plugins)
    config = vllm_config.model_config
    if config.name or config.model:  # clients use the name as it was given
        config.served_model_name = config.served_names
    path = _find(vllm_config)
    config.model = str(path)
    gguf = None
    if is_gguf(path):
        gguf = GGUFReader(path)
        hf_config = hf_config_from_gguf(gguf)
    else:
        hf_config = _folder_config(path)
    if config.hf_overrides:
        hf_config = HFConfig(
            hf_config.raw | config.hf_overrides, f"{hf_config.origin} with hf_overrides"
        )
    hf_config.gguf = gguf
    config.hf_config = hf_config
    _check_load_format(vllm_config, path)
    _check_architecture(hf_config)
    _check_family(hf_config)
    config.dtype = DTYPE_ALIASES.get(config.dtype, config.dtype)
    _resolve_max_model_len(config)
    config.generation_config_dict = _generation_config(config, path, gguf)


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file in GGUF form, by suffix or by its first bytes."""
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    with open(path, "rb") as handle:
        return handle.read(4) == MAGIC


def _find(vllm_config: VllmConfig) -> Path:
    config, load = vllm_config.model_config, vllm_config.load_config
    if config.model:
        path = Path(config.model).expanduser().absolute()
        if path.is_dir() or is_gguf(path):
            return path
        if path.is_file():
            raise CheckpointError(f"{path} is neither a folder nor a GGUF file.")
        raise ModelNotFoundError(_not_there(config.model))
    if config.source is None:
        raise ModelNotFoundError(
            f"No model is set: pass a path or one of {', '.join(model_files()) or 'conf/model'}."
        )
    name = config.name or config.source.packages[0].split("==")[0]
    cached = cached_path(name, config.source, load.download_dir)
    if cached is not None:
        return _model_of(cached, config.source)
    if load.offline:
        raise ModelNotFoundError(
            f"Model {name!r} is not in the cache and load.offline is set; run `vllmx fetch {name}` "
            "where there is a network."
        )
    found = fetch(config.source, load.download_dir, load.use_tqdm_on_load, name=name)
    return _model_of(found, config.source)


def _model_of(file: Path, source: ModelSource) -> Path:
    """What is loaded of a fetched file: itself, or the folder where more lies beside it."""
    return file.parent if source.beside else file


def _not_there(model: str) -> str:
    names = model_files()
    if "/" in model and not model.startswith((".", "/", "~")):
        return (
            f"Model {model!r}: no such folder or file. vllmx downloads nothing from a model hub: "
            "pass a local folder with config.json and safetensors, or a GGUF file."
        )
    near = get_close_matches(model, names, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    known = f" Named models: {', '.join(names)}." if names else ""
    return f"Model {model!r}: no such folder or file, and no model of that name.{hint}{known}"


def _folder_config(folder: Path) -> HFConfig:
    path = folder / "config.json"
    if not path.is_file():
        found = sorted(folder.glob("*.gguf"))
        hint = f" It holds a GGUF file: pass {found[0]}." if found else ""
        raise CheckpointError(f"{folder} has no config.json.{hint}")
    return HFConfig(read_json(path), str(path))


def _check_load_format(vllm_config: VllmConfig, path: Path) -> None:
    wanted = vllm_config.load_config.load_format
    found = "gguf" if path.is_file() else "pt" if pt_file(path) else "safetensors"
    if wanted not in ("auto", "dummy", found):
        raise UserError(f"load.load_format={wanted}, but {path} is of format {found}.")


def _check_architecture(config: HFConfig) -> None:
    """Refuse an architecture that is not in vllmx/models, and one that brings its own code."""
    from vllmx.registry import architectures

    known = architectures()
    names = config.architectures
    if any(name in known for name in names):
        return
    if not names:
        raise CheckpointError(f"{config.origin}: 'architectures' is missing or empty.")
    near = _nearest(str(names[0]), known)
    nearest = f" Nearest by name: {', '.join(near)}." if near else ""
    code = (
        " It brings its own code (auto_map), which vllmx never runs."
        if "auto_map" in config
        else ""
    )
    raise UserError(
        f"{config.origin}: architecture {names[0]!r} is not supported.{code}{nearest} {len(known)} "
        "are: vllmx.ModelRegistry.get_supported_archs() and reports/architectures.md list them."
    )


def _nearest(name: str, known: set[str]) -> list[str]:
    """A few of the names that are most like `name`, by what stands before the `For...` that most
    have."""
    families: dict[str, list[str]] = {}
    for other in sorted(known):
        families.setdefault(other.split("For")[0], []).append(other)
    near = get_close_matches(name.split("For")[0], families, n=MOST_NAMED, cutoff=0.5)
    return [other for family in near for other in families[family]][:MOST_NAMED]


def _check_family(config: HFConfig) -> None:
    """Refuse a language model that doesn't say its family, of which what it leaves out depends."""
    text = config.text_config
    if text is not config and not text.read("model_type", str, ""):
        outer = config.read("model_type", (str, type(None)), None)
        raise CheckpointError(
            f"{text.origin}: 'model_type' is missing, and the outer one, {outer!r}, doesn't tell "
            "it: add it."
        )


def _resolve_max_model_len(config: ModelConfig) -> None:
    limit, key = longest_sequence(config.hf_text_config, config.disable_sliding_window)
    wanted = config.max_model_len
    config.max_model_len_pinned = wanted not in (None, -1)
    if wanted is None or wanted == -1:
        config.max_model_len = usual_length(config.hf_text_config, limit)
    elif wanted > limit:
        raise UserError(
            f"model.max_model_len={wanted} is longer than the {limit} tokens that the model takes "
            f"({key} in {config.hf_config.origin}); lower it to {limit} or less."
        )
    elif wanted == 0:
        raise UserError("model.max_model_len=0: must be at least 1.")


def _generation_config(config: ModelConfig, path: Path, gguf: GGUFReader | None) -> dict[str, Any]:
    """Sampling defaults of the model with model.override_generation_config on top."""
    where = config.generation_config
    values: dict[str, Any] = {}
    if where == "auto" and gguf is not None:
        values = generation_config_from_gguf(gguf)
    elif where == "auto":
        file = path / "generation_config.json"
        values = read_json(file) if file.is_file() else {}
    elif where != "vllm":
        file = Path(where).expanduser() / "generation_config.json"
        if not file.is_file():
            raise UserError(f"model.generation_config={where}: there is no {file}.")
        values = read_json(file)
    return values | config.override_generation_config

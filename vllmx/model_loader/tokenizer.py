# SPDX-License-Identifier: Apache-2.0
"""A thin wrapper of `tokenizers`: text to token ids and back, for tokenizer.json and GGUF."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from vllmx.config import VllmConfig
from vllmx.exceptions import CheckpointError, ModelNotFoundError, UserError, VLLMValidationError
from vllmx.model_loader.gguf_reader import GGUFReader
from vllmx.model_loader.resolve import is_gguf
from vllmx.models.hf_config import read_json


class Tokenizer:
    """Encodes and decodes with `backend`; ids it doesn't know decode to the empty string.

    special_tokens_map: "bos_token", "eos_token", ... -> text, as chat templates see them.
    chat_templates: name -> Jinja source; "default" is the one that `chat_template` gives.
    extra_eos_token_ids: ids besides eos_token_id that end an answer.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens_map: dict[str, str] | None = None,
        chat_templates: dict[str, str] | None = None,
        extra_eos_token_ids: Iterable[int] = (),
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.special_tokens_map = dict(special_tokens_map or {})
        self.chat_templates = dict(chat_templates or {})
        self.extra_eos_token_ids = set(extra_eos_token_ids)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        # Ids have no gaps but for added tokens, so the last one needs no walk over the vocabulary.
        self.max_token_id = max([self.vocab_size - 1, *added])
        self.all_special_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_token = self.special_tokens_map.get("bos_token", "")
        self.eos_token = self.special_tokens_map.get("eos_token", "")
        self.bos_token_id = backend.token_to_id(self.bos_token) if self.bos_token else None
        self.eos_token_id = backend.token_to_id(self.eos_token) if self.eos_token else None

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the model's chat template, or None where it has none."""
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with BOS and EOS as the model wants unless told otherwise."""
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise VLLMValidationError(
                "The text is not valid Unicode (it holds a lone surrogate).", parameter="prompt"
            ) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of `ids`; incomplete UTF-8 becomes U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        """The vocabulary's spelling of each id; "" where there is none."""
        return [self.backend.id_to_token(token) or "" for token in ids]

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Id of `token` in the vocabulary's spelling, or None."""
        return self.backend.token_to_id(token)

    def __len__(self) -> int:
        return self.vocab_size


def get_tokenizer(vllm_config: VllmConfig) -> Tokenizer | None:
    """Load the tokenizer of a resolved config; None where model.skip_tokenizer_init is set.

    model.tokenizer names a folder, a tokenizer.json or a GGUF file in place of the model's own;
    model.chat_template (a file, or Jinja source) replaces its chat template.
    """
    config = vllm_config.model_config
    if config.skip_tokenizer_init:
        return None
    path = Path(config.tokenizer or config.model).expanduser().absolute()
    if is_gguf(path):
        from vllmx.model_loader.gguf_tokenizer import tokenizer_from_gguf

        reader = config.hf_config.gguf if str(path) == config.model else None
        tokenizer = tokenizer_from_gguf(reader or GGUFReader(path))
    else:
        tokenizer = tokenizer_from_folder(path)
    if config.chat_template:
        tokenizer.chat_templates = {"default": load_chat_template(config.chat_template)}
    return tokenizer


def load_chat_template(template: str) -> str:
    """Read the Jinja file `template`; a text with braces or line ends is the source itself."""
    if any(mark in template for mark in "{}\n"):
        return template
    path = Path(template).expanduser()
    if not path.is_file():
        raise UserError(f"model.chat_template={template!r}: there is no such file.")
    return path.read_text(encoding="utf-8")


def tokenizer_from_folder(path: Path) -> Tokenizer:
    """Load tokenizer.json at `path` (the file or its folder) and the settings beside it."""
    file = path if path.is_file() else path / "tokenizer.json"
    if not file.is_file():
        raise ModelNotFoundError(
            f"{path} has no tokenizer.json; set model.tokenizer to a folder that has one (save it "
            "with transformers' fast tokenizer), or model.skip_tokenizer_init=true."
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{file} cannot be read: {error}.") from error
    folder = file.parent
    settings = _optional_json(folder / "special_tokens_map.json")
    settings |= _optional_json(folder / "tokenizer_config.json")
    special = _special_tokens(settings)
    _mark_special(backend, special.values())
    return Tokenizer(
        backend, special_tokens_map=special, chat_templates=_chat_templates(folder, settings)
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    result = {}
    for key, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and not key.startswith("add_") and isinstance(text, str):
            result[key] = text
    return result


def _mark_special(backend: tokenizers.Tokenizer, tokens: Iterable[str]) -> None:
    """Hide the named special tokens from skip_special_tokens even if only the config names them."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [t for t in tokens if t not in known and backend.token_to_id(t) is not None]
    if missing:
        backend.add_special_tokens(
            [tokenizers.AddedToken(t, special=True, normalized=False) for t in missing]
        )


def _chat_templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Templates from chat_template.jinja, additional_chat_templates/, or the JSON files."""
    template = settings.get("chat_template")
    if template is None:
        template = _optional_json(folder / "chat_template.json").get("chat_template")
    result = {}
    if isinstance(template, str):
        result["default"] = template
    elif isinstance(template, list):
        result = {entry["name"]: entry["template"] for entry in template}
    elif template is not None:
        raise CheckpointError(
            f"{folder}: chat_template is a {type(template).__name__}: {json.dumps(template)[:80]}."
        )
    if (file := folder / "chat_template.jinja").is_file():
        result["default"] = file.read_text(encoding="utf-8")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        result[file.stem] = file.read_text(encoding="utf-8")
    return result

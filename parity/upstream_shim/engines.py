# SPDX-License-Identifier: Apache-2.0
"""Engines as upstream's tests build them: a model of the hub becomes its stand-in.

The engine is vllmx's own, on a CPU; only names and arguments that ask for nothing are turned.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any, Self

import torch

import vllmx.config as config
from vllmx.cli_args import engine_flags
from vllmx.engine import arg_utils
from vllmx.entrypoints import llm
from vllmx.model_loader.resolve import resolve_model
from vllmx.model_loader.tokenizer import Tokenizer, get_tokenizer, tokenizer_from_folder

from .placeholder import MissingSymbol
from .standins import MODELS, folder_of, tagged_folder

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
# What a stand-in is built with unless the test says otherwise.
SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "kv_cache_memory_bytes": 64 << 20,
    "num_threads": 1,
    "use_tqdm_on_load": False,
}
# Arguments that vllmx does not have, with what asks for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "speculative_config": (None,),
    "kv_transfer_config": (None,),
    "kv_events_config": (None,),
    "enable_lora": (False,),
    "swap_space": (0, 4),
}


class EngineArgs(arg_utils.EngineArgs):
    """Upstream's has a model by default, and names it as the hub does."""

    def __init__(self, model: str = DEFAULT_MODEL, **kwargs: Any) -> None:
        super().__init__(model, **_turned(kwargs))

    def create_engine_config(
        self, usage_context: Any = None, headless: bool = False
    ) -> config.VllmConfig:
        """The config of the stand-in."""
        folder = folder_of(self.model)
        if folder is None:
            raise MissingSymbol(f"models.yaml:{self.model}")
        given = _turned({name: value for name, value in vars(self).items() if name != "model"})
        given = {"served_model_name": [self.model], **SETTINGS, **given}
        if os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION") == "1":
            given.setdefault("allow_insecure_serialization", True)
        return arg_utils.AsyncEngineArgs(str(folder), **given).create_engine_config()


class AsyncEngineArgs(EngineArgs, arg_utils.AsyncEngineArgs):
    """The same for AsyncLLM."""


def _turned(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those of `kwargs` that vllmx has; MissingSymbol for another that asks for something."""
    known = {**kwargs, "trust_remote_code": False}  # no code comes with a stand-in
    for name, value in kwargs.items():
        if name == "compilation_config" and isinstance(value, dict) and value.get("mode") == 0:
            known[name] = {key: v for key, v in value.items() if key != "mode"}
        if name not in engine_flags() and name not in arg_utils.AsyncEngineArgs._OWN:
            if value not in NEUTRAL.get(name, ()):
                raise MissingSymbol(f"vllm.engine.arg_utils.EngineArgs.{name}")
            del known[name]
    return known


class LLM(llm.LLM):
    """vllmx's, built from a name of the hub."""

    def __init__(self, model: str = DEFAULT_MODEL, **kwargs: Any) -> None:
        quiet = kwargs.pop("disable_log_stats", True)
        made = EngineArgs(model, **kwargs).create_engine_config()
        super().__init__(config=made, disable_log_stats=quiet)


class VllmRunner:
    """What upstream's fixture `vllm_runner` gives: an LLM for the length of a `with`."""

    def __init__(self, model_name: str, **kwargs: Any) -> None:
        self.llm = LLM(model_name, **kwargs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.llm.shutdown()


class UsageContext(enum.Enum):
    """Where an engine is used, which upstream's defaults depend on and vllmx's do not."""

    UNKNOWN_CONTEXT = LLM_CLASS = API_SERVER = OPENAI_API_SERVER = ENGINE_CONTEXT = "any"


class AutoTokenizer:
    """A tokenizer of the model hub: that of a stand-in, or one of conf/model from the cache."""

    @staticmethod
    def from_pretrained(name: str, **kwargs: Any) -> CallableTokenizer:
        """The tokenizer that models.yaml gives for `name`."""
        return CallableTokenizer(_tokenizer_for(name), name)


@cache
def _tokenizer_for(name: str) -> Tokenizer:
    if name not in MODELS["tokenizers"]:
        folder = tagged_folder(name) or folder_of(name)
        if folder is None:
            raise MissingSymbol(f"models.yaml:{name}")
        return tokenizer_from_folder(folder)
    run = arg_utils.engine_args_to_config(model=MODELS["tokenizers"][name])
    run.load.offline = True
    vllm_config = config.finalize(run)
    resolve_model(vllm_config)
    tokenizer = get_tokenizer(vllm_config)
    assert tokenizer is not None
    return tokenizer


class CallableTokenizer(Tokenizer):
    """vllmx's tokenizer, called as transformers' are."""

    def __init__(self, inner: Tokenizer, name: str) -> None:
        self.__dict__.update(vars(inner))
        self.name_or_path = name
        self.vocab = inner.backend.get_vocab()

    def __call__(self, text: str) -> SimpleNamespace:
        """Token ids under `input_ids`."""
        return SimpleNamespace(input_ids=self.encode(text))

    def add_tokens(self, tokens: list[str]) -> None:
        """More tokens, in a copy that is this test's own."""
        self.backend = type(self.backend).from_str(self.backend.to_str())
        self.backend.add_tokens(tokens)
        self.vocab = self.backend.get_vocab()

    def get_vocab(self) -> dict[str, int]:
        """Token ids by the vocabulary's spelling."""
        return self.vocab

    def tokenize(self, text: str) -> list[str]:
        """The text's tokens, by the vocabulary's spelling."""
        return self.backend.encode(text, add_special_tokens=False).tokens

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of tokens."""
        return self.decode(self.convert_tokens_to_ids(tokens))

    def convert_tokens_to_ids(self, tokens: list[str] | str) -> Any:
        """The id of each token."""
        if isinstance(tokens, str):
            return self.vocab.get(tokens)
        return [self.vocab[token] for token in tokens]

    def convert_ids_to_tokens(self, token_ids: list[int]) -> list[str]:
        """The vocabulary's spelling of each id."""
        return [self.backend.id_to_token(token_id) for token_id in token_ids]


def named_tokenizer(tokenizer_name: str, **kwargs: Any) -> CallableTokenizer:
    """The same by another name."""
    return AutoTokenizer.from_pretrained(tokenizer_name)


class ChatRequest(SimpleNamespace):
    """A chat of which a test asks for little more than its template's arguments."""

    chat_template_kwargs: dict[str, Any] | None = None


@contextlib.contextmanager
def set_default_torch_num_threads(num_threads: int) -> Iterator[None]:
    """Torch with `num_threads` threads inside the `with`."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)

# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/reasoning/__init__.py, abs_reasoning_parsers.py @ v0.25.0
"""Reasoning parsers: where a model's reasoning ends and its answer begins."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vllmx.exceptions import UserError

if TYPE_CHECKING:
    from vllmx.config import StructuredOutputsConfig
    from vllmx.model_loader.tokenizer import Tokenizer


@dataclass
class DeltaMessage:
    """What is new in a streamed answer: a part of its reasoning, of its content, or both."""

    reasoning: str | None = None
    content: str | None = None


class ReasoningParser:
    """Base of the parsers; one is made for each answer.

    A parser of one's own has to say `is_reasoning_end` and `extract_content_ids`, and for chats
    the two methods that take a text apart.
    """

    keeps_special_tokens = False
    """Whether its markers are special tokens, which answers then have to show to it."""

    def __init__(self, tokenizer: Tokenizer, *args: Any, **kwargs: Any) -> None:
        """`kwargs`: what the request's chat template was given, as `chat_template_kwargs`."""
        self.model_tokenizer = tokenizer

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Token ids by the vocabulary's spelling; takes a tenth of a second to make where there
        are 150,000 tokens, so `token_id` is what a parser asks for a few."""
        return self.model_tokenizer.backend.get_vocab()

    def token_id(self, token: str) -> int | None:
        """Id of one token by the vocabulary's spelling; None if there is none."""
        return self.model_tokenizer.backend.token_to_id(token)

    @property
    def reasoning_start_str(self) -> str | None:
        """Text that begins the reasoning, if there is one."""
        return None

    @property
    def reasoning_end_str(self) -> str | None:
        """Text that ends it."""
        return None

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether a text of these tokens is past its reasoning."""
        raise NotImplementedError(f"{type(self).__name__} has no is_reasoning_end")

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Iterable[int]
    ) -> bool:
        """Whether the reasoning ended in `delta_ids`, the last of `input_ids`."""
        return self.is_reasoning_end(input_ids)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """Those tokens of a model's output that come after its reasoning."""
        raise NotImplementedError(f"{type(self).__name__} has no extract_content_ids")

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """Tokens of a model's output that are reasoning; 0 where the parser does not know."""
        return 0

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """(reasoning, content) of a whole answer to `request`, None where there is no such part."""
        raise NotImplementedError(f"{type(self).__name__} has no extract_reasoning")

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """The same of the text that has come last; None where it is to be kept to itself.

        An answer's deltas are given one after the other, previous + delta = current.
        """
        raise NotImplementedError(f"{type(self).__name__} has no extract_reasoning_streaming")

    def finish(self) -> DeltaMessage | None:
        """What was kept to itself until the end of a stream; None if that is nothing."""
        return None

    @classmethod
    def takes_texts_apart(cls) -> bool:
        """Whether it has the two methods that chats need, and not only finds the end."""
        return cls.extract_reasoning is not ReasoningParser.extract_reasoning


class ReasoningParserManager:
    """Reasoning parsers by the name that --reasoning-parser takes."""

    reasoning_parsers: ClassVar[dict[str, type[ReasoningParser]]] = {}
    lazy_parsers: ClassVar[dict[str, tuple[str, str]]] = {
        name: (f"vllmx.reasoning.{module}", f"{class_name}ReasoningParser")
        for name, module, class_name in (
            ("deepseek_r1", "basic_parsers", "DeepSeekR1"),
            ("qwen3", "basic_parsers", "Qwen3"),
            ("mimo", "basic_parsers", "Qwen3"),
            ("seed_oss", "basic_parsers", "SeedOss"),
            ("glm45", "basic_parsers", "Glm45"),
            ("glm47", "basic_parsers", "Glm45"),
            ("kimi_k2", "basic_parsers", "KimiK2"),
            ("minimax_m2", "basic_parsers", "MiniMaxM2"),
            ("nemotron_v3", "basic_parsers", "NemotronV3"),
            ("step3", "step3", "Step3"),
            ("identity", "identity", "Identity"),
            ("minimax_m2_append_think", "identity", "MiniMaxM2AppendThink"),
            ("deepseek_v3", "deepseek_v3", "DeepSeekV3"),
            ("holo2", "deepseek_v3", "DeepSeekV3WithThinking"),
            ("hy_v3", "hunyuan", "HYV3"),
            ("hunyuan_a13b", "hunyuan", "HunyuanA13B"),
            ("ernie45", "ernie45", "Ernie45"),
            ("granite", "granite", "Granite"),
            ("olmo3", "olmo3", "Olmo3"),
            ("mistral", "mistral", "Mistral"),
            ("openai_gptoss", "gptoss", "GptOss"),
        )
    }

    @classmethod
    def get_reasoning_parser(cls, name: str) -> type[ReasoningParser]:
        """The class called `name`; KeyError with the names that there are."""
        if name not in cls.reasoning_parsers and name in cls.lazy_parsers:
            module, class_name = cls.lazy_parsers[name]
            cls.reasoning_parsers[name] = getattr(importlib.import_module(module), class_name)
        if name not in cls.reasoning_parsers:
            registered = ", ".join(cls.list_registered())
            raise KeyError(f"Reasoning parser '{name}' not found. Available parsers: {registered}")
        return cls.reasoning_parsers[name]

    @classmethod
    def list_registered(cls) -> list[str]:
        """All names, sorted."""
        return sorted({*cls.reasoning_parsers, *cls.lazy_parsers})

    @classmethod
    def register_lazy_module(cls, name: str, module_path: str, class_name: str) -> None:
        """Import `class_name` of `module_path` when parser `name` is asked for."""
        cls.lazy_parsers[name] = (module_path, class_name)

    @classmethod
    def register_module(
        cls,
        name: str | list[str] | None = None,
        force: bool = True,
        module: type[ReasoningParser] | None = None,
    ) -> Any:
        """Register a class under one or several names (default: its own); without `module`, a
        decorator that does."""

        def register(parser: type[ReasoningParser]) -> type[ReasoningParser]:
            if not (isinstance(parser, type) and issubclass(parser, ReasoningParser)):
                raise TypeError(f"module must be subclass of ReasoningParser, but got {parser}")
            names = [name or parser.__name__] if not isinstance(name, list) else name
            for each in names:
                if not force and each in cls.reasoning_parsers:
                    raise KeyError(f"{each} is already registered")
                cls.reasoning_parsers[each] = parser
            return parser

        decorator: Callable[[type[ReasoningParser]], type[ReasoningParser]] = register
        return decorator if module is None else register(module)

    @classmethod
    def import_reasoning_parser(cls, plugin_path: str) -> None:
        """Run the Python file at `plugin_path`, which registers its parsers."""
        path = Path(plugin_path).expanduser()
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise UserError(f"--reasoning-parser-plugin: {plugin_path} is no Python file.")
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def get_reasoning_parser_cls(config: StructuredOutputsConfig) -> type[ReasoningParser]:
    """The class that `config` names; UserError if there is none."""
    if config.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(config.reasoning_parser_plugin)
    try:
        return ReasoningParserManager.get_reasoning_parser(config.reasoning_parser)
    except KeyError as error:
        raise UserError(f"--reasoning-parser: {error.args[0]}.") from None

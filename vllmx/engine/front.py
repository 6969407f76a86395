# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/engine/llm_engine.py, vllm/v1/engine/async_llm.py @ v0.25.0
"""What the synchronous and the asynchronous front end have in common."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import TYPE_CHECKING

from vllmx.config import ReasoningConfig
from vllmx.engine import EngineCoreRequest
from vllmx.engine.input_processor import InputProcessor
from vllmx.engine.output_processor import OutputProcessor
from vllmx.engine.parallel_sampling import ParentRequest
from vllmx.exceptions import UserError
from vllmx.model_loader.resolve import resolve_model
from vllmx.model_loader.tokenizer import Tokenizer, get_tokenizer
from vllmx.reasoning import get_reasoning_parser_cls

if TYPE_CHECKING:
    from vllmx.config import VllmConfig
    from vllmx.metrics.loggers import StatLoggerFactory, StatLoggerManager


class EngineFront:
    """Both ends around an engine core: requests are checked going in, outputs made coming out."""

    def __init__(self, vllm_config: VllmConfig, log_stats: bool) -> None:
        """Find the model and load its tokenizer; the engine core is the subclass's affair."""
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.log_stats = log_stats
        tokenizer = load_tokenizer(vllm_config)
        if tokenizer is not None:
            set_reasoning_markers(vllm_config, tokenizer)
        self.input_processor = InputProcessor(vllm_config, tokenizer)
        self.output_processor = OutputProcessor(
            tokenizer,
            log_stats=log_stats,
            stream_interval=vllm_config.scheduler_config.stream_interval,
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None with skip_tokenizer_init."""
        return self.input_processor.tokenizer


def has_reasoning_markers(vllm_config: VllmConfig) -> bool:
    """Whether the config names markers of reasoning, or a parser that may."""
    structured = vllm_config.structured_outputs_config
    return vllm_config.reasoning_config is not None or bool(
        structured is not None and structured.reasoning_parser
    )


def set_reasoning_markers(vllm_config: VllmConfig, tokenizer: Tokenizer) -> None:
    """Make the markers of reasoning tokens: those of the config, else the reasoning parser's."""
    reasoning, structured = vllm_config.reasoning_config, vllm_config.structured_outputs_config
    if reasoning is None and structured is not None and structured.reasoning_parser:
        try:
            parser = get_reasoning_parser_cls(structured)(tokenizer)
        except RuntimeError as error:
            name, model = structured.reasoning_parser, vllm_config.model_config.model
            raise UserError(
                f"--reasoning-parser {name} is not for {model}: {error}. Leave it out, or name the "
                "parser of this family of models."
            ) from error
        if parser.reasoning_start_str and parser.reasoning_end_str:
            reasoning = ReasoningConfig(parser.reasoning_start_str, parser.reasoning_end_str)
            vllm_config.reasoning_config = reasoning
    if reasoning is not None:
        reasoning.initialize_token_ids(
            tokenizer.encode(reasoning.reasoning_start_str, add_special_tokens=False),
            tokenizer.encode(reasoning.reasoning_end_str, add_special_tokens=False),
        )


def find_model(vllm_config: VllmConfig) -> None:
    """Find the checkpoint of `vllm_config`, if that has not been done."""
    if not hasattr(vllm_config.model_config, "hf_config"):
        resolve_model(vllm_config)


def load_tokenizer(vllm_config: VllmConfig) -> Tokenizer | None:
    """Find the checkpoint of `vllm_config` and load its tokenizer."""
    find_model(vllm_config)
    return get_tokenizer(vllm_config)


def make_logger_manager(
    vllm_config: VllmConfig, log_stats: bool, stat_loggers: list[StatLoggerFactory] | None
) -> StatLoggerManager | None:
    """The receivers of statistics; None where no statistics are kept."""
    if not log_stats:
        return None
    from vllmx.metrics.loggers import StatLoggerManager

    manager = StatLoggerManager(vllm_config, custom_stat_loggers=stat_loggers)
    manager.log_engine_initialized()
    return manager


def fan_out(
    request: EngineCoreRequest,
) -> Iterator[tuple[EngineCoreRequest, ParentRequest | None, int]]:
    """The requests that answer `request`: itself, or n children with their parent and index."""
    params = request.sampling_params
    assert params is not None
    if params.n == 1:
        yield request, None, 0
        return
    parent = ParentRequest(request)
    # All of them count as running before the first is queued, so that none ends the parent.
    children = [parent.get_child_info(index) for index in range(params.n)]
    for index, (child_id, child_params) in enumerate(children):
        child = copy(request)
        child.request_id = child_id
        child.sampling_params = child_params
        yield child, parent, index
        request.block_hashes = child.block_hashes

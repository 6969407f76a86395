# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/structured_output/__init__.py @ v0.25.0
"""The engine's grammars: compiled beside its loop, and asked for the tokens of each step."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from vllmx.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)
from vllmx.structured_output.compilation import GrammarCompiler
from vllmx.structured_output.request import get_structured_output_key

if TYPE_CHECKING:
    from vllmx.config import VllmConfig
    from vllmx.reasoning import ReasoningParser
    from vllmx.request import Request
    from vllmx.sampling_params import StructuredOutputsParams

logger = logging.getLogger(__name__)


class StructuredOutputManager:
    """Compiles the grammars of requests and fills the bitmasks of steps.

    `grammar_init` may be called from any thread, the rest belongs to the engine's loop. Nothing is
    loaded before the first request with a constraint comes, but what `prepare` makes.
    """

    def __init__(self, vllm_config: VllmConfig, tokenizer: Any | None = None) -> None:
        """`tokenizer` None: loaded when it is needed."""
        self.vllm_config = vllm_config
        config = vllm_config.structured_outputs_config
        self.enable_in_reasoning = config.enable_in_reasoning
        self.backends: dict[str, StructuredOutputBackend] = {}
        self.reasoner_cls: type[ReasoningParser] | None = None
        if config.reasoning_parser:
            from vllmx.reasoning import get_reasoning_parser_cls

            self.reasoner_cls = get_reasoning_parser_cls(config)
        if tokenizer is not None:
            self.tokenizer = tokenizer
        self._lock = Lock()
        self._grammar_bitmask: np.ndarray | None = None
        self._compiler: GrammarCompiler | None = None

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        from vllmx.model_loader.tokenizer import get_tokenizer

        return get_tokenizer(self.vllm_config)

    # ------------------------------------------------------------------ compilation

    def prepare(self) -> None:
        """Make, when the engine starts, what would stop its loop at the first request."""
        name = self.vllm_config.structured_outputs_config.backend
        if name != "lm-format-enforcer" or self.vllm_config.model_config.skip_tokenizer_init:
            return
        with self._lock:
            self.backends[name] = self._make_backend(name)
        self.backends[name].prepare()

    def grammar_init(self, request: Request) -> None:
        """Have the grammar of `request` compiled, if it has a constraint."""
        structured = request.structured_output_request
        if structured is None:
            return
        from vllmx.structured_output.validation import json_options

        params = structured.params
        compile_first = partial(self.compile, params, check=True)
        launched = self.vllm_config.parallel_config.distributed_executor_backend
        if launched == "external_launcher":  # engines that must all do the same in a step
            structured.grammar = self._create_grammar(request, compile_first())
            return
        with self._lock:
            if self._compiler is None:
                self._compiler = GrammarCompiler()
        key = (self._backend_of(params), *structured.structured_output_key, json_options(params))
        structured.grammar = self._compiler.submit(
            key, compile_first, partial(self._create_grammar, request)
        )

    def _create_grammar(
        self, request: Request, compiled: StructuredOutputGrammar | None = None
    ) -> StructuredOutputGrammar:
        """`compiled` or else another one, when the request's parser of reasoning is there."""
        structured = request.structured_output_request
        assert structured is not None
        with self._lock:
            if self.reasoner_cls is not None:
                self._get_reasoner(request)  # loads the tokenizer here, not in the loop
        return self.compile(structured.params) if compiled is None else compiled

    def compile(
        self, params: StructuredOutputsParams, check: bool = False
    ) -> StructuredOutputGrammar:
        """A grammar at its begin, by the backend that `params` name; from any thread.

        check: raise ValueError for one under which no token may be the first.
        """
        from vllmx.structured_output.validation import json_options

        name = self._backend_of(params)
        with self._lock:
            if name not in self.backends:
                self.backends[name] = self._make_backend(name)
        backend = self.backends[name]
        kind, spec = get_structured_output_key(params)
        grammar = backend.compile_grammar(kind, spec, json_options(params))
        if check:
            first = backend.allocate_token_bitmask(1)
            grammar.fill_bitmask(first, 0)
            if not first.any():
                raise ValueError(
                    f"{name}: no answer can be written: none of the model's tokens may begin one. "
                    "Give the constraint an end that can be reached."
                )
        return grammar

    def _backend_of(self, params: StructuredOutputsParams) -> str:
        return params._backend or self.vllm_config.structured_outputs_config.backend

    def _make_backend(self, name: str) -> StructuredOutputBackend:
        backend: type[StructuredOutputBackend]
        if name in ("xgrammar", "auto"):
            from vllmx.structured_output.backend_xgrammar import XgrammarBackend as backend
        elif name == "guidance":
            from vllmx.structured_output.backend_guidance import GuidanceBackend as backend
        elif name == "outlines":
            from vllmx.structured_output.backend_outlines import OutlinesBackend as backend
        elif name == "lm-format-enforcer":
            from vllmx.structured_output.backend_lm_format_enforcer import (
                LMFormatEnforcerBackend as backend,
            )
        else:
            raise ValueError(f"Unsupported structured output backend: {name}")
        return backend(
            self.vllm_config, self.tokenizer, self.vllm_config.model_config.get_vocab_size()
        )

    def clear_backend(self) -> None:
        """Let go of the libraries, when the engine ends."""
        if self._compiler is not None:
            self._compiler.close()
        for backend in self.backends.values():
            backend.destroy()

    # ------------------------------------------------------------------ bitmasks

    def grammar_bitmask(
        self,
        requests: Mapping[str, Request],
        structured_output_request_ids: Iterable[str],
        scheduled_spec_decode_tokens: Mapping[str, Sequence[int]],
    ) -> np.ndarray:
        """What may be sampled: int32 [rows, ceil(vocab / 32)], for each request a row for each of
        its drafts and one more. The array is written again in the next step."""
        req_ids = list(structured_output_request_ids)
        num_rows = len(req_ids) + sum(
            len(scheduled_spec_decode_tokens.get(req_id, ())) for req_id in req_ids
        )
        bitmask = self._rows(num_rows)
        plain: dict[type[StructuredOutputGrammar], tuple[list[Any], list[int]]] = {}
        row = 0
        for req_id in req_ids:
            request = requests[req_id]
            structured = request.structured_output_request
            assert structured is not None and structured.grammar is not None
            drafts = scheduled_spec_decode_tokens.get(req_id, ())
            if drafts:
                self._fill_with_drafts(bitmask, row, request, structured.grammar, drafts)
            elif self.should_fill_bitmask(request) and not structured.grammar.is_terminated():
                kind = type(structured.grammar)
                grammars, indices = plain.setdefault(kind, ([], []))
                grammars.append(structured.grammar)
                indices.append(row)
            else:
                bitmask[row] = -1
            row += 1 + len(drafts)
        for kind, (grammars, indices) in plain.items():
            kind.fill_bitmasks(grammars, bitmask, indices)
        return bitmask

    def _rows(self, num_rows: int) -> np.ndarray:
        known = self._grammar_bitmask
        if known is None or len(known) < num_rows:
            config = self.vllm_config
            drafts = config.num_speculative_tokens
            most = config.scheduler_config.max_num_seqs * (1 + drafts)
            backend = next(iter(self.backends.values()))
            known = self._grammar_bitmask = backend.allocate_token_bitmask(max(most, num_rows))
        return known[:num_rows]

    def _fill_with_drafts(
        self,
        bitmask: np.ndarray,
        row: int,
        request: Request,
        grammar: StructuredOutputGrammar,
        drafts: Sequence[int],
    ) -> None:
        """Fill the rows of a request whose drafts are to be verified, by going through them.

        A draft of -1 is none: nothing is known of what follows. Where reasoning ends among the
        drafts, the rest is constrained, though it was drafted without: it may be refused.
        """
        reasoner = self._get_reasoner(request)
        applies = bonus_applies = self.should_fill_bitmask(request)
        watches = reasoner is not None and not applies
        history = [*request.all_token_ids] if watches else []
        advanced = 0
        drafted_under_grammar = applies
        for token in drafts:
            self._fill_row(bitmask, row, grammar, applies)
            row += 1
            history.append(token)
            if token == -1:
                applies = False
            elif watches and not applies:
                assert reasoner is not None
                applies = reasoner.is_reasoning_end_streaming(history, [token])
            elif applies and not grammar.is_terminated():
                # A grammar that is told what it forbids may be of no use any more.
                accepted = bool(grammar.validate_tokens([token]))
                assert accepted or not drafted_under_grammar, (
                    f"{request.request_id}: draft {token} was not checked"
                )
                if accepted:
                    advanced += grammar.accept_tokens(request.request_id, [token])
        self._fill_row(bitmask, row, grammar, bonus_applies or applies)
        if advanced:
            grammar.rollback(advanced)

    @staticmethod
    def _fill_row(
        bitmask: np.ndarray, row: int, grammar: StructuredOutputGrammar, applies: bool
    ) -> None:
        if applies and not grammar.is_terminated():
            grammar.fill_bitmask(bitmask, row)
        else:
            bitmask[row] = -1

    # ------------------------------------------------------------------ reasoning

    def _get_reasoner(self, request: Request) -> Any | None:
        """The request's own parser, which may depend on arguments of its chat template."""
        structured = request.structured_output_request
        if structured is None or self.reasoner_cls is None:
            return None
        if structured.reasoner is None:
            kwargs = structured.reasoning_parser_kwargs or {}
            structured.reasoner = self.reasoner_cls(tokenizer=self.tokenizer, **kwargs)  # type: ignore[call-arg]
        return structured.reasoner

    def should_fill_bitmask(self, request: Request) -> bool:
        """Whether the grammar applies to the request's next token: not while it reasons."""
        if self.enable_in_reasoning:
            return True
        reasoner = self._get_reasoner(request)
        if reasoner is None:
            return True
        structured = request.structured_output_request
        assert structured is not None
        if structured.reasoning_ended is None:
            structured.reasoning_ended = reasoner.is_reasoning_end(request.prompt_token_ids or [])
        return structured.reasoning_ended

    def should_advance(self, request: Request) -> bool:
        """Whether the grammar is to see the tokens that were just appended to `request`."""
        if not request.use_structured_output:
            return False
        reasoner = self._get_reasoner(request)
        if reasoner is None or self.enable_in_reasoning:
            return True
        structured = request.structured_output_request
        assert structured is not None
        if structured.reasoning_ended:
            return True
        token_ids = request.all_token_ids
        start = request.num_computed_tokens - request.num_output_placeholders
        if start < 0:
            start = max(len(token_ids) + start, 0)
        if not reasoner.is_reasoning_end_streaming(token_ids, token_ids[start:]):
            return False
        structured.reasoning_ended = True
        if (
            self.vllm_config.speculative_config is None
            or structured.structured_output_key[0] != StructuredOutputOptions.STRUCTURAL_TAG
        ):
            return False
        # The step brought tokens of the structured part as well.
        structured.reasoning_end_token_index = self._find_reasoning_end_index(
            reasoner, token_ids, start
        )
        return True

    @staticmethod
    def _find_reasoning_end_index(reasoner: Any, token_ids: Sequence[int], start: int) -> int:
        """Place of the token in `token_ids[start:]` that ends the reasoning; the last one if none
        does so alone."""
        for end in range(start, len(token_ids)):
            if reasoner.is_reasoning_end_streaming(token_ids[: end + 1], [token_ids[end]]):
                return end
        return len(token_ids) - 1

    def trim_reasoning_for_advance(self, request: Request, new_token_ids: list[int]) -> list[int]:
        """Those of the tokens just appended that come after the end of the reasoning."""
        structured = request.structured_output_request
        if structured is None or structured.reasoning_end_token_index is None:
            return new_token_ids
        first = len(request.all_token_ids) - len(new_token_ids)
        return new_token_ids[max(0, structured.reasoning_end_token_index + 1 - first) :]

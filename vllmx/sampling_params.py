# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/sampling_params.py @ v0.25.0
"""What a request asks of the sampler and of the text that comes back.

Everything is checked here, before a request gets near the engine: values when a `SamplingParams`
is made, token ids against the model's vocabulary in `verify`.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import numbers
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from vllmx.exceptions import VLLMValidationError, shown

if TYPE_CHECKING:
    from vllmx.config import ModelConfig
    from vllmx.model_loader.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_SAMPLING_EPS = 1e-5
_MAX_TEMP = 1e-2
_MAX_N = 16384
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1

MAX_LOGPROB_TOKEN_IDS = 128
"""Longest `SamplingParams.logprob_token_ids`: the sampler keeps rows of this width."""


class SamplingType(IntEnum):
    """How the next token is chosen."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class RequestOutputKind(Enum):
    """What each RequestOutput of a request holds."""

    CUMULATIVE = 0
    """All the output so far."""
    DELTA = 1
    """What is new since the last one."""
    FINAL_ONLY = 2
    """All of it, once, when the request has finished."""


_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass
class StructuredOutputsParams:
    """A grammar for the output; exactly one of the constraints must be given.

    Raises VLLMValidationError for another number of them and for a value of another type.
    """

    json: str | dict[str, Any] | bool | None = None
    """JSON schema, as text or as what JSON makes of it."""
    regex: str | None = None
    """Regular expression for the whole output."""
    choice: list[str] | None = None
    """Texts to choose from."""
    grammar: str | None = None
    """Context-free grammar in EBNF or Lark."""
    json_object: bool | None = None
    """Any JSON object."""
    disable_any_whitespace: bool = False
    """Compact JSON only."""
    disable_additional_properties: bool = False
    """Only the properties that the schema names."""
    whitespace_pattern: str | None = None
    """Regular expression for the whitespace inside JSON."""
    structural_tag: str | None = None
    """Structural tag, as JSON text."""
    _backend: str | None = field(default=None, init=False)
    _backend_was_auto: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        count = sum(getattr(self, name) is not None for name in _CONSTRAINTS)
        if count != 1:
            found = "multiple are specified" if count else "none are specified"
            verb = "can only" if count else "must"
            raise VLLMValidationError(
                f"You {verb} use one kind of structured outputs constraint "
                f"but {found}: {shown(self.__dict__)}",
                parameter="structured_outputs",
            )
        self._verify_types()

    def _verify_types(self) -> None:
        if isinstance(self.choice, (tuple, set, frozenset)):
            self.choice = list(self.choice)
        for name, (kind, what) in _CONSTRAINT_TYPES.items():
            value = getattr(self, name)
            if value is None and not name.startswith("disable_"):
                continue
            texts = value if isinstance(value, list) else [value] if isinstance(value, str) else ()
            fits = isinstance(value, kind) and all(isinstance(text, str) for text in texts)
            if not fits or not all(map(_is_unicode, texts)):
                raise VLLMValidationError(
                    f"structured_outputs.{name} must be {what}, got {shown(value)} of type "
                    f"{_type_name(value)}.",
                    parameter="structured_outputs",
                )

    def all_constraints_none(self) -> bool:
        """Whether no constraint is left."""
        return all(getattr(self, name) is None for name in _CONSTRAINTS)

    def all_non_structural_tag_constraints_none(self) -> bool:
        """Whether no constraint but possibly `structural_tag` is left."""
        return all(getattr(self, name) is None for name in _CONSTRAINTS[:-1])


@dataclass
class RepetitionDetectionParams:
    """When to end a request that repeats itself: `min_count` times the same n tokens in a row.

    Raises VLLMValidationError for what is no integer of 64 bits, and out of range.
    """

    max_pattern_size: int = 0
    """Longest pattern looked for, in tokens; 0 turns the detection off."""
    min_pattern_size: int = 0
    """Shortest pattern looked for; 0 is 1."""
    min_count: int = 0
    """Repetitions that end the request, at least 2."""

    def __post_init__(self) -> None:
        for name in ("max_pattern_size", "min_pattern_size", "min_count"):
            value = getattr(self, name)
            number = _as_int64(value)
            if number is None:
                raise VLLMValidationError(
                    f"repetition_detection.{name} must be an integer that fits in 64 bits, got "
                    f"{shown(value)} of type {_type_name(value)}.",
                    parameter="repetition_detection",
                )
            setattr(self, name, number)
        if not 0 <= self.min_pattern_size <= self.max_pattern_size:
            raise VLLMValidationError(
                "max_pattern_size, min_pattern_size must be >=0, "
                "with min_pattern_size <= max_pattern_size. "
                "Set both to 0 to disable repetitive pattern detection.",
                parameter="repetition_detection",
            )
        if self.max_pattern_size > 0 and self.min_count < 2:
            raise VLLMValidationError(
                "min_count must be >= 2 to detect repetitive patterns "
                "in engine output. If you do not wish to detect repetitive "
                "patterns, set max_pattern_size to 0.",
                parameter="repetition_detection",
            )


_CONSTRAINT = "structured_outputs=StructuredOutputsParams(...), of the same fields"
_INSTEAD = {
    "guided_decoding": _CONSTRAINT,
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object"),
        _CONSTRAINT,
    ),
    "best_of": "n, and take the answer of the highest cumulative_logprob",
    "use_beam_search": "LLM.beam_search with BeamSearchParams",
    "logits_processors": "LLM(logits_processors=[...]), classes of the whole engine",
    "truncate_prompt_tokens": "LLM.generate(tokenization_kwargs={'truncate_prompt_tokens': ...})",
}
"""Arguments that older versions had -> what takes their place."""


class _NamesWhatIsMeant(type(msgspec.Struct)):  # type: ignore[misc]
    """Says of an unknown argument what takes its place, or which is near."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except TypeError:
            unknown = next((name for name in kwargs if name not in cls.__struct_fields__), None)
            if unknown is None:
                raise
        from vllmx.cli_args import did_you_mean

        cure = f".{did_you_mean(unknown, cls.__struct_fields__)}"
        cure = f": give {_INSTEAD[unknown]}." if unknown in _INSTEAD else cure
        raise TypeError(f"{cls.__name__} has no argument {unknown}{cure}")


class SamplingParams(msgspec.Struct, omit_defaults=True, dict=True, metaclass=_NamesWhatIsMeant):
    """Sampling parameters of one request; names and meaning follow OpenAI's completion API.

    Raises ValueError (VLLMValidationError where a client may need the parameter's name) for a
    value out of range, NaN included.
    """

    n: int = 1
    """Answers to generate, at most 16384; greedy sampling allows 1."""
    presence_penalty: float = 0.0
    """In [-2, 2]; above 0 favours tokens that have not been generated yet."""
    frequency_penalty: float = 0.0
    """In [-2, 2]; above 0 favours tokens that have been generated less often."""
    repetition_penalty: float = 1.0
    """Factor above 0; above 1 favours tokens that are in neither prompt nor answer."""
    temperature: float = 1.0
    """In [0, 2]; 0 is greedy, below 0.01 is raised to 0.01."""
    top_p: float = 1.0
    """In (0, 1]; keep the likeliest tokens that together reach this probability."""
    top_k: int = 0
    """Keep this many likeliest tokens; 0 (or -1) keeps all."""
    min_p: float = 0.0
    """In [0, 1]; drop tokens less likely than this share of the likeliest."""
    seed: int | None = None
    """Makes the request reproducible; -1 is no seed. Answer i of n uses seed + i."""
    stop: str | list[str] | None = None
    """Texts that end the answer; not part of it unless include_stop_str_in_output."""
    stop_token_ids: list[int] | None = None
    """Tokens that end the answer, besides the model's own end tokens."""
    ignore_eos: bool = False
    """Go on after the model's end tokens."""
    max_tokens: int | None = 16
    """Longest answer in tokens; None is whatever the context has room for."""
    min_tokens: int = 0
    """No end token and no stop string ends the answer before this many tokens."""
    logprobs: int | None = None
    """Likeliest tokens to report at each position, besides the chosen one; -1 is all."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    logprob_token_ids: list[int] | None = None
    """Report exactly these tokens, besides the chosen one, instead of the likeliest."""
    flat_logprobs: bool = False
    """Return log-probabilities as FlatLogprobs: few objects instead of a dict a position."""
    detokenize: bool = True
    """Turn the tokens into text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Keep the spaces that some decoders put between special tokens."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the stop token, at the end of the answer."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each RequestOutput holds."""
    skip_clone: bool = False
    """The caller gives this object away: `clone` may share what it holds."""

    # Not meant as input; set when the object is made or by the input processor.
    output_text_buffer_length: int = 0
    _eos_token_id: int | None = None
    _all_stop_token_ids: set[int] = msgspec.field(default_factory=set)

    structured_outputs: StructuredOutputsParams | None = None
    """Grammar for the output."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these tokens."""
    allowed_token_ids: list[int] | None = None
    """The only tokens that may be generated."""
    extra_args: dict[str, Any] | None = None
    """For plugins; nothing in vllmx reads it."""
    routed_experts_prompt_start: int = 0
    """First prompt token whose routing is returned, where routing is returned at all."""
    bad_words: list[str] | None = None
    """Words that must not be generated: the last token of each is banned where the ones before
    it were just generated."""
    _bad_words_token_ids: list[list[int]] | None = None
    skip_reading_prefix_cache: bool | None = None
    """Compute every prompt token; None: only where prompt_logprobs needs it."""
    thinking_token_budget: int | None = None
    """Most tokens of reasoning; -1 is no limit."""
    repetition_detection: RepetitionDetectionParams | None = None
    """End an answer that repeats itself."""

    @staticmethod
    def from_optional(
        n: int | None = 1,
        presence_penalty: float | None = 0.0,
        frequency_penalty: float | None = 0.0,
        repetition_penalty: float | None = 1.0,
        temperature: float | None = 1.0,
        top_p: float | None = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | list[str] | None = None,
        stop_token_ids: list[int] | None = None,
        bad_words: list[str] | None = None,
        thinking_token_budget: int | None = None,
        include_stop_str_in_output: bool = False,
        ignore_eos: bool = False,
        max_tokens: int | None = 16,
        min_tokens: int = 0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        detokenize: bool = True,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
        structured_outputs: StructuredOutputsParams | None = None,
        logit_bias: dict[int, float] | dict[str, float] | None = None,
        allowed_token_ids: list[int] | None = None,
        extra_args: dict[str, Any] | None = None,
        skip_clone: bool = False,
        repetition_detection: RepetitionDetectionParams | None = None,
    ) -> SamplingParams:
        """Build from values that may be None, as a JSON body has them.

        Keys of `logit_bias` may be numerals; its values are clamped to [-100, 100].
        """
        return SamplingParams(
            n=_default(n, 1),
            presence_penalty=_default(presence_penalty, 0.0),
            frequency_penalty=_default(frequency_penalty, 0.0),
            repetition_penalty=_default(repetition_penalty, 1.0),
            temperature=_default(temperature, 1.0),
            top_p=_default(top_p, 1.0),
            top_k=_default(top_k, 0),
            min_p=_default(min_p, 0.0),
            seed=seed,
            stop=stop,
            stop_token_ids=stop_token_ids,
            bad_words=bad_words,
            thinking_token_budget=thinking_token_budget,
            include_stop_str_in_output=include_stop_str_in_output,
            ignore_eos=ignore_eos,
            max_tokens=max_tokens,
            min_tokens=_default(min_tokens, 0),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            detokenize=detokenize,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
            output_kind=output_kind,
            structured_outputs=structured_outputs,
            logit_bias=None if logit_bias is None else _parse_logit_bias(logit_bias),
            allowed_token_ids=allowed_token_ids,
            extra_args=extra_args,
            skip_clone=skip_clone,
            repetition_detection=repetition_detection,
        )

    def __post_init__(self) -> None:
        self._verify_types()
        if self.seed is not None:
            self._require_int("seed")
            self.seed = None if self.seed == -1 else self.seed
        self.stop = [self.stop] if isinstance(self.stop, str) else list(_default(self.stop, ()))
        self.stop_token_ids = list(_default(self.stop_token_ids, ()))
        self.bad_words = list(_default(self.bad_words, ()))

        self._verify_args()

        if 0 < self.temperature < _MAX_TEMP:
            logger.warning(
                "temperature=%s would make logits overflow; %s is used instead",
                self.temperature,
                _MAX_TEMP,
            )
            self.temperature = _MAX_TEMP
        if self.temperature < _SAMPLING_EPS:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
            self._verify_greedy_sampling()
        # So much text might still turn out to be the start of a stop string.
        if self.stop and not self.include_stop_str_in_output:
            self.output_text_buffer_length = max(map(len, self.stop)) - 1
        self._all_stop_token_ids.update(self.stop_token_ids)
        if self.skip_reading_prefix_cache is None:
            # Cached prompt tokens are not computed, so they would have no log-probabilities.
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None

    def _verify_types(self) -> None:
        """What the other checks rely on. Numbers and lists of other libraries pass."""
        for name in _NUMBERS:
            value = getattr(self, name)
            if not isinstance(value, numbers.Real):
                self._require(False, name, f"must be a number, not {_type_name(value)}")
        for name in _LISTS:
            value = getattr(self, name)
            fits = value is None or _is_list(value) or (name == "stop" and isinstance(value, str))
            self._require(fits, name, f"must be a list, not {_type_name(value)}")
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if value is not None or name == "output_kind":
                fits = isinstance(value, kind)
                problem = f"must be of type {kind.__name__}, not {_type_name(value)}"
                self._require(fits, name, problem)
        for name in _FLAGS:
            value = getattr(self, name)
            problem = f"must be true or false, not {_type_name(value)}"
            self._require(_has_truth(value), name, problem)
            if value is not None or name != "skip_reading_prefix_cache":
                setattr(self, name, bool(value))
        self._verify_extra_args()

    def _verify_extra_args(self) -> None:
        """What JSON may hold must reach the engine's process; objects are a plugin's affair."""
        if self.extra_args is None:
            return
        self.extra_args = dict(self.extra_args)
        try:
            sent = msgspec.msgpack.encode(self.extra_args, enc_hook=lambda _: None)
            msgspec.msgpack.decode(sent, type=dict[str, Any])
        except (ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            raise VLLMValidationError(
                f"extra_args (`vllm_xargs` over HTTP) cannot be sent to the engine: {error}. They "
                "map names to values of JSON, integers within 64 bits.",
                parameter="extra_args",
            ) from None

    def _verify_args(self) -> None:
        self._verify_numbers()
        self._verify_lengths()
        self._verify_lists()

    def _verify_numbers(self) -> None:
        if not isinstance(self.n, int):
            raise VLLMValidationError(
                f"n must be an int, but is of type {type(self.n)}", parameter="n", value=self.n
            )
        # A comparison that must hold, never one that must not: NaN fails every comparison.
        self._require(self.n >= 1, "n", "must be at least 1")
        if self.n > _MAX_N:
            raise VLLMValidationError(
                f"n must be at most {_MAX_N}, got {shown(self.n)}. Send several requests for more.",
                parameter="n",
                value=self.n,
            )
        self.n = int(self.n)
        for name in ("presence_penalty", "frequency_penalty"):
            self._require(-2.0 <= getattr(self, name) <= 2.0, name, "must be in [-2, 2]")
        for name in ("repetition_penalty", "temperature"):
            self._require(_is_finite(getattr(self, name)), name, "must be a finite number")
        self._require(
            self.repetition_penalty > 0.0, "repetition_penalty", "must be greater than zero"
        )
        self._require(self.temperature >= 0.0, "temperature", "must be non-negative")
        self._require(self.temperature <= 2.0, "temperature", "must be in [0, 2]")
        self._require(0.0 < self.top_p <= 1.0, "top_p", "must be in (0, 1]")
        if not isinstance(self.top_k, int):
            raise TypeError(f"top_k must be an integer, got {type(self.top_k).__name__}")
        self._require(self.top_k >= -1, "top_k", "must be 0 (disable), or at least 1")
        self._require_int("top_k")
        self._require(0.0 <= self.min_p <= 1.0, "min_p", "must be in [0, 1]")
        for name in _NUMBERS:
            setattr(self, name, float(getattr(self, name)))
        if self.seed is not None:
            self._require(
                _INT64_MIN <= self.seed <= _INT64_MAX - (self.n - 1), "seed", "must fit in 64 bits"
            )
        self.thinking_token_budget = validate_thinking_token_budget(self.thinking_token_budget)

    def _verify_lengths(self) -> None:
        if self.max_tokens is not None:
            self._require_int("max_tokens")
            self._require(self.max_tokens >= 1, "max_tokens", "must be at least 1")
        self._require_int("min_tokens")
        self._require(self.min_tokens >= 0, "min_tokens", "must be greater than or equal to 0")
        if self.max_tokens is not None:
            self._require(
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                f"must be less than or equal to max_tokens={self.max_tokens}",
            )
        for name in ("routed_experts_prompt_start", "output_text_buffer_length"):
            self._require_int(name)
            self._require(getattr(self, name) >= 0, name, "must be greater than or equal to 0")
        if self._eos_token_id is not None:
            self._require_int("_eos_token_id")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._require_int(name)
                self._require(getattr(self, name) >= -1, name, "must be non-negative or -1")

    def _verify_lists(self) -> None:
        assert isinstance(self.stop, list) and self.bad_words is not None
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            token_ids = getattr(self, name)
            if token_ids is not None:
                self._require(_holds_ints(token_ids), name, "must contain only integers")
                setattr(self, name, list(map(int, token_ids)))
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)
            self._require(
                all(isinstance(text, str) for text in texts), name, "must contain only strings"
            )
            self._require(all(map(_is_unicode, texts)), name, "must contain only valid Unicode")
            setattr(self, name, list(map(str, texts)))
        if not all(self.stop):
            raise VLLMValidationError(
                "stop cannot contain an empty string.", parameter="stop", value=self.stop
            )
        if self.stop and not self.detokenize:
            raise VLLMValidationError(
                "stop strings are only supported when detokenize is True. "
                "Set detokenize=True to use stop.",
                parameter="stop",
                value=self.stop,
            )
        if not all(self.bad_words):
            raise VLLMValidationError(
                f"bad_words cannot contain an empty string. Got bad_words={self.bad_words}",
                parameter="bad_words",
                value=self.bad_words,
            )
        if self.logit_bias is not None:
            for token_id, bias in self.logit_bias.items():
                fits = _is_number(bias) and (bias == -math.inf or _is_finite(bias))
                if not isinstance(token_id, int) or not fits:
                    raise VLLMValidationError(
                        f"logit_bias must map token ids to numbers, got {_shown_repr(token_id)}: "
                        f"{_shown_repr(bias)}.",
                        parameter="logit_bias",
                        value=token_id,
                    )
            self.logit_bias = {int(i): float(bias) for i, bias in self.logit_bias.items()}
        banned = self._bad_words_token_ids
        fits = banned is None or (
            isinstance(banned, list)
            and all(isinstance(word, list) and word and _holds_ints(word) for word in banned)
        )
        self._require(fits, "_bad_words_token_ids", "must be a list of lists of token ids")
        fits = isinstance(self._all_stop_token_ids, set) and _holds_ints(self._all_stop_token_ids)
        self._require(fits, "_all_stop_token_ids", "must be a set of token ids")

    def _require(self, holds: bool, name: str, problem: str) -> None:
        if not holds:
            value = getattr(self, name)
            raise VLLMValidationError(
                f"{name} {problem}, got {shown(value)}.", parameter=name, value=value
            )

    def _require_int(self, name: str) -> None:
        value = getattr(self, name)
        if type(value) is not int:
            try:
                value = operator.index(value)
            except TypeError:
                raise VLLMValidationError(
                    f"{name} must be an integer, got {_shown_repr(value)}.",
                    parameter=name,
                    value=value,
                ) from None
            setattr(self, name, value)
        self._require(_INT64_MIN <= value <= _INT64_MAX, name, "must fit in 64 bits")

    def _verify_greedy_sampling(self) -> None:
        self._require(self.n == 1, "n", "must be 1 when using greedy sampling")

    def update_from_generation_config(
        self, generation_config: dict[str, Any], eos_token_id: int | None = None
    ) -> None:
        """Add the model's end tokens: `eos_token_id` of the tokenizer and those in
        `generation_config["eos_token_id"]` (an id or a list)."""
        if not self.ignore_eos:
            self._eos_token_id = eos_token_id
        eos_ids = generation_config.get("eos_token_id")
        eos_ids = {eos_ids} if isinstance(eos_ids, int) else set(eos_ids or ())
        # With ignore_eos as well: min_tokens bans whatever is in this set.
        self._all_stop_token_ids |= eos_ids
        if eos_token_id is not None:
            self._all_stop_token_ids.add(eos_token_id)
        # The tokenizer's own is checked apart from stop_token_ids: it gives no stop_reason.
        eos_ids.discard(eos_token_id)
        if eos_ids and not self.ignore_eos:
            self.stop_token_ids = sorted(eos_ids.union(self.stop_token_ids or ()))

    def update_from_tokenizer(self, tokenizer: Tokenizer, vocab_size: int | None = None) -> None:
        """Turn `bad_words` into token sequences: each word bare and after a space.

        The two are often of different length, and both must be banned. Where the spaced form
        merely ends in the bare one, banning that covers it. vocab_size: the model's, which may be
        less than the tokenizer's; VLLMValidationError for a word with a token above either.
        """
        if not self.bad_words:
            return
        self._bad_words_token_ids = banned = []
        for word in self.bad_words:
            word = word.lstrip()
            bare = tokenizer.encode(word, add_special_tokens=False)
            spaced = tokenizer.encode(" " + word, add_special_tokens=False)
            if bare:
                banned.append(bare)
            if spaced and not (bare and spaced[-len(bare) :] == bare):
                banned.append(spaced)
        max_token_id = tokenizer.max_token_id
        if vocab_size is not None:
            max_token_id = min(max_token_id, vocab_size - 1)
        invalid = [i for token_ids in banned for i in token_ids if not 0 <= i <= max_token_id]
        if invalid:
            raise VLLMValidationError(
                f"The model vocabulary size is {max_token_id + 1}, but the following tokens "
                f"were specified as bad: {invalid}. All token id values should be integers "
                f"satisfying: 0 <= token_id <= {max_token_id}.",
                parameter="bad_words",
                value=self.bad_words,
            )

    def verify_some_token_left(self, vocab_size: int) -> None:
        """Refuse rules that together could leave no token to choose.

        Called last, when end tokens and bad words are known. A bad word counts as soon as it could
        be completed, so what passes here never empties a row of logits.
        """
        allowed = None if self.allowed_token_ids is None else set(self.allowed_token_ids)
        biases = (self.logit_bias or {}).items()
        banned_by = {
            "logit_bias": {token_id for token_id, bias in biases if bias == -math.inf},
            "bad_words": {
                word[-1]
                for word in self._bad_words_token_ids or ()
                if allowed is None or allowed.issuperset(word)
            },
            "min_tokens": self._all_stop_token_ids if self.min_tokens else set(),
        }
        banned = set().union(*banned_by.values())
        num_left = vocab_size - len(banned) if allowed is None else len(allowed - banned)
        if num_left > 0:
            return
        names = [name for name, ids in banned_by.items() if ids]
        if allowed is not None:
            names.insert(0, "allowed_token_ids")
        raise VLLMValidationError(
            f"{', '.join(names)} together leave no token that may be generated (before "
            "min_tokens, end and stop tokens may not).",
            parameter=names[0],
            value=self.allowed_token_ids,
        )

    @cached_property
    def sampling_type(self) -> SamplingType:
        """Greedy, random, or random with a seed."""
        if self.temperature < _SAMPLING_EPS:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end token; None with ignore_eos."""
        return self._eos_token_id

    @property
    def all_stop_token_ids(self) -> set[int]:
        """Every token that min_tokens holds back."""
        return self._all_stop_token_ids

    @property
    def bad_words_token_ids(self) -> list[list[int]] | None:
        """Token sequences made of `bad_words` by `update_from_tokenizer`."""
        return self._bad_words_token_ids

    @property
    def num_logprobs(self) -> int | None:
        """Log-probabilities at each position besides the chosen token's; None for none at all."""
        if self.logprobs is not None:
            return self.logprobs
        return len(self.logprob_token_ids) if self.logprob_token_ids else None

    def clone(self) -> SamplingParams:
        """A copy that may be changed without changing this; shallow with `skip_clone`.

        Nothing is checked anew, as deepcopy would: that takes 50 us, and this 5.
        """
        twin = copy.copy(self)
        if self.skip_clone:
            return twin
        for name, copied in _CHANGEABLE.items():
            value = getattr(self, name)
            if value is not None:
                setattr(twin, name, copied(value))
        return twin

    def verify_own(self) -> None:
        """Check the values as they are now, which may have been set since they were checked.

        Raises as the constructor does.
        """
        self.__post_init__()

    def verify(
        self,
        model_config: ModelConfig,
        speculative_config: Any | None,
        structured_outputs_config: Any | None,
        tokenizer: Tokenizer | None,
    ) -> None:
        """Check what depends on the model: ids against its vocabulary, numbers against limits.

        Raises VLLMValidationError naming the parameter and the ids.
        """
        vocab_size = model_config.get_vocab_size()
        self._validate_logprobs(model_config.max_logprobs, vocab_size)
        self._check_in_vocab("logit_bias", self.logit_bias or (), vocab_size)
        self._check_in_vocab("stop_token_ids", self.stop_token_ids or (), vocab_size)
        # Whoever copies parameters may have set these, too.
        self._check_in_vocab("_all_stop_token_ids", self._all_stop_token_ids, vocab_size)
        banned = itertools.chain.from_iterable(self._bad_words_token_ids or ())
        self._check_in_vocab("_bad_words_token_ids", banned, vocab_size)
        self._validate_allowed_token_ids(tokenizer, vocab_size)
        if speculative_config is not None and (self.min_p > _SAMPLING_EPS or self.logit_bias):
            raise ValueError(
                "The min_p and logit_bias sampling parameters "
                "are not yet supported with speculative decoding."
            )

    def _validate_logprobs(self, max_logprobs: int, vocab_size: int) -> None:
        max_logprobs = vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)
        for name, what in (("logprobs", "sample"), ("prompt_logprobs", "prompt")):
            asked = getattr(self, name) or 0
            count = vocab_size if asked == -1 else asked
            if count > max_logprobs:
                raise VLLMValidationError(
                    f"Requested {what} logprobs of {count}{' (-1: all)' if asked == -1 else ''}, "
                    f"which is greater than max allowed: {max_logprobs} (--max-logprobs)",
                    parameter=name,
                    value=count,
                )
        if self.logprob_token_ids is None:
            return
        count = len(self.logprob_token_ids)
        if count > MAX_LOGPROB_TOKEN_IDS:
            raise VLLMValidationError(
                f"Requested logprob_token_ids of length {count}, "
                f"which is greater than max allowed: {MAX_LOGPROB_TOKEN_IDS}",
                parameter="logprob_token_ids",
                value=count,
            )
        self._check_in_vocab("logprob_token_ids", self.logprob_token_ids, vocab_size)
        if self.logprobs is not None and self.logprobs != count:
            raise VLLMValidationError(
                f"When both logprobs and logprob_token_ids are set, "
                f"logprobs must equal len(logprob_token_ids). Got "
                f"logprobs={self.logprobs}, len(logprob_token_ids)={count}.",
                parameter="logprob_token_ids",
                value=count,
            )

    def _validate_allowed_token_ids(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        if self.allowed_token_ids is None:
            return
        if not self.allowed_token_ids:
            raise VLLMValidationError(
                "allowed_token_ids is not None and empty!",
                parameter="allowed_token_ids",
                value=self.allowed_token_ids,
            )
        if tokenizer is not None:
            vocab_size = min(vocab_size, len(tokenizer))
        invalid = [i for i in self.allowed_token_ids if not 0 <= i < vocab_size]
        if invalid:
            raise VLLMValidationError(
                "allowed_token_ids contains out-of-vocab token id!",
                parameter="allowed_token_ids",
                value=invalid,
            )

    @staticmethod
    def _check_in_vocab(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
        invalid = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
        if invalid:
            raise VLLMValidationError(
                f"token_id(s) {shown(invalid)} in {name} contain out-of-vocab token ids. "
                f"Vocabulary size: {vocab_size}",
                parameter=name,
                value=invalid,
            )

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{k}={getattr(self, k)}' for k in _REPR_FIELDS)})"


class BeamSearchParams(msgspec.Struct, omit_defaults=True, dict=True):
    """Parameters of a beam search. Raises VLLMValidationError for a value out of range."""

    beam_width: int
    """Beams kept at each step, and answers returned; half the engine's max_logprobs at most."""
    max_tokens: int
    """Longest answer in tokens."""
    ignore_eos: bool = False
    """Go on after the model's end tokens."""
    temperature: float = 0.0
    """Only of the token that is sampled beside the candidates, which are the likeliest ones."""
    length_penalty: float = 1.0
    """Exponent of the length by which log-probabilities are divided."""
    include_stop_str_in_output: bool = False
    """Leave the end token among the answer's tokens (in the API)."""
    structured_outputs: StructuredOutputsParams | None = None
    """Grammar for the output (of `LLM.beam_search`)."""

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            fits = not isinstance(value, bool) and isinstance(value, int)
            self._require(fits and value >= 1, name, "must be an integer of at least 1")
            self._require(value <= _INT64_MAX, name, "must fit in 64 bits")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            self._require(_has_truth(getattr(self, name)), name, "must be true or false")
            setattr(self, name, bool(getattr(self, name)))
        for name in ("temperature", "length_penalty"):
            value = getattr(self, name)
            fits = isinstance(value, numbers.Real) and _is_finite(value)
            self._require(fits, name, "must be a finite number")
            setattr(self, name, float(value))
        self._require(0.0 <= self.temperature <= 2.0, "temperature", "must be in [0, 2]")
        asked = self.structured_outputs
        fits = asked is None or isinstance(asked, StructuredOutputsParams)
        self._require(fits, "structured_outputs", "must be of type StructuredOutputsParams")

    def _require(self, holds: bool, name: str, problem: str) -> None:
        if not holds:
            value = getattr(self, name)
            raise VLLMValidationError(
                f"{name} {problem}, got {_shown_repr(value)}.", parameter=name, value=value
            )

    def verify(self, model_config: ModelConfig, parameter: str = "beam_width") -> None:
        """Check the width against the engine's limit of log-probabilities, of which a step asks for
        two a beam. Raises VLLMValidationError; `parameter` is what the caller calls the width.
        """
        vocab_size, limit = model_config.get_vocab_size(), model_config.max_logprobs
        limit = vocab_size if limit == -1 else min(limit, vocab_size)
        wanted = 2 * self.beam_width
        if wanted <= limit:
            return
        cures = [f"ask for {parameter}={limit // 2} at most"] if limit > 1 else []
        if wanted <= vocab_size:
            cures.append(f"start the engine with max_logprobs={wanted} (--max-logprobs {wanted})")
        cure = ", or ".join(cures) or "there is no beam search with this model"
        of = "max_logprobs" if limit < vocab_size else "the size of the vocabulary"
        raise VLLMValidationError(
            f"{parameter}={self.beam_width} is too wide for this engine: a beam search looks at "
            f"two candidates a beam, {wanted} in all, and the limit is {limit} ({of}): {cure}.",
            parameter=parameter,
            value=self.beam_width,
        )


# What `_verify_types` looks at; integers have checks of their own.
_NUMBERS = (
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("temperature", "top_p", "min_p"),
)
_LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logprob_token_ids")
_CHANGEABLE: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys((*_LISTS, "logit_bias", "_all_stop_token_ids"), copy.copy),
    **dict.fromkeys(
        ("extra_args", "structured_outputs", "repetition_detection", "_bad_words_token_ids"),
        copy.deepcopy,
    ),
}
"""Fields whose values can be changed in place -> what copies all that can be changed."""
_KINDS: dict[str, type] = {
    "output_kind": RequestOutputKind,
    "structured_outputs": StructuredOutputsParams,
    "logit_bias": Mapping,
    "extra_args": Mapping,
    "repetition_detection": RepetitionDetectionParams,
}

_CONSTRAINT_TYPES: dict[str, tuple[Any, str]] = {
    "json": (
        (str, dict, bool),
        "a JSON schema, as text of valid Unicode or as what JSON makes of it",
    ),
    "regex": (str, "text of valid Unicode"),
    "choice": (list, "a list of strings of valid Unicode"),
    "grammar": (str, "text of valid Unicode"),
    "json_object": (bool, "true or false"),
    "disable_any_whitespace": (bool, "true or false"),
    "disable_additional_properties": (bool, "true or false"),
    "whitespace_pattern": (str, "text of valid Unicode"),
    "structural_tag": (str, "text of valid Unicode"),
}

_FLAGS = (
    *("ignore_eos", "flat_logprobs", "detokenize", "skip_special_tokens", "skip_clone"),
    *("spaces_between_special_tokens", "include_stop_str_in_output", "skip_reading_prefix_cache"),
)

_REPR_FIELDS = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "bad_words",
    "thinking_token_budget",
    "include_stop_str_in_output",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "structured_outputs",
    "extra_args",
)


def validate_thinking_token_budget(value: Any) -> int | None:
    """`value` if it is a non-negative int, None for None and -1; else VLLMValidationError."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < -1:
        raise VLLMValidationError(
            "`thinking_token_budget` must be a non-negative integer or -1 for unlimited.",
            parameter="thinking_token_budget",
            value=value,
        )
    if value > _INT64_MAX:
        raise VLLMValidationError(
            f"`thinking_token_budget` must fit in 64 bits, got {shown(value)}; -1 is unlimited.",
            parameter="thinking_token_budget",
            value=value,
        )
    return None if value == -1 else value


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _type_name(value: Any) -> str:
    return type(value).__name__


def _is_list(value: Any) -> bool:
    return isinstance(value, Collection) and not isinstance(value, (str, bytes, Mapping))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == value  # NaN is not


def _is_finite(value: Any) -> bool:
    """Whether a number is finite, and not beyond every float."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _as_int64(value: Any) -> int | None:
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return number if _INT64_MIN <= number <= _INT64_MAX else None


def _holds_ints(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int) for value in values)


def _has_truth(value: Any) -> bool:
    """Numbers and None have a truth of their own; texts, lists and arrays are no flags."""
    return hasattr(value, "__bool__") and getattr(value, "shape", ()) == ()


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown_repr(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:
        return shown(value)


def _parse_logit_bias(logit_bias: Any) -> Any:
    if not isinstance(logit_bias, Mapping):
        return logit_bias  # SamplingParams refuses it
    biases: dict[int, float] = {}
    bad_keys, bad_values = [], []
    for token, bias in logit_bias.items():
        try:
            token_id = int(token)
        except (ValueError, TypeError):
            bad_keys.append(token)
            continue
        if _is_number(bias):
            biases[token_id] = min(100.0, max(-100.0, bias))
        else:
            bad_values.append(token)
    if bad_keys:
        raise VLLMValidationError(
            f"logit_bias contains key(s) that cannot be converted to integer token IDs: "
            f"{bad_keys!r}",
            parameter="logit_bias",
            value=bad_keys,
        )
    if bad_values:
        raise VLLMValidationError(
            f"logit_bias of token(s) {bad_values!r} is not a number.",
            parameter="logit_bias",
            value=bad_values,
        )
    return biases

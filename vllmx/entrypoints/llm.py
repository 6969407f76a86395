# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/entrypoints/llm.py, vllm/entrypoints/offline_utils.py @ v0.25.0
"""`LLM`: a model in this process, for scripts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Literal, Self

from vllmx.config import VllmConfig, finalize
from vllmx.engine.input_processor import PromptType
from vllmx.engine.llm_engine import LLMEngine
from vllmx.exceptions import UserError, VLLMValidationError
from vllmx.outputs import RequestOutput
from vllmx.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from vllmx.entrypoints.beam_search import (
        BeamSearchInstance,
        BeamSearchOutput,
        BeamSearchSequence,
    )
    from vllmx.metrics.reader import Metric
    from vllmx.model_loader.tokenizer import Tokenizer

Message = dict[str, Any]
UseTqdm = bool | Callable[..., Any]


class LLM:
    """Generates text from prompts, many at a time.

    >>> llm = LLM("smollm2-135m")
    >>> llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text

    `model` is a name in conf/model or a path. Further keyword arguments are upstream's
    EngineArgs (dtype, max_model_len, max_num_seqs, ...), or `config` is a whole VllmConfig
    instead. Statistics are off unless disable_log_stats=False is given.
    """

    def __init__(
        self, model: str | None = None, *, config: VllmConfig | None = None, **kwargs: Any
    ) -> None:
        """Load the model. Raises UserError for a wrong value, TypeError for an unknown name."""
        disable_log_stats = kwargs.pop("disable_log_stats", True)
        if config is None:
            config = _config_from_kwargs(model, kwargs)
        elif model is not None or kwargs:
            names = ", ".join((["model"] if model is not None else []) + sorted(kwargs))
            raise UserError(f"LLM() got config and {names}: the config already says it all.")
        self.llm_engine = LLMEngine.from_vllm_config(config, disable_log_stats=disable_log_stats)
        self.model_config = config.model_config
        self.input_processor = self.llm_engine.input_processor
        self.request_counter = itertools.count()

    def shutdown(self) -> None:
        """Free the model and the KV cache; nothing can be generated afterwards.

        `with LLM(...) as llm:` does so at its end, `del llm` as well.
        """
        self.llm_engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"LLM(model={self.model_config.model!r})"

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer; ValueError with skip_tokenizer_init."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """New parameters with the defaults of the model's generation config."""
        return SamplingParams.from_optional(**self.model_config.get_diff_sampling_param())

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: Any | None = None,
        priority: list[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or several; the outputs are in the order of the prompts.

        prompts: text, a list of token ids, or a dict with "prompt" or "prompt_token_ids" (and
        "cache_salt"), or a sequence of these. sampling_params: for all, or one a prompt; None is
        the model's defaults. use_tqdm: a progress bar on stderr, or a callable that makes one.
        priority: one number a prompt, used by the priority scheduling policy; lower goes first.
        tokenization_kwargs: as in InputProcessor.process_inputs.

        Raises ValueError for a bad prompt or parameter; then none of the prompts is run.
        """
        self._add_requests(
            _as_prompts(prompts),
            sampling_params,
            priority=priority,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
        )
        return self._run_engine(use_tqdm)

    def chat(
        self,
        messages: list[Message] | Sequence[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: Any | None = None,
        chat_template: str | None = None,
        chat_template_content_format: Literal["auto", "string", "openai"] = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered with the model's chat template.

        messages: a conversation (dicts with "role" and "content") or a list of them.
        chat_template: Jinja source to use instead of the model's. The template writes the special
        tokens, so none are added. Other arguments as in `generate`; raises as `generate` does.
        """
        from vllmx.entrypoints.chat_utils import render_chat

        tokenizer = self.get_tokenizer()
        prompts = (
            render_chat(
                tokenizer,
                conversation,
                chat_template=chat_template,
                content_format=chat_template_content_format,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template_kwargs=chat_template_kwargs,
            )
            for conversation in _as_conversations(messages)
        )
        self._add_requests(
            list(prompts),
            sampling_params,
            lora_request=lora_request,
            tokenization_kwargs={"add_special_tokens": False, **(tokenization_kwargs or {})},
        )
        return self._run_engine(use_tqdm)

    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: Any | None = None,
        priority: list[int] | None = None,
        use_tqdm: UseTqdm = True,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Queue prompts without running them; returns their request ids. As `generate` otherwise.

        Adding them takes no time that a bar would show, so use_tqdm shows none.
        """
        return self._add_requests(
            _as_prompts(prompts),
            sampling_params,
            priority=priority,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
        )

    def wait_for_completion(
        self, output_type: Any | None = None, *, use_tqdm: UseTqdm = True
    ) -> list[RequestOutput]:
        """Run all that is queued; the outputs in the order in which they were queued.

        output_type: RequestOutput, a tuple with it, or None; there is no other kind.
        """
        wanted = output_type if isinstance(output_type, tuple) else (output_type,)
        if output_type is not None and RequestOutput not in wanted:
            raise TypeError(f"output_type must be RequestOutput, got {output_type!r}.")
        return self._run_engine(use_tqdm)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: Any | None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The params.beam_width likeliest answers to each prompt, likeliest first.

        Tokens and text of a sequence begin with the prompt's; there is no text without a tokenizer.
        concurrency_limit: prompts searched
        from at once, all by default. Raises ValueError for a bad prompt or parameter.
        """
        from vllmx.entrypoints.beam_search import BeamSearchInstance, BeamSearchOutput

        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params must be BeamSearchParams, got {type(params).__name__}")
        params.verify(self.model_config)
        grammar = None
        if params.structured_outputs is not None:
            from vllmx.structured_output.beams import BeamGrammar
            from vllmx.structured_output.manager import StructuredOutputManager

            manager = StructuredOutputManager(
                self.llm_engine.vllm_config, self.input_processor.tokenizer
            )
            grammar = BeamGrammar(manager, params.structured_outputs)
        instances = []
        for prompt in _as_prompts(prompts):
            request = self.input_processor.process_inputs("", prompt, SamplingParams(max_tokens=1))
            assert request.prompt_token_ids is not None and self.model_config.max_model_len
            instances.append(
                BeamSearchInstance(
                    prompt,
                    request.prompt_token_ids,
                    params,
                    frozenset(self.input_processor.end_token_ids),
                    self.model_config.max_model_len,
                    lora_request,
                    grammar,
                )
            )
        limit = concurrency_limit or max(len(instances), 1)
        for start in range(0, len(instances), limit):
            self._search(instances[start : start + limit], params, use_tqdm)
        found = [instance.best() for instance in instances]
        tokenizer = self.input_processor.tokenizer
        for sequence in itertools.chain.from_iterable(found if tokenizer else ()):
            assert tokenizer is not None
            sequence.text = tokenizer.decode(sequence.tokens)
        return [BeamSearchOutput(sequences) for sequences in found]

    def _search(
        self, instances: list[BeamSearchInstance], params: BeamSearchParams, use_tqdm: bool
    ) -> None:
        """Step the searches together to their ends; the bar counts tokens, at most so many."""
        steps: Iterable[int] = range(params.max_tokens)
        if use_tqdm:
            steps = _tqdm()(steps, desc="Beam search", unit="token")
        for _ in steps:
            asked = [each for instance in instances for each in instance.begin_step()]
            going = [instance for instance in instances if instance.beams]
            if not going:
                return
            beams = [beam for instance in going for beam in instance.beams]
            self._add_requests(
                [_continued(beam) for beam in beams],
                asked,
                lora_request=going[0].lora_request,
            )
            results = iter(self._run_engine(use_tqdm=False))
            for instance in going:
                instance.advance(list(itertools.islice(results, len(instance.beams))))

    def get_metrics(self) -> list[Metric]:
        """The engine's metrics as they stand; needs disable_log_stats=False.

        One object for each set of labels: a Counter, a Gauge or a Histogram of
        vllmx.metrics.reader.
        """
        return self.llm_engine.get_metrics()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empty the prefix cache; False if running requests still hold blocks."""
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker by name, or a function on every worker."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def _add_requests(
        self,
        prompts: Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        priority: list[int] | None = None,
        lora_request: Any | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Queue all the prompts, or none if one of them is refused; their request ids."""
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        all_params = _one_each(sampling_params, "params", len(prompts))
        priorities = _one_each(0 if priority is None else priority, "priority", len(prompts))
        added: list[str] = []
        try:
            for prompt, params, rank in zip(prompts, all_params, priorities, strict=True):
                params = copy(params)  # the caller's own stays as it is
                if isinstance(params, SamplingParams):
                    params.output_kind = RequestOutputKind.FINAL_ONLY
                added.append(
                    self.llm_engine.add_request(
                        str(next(self.request_counter)),
                        prompt,
                        params,
                        lora_request=lora_request,
                        tokenization_kwargs=tokenization_kwargs,
                        priority=rank,
                    )
                )
        except BaseException:
            self.llm_engine.abort_request(added, internal=True)
            raise
        return added

    def _run_engine(self, use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Step until every request has finished; their outputs in the order they were added."""
        engine = self.llm_engine
        progress = _Progress(use_tqdm, engine.get_num_unfinished_requests())
        outputs: list[RequestOutput] = []
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        outputs.append(output)
                        progress.update(output)
        except BaseException:
            # Interrupted: the next call must not find what this one left.
            engine.abort_all()
            raise
        finally:
            progress.close()
        return sorted(outputs, key=lambda output: int(output.request_id))


class _Progress:
    """The progress bar: answers done, and tokens a second in and out."""

    def __init__(self, use_tqdm: UseTqdm, total: int) -> None:
        self.bar: Any = None
        self.num_in = self.num_out = 0
        if not use_tqdm:
            return
        make_bar = use_tqdm if callable(use_tqdm) else _tqdm()
        self.bar = make_bar(total=total, desc="Processed prompts", dynamic_ncols=True)

    def update(self, output: RequestOutput) -> None:
        """Count a finished request."""
        if self.bar is None:
            return
        n = len(output.outputs)
        self.num_in += n * len(output.prompt_token_ids or ())
        self.num_out += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed = max(self.bar.format_dict["elapsed"], 1e-9)
        self.bar.set_postfix_str(
            f"est. speed input: {self.num_in / elapsed:.2f} toks/s, "
            f"output: {self.num_out / elapsed:.2f} toks/s",
            refresh=False,
        )
        self.bar.update(n)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self.bar is not None:
            self.bar.close()


def _continued(beam: BeamSearchSequence) -> PromptType:
    """The prompt of a beam's next step, in the prompt's own part of the prefix cache."""
    prompt: dict[str, Any] = {"prompt_token_ids": beam.tokens}
    salt = beam.orig_prompt.get("cache_salt") if isinstance(beam.orig_prompt, dict) else None
    return prompt if salt is None else {**prompt, "cache_salt": salt}


def _tqdm() -> Callable[..., Any]:
    from tqdm import tqdm  # writes to stderr

    return tqdm


def _config_from_kwargs(model: str | None, kwargs: dict[str, Any]) -> VllmConfig:
    from vllmx.engine.arg_utils import engine_args_to_config

    if model is None:
        raise TypeError("LLM() needs a model: a name in conf/model or a path, or config=.")
    return finalize(engine_args_to_config(model=model, **kwargs))


def _as_prompts(prompts: PromptType | Sequence[PromptType]) -> Sequence[PromptType]:
    """A list of prompts, also for a single one: text, a dict, or a list of ids."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise VLLMValidationError(
            f"prompts must be text, token ids, a dict, or a list of these, "
            f"got {type(prompts).__name__}.",
            parameter="prompts",
        )
    items: list[Any] = list(prompts)
    if items and not hasattr(items[0], "__len__"):
        return [items]  # token ids
    return items


def _as_conversations(
    messages: list[Message] | Sequence[list[Message]],
) -> Sequence[list[Message]]:
    """A list of conversations, also for a single one."""
    items: list[Any] = list(messages)
    return [items] if items and isinstance(items[0], dict) else items


def _one_each(value: Any, name: str, count: int) -> Sequence[Any]:
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(
            f"The lengths of prompts ({count}) and {name} ({len(value)}) must be the same."
        )
    return value

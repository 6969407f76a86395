# SPDX-License-Identifier: Apache-2.0
"""A tiny tokenizer and model folder, an engine that follows a script, a server in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import openai
import tokenizers
from fastapi import FastAPI
from tokenizers import decoders, models, pre_tokenizers

from vllmx.config import ModelConfig, RunConfig, ServerConfig, VllmConfig, finalize
from vllmx.engine.async_llm import AsyncLLM
from vllmx.engine.input_processor import InputProcessor
from vllmx.entrypoints.openai.api_server import build_app
from vllmx.entrypoints.openai.launcher import (
    Server,
    create_server_socket,
    socket_url,
    uvicorn_config,
)
from vllmx.exceptions import EngineDeadError
from vllmx.logprobs import Logprob
from vllmx.model_loader.tokenizer import Tokenizer, tokenizer_from_folder
from vllmx.models.hf_config import HFConfig
from vllmx.outputs import CompletionOutput, RequestOutput
from vllmx.sampling_params import RequestOutputKind, SamplingParams

MODEL = "tiny"
MAX_MODEL_LEN = 128
SPECIAL = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 257
HTTP = httpx.Client(timeout=20)
PATIENCE_S = 120
"""How long a server may take to start or to end: on a busy machine one has stood for 20 s."""
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'critic' %}{{ raise_exception('no critics here') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def byte_backend() -> tokenizers.Tokenizer:
    """One token a byte (in the order of ByteLevel's alphabet), then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    return backend


def write_model_folder(folder: Path, chat_template: str | None = TEMPLATE) -> Path:
    """config.json and tokenizer files of a model without weights."""
    byte_backend().save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 260,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": MAX_MODEL_LEN,
        "eos_token_id": EOS_ID,
        "bos_token_id": 256,
    }
    (folder / "config.json").write_text(json.dumps(config))
    settings: dict[str, Any] = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1]}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def ids(text: str) -> list[int]:
    """Token ids of `text` in the byte tokenizer."""
    return byte_backend().encode(text, add_special_tokens=False).ids


class EngineDouble:
    """AsyncLLM's interface over a script: the same tokens for every request, then EOS or length.

    `fail_with` is raised before the first output, `fail_after` (n, exception) after n tokens.
    `hold` keeps requests waiting until it is set.
    """

    def __init__(self, folder: Path, script: str = "Hello wörld", **model: Any) -> None:
        config = ModelConfig(model=str(folder), name=MODEL, max_model_len=MAX_MODEL_LEN, **model)
        config.hf_config = HFConfig(json.loads((folder / "config.json").read_text()))
        self.vllm_config = VllmConfig(model_config=config)
        self.tokenizer: Tokenizer | None = tokenizer_from_folder(folder)
        self.input_processor = InputProcessor(self.vllm_config, self.tokenizer)
        self.reset(script)

    def reset(self, script: str = "Hello wörld") -> None:
        """Forget what was asked and what was set."""
        self.script = ids(script)
        self.dead_error = EngineDeadError()
        self.errored = False
        self.logger_manager = None
        self.fail_with: Exception | None = None
        self.fail_after: tuple[int, Exception] | None = None
        self.finish_reason = "length"
        self.abort_at_once = False
        self.logprob = -0.5
        self.delay = 0.0
        self.seen: list[tuple[Any, SamplingParams, str]] = []
        self.aborted: list[str] = []
        self.running: set[str] = set()

    @property
    def is_running(self) -> bool:
        """Whether it is alive."""
        return not self.errored

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer."""
        return self.tokenizer

    async def check_health(self) -> None:
        """Raise when dead."""
        if self.errored:
            raise self.dead_error

    async def do_log_stats(self) -> None:
        """Nothing to log."""

    async def abort(self, request_id: Any, internal: bool = False) -> None:
        """Remember who was aborted."""
        self.aborted += [request_id] if isinstance(request_id, str) else list(request_id)

    def _position(self, token: int) -> dict[int, Logprob]:
        assert self.tokenizer is not None
        text = self.tokenizer.decode([token])
        return {token: Logprob(self.logprob, 1, text), 0: Logprob(float("-inf"), 2, "!")}

    async def generate(
        self,
        prompt: dict[str, Any],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs as AsyncLLM yields them."""
        self.seen.append((prompt, sampling_params, request_id))
        if self.fail_with is not None:
            raise self.fail_with
        self.running.add(request_id)
        try:
            async for output in self._run(prompt["prompt_token_ids"], sampling_params, request_id):
                yield output
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request_id)
            raise
        finally:
            self.running.discard(request_id)

    async def _run(
        self, prompt_ids: list[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        assert self.tokenizer is not None
        if self.abort_at_once:
            empty = CompletionOutput(0, "", [], None, [], finish_reason="abort")
            yield self._output(request_id, prompt_ids, None, [empty], True)
            return
        tokens = [self.script[i % len(self.script)] for i in range(params.max_tokens or 0)]
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(self._position(t) for t in prompt_ids[1:])]
        delta = params.output_kind == RequestOutputKind.DELTA
        outputs = []
        for start in range(len(tokens)) if delta else [0]:
            if self.fail_after is not None and start >= self.fail_after[0]:
                raise self.fail_after[1]
            await asyncio.sleep(self.delay * (1 if delta else len(tokens)))
            part = tokens[start : start + 1] if delta else tokens
            last = not delta or start == len(tokens) - 1
            for index in range(params.n):
                outputs.append(
                    CompletionOutput(
                        index=index,
                        text=self.tokenizer.decode(part),
                        token_ids=part,
                        cumulative_logprob=None,
                        logprobs=(
                            [self._position(t) for t in part]
                            if params.logprobs is not None
                            else None
                        ),
                        finish_reason=self.finish_reason if last else None,
                    )
                )
                if delta:
                    yield self._output(request_id, prompt_ids, prompt_logprobs, outputs, last)
                    outputs = []
            prompt_logprobs = None if delta else prompt_logprobs
        if outputs:
            yield self._output(request_id, prompt_ids, prompt_logprobs, outputs, True)

    @staticmethod
    def _output(
        request_id: str, prompt_ids: list[int], prompt_logprobs: Any, outputs: Any, last: bool
    ) -> RequestOutput:
        return RequestOutput(request_id, None, prompt_ids, prompt_logprobs, outputs, last)


@contextlib.contextmanager
def running_server(app: FastAPI, config: ServerConfig | None = None) -> Iterator[str]:
    """Serve `app` on a free port of 127.0.0.1 from a thread; yields the URL."""
    config = config or ServerConfig(host="127.0.0.1", port=0, uvicorn_log_level="warning")
    with create_server_socket("127.0.0.1", 0) as sock:
        ready = threading.Event()
        server = Server(uvicorn_config(app, config), ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        assert ready.wait(PATIENCE_S)
        try:
            yield socket_url(sock)
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)
            if thread.is_alive():
                faulthandler.dump_traceback(sys.__stderr__)
                raise AssertionError("the server did not end; where each thread is, is above")


def client(url: str, **kwargs: Any) -> openai.OpenAI:
    """The official client, without retries."""
    kwargs.setdefault("api_key", "none")
    return openai.OpenAI(base_url=f"{url}/v1", max_retries=0, timeout=20, **kwargs)


def post(url: str, path: str, body: Any, **kwargs: Any) -> httpx.Response:
    """POST `body`: as it is when bytes, else as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **kwargs.pop("headers", {})}
    return HTTP.post(url + path, content=content, headers=headers, **kwargs)


def get(url: str) -> httpx.Response:
    """GET `url`."""
    return HTTP.get(url)


def strict_json(text: str) -> Any:
    """Parse JSON that has no NaN and no infinities."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def events(response: httpx.Response) -> list[Any]:
    """The parsed events of an SSE body, which must end with [DONE]."""
    data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert data[-1] == "[DONE]"
    return [strict_json(item) for item in data[:-1]]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, after checking status and OpenAI's shape."""
    assert response.status_code == status, response.text
    body = strict_json(response.text)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == status
    assert body["error"]["message"]
    return body["error"]


def wait_until(condition: Any, seconds: float = 5.0) -> None:
    """Poll `condition` until it holds; AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true in time"
        time.sleep(0.02)


def engine_over(model: Path | str, worker: str, name: str | None = MODEL) -> AsyncLLM:
    """An engine whose worker is `worker` of server.workers."""
    run = RunConfig()
    run.model.model = str(model)
    run.model.name = name
    run.parallel.worker_cls = f"server.workers.{worker}"
    return AsyncLLM.from_vllm_config(finalize(run))


def served(model: Path | str, worker: str, name: str | None = MODEL) -> Iterator[str]:
    """Serve that engine; yields the URL."""
    engine = engine_over(model, worker, name)
    app = build_app(engine, engine.vllm_config, ServerConfig())
    try:
        with running_server(app) as url:
            yield url
    finally:
        engine.shutdown()

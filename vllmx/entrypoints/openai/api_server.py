# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/entrypoints/openai/api_server.py @ v0.25.0
"""The OpenAI-compatible server: routes, and `run_server`, which `vllmx serve` calls."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from vllmx.config import ServerConfig, VllmConfig
from vllmx.entrypoints.openai.errors import (
    create_error_response,
    install_exception_handlers,
    json_error,
)
from vllmx.entrypoints.openai.launcher import create_server_socket, serve_http
from vllmx.entrypoints.openai.middleware import AuthenticationMiddleware, BodyLimitMiddleware
from vllmx.entrypoints.openai.protocol import ErrorResponse
from vllmx.entrypoints.openai.protocol_chat import ChatCompletionRequest
from vllmx.entrypoints.openai.protocol_completion import CompletionRequest
from vllmx.entrypoints.openai.serving_chat import OpenAIServingChat
from vllmx.entrypoints.openai.serving_completion import OpenAIServingCompletion
from vllmx.entrypoints.openai.serving_models import OpenAIServingModels
from vllmx.entrypoints.openai.serving_tokenization import (
    DetokenizeRequest,
    ServingTokenization,
    TokenizeRequest,
)
from vllmx.entrypoints.openai.streams import (
    EventStream,
    EventStreamResponse,
    run_unless_disconnected,
)
from vllmx.exceptions import EngineDeadError
from vllmx.gc_utils import freeze_gc_heap, unfreeze_gc_heap
from vllmx.metrics.prometheus import create_registry, render_metrics

if TYPE_CHECKING:
    from vllmx.engine.async_llm import AsyncLLM

ERROR_BODIES: dict[int | str, dict[str, Any]] = {
    status.value: {"model": ErrorResponse}
    for status in (
        *(HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, HTTPStatus.NOT_FOUND),
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        *(HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE),
    )
}


@dataclass
class ServerState:
    """What the routes need; `app.state.server` holds it."""

    engine: AsyncLLM
    models: OpenAIServingModels
    completion: OpenAIServingCompletion
    chat: OpenAIServingChat
    tokenization: ServingTokenization
    log_stats_interval: float
    active_requests: set[str] = field(default_factory=set)


def _state(request: Request) -> ServerState:
    return request.app.state.server


async def _require_json(request: Request) -> None:
    media_type = request.headers.get("content-type", "").split(";", maxsplit=1)[0]
    if media_type.strip().lower() != "application/json":
        raise RequestValidationError(["Unsupported Media Type: Only 'application/json' is allowed"])


async def _answer(
    request: Request, work: Callable[[], Awaitable[BaseModel | EventStream]]
) -> Response:
    """The HTTP answer for what `work` returns or raises; dropped when the client leaves."""

    async def respond() -> Response:
        try:
            result = await work()
        except Exception as exc:
            return json_error(create_error_response(exc))
        if isinstance(result, EventStream):
            return EventStreamResponse(result)
        return JSONResponse(result.model_dump())

    return await run_unless_disconnected(request, respond)


router = APIRouter(responses=ERROR_BODIES)
posted = [Depends(_require_json)]


@router.get("/health")
async def health(raw_request: Request) -> Response:
    """200 while the engine runs, 503 once it is dead."""
    try:
        await _state(raw_request).engine.check_health()
    except EngineDeadError as exc:
        return json_error(create_error_response(exc))
    return Response(status_code=HTTPStatus.OK)


@router.get("/ping")
@router.post("/ping", include_in_schema=False)
async def ping(raw_request: Request) -> Response:
    """The same as /health."""
    return await health(raw_request)


@router.get("/version")
async def show_version() -> dict[str, str]:
    """The version of vllmx."""
    return {"version": version("vllmx")}


@router.get("/load")
async def show_load(raw_request: Request) -> dict[str, int]:
    """How many prompts are in the engine."""
    return {"server_load": len(_state(raw_request).active_requests)}


@router.get("/metrics")
async def show_metrics(raw_request: Request) -> Response:
    """The metrics as Prometheus reads them."""
    manager = _state(raw_request).engine.logger_manager
    registry = create_registry() if manager is None else manager.registry
    return Response(render_metrics(registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models")
async def show_available_models(raw_request: Request) -> Response:
    """The names under which the model is served."""
    return JSONResponse(_state(raw_request).models.show_available_models().model_dump())


@router.get("/v1/models/{model:path}")
async def show_model(model: str, raw_request: Request) -> Response:
    """One of the names."""
    return JSONResponse(_state(raw_request).models.show_model(model).model_dump())


@router.post("/v1/completions", dependencies=posted)
async def create_completion(request: CompletionRequest, raw_request: Request) -> Response:
    """Complete one or more prompts."""
    serving = _state(raw_request).completion
    return await _answer(raw_request, lambda: serving.create_completion(request, raw_request))


@router.post("/v1/chat/completions", dependencies=posted)
async def create_chat_completion(request: ChatCompletionRequest, raw_request: Request) -> Response:
    """Answer a conversation."""
    serving = _state(raw_request).chat
    return await _answer(raw_request, lambda: serving.create_chat_completion(request, raw_request))


@router.post("/tokenize", dependencies=posted)
async def tokenize(request: TokenizeRequest, raw_request: Request) -> Response:
    """Token ids of a prompt or a conversation."""
    serving = _state(raw_request).tokenization
    return await _answer(raw_request, lambda: serving.create_tokenize(request))


@router.post("/detokenize", dependencies=posted)
async def detokenize(request: DetokenizeRequest, raw_request: Request) -> Response:
    """Text of token ids."""
    serving = _state(raw_request).tokenization
    return await _answer(raw_request, lambda: serving.create_detokenize(request))


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Log the engine's statistics every now and then while the app runs."""
    freeze_gc_heap()
    state: ServerState = app.state.server

    async def log_stats() -> None:
        while True:
            await asyncio.sleep(state.log_stats_interval)
            await state.engine.do_log_stats()

    task = asyncio.create_task(log_stats())
    try:
        yield
    finally:
        task.cancel()
        unfreeze_gc_heap()


def build_app(
    engine_client: AsyncLLM, vllm_config: VllmConfig, server_config: ServerConfig
) -> FastAPI:
    """The app over a running engine."""
    active_requests: set[str] = set()
    models = OpenAIServingModels(vllm_config.model_config)
    shared = (engine_client, models, server_config, active_requests)
    app = FastAPI(title="vllmx", version=version("vllmx"), lifespan=lifespan)
    app.state.server = ServerState(
        engine=engine_client,
        models=models,
        completion=OpenAIServingCompletion(*shared),
        chat=OpenAIServingChat(*shared),
        tokenization=ServingTokenization(*shared),
        log_stats_interval=vllm_config.observability_config.log_stats_interval,
        active_requests=active_requests,
    )
    app.include_router(router)
    install_exception_handlers(app)
    app.add_middleware(BodyLimitMiddleware, limit=server_config.max_request_bytes)
    if server_config.api_key:
        app.add_middleware(AuthenticationMiddleware, api_key=server_config.api_key)
    app.add_middleware(
        CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"]
    )
    return app


class _Stopped(BaseException):
    """A signal that came before the server was up."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGINT into _Stopped, until the running server takes them over."""

    def stop(signum: int, _: object) -> None:
        raise _Stopped(0 if signum == signal.SIGTERM else 128 + signum)

    previous = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def run_server(vllm_config: VllmConfig, server_config: ServerConfig) -> int:
    """Load the model, serve it until told to stop, and return the exit code. Main thread only.

    0: SIGTERM, after running requests had `server_config.shutdown_timeout` seconds to finish.
    130, 143: SIGINT or a second SIGTERM, which end at once. 1: the engine died. Raises UserError
    for a port in use and for what is wrong with the model.
    """
    sock = create_server_socket(server_config.host, server_config.port)
    with contextlib.closing(sock), _stop_on_signals():
        try:
            engine = _build_engine(vllm_config)
            try:
                return asyncio.run(_serve(engine, vllm_config, server_config, sock))
            finally:
                engine.shutdown()
        except _Stopped as stopped:
            return stopped.exit_code


def _build_engine(vllm_config: VllmConfig) -> AsyncLLM:
    from vllmx.engine.async_llm import AsyncLLM

    log_stats = vllm_config.observability_config.log_stats
    return AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=not log_stats)


async def _serve(
    engine: AsyncLLM, vllm_config: VllmConfig, server_config: ServerConfig, sock: socket.socket
) -> int:
    app = build_app(engine, vllm_config, server_config)
    active_requests = app.state.server.active_requests
    return await serve_http(app, engine, server_config, sock, active_requests)

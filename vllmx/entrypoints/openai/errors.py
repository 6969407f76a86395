# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/entrypoints/serve/utils/{error_response,server_utils}.py @ v0.25.0
"""Every failure as an HTTP status and a body in OpenAI's shape."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import jinja2
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from vllmx.entrypoints.openai.protocol import ErrorInfo, ErrorResponse
from vllmx.exceptions import (
    EngineDeadError,
    EngineGenerateError,
    VLLMNotFoundError,
    VLLMValidationError,
)

logger = logging.getLogger(__name__)

# Steps of a pydantic location that name a branch of a type, not a field.
_TYPE_STEP = re.compile(r"[\[\](){}]|^(str|int|float|bool|bytes|list|dict|none|function-\w+)$")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+>")
_ERRORS_SHOWN = 3


class GenerationError(Exception):
    """A request that the engine gave up with finish_reason "error": HTTP 500."""

    def __init__(self, message: str = "Internal server error") -> None:
        super().__init__(message)
        self.status_code = HTTPStatus.INTERNAL_SERVER_ERROR


def error_body(
    message: str, err_type: str, status_code: HTTPStatus, param: str | None = None
) -> ErrorResponse:
    """An error body; memory addresses are taken out of the message."""
    message = _ADDRESS.sub(">", message).encode("utf-8", "replace").decode()
    return ErrorResponse(
        error=ErrorInfo(message=message, type=err_type, code=status_code.value, param=param)
    )


def create_error_response(exc: Exception) -> ErrorResponse:
    """The error body for an exception: 400 for what a user can mend, 404, 503 or 500."""
    if isinstance(exc, VLLMNotFoundError):
        return error_body(str(exc), "NotFoundError", HTTPStatus.NOT_FOUND, exc.parameter)
    if isinstance(exc, RequestValidationError):
        return _validation_error(exc.errors())
    if isinstance(exc, UnicodeError):
        message = f"The request holds text that is no valid Unicode: {exc}."
        return error_body(message, "BadRequestError", HTTPStatus.BAD_REQUEST)
    if isinstance(exc, (ValueError, TypeError, OverflowError, jinja2.TemplateError)):
        param = exc.parameter if isinstance(exc, VLLMValidationError) else None
        return error_body(str(exc), "BadRequestError", HTTPStatus.BAD_REQUEST, param)
    if isinstance(exc, EngineDeadError):
        return error_body(str(exc), "ServiceUnavailableError", HTTPStatus.SERVICE_UNAVAILABLE)
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    if isinstance(exc, GenerationError):
        return error_body(str(exc), "InternalServerError", status)
    if isinstance(exc, EngineGenerateError):
        return error_body(str(exc) or "The engine failed.", "InternalServerError", status)
    logger.error("Unexpected failure of a request", exc_info=exc)
    return error_body("Internal server error", "InternalServerError", status)


def _field_path(location: Sequence[Any]) -> str | None:
    """`messages[0].role` for ("body", "messages", 0, "role"); None for the body as a whole."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step != "body" and not _TYPE_STEP.search(step):
            path += f".{step}" if path else step
    return path or None


def _validation_error(errors: Sequence[Any]) -> ErrorResponse:
    """One line for what pydantic found; the branches of a union count as one finding."""
    found: dict[str | None, str] = {}
    param = None
    for error in errors:
        if isinstance(error, str):
            found[error] = error
            continue
        if error["type"] == "json_invalid":
            position = error["loc"][-1]
            problem = error.get("ctx", {}).get("error", "not JSON")
            found[None] = f"The body is not valid JSON: {problem} at character {position}."
            continue
        cause = error.get("ctx", {}).get("error")
        path = _field_path(error["loc"])
        if isinstance(cause, VLLMValidationError):
            path = cause.parameter
        message = str(cause) if isinstance(cause, ValueError) else error["msg"]
        if path in found and not isinstance(cause, ValueError):
            found[path] += f", or {message[0].lower()}{message[1:]}"
        else:
            at_fault = path and not isinstance(cause, ValueError)
            found[path] = f"{path}: {message}" if at_fault else message
        param = param or path
    lines = list(found.values())
    if len(lines) > _ERRORS_SHOWN:
        lines[_ERRORS_SHOWN:] = [f"and {len(lines) - _ERRORS_SHOWN} more"]
    status = HTTPStatus.BAD_REQUEST
    return error_body("; ".join(lines), status.phrase, status, param)


def json_error(error: ErrorResponse, headers: dict[str, str] | None = None) -> JSONResponse:
    """The HTTP answer for an error body."""
    return JSONResponse(error.model_dump(), status_code=error.error.code, headers=headers)


async def exception_handler(_: Request, exc: Exception) -> JSONResponse:
    """Answer for an exception that reached the app."""
    return json_error(create_error_response(exc))


async def http_exception_handler(_: Request, exc: Exception) -> JSONResponse:
    """Answer for an unknown route, a method that isn't allowed, and their like."""
    assert isinstance(exc, HTTPException)
    status = HTTPStatus(exc.status_code)
    return json_error(error_body(str(exc.detail), status.phrase, status), dict(exc.headers or {}))


def install_exception_handlers(app: FastAPI) -> None:
    """Make every failure inside `app` end in an error body."""
    app.add_exception_handler(HTTPException, http_exception_handler)
    for kind in (
        *(RequestValidationError, VLLMValidationError, VLLMNotFoundError, GenerationError),
        # pydantic raises what it cannot encode, instead of a validation error.
        *(EngineGenerateError, EngineDeadError, UnicodeError, Exception),
    ):
        app.add_exception_handler(kind, exception_handler)

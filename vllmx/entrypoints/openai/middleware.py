# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/entrypoints/serve/utils/server_utils.py @ v0.25.0
"""What every HTTP request passes on its way to a route, in plain ASGI."""

from __future__ import annotations

import hashlib
import secrets
from http import HTTPStatus

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllmx.entrypoints.openai.errors import error_body, json_error

GUARDED_PREFIXES = ("/v1", "/tokenize", "/detokenize")
"""Paths that need the API key; health, version and metrics don't."""


def _refusal(
    status: HTTPStatus, message: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    return json_error(error_body(message, status.phrase, status), headers)


class AuthenticationMiddleware:
    """Refuses requests to GUARDED_PREFIXES without the bearer token, comparing in constant time."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app = app
        self._digest = hashlib.sha256(api_key.encode()).digest()

    def _allowed(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        digest = hashlib.sha256(token.strip().encode()).digest()
        return scheme.lower() == "bearer" and secrets.compare_digest(digest, self._digest)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if (
            scope["type"] == "http"
            and scope["method"] != "OPTIONS"
            and scope["path"].startswith(GUARDED_PREFIXES)
            and not self._allowed(Headers(scope=scope))
        ):
            message = "The API key is missing or wrong: send it as `Authorization: Bearer KEY`."
            answer = _refusal(HTTPStatus.UNAUTHORIZED, message, {"WWW-Authenticate": "Bearer"})
            await answer(scope, receive, send)
            return
        await self.app(scope, receive, send)


class BodyLimitMiddleware:
    """Refuses bodies of more than `limit` bytes before they are held in memory."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit
        self._message = f"The body is longer than the {limit} bytes of server.max_request_bytes."

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 413: by its Content-Length, else once it is too long."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if int(Headers(scope=scope).get("Content-Length", 0)) > self.limit:
            answer = _refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._message)
            await answer(scope, receive, send)
            return
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.limit:
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._message)
            return message

        await self.app(scope, counted, send)

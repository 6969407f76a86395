# SPDX-License-Identifier: Apache-2.0
"""`chat` and `complete` against a running server: plain HTTP and server-sent events."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from vllmx.exceptions import UserError


class Client:
    """An OpenAI-compatible server at `url`, with or without /v1 at its end."""

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"server.url={url!r}: needs http:// or https:// in front.")
        self.base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self.headers["Authorization"] = f"Bearer {api_key}"
        self.model = model or self._first_model()

    def chat(self, messages: list[dict[str, Any]], fields: dict[str, Any]) -> Iterator[str]:
        """The answer to `messages`, piece by piece."""
        body = {"model": self.model, "messages": messages, "stream": True, **fields}
        for event in self._events("/chat/completions", body):
            for choice in event.get("choices", []):
                yield choice["delta"].get("content") or ""

    def complete(self, prompt: str, fields: dict[str, Any]) -> Iterator[str]:
        """The continuation of `prompt`, piece by piece."""
        body = {"model": self.model, "prompt": prompt, "stream": True, **fields}
        for event in self._events("/completions", body):
            for choice in event.get("choices", []):
                yield choice.get("text") or ""

    def _first_model(self) -> str:
        with self._open("/models", None) as response:
            models = json.load(response).get("data", [])
        if not models:
            raise UserError(f"{self.base}/models names no model.")
        return models[0]["id"]

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._open(path, body) as response:
            for raw in response:
                line = raw.decode("utf-8").strip()
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise UserError(f"{self.base}{path}: {_message(data)}")
                yield event

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, self.headers)
        try:
            return urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")
            raise UserError(f"{self.base}{path}: HTTP {error.code}: {_message(text)}") from None
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise UserError(f"no server answers at {self.base}: {reason}") from None


def _message(text: str) -> str:
    """The message of an OpenAI error body, or the body itself."""
    try:
        error = json.loads(text)["error"]
        return error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        return text.strip()[:500]

# SPDX-License-Identifier: Apache-2.0
"""`chat` and `complete` against a running server: plain HTTP and server-sent events."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllmx.exceptions import UserError

TIMEOUT_S = 600.0
"""Longest silence of a server; a long prompt on a slow machine takes minutes to its first token."""


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
        return self._texts("/chat/completions", body, lambda choice: choice["delta"].get("content"))

    def complete(self, prompt: str, fields: dict[str, Any]) -> Iterator[str]:
        """The continuation of `prompt`, piece by piece."""
        body = {"model": self.model, "prompt": prompt, "stream": True, **fields}
        return self._texts("/completions", body, lambda choice: choice.get("text"))

    def _first_model(self) -> str:
        with self._faults_named("/models"), self._open("/models", None) as response:
            models = json.load(response)["data"]
            if not models:
                raise UserError(f"{self.base}/models names no model.")
            return models[0]["id"]

    def _texts(
        self, path: str, body: dict[str, Any], text_of: Callable[[dict[str, Any]], str | None]
    ) -> Iterator[str]:
        """What `text_of` finds in each choice of the events that the server sends."""
        with self._faults_named(path), self._open(path, body) as response:
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
                for choice in event.get("choices", []):
                    text = text_of(choice) or ""
                    if not isinstance(text, str):
                        raise TypeError(f"{text!r} in place of a text")
                    yield text
        raise UserError(f"{self.base}{path}: the answer broke off before its end.")

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, self.headers)
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")
            raise UserError(f"{self.base}{path}: HTTP {error.code}: {_message(text)}") from None
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise UserError(f"no server answers at {self.base}: {reason}") from None

    @contextmanager
    def _faults_named(self, path: str) -> Iterator[None]:
        """UserError for a server that falls silent, hangs up, or speaks something else."""
        where = f"{self.base}{path}"
        try:
            yield
        except UserError:
            raise
        except TimeoutError:
            raise UserError(f"{where}: no answer for {TIMEOUT_S:g} s.") from None
        except (http.client.HTTPException, OSError) as error:
            reason = str(error) or type(error).__name__
            raise UserError(f"{where}: the answer broke off: {reason}.") from None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(
                f"{where}: not an answer of an OpenAI-compatible server: "
                f"{type(error).__name__}: {error}."
            ) from None


def _message(text: str) -> str:
    """The message of an OpenAI error body, or the body itself."""
    try:
        error = json.loads(text)["error"]
        return error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        return text.strip()[:500]

# SPDX-License-Identifier: Apache-2.0
"""`chat` and `complete` against a server: the requests they send and what they show."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vllmx.cli import main


class FakeServer(BaseHTTPRequestHandler):
    """Answers as an OpenAI-compatible server; keeps the requests."""

    requests: list[dict] = []
    status = 200

    def do_GET(self) -> None:
        self._reply("application/json", json.dumps({"data": [{"id": "first-model"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append({"path": self.path, "auth": self.headers["Authorization"], **body})
        if FakeServer.status != 200:
            self._reply(
                "application/json", json.dumps({"error": {"message": "bad n", "code": 400}})
            )
            return
        chat = self.path.endswith("/chat/completions")
        pieces = [{"delta": {"role": "assistant"}}] if chat else []
        pieces += [{"delta": {"content": t}} if chat else {"text": t} for t in ("Grü", "ße\n", "!")]
        events = [json.dumps({"choices": [piece]}) for piece in pieces]
        events += [json.dumps({"choices": [], "usage": {}}), "[DONE]"]
        self._reply("text/event-stream", "".join(f"data: {event}\n\n" for event in events))

    def _reply(self, kind: str, text: str) -> None:
        self.send_response(FakeServer.status if self.command == "POST" else 200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    FakeServer.requests.clear()
    FakeServer.status = 200
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_chat_sends_the_conversation_and_streams_the_answer(capsys, url: str, suffix: str) -> None:
    argv = ["chat", "--url", url + suffix, "--prompt", "hi", "--temperature", "0", "--top-k=5"]
    assert main([*argv, "--api-key", "sk-1"]) == 0
    assert capsys.readouterr().out == "Grüße\n!\n"
    (sent,) = FakeServer.requests
    assert sent["path"] == "/v1/chat/completions" and sent["auth"] == "Bearer sk-1"
    assert sent["messages"] == [{"role": "user", "content": "hi"}]
    assert (sent["model"], sent["temperature"], sent["top_k"]) == ("first-model", 0, 5)


def test_complete_names_the_model_it_was_given(capsys, url: str) -> None:
    assert main(["complete", "my/model", "--url", url, "--prompt", "a b"]) == 0
    assert capsys.readouterr().out == "Grüße\n!\n"
    (sent,) = FakeServer.requests
    assert (sent["path"], sent["model"], sent["prompt"]) == ("/v1/completions", "my/model", "a b")
    assert "temperature" not in sent


def test_error_of_the_server_and_no_server_at_all(capsys, url: str) -> None:
    FakeServer.status = 400
    assert main(["complete", "m", "--url", url, "--prompt", "a"]) == 2
    assert "HTTP 400: bad n" in capsys.readouterr().err
    assert main(["chat", "m", "--url", "http://127.0.0.1:9", "--prompt", "a"]) == 2
    assert "no server answers at http://127.0.0.1:9/v1" in capsys.readouterr().err

# SPDX-License-Identifier: Apache-2.0
"""`chat` and `complete` against a server: the requests they send and what they show."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vllmx.cli import main


class FakeServer(BaseHTTPRequestHandler):
    """Answers as an OpenAI-compatible server; keeps the requests."""

    requests: list[dict] = []
    status = 200
    raw: bytes | None = None
    """Sent as it is, after which the connection ends."""

    def do_GET(self) -> None:
        if FakeServer.raw is not None:
            self.wfile.write(FakeServer.raw)
            return
        self._reply("application/json", json.dumps({"data": [{"id": "first-model"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append({"path": self.path, "auth": self.headers["Authorization"], **body})
        if FakeServer.raw is not None:
            self.wfile.write(FakeServer.raw)
            return
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
    FakeServer.raw = None
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


OK = b"HTTP/1.0 200 OK\r\n\r\n"
PIECE = b'data: {"choices": [{"text": "a", "delta": {"content": "a"}}]}\n\n'
BROKEN = {
    "hangs up": b"",
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "half a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\ndata: {",
    "too little": b"HTTP/1.0 200 OK\r\nContent-Length: 900\r\n\r\n" + PIECE,
    "no end": OK + PIECE,
    "half an event": OK + PIECE + b'data: {"choi\n\n',
    "a list": OK + b"data: [1]\n\n",
    "odd choices": OK + b'data: {"choices": [5]}\n\n',
    "odd content": OK + b'data: {"choices": [{"text": 5, "delta": {"content": 5}}]}\n\n',
    "not UTF-8": OK + b"data: \xff\xfe\n\n",
    "a web page": OK + b"<html></html>",
    "an error in place of JSON": b"HTTP/1.0 502 Bad Gateway\r\n\r\n<html>no</html>",
}


@pytest.mark.parametrize("command", ["chat", "complete"])
@pytest.mark.parametrize("raw", BROKEN.values(), ids=BROKEN)
def test_broken_answer_is_one_line_and_exit_2(capsys, url: str, command: str, raw: bytes) -> None:
    FakeServer.raw = raw
    for model in (["m"], []):  # without a name the client asks for one first
        assert main([command, *model, "--url", url, "--prompt", "a"]) == 2
        out, err = capsys.readouterr()
        assert out in ("", "a")
        assert err.startswith("vllmx: error: ") and err.count("\n") == 1, err
        assert url in err


@pytest.mark.parametrize("model", [["m"], []])
def test_silent_server_is_given_up(capsys, monkeypatch, model: list[str]) -> None:
    monkeypatch.setattr("vllmx.tasks.http_client.TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert main(["chat", *model, "--url", url, "--prompt", "a"]) == 2
    err = capsys.readouterr().err
    assert url in err and "timed out" in err and err.count("\n") == 1


def test_server_that_falls_silent_in_an_answer_is_given_up(capsys, monkeypatch) -> None:
    monkeypatch.setattr("vllmx.tasks.http_client.TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def half_an_answer() -> None:
            connection, _ = server.accept()
            connection.sendall(OK + PIECE)
            connections.append(connection)

        connections: list[socket.socket] = []
        threading.Thread(target=half_an_answer, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert main(["complete", "m", "--url", url, "--prompt", "a"]) == 2
        connections.pop().close()
    out, err = capsys.readouterr()
    assert out == "a" and "no answer for 0.2 s" in err and err.count("\n") == 1

# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M behind the server: text, log-probabilities, batches, streams."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import pytest
from server.helpers import client, events, post, running_server, strict_json

from vllmx.compose import compose_run
from vllmx.config import ServerConfig, finalize

pytestmark = pytest.mark.slow
MODEL = "smollm2-135m"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time", "def add(a, b):"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server over the real model."""
    from vllmx.engine.async_llm import AsyncLLM
    from vllmx.entrypoints.openai.api_server import build_app

    run = compose_run([f"model={MODEL}", "model.max_model_len=512", "device.num_threads=1"])
    run.cache.num_gpu_blocks_override = 256
    run.load.use_tqdm_on_load = False
    engine = AsyncLLM.from_vllm_config(finalize(run))
    try:
        with running_server(build_app(engine, engine.vllm_config, ServerConfig())) as url:
            yield url
    finally:
        engine.shutdown()


def complete(url: str, **body: Any) -> dict[str, Any]:
    """The first choice of a greedy completion."""
    response = post(url, COMPLETIONS, {"temperature": 0, **body}, timeout=120)
    assert response.status_code == 200, response.text
    return strict_json(response.text)["choices"][0]


def test_openai_client_gets_the_expected_answers(url: str) -> None:
    api = client(url).with_options(timeout=120)
    answer = api.completions.create(model=MODEL, prompt=PROMPTS[0], max_tokens=8, temperature=0)
    assert answer.choices[0].text.startswith(" Paris.")
    fields: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 24,
        "temperature": 0,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    plain = api.chat.completions.create(**fields)
    assert "Paris" in plain.choices[0].message.content
    chunks = list(api.chat.completions.create(**fields, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == plain.choices[0].message.content


def test_batch_says_the_same_as_one_by_one(url: str) -> None:
    alone = [complete(url, prompt=prompt, max_tokens=12)["text"] for prompt in PROMPTS]
    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(
            pool.map(lambda prompt: complete(url, prompt=prompt, max_tokens=12)["text"], PROMPTS)
        )
    assert together == alone


@pytest.mark.parametrize("prompt", ["\n2. Ann owns 15", "naïve “quote” 東京 🙂 x"])
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_echoed_tokens_join_to_the_text(url: str, prompt: str, max_tokens: int) -> None:
    fields = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": max_tokens}
    choice = complete(url, **fields)
    found = choice["logprobs"]
    assert choice["text"].startswith(prompt)
    assert "".join(found["tokens"]) == choice["text"]
    offset = 0
    for token, start in zip(found["tokens"], found["text_offset"], strict=True):
        assert start == offset
        offset += len(token)
    assert found["token_logprobs"][0] is None
    assert all(value <= 0 for value in found["token_logprobs"][1:])
    # The prompt's part does not change when it is in the prefix cache.
    again = complete(url, **fields)["logprobs"]
    assert again["tokens"] == found["tokens"]
    assert again["token_logprobs"][1:] == pytest.approx(found["token_logprobs"][1:], abs=1e-4)
    body = {"temperature": 0, **fields, "stream": True}
    chunks = [chunk["choices"][0] for chunk in events(post(url, COMPLETIONS, body, timeout=120))]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    for name in ("tokens", "text_offset"):
        joined = [v for chunk in chunks if chunk["logprobs"] for v in chunk["logprobs"][name]]
        assert joined == found[name]


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [260], "logprobs": 5},
        {"bad_words": ["Paris", " Paris"], "logprobs": 20},
        {"logit_bias": {"7042": -100}, "logprobs": 5},
        {"echo": True, "logprobs": 1, "temperature": 1.0, "top_k": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("streamed", [False, True])
def test_masked_logits_still_make_strict_json(
    url: str, fields: dict[str, Any], streamed: bool
) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": 3, "temperature": 0, **fields, "stream": streamed}
    response = post(url, COMPLETIONS, body, timeout=120)
    assert response.status_code == 200, response.text
    parsed = events(response) if streamed else [strict_json(response.text)]
    assert all(item["choices"][0]["logprobs"] for item in parsed)


def test_chat_logprobs_are_neither_lost_nor_doubled_by_a_stop(url: str) -> None:
    fields: dict[str, Any] = {
        "max_tokens": 10,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "messages": [{"role": "user", "content": "Count to five."}],
    }
    plain = strict_json(post(url, CHAT, fields, timeout=120).text)["choices"][0]
    body = {**fields, "stop": ["\n\n\n\n\n"], "stream": True}
    choices = [chunk["choices"][0] for chunk in events(post(url, CHAT, body, timeout=120))]
    assert "".join(c["delta"].get("content", "") for c in choices) == plain["message"]["content"]
    tokens = [e["token"] for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
    assert tokens == [entry["token"] for entry in plain["logprobs"]["content"]]
    assert choices[-1]["finish_reason"] == plain["finish_reason"]

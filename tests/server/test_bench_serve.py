# SPDX-License-Identifier: Apache-2.0
"""`vllmx bench serve` counts what a server really sends, and says what failed."""

import json

import pytest

from vllmx.cli import main
from vllmx.tasks import bench_serve
from vllmx.tasks.bench_serve import Outcome, summary


@pytest.fixture
def small_ids(monkeypatch) -> None:
    """Prompts that the small vocabulary of the test's model has."""
    monkeypatch.setattr(bench_serve, "LOWEST_TOKEN_ID", 3)
    monkeypatch.setattr(bench_serve, "HIGHEST_TOKEN_ID", 20)


def run(url: str, tmp_path, *flags: str) -> dict:
    out = tmp_path / "out.json"
    command = ["bench", "serve", "--url", url, "--input-len", "6", "--output-len", "5"]
    assert main([*command, "--output-json", str(out), *flags]) == 0
    return json.loads(out.read_text())


def test_every_token_of_every_request_is_counted(slow_url, tmp_path, small_ids, capfd) -> None:
    got = run(slow_url, tmp_path, "--num-prompts", "6", "--num-iters-warmup", "1")
    assert got["completed"] == 6 and got["failed"] == 0
    assert got["total_input_tokens"] == 36 and got["total_output_tokens"] == 30
    # A step of this worker takes 20 ms, and all requests fit into one.
    assert 15 < got["mean_tpot_ms"] < 200
    assert got["mean_ttft_ms"] > 15
    assert got["mean_e2el_ms"] >= got["mean_ttft_ms"] + 3.9 * got["median_tpot_ms"] * 0.5
    assert "6 of 6 requests" in capfd.readouterr().err


def test_more_warm_ups_than_requests_are_as_many_as_there_are(letters_url, tmp_path, small_ids):
    got = run(letters_url, tmp_path, "--num-prompts", "1", "--num-iters-warmup", "3")
    assert got["completed"] == 1 and got["total_output_tokens"] == 5


def test_no_more_than_so_many_are_under_way_at_once(slow_url, tmp_path, small_ids) -> None:
    got = run(
        slow_url,
        tmp_path,
        *("--num-prompts", "6", "--num-iters-warmup", "0"),
        "--max-concurrency=1",
    )
    assert got["max_concurrency"] == 1
    assert got["duration"] > 6 * 5 * 0.019, "six answers of five steps, one after another"


def test_requests_arrive_at_the_rate(letters_url, tmp_path, small_ids) -> None:
    got = run(letters_url, tmp_path, "--num-prompts", "10", "--request-rate", "20")
    assert got["duration"] > 0.1, "ten arrivals at twenty a second"
    assert got["completed"] == 10


def test_refused_requests_are_failures_with_the_servers_words(letters_url, tmp_path, capfd) -> None:
    command = ["bench", "serve", "--url", letters_url, "--num-prompts", "2"]
    assert main([*command, "--input-len", "100000"]) == 2
    told = capfd.readouterr().err
    assert "no request succeeded" in told and "out of vocabulary" in told


def test_without_a_url_it_says_what_it_needs(capfd) -> None:
    assert main(["bench", "serve"]) == 2
    assert "--url" in capfd.readouterr().err


def test_figures_are_upstreams() -> None:
    """Two requests by hand: times of first tokens, of later ones, and tokens a second."""
    first = Outcome(10, 3, [0.1, 0.2, 0.4], 0.4)
    second = Outcome(10, 2, [0.3, 0.5], 0.5)
    got = summary([first, second, Outcome(10, error="refused")], 2.0)
    assert (got["completed"], got["failed"]) == (2, 1)
    assert got["output_throughput"] == 2.5 and got["total_token_throughput"] == 12.5
    assert got["mean_ttft_ms"] == pytest.approx(200)
    assert got["mean_tpot_ms"] == pytest.approx((150 + 200) / 2)
    assert got["median_itl_ms"] == pytest.approx(200)
    assert got["p99_e2el_ms"] == pytest.approx(499)

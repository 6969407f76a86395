# SPDX-License-Identifier: Apache-2.0
"""A cell of a model and a mode is red where the engine answers less than it was asked for, or
batches otherwise than the mode says, though every score that it gives is right."""

from types import SimpleNamespace

import pytest

from parity.model_replay import ModelLane
from parity.model_table import GPU_MODES, expected
from parity.model_watch import CHUNK, Seen, unlike, watched
from vllmx.core import scheduler
from vllmx.core.scheduler import Scheduler


def limited(name: str, value: int):
    """A scheduler one of whose limits is not what it was told."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = Scheduler._init_limits

        def init(self: Scheduler) -> None:
            original(self)
            setattr(self, name, value)

        patch.setattr(Scheduler, "_init_limits", init)

    return plant


def ends_early(patch: pytest.MonkeyPatch) -> None:
    """Requests that end at eight tokens."""
    original = scheduler.check_stop

    def check_stop(request, max_model_len: int) -> bool:
        request.max_tokens = min(request.max_tokens, 8)
        return original(request, max_model_len)

    patch.setattr(scheduler, "check_stop", check_stop)


FAULTS = {
    # fault -> the checks that it must fail, by mode; the other modes pass
    "requests end early": (
        ends_early,
        {"batch": {"decode.length"}, "chunked": {"decode.length"}, "prefix": {"decode.length"}},
    ),
    "one request at a time": (
        limited("max_num_running_reqs", 1),
        {
            "batch": {"prefill.mode", "decode.mode"},
            "chunked": {"decode.mode"},
            "prefix": {"decode.mode"},
        },
    ),
    "no prompt is ever cut": (
        limited("max_num_scheduled_tokens", 1 << 20),
        {"chunked": {"prefill.mode", "decode.mode"}, "prefix": {"decode.mode"}},
    ),
    "every prompt is cut": (
        limited("max_num_scheduled_tokens", 24),
        {"batch": {"prefill.mode", "decode.mode"}},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mode_that_the_engine_does_not_keep_is_red(monkeypatch, fault: str) -> None:
    plant, wanted = FAULTS[fault]
    plant(monkeypatch)
    cells = [cell for cell in expected("model.tiny-llama/", "auto") if cell.mode != "bs1"]
    for row in ModelLane().rows(cells):
        failed = {
            name
            for name, check in row["checks"].items()
            if name.endswith((".length", ".mode")) and check["measured"] > check["limit"]
        }
        assert failed == wanted.get(row["mode"], set()), (row["mode"], row.get("reason"))
        assert row["verdict"] == ("fail" if failed else "pass"), row.get("reason")


def told(new=(), cached=(), **scheduled: int):
    """A step: requests that are new (name, prompt, computed) or known (name, computed)."""
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, prompt_token_ids=[0] * prompt, num_computed_tokens=done)
            for name, prompt, done in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _ in cached], num_computed_tokens=[n for _, n in cached]
        ),
    )


def test_steps_are_counted_as_what_they_are() -> None:
    seen = Seen()
    seen.step(told(new=[("a", 20, 0), ("b", 1, 0)], a=16, b=1), False)
    assert (seen.requests, seen.tokens, seen.cut, seen.decodes) == (2, 17, {"a"}, 0)
    seen.step(told(cached=[("a", 16), ("b", 1)], a=4, b=1), False)
    assert (seen.cut, seen.decodes) == ({"a"}, 0)
    seen.step(told(new=[("c", 17, 16)], cached=[("b", 2)], c=1, b=1), True)
    assert (seen.decodes, seen.graphs) == (0, 0)  # the last piece of a prompt is no decode
    seen.step(told(cached=[("a", 20), ("b", 3)], a=1, b=1), True)
    seen.step(told(cached=[("a", 21), ("b", 4)], a=1, b=1), False)
    assert (seen.requests, seen.tokens, seen.decodes, seen.graphs) == (2, 17, 2, 1)
    assert seen.facts() == {"requests": 2, "tokens": 17, "decodes": 2, "graphs": 1, "cut": 1}


def test_a_runner_is_as_before_once_it_was_watched() -> None:
    class Manager:
        def run_fullgraph(self, desc):
            return desc

    class Runner:
        gpu_steps = SimpleNamespace(cudagraph_manager=Manager())

        def execute_model(self, step):
            if not step.scheduled_new_reqs and step.num_scheduled_tokens:
                self.gpu_steps.cudagraph_manager.run_fullgraph(step)
            return step

    runner = Runner()
    with watched(runner) as seen:
        for step in (told(new=[("a", 3, 0)], a=3), told(cached=[("a", 3)], a=1), told()):
            assert runner.execute_model(step) is step
    assert (seen.tokens, seen.decodes, seen.graphs) == (3, 1, 1)
    assert "execute_model" not in vars(runner)
    assert "run_fullgraph" not in vars(runner.gpu_steps.cudagraph_manager)


KEPT = {
    "bs1": Seen(requests=1, tokens=300),
    "batch": Seen(requests=2, tokens=400, decodes=9, graphs=9),
    "eager": Seen(requests=2, tokens=400, decodes=9),
    "straddle": Seen(requests=2, tokens=400, decodes=9, graphs=9),
    "chunked": Seen(requests=2, tokens=CHUNK, decodes=9, graphs=9, cut={"a"}),
    "prefix": Seen(requests=2, tokens=CHUNK, decodes=9, graphs=9, cut={"a"}),
}
BROKEN = {
    "bs1": [("requests", 2), ("cut", {"a"})],
    "batch": [("requests", 1), ("cut", {"a"}), ("graphs", 8), ("decodes", 0)],
    "eager": [("requests", 1), ("cut", {"a"}), ("graphs", 1), ("decodes", 0)],
    "straddle": [("requests", 1), ("cut", {"a"}), ("graphs", 0), ("decodes", 0)],
    "chunked": [("requests", 1), ("tokens", CHUNK + 1), ("graphs", 0)],
    "prefix": [("requests", 1), ("tokens", CHUNK + 1), ("graphs", 0)],
}


@pytest.mark.parametrize("mode", GPU_MODES)
def test_each_thing_that_a_mode_stands_for_is_asked_for_on_a_gpu(mode: str) -> None:
    seen, decoding = KEPT[mode], mode != "bs1"
    assert unlike(mode, "cuda", [300, 100], seen, decoding) == []
    for name, value in BROKEN[mode]:
        broken = Seen(**{**vars(seen), name: value})
        assert len(unlike(mode, "cuda", [300, 100], broken, decoding)) == 1, name


def test_prompts_that_are_longer_than_a_step_are_cut_each() -> None:
    seen = Seen(requests=2, tokens=CHUNK, cut={"a"})
    assert unlike("chunked", "cpu", [CHUNK, CHUNK + 1], seen, decoding=False) == []
    (words,) = unlike("chunked", "cpu", [CHUNK + 1, CHUNK + 1], seen, decoding=False)
    assert words == "1 prompts cut, of 2 longer than 48 tokens"

# SPDX-License-Identifier: Apache-2.0
"""The end of an engine with a real runner, and the end of a step that is interrupted."""

import gc
import subprocess
import sys
import weakref

import pytest
from checkpoints import build_engine

from vllmx import SamplingParams
from vllmx.exceptions import EngineDeadError

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [3 + (i * k) % 150 for i in range(50)]} for k in (1, 7)]


def model_of(llm):
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner.model


def tokens(llm):
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("how", ["del", "shutdown", "with"])
def test_model_is_freed_at_once(tiny, how) -> None:
    llm = build_engine(tiny[0])
    tokens(llm)
    freed = weakref.ref(model_of(llm))
    gc.disable()  # what only the collector frees stays beside the next model
    try:
        if how == "del":
            del llm
        elif how == "shutdown":
            llm.shutdown()
        else:
            with llm:
                pass
        assert freed() is None
        assert gc.get_freeze_count() == 0  # or what else the user makes is never looked at again
    finally:
        gc.enable()
    if how != "del":
        with pytest.raises(EngineDeadError, match="has been shut down"):
            tokens(llm)


@pytest.mark.parametrize("tiny", ["llama"], indirect=True)
def test_heap_is_thawed_at_the_end_of_a_script_that_shuts_nothing_down(tiny) -> None:
    """Python tears down no frozen object, and libraries that count theirs print pages of leaks."""
    code = """
import atexit, gc, sys
atexit.register(lambda: print(gc.get_freeze_count()))  # the first registered is the last to run
from vllmx import LLM
options = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 4 << 20, "device": "cpu"}
llm = LLM(model=sys.argv[1], use_tqdm_on_load=False, **options)
print(gc.get_freeze_count() > 0)
"""
    argv = [sys.executable, "-c", code, str(tiny[0])]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert result.stdout.split() == ["True", "0"], result.stderr[-2000:]


@pytest.mark.parametrize("where", ["model", "sampler", "rows"])
def test_same_prompts_after_an_interrupted_step(tiny, where, monkeypatch) -> None:
    llm = build_engine(tiny[0], max_num_seqs=2, max_num_batched_tokens=32)
    expected = tokens(llm)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner
    llm.reset_prefix_cache()

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    for calls_before in range(3):
        remaining = iter(range(calls_before))
        owner, name = {
            "model": (type(runner.model), "forward"),
            "sampler": (runner, "_sample"),
            "rows": (runner, "add_requests"),
        }[where]
        real = getattr(owner, name)

        def after_some(*args, remaining=remaining, real=real):
            return real(*args) if next(remaining, None) is not None else interrupt()

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, after_some)
            with pytest.raises(KeyboardInterrupt):
                tokens(llm)
        assert tokens(llm) == expected
        llm.reset_prefix_cache()

# SPDX-License-Identifier: Apache-2.0
"""End to end on a CPU: one engine saves what it computed, another one loads it."""

import shutil

import pytest
from checkpoints import build_engine

from vllmx.core.output import KVConnectorOutput
from vllmx.kv_transfer.example_connector import ExampleConnector, ReqMeta
from vllmx.sampling_params import SamplingParams

PROMPT = [(7 * i) % 190 + 3 for i in range(53)]  # three blocks of 16, and five tokens
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


class BackgroundConnector(ExampleConnector):
    """Loads over three steps; `broken` is a file that can't be read."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.queue = []

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        num_tokens, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return num_tokens, num_tokens > 0

    def build_connector_meta(self, scheduler_output):
        loads = [ReqMeta(req_id, blocks) for req_id, blocks in self._loads.items()]
        self._loads = {}
        metadata = super().build_connector_meta(scheduler_output)
        metadata.requests += loads
        return metadata

    def start_load_kv(self, forward_context, **kwargs):
        for request in self._get_connector_metadata().requests:
            if request.loads:
                self.queue.append([3, ReqMeta(request.req_id, request.loads)])
                request.loads = []
        super().start_load_kv(forward_context)

    def get_finished(self, finished_req_ids):
        done = set()
        for entry in list(self.queue):
            entry[0] -= 1
            if entry[0] == 0:
                self.queue.remove(entry)
                for name, block_id in entry[1].loads:
                    self._load(name, block_id)
                done.add(entry[1].req_id)
        return None, done or None


def config(folder, connector="ExampleConnector", role="kv_both", **kwargs):
    return {
        "kv_connector": connector,
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        **kwargs,
    }


def engine(model, transfer=None, **kwargs):
    if transfer is not None:
        kwargs["kv_transfer_config"] = transfer
    return build_engine(
        model, **{"max_model_len": 128, "num_gpu_blocks_override": 40, "block_size": 16, **kwargs}
    )


def run(llm, prompt=PROMPT, params=GREEDY, **extra):
    """(tokens, prompt tokens that came from a cache, finish reason)."""
    (result,) = llm.generate([{"prompt_token_ids": prompt, **extra}], params, use_tqdm=False)
    answer = result.outputs[0]
    return list(answer.token_ids), result.num_cached_tokens, answer.finish_reason


def files(folder):
    return sorted(folder.glob("*.safetensors"))


@pytest.fixture(scope="module")
def expected(tiny_llama):
    """The tokens without a connector."""
    return run(engine(tiny_llama))[0]


@pytest.fixture
def saved(tiny_llama, tmp_path, expected):
    """A folder with the blocks of PROMPT."""
    folder = tmp_path / "kv"
    assert run(engine(tiny_llama, config(folder))) == (expected, 0, "length")
    assert len(files(folder)) == 3
    return folder


def test_an_engine_loads_what_another_has_saved(tiny_llama, saved, expected):
    llm = engine(tiny_llama, config(saved))
    assert run(llm) == (expected, 48, "length")
    # From its own prefix cache now, as nothing was to load.
    assert run(llm) == (expected, 48, "length")
    stats = llm.llm_engine.engine_core.engine_core.scheduler.make_stats()
    assert stats is None or stats.connector_prefix_cache_stats is not None
    assert len(files(saved)) == 3


def test_a_prompt_with_the_same_begin_loads_that_much_and_saves_the_rest(tiny_llama, saved):
    other = [*PROMPT[:40], *range(3, 31)]  # two blocks in common, four in all
    assert run(engine(tiny_llama, config(saved)), other) == (
        run(engine(tiny_llama), other)[0],
        32,
        "length",
    )
    assert len(files(saved)) == 5


@pytest.mark.parametrize("budget", [16, 24])
def test_a_prompt_in_pieces_is_saved_once_its_blocks_are_full(
    tiny_llama, tmp_path, expected, budget
):
    pieces = {"max_num_batched_tokens": budget, "max_num_seqs": 4}
    assert run(engine(tiny_llama, config(tmp_path), **pieces)) == (expected, 0, "length")
    assert len(files(tmp_path)) == 3
    assert run(engine(tiny_llama, config(tmp_path), **pieces)) == (expected, 48, "length")


def test_roles_decide_who_saves_and_who_loads(tiny_llama, tmp_path, saved, expected):
    assert run(engine(tiny_llama, config(saved, role="kv_producer"))) == (expected, 0, "length")
    empty = tmp_path / "empty"
    assert run(engine(tiny_llama, config(empty, role="kv_consumer"))) == (expected, 0, "length")
    assert files(empty) == []


def test_a_salt_keeps_prompts_apart(tiny_llama, saved, expected):
    llm = engine(tiny_llama, config(saved))
    assert run(llm, cache_salt="mine") == (expected, 0, "length")
    assert len(files(saved)) == 6
    assert run(engine(tiny_llama, config(saved)), cache_salt="mine") == (expected, 48, "length")


def test_prompt_logprobs_are_computed_although_the_blocks_are_there(tiny_llama, saved):
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    (result,) = engine(tiny_llama, config(saved)).generate(
        [{"prompt_token_ids": PROMPT}], params, use_tqdm=False
    )
    assert len(result.prompt_logprobs) == len(PROMPT)


def test_layers_of_several_kinds_share_one_group(tiny_gemma, tmp_path):
    tokens = run(engine(tiny_gemma))[0]
    assert run(engine(tiny_gemma, config(tmp_path))) == (tokens, 0, "length")
    llm = engine(tiny_gemma, config(tmp_path))
    assert run(llm) == (tokens, 48, "length")
    assert len(llm.llm_engine.engine_core.engine_core.kv_cache_config.kv_cache_groups) == 1


def test_other_models_have_other_files(tiny_llama, tiny_gemma, saved):
    assert run(engine(tiny_gemma, config(saved)))[1] == 0
    assert len(files(saved)) == 6


@pytest.mark.parametrize("connector", ["ExampleConnector", "BackgroundConnector"])
@pytest.mark.parametrize("num_good", [0, 1])
def test_a_file_that_can_not_be_read_is_computed_again(
    tiny_llama, saved, expected, connector, num_good
):
    transfer = config(saved, connector, kv_load_failure_policy="recompute")
    if connector == "BackgroundConnector":
        transfer["kv_connector_module_path"] = __name__
    llm = engine(tiny_llama, transfer)
    scheduler_side = llm.llm_engine.engine_core.engine_core.scheduler.connector
    probe = engine(tiny_llama, config(saved))  # its connector knows the names
    names = []
    note = ExampleConnector.on_new_request
    connector_of_probe = probe.llm_engine.engine_core.engine_core.scheduler.connector

    def noting(request):
        note(connector_of_probe, request)
        names.extend(connector_of_probe._names[request.request_id])

    connector_of_probe.on_new_request = noting
    run(probe)
    scheduler_side._file(names[num_good]).write_bytes(b"damaged")
    tokens, _, reason = run(llm)
    assert (tokens, reason) == (expected, "length")
    # The engine goes on, and what it computed itself is in its prefix cache or computed again.
    assert run(llm)[0] == expected


def test_a_file_that_can_not_be_read_ends_the_request_and_no_other(tiny_llama, saved, expected):
    llm = engine(tiny_llama, config(saved))
    for file in files(saved):
        file.write_bytes(b"damaged")
    tokens, _, reason = run(llm)
    assert (tokens, reason) == ([], "error")
    for file in files(saved):
        file.unlink()
    assert run(llm) == (expected, 0, "length")


def test_a_load_in_the_background_ends_in_the_same_tokens(tiny_llama, saved, expected):
    transfer = config(saved, "BackgroundConnector", kv_connector_module_path=__name__)
    llm = engine(tiny_llama, transfer)
    prompts = [{"prompt_token_ids": p} for p in (PROMPT, PROMPT[:20], PROMPT[5:40])]
    wanted = [list(r.outputs[0].token_ids) for r in engine(tiny_llama).generate(prompts, GREEDY)]
    results = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [list(r.outputs[0].token_ids) for r in results] == wanted
    assert [r.num_cached_tokens for r in results] == [48, 16, 0]


def test_the_second_of_two_stores_is_asked_where_the_first_has_nothing(
    tiny_llama, tmp_path, expected
):
    one, two = tmp_path / "one", tmp_path / "two"
    children = [config(one), config(two)]
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
    }
    assert run(engine(tiny_llama, transfer)) == (expected, 0, "length")
    assert [f.name for f in files(one)] == [f.name for f in files(two)] != []
    shutil.rmtree(one)
    assert run(engine(tiny_llama, transfer)) == (expected, 48, "length")


def test_preempted_requests_load_their_prompts_again(tiny_llama, tmp_path):
    prompts = [{"prompt_token_ids": [(i * 13 + j) % 190 + 3 for j in range(34)]} for i in range(4)]
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    small = {"num_gpu_blocks_override": 14, "max_model_len": 80, "max_num_seqs": 4}

    def tokens(llm):
        return [list(r.outputs[0].token_ids) for r in llm.generate(prompts, params, use_tqdm=False)]

    wanted = tokens(engine(tiny_llama))
    for _ in range(2):
        llm = engine(tiny_llama, config(tmp_path), **small)
        assert tokens(llm) == wanted
        pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == 13


def test_without_a_connector_there_is_nothing_to_pay(tiny_llama):
    llm = engine(tiny_llama)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner
    assert runner.kv_connector is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in runner.model.modules())
    assert KVConnectorOutput().is_empty()

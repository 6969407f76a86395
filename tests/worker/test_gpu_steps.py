# SPDX-License-Identifier: Apache-2.0
"""A GPU's steps with its kernels in Triton's interpreter: the same tokens as a CPU's steps."""

import numpy as np
import pytest
import torch
from checkpoints import VOCAB, build_engine, save_tiny
from gpu_helpers import on_a_gpu, runner_of

from vllmx import LLM, SamplingParams
from vllmx.config import CompilationConfig, VllmConfig
from vllmx.exceptions import UserError
from vllmx.worker.buffer_utils import PackedBuffer, StagedWriteTensor
from vllmx.worker.cudagraph_utils import CudaGraphManager, capture_sizes, resolve_cudagraph_mode


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / request.param
    save_tiny(request.param, path)
    return path


def prompts() -> list[dict]:
    rng = np.random.default_rng(3)
    return [{"prompt_token_ids": rng.integers(3, VOCAB, n).tolist()} for n in (1, 30, 5, 17, 2)]


def params() -> list[SamplingParams]:
    """Greedy, seeded, with logprobs, with penalties and words; of several lengths."""
    return [
        SamplingParams(temperature=0, max_tokens=7, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=5, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=9, logprobs=2, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=6, repetition_penalty=1.5, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=1, ignore_eos=True),
    ]


def answers(llm: LLM, given: list[SamplingParams]) -> list:
    outputs = llm.generate(prompts(), given, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in outputs]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_gpus_steps_bring_the_tokens_of_a_cpus(monkeypatch, folder, async_scheduling) -> None:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 64}
    want = [
        answers(build_engine(folder, **limits), given)
        for given in (params(), [SamplingParams(temperature=0, max_tokens=6)] * 5)
    ]
    llm = on_a_gpu(monkeypatch, folder, [1, 2, 4], async_scheduling=async_scheduling, **limits)
    assert answers(llm, params()) == want[0]
    assert answers(llm, [SamplingParams(temperature=0, max_tokens=6)] * 5) == want[1]
    graphs = runner_of(llm).gpu_steps.cudagraph_manager.graphs
    assert all(graph.replays for graph in graphs.values()), "every graph was used"


def test_no_kernel_reads_old_keys_that_another_request_writes_in_the_same_step(
    monkeypatch, folder
) -> None:
    """A prefix hit on a block that is filled in the very step: the kernel that stores new keys and
    attends to the old ones at once must not have it."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64}
    llm = on_a_gpu(monkeypatch, folder, [1, 2, 4], async_scheduling=False, block_size=16, **limits)
    steps, engine = runner_of(llm).gpu_steps, llm.llm_engine
    joined, build = [], steps.runner.attn_builders.build

    def watched(batch, *args, **kwargs):
        joined.append((list(batch.req_ids), batch.shares_new_blocks))
        return build(batch, *args, **kwargs)

    monkeypatch.setattr(steps.runner.attn_builders, "build", watched)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    first = [3 + i for i in range(12)]
    engine.add_request("a", {"prompt_token_ids": first}, greedy)
    for _ in range(4):
        engine.step()
    row = steps.runner.req_states.all_token_ids.np
    known = row[next(iter(steps.runner.req_states.req_id_to_index.values())), :16].tolist()
    assert known[:12] == first
    engine.add_request("b", {"prompt_token_ids": [*known, 9]}, greedy)
    joined.clear()
    engine.step()
    ((req_ids, shares),) = joined
    assert sorted(r[0] for r in req_ids) == ["a", "b"] and shares, "and not a replay"
    joined.clear()
    engine.step()
    assert joined == [([], False)], "the next step is a replay again"


def test_words_are_excluded_while_the_token_before_is_under_way(monkeypatch, folder) -> None:
    given = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    (first,) = build_engine(folder).generate(prompts()[:1], given, use_tqdm=False)
    tokens = first.outputs[0].token_ids
    given = [SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)]
    given[0]._bad_words_token_ids = [tokens[2:4], tokens[5:8]]
    want = build_engine(folder).generate(prompts()[:1], given, use_tqdm=False)
    llm = on_a_gpu(monkeypatch, folder, [1], async_scheduling=True)
    got = llm.generate(prompts()[:1], given, use_tqdm=False)
    assert got[0].outputs[0].token_ids == want[0].outputs[0].token_ids != tokens


def test_a_pool_too_small_for_all_preempts_and_goes_on(monkeypatch, folder) -> None:
    limits = {"max_num_seqs": 4, "max_model_len": 64, "num_gpu_blocks_override": 40}
    limits |= {"block_size": 4, "enable_prefix_caching": False}
    given = [SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)] * 5
    want = answers(build_engine(folder, max_model_len=64), given)
    llm = on_a_gpu(monkeypatch, folder, [2, 4], async_scheduling=True, **limits)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempted = []
    preempt = scheduler._preempt_request
    monkeypatch.setattr(
        scheduler, "_preempt_request", lambda *args: preempted.append(args) or preempt(*args)
    )
    assert answers(llm, given) == want
    assert preempted


def test_after_an_interrupted_step_rows_start_anew_in_place(monkeypatch, folder) -> None:
    given = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)] * 5
    llm = on_a_gpu(monkeypatch, folder, [4], async_scheduling=True, max_num_seqs=4)
    want = answers(llm, given)
    runner = runner_of(llm)
    table, buffers = runner.req_states.all_token_ids.gpu, runner.gpu_steps.buffers
    execute = runner.gpu_steps.execute
    calls = iter(range(100))

    def interrupted(scheduler_output):
        if next(calls) == 3:
            raise KeyboardInterrupt
        return execute(scheduler_output)

    runner.gpu_steps.execute = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts(), given, use_tqdm=False)
    assert runner.req_states.all_token_ids.gpu is table and runner.gpu_steps.buffers is buffers
    assert runner.req_states.num_reqs == 0
    assert answers(llm, given) == want


def test_what_was_written_is_taken_once_and_by_its_place() -> None:
    table = StagedWriteTensor((4, 6), torch.int32, "cpu")
    table._on_gpu = True
    assert table.take_staged() is None
    table.stage_write(2, 1, [7, 8])
    table.stage_write(0, 0, [9])
    places, values = table.take_staged()
    assert places.tolist() == [13, 14, 0] and values.tolist() == [7, 8, 9]
    assert places.dtype == values.dtype == np.int32
    assert table.take_staged() is None


def test_a_packet_is_not_overwritten_while_its_copy_may_be_under_way() -> None:
    packet = PackedBuffer(8, "cpu")
    seen = []
    for number in range(PackedBuffer.DEPTH):
        packet.next()[:] = number
        seen.append(packet._ring[packet.turn])
    assert [int(buffer[0]) for buffer in seen] == list(range(PackedBuffer.DEPTH))
    packet.send(3)
    last = PackedBuffer.DEPTH - 1
    assert packet.gpu.tolist() == [last] * 3 + [0] * 5


def test_many_changes_of_the_tables_go_in_packets_of_their_own(monkeypatch, folder) -> None:
    from vllmx.worker import input_buffers

    monkeypatch.setattr(input_buffers, "STAGED_ROOM", 16)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    llm = on_a_gpu(monkeypatch, folder, [])
    runner = runner_of(llm)
    buffers = runner.gpu_steps.buffers
    table = runner.req_states.all_token_ids
    table.np[:] = 0
    table._on_gpu = True
    table.gpu = torch.zeros_like(table.cpu)
    blocks = runner.block_tables.tables[0]
    blocks._on_gpu = True
    blocks.gpu = torch.zeros_like(blocks.cpu)
    table.stage_write(1, 2, list(range(1, 31)))
    blocks.stage_write(0, 1, [5, 6, 7])
    buffers._send_changes(buffers.packet.next(), buffers._offsets[-1])
    assert table.gpu[1, 2:32].tolist() == list(range(1, 31))
    assert blocks.gpu[0].tolist()[:5] == [0, 5, 6, 7, 0]


@pytest.mark.parametrize(
    ("configured", "max_num_seqs", "want"),
    [
        (None, 1, [1]),
        (None, 20, [1, 2, 4, 8, 16, 20]),
        (None, 300, [1, 2, 4, *range(8, 256, 8), 256, 272, 288, 300]),
        ([8, 2, 2, 512], 64, [2, 8]),
        ([], 64, []),
    ],
)
def test_sizes_to_capture(configured, max_num_seqs, want) -> None:
    config = CompilationConfig(cudagraph_capture_sizes=configured)
    assert capture_sizes(config, max_num_seqs) == want


def test_sizes_to_capture_are_positive() -> None:
    with pytest.raises(UserError, match="positive"):
        capture_sizes(CompilationConfig(cudagraph_capture_sizes=[0, 8]), 64)


def test_a_batch_runs_in_the_smallest_graph_that_holds_it() -> None:
    config = VllmConfig()
    config.scheduler_config.max_num_seqs = 16
    manager = CudaGraphManager(config, "FULL_DECODE_ONLY")
    taken = {n: manager.dispatch(n, n) for n in range(1, 18)}
    want = {1: 1, 2: 2, 3: 4, 4: 4} | dict.fromkeys(range(5, 9), 8)
    want |= dict.fromkeys(range(9, 17), 16)
    assert {n: desc.num_reqs for n, desc in taken.items() if desc} == want
    assert taken[17] is None
    assert manager.dispatch(4, 5) is None, "a prefill is among them"
    assert CudaGraphManager(config, "NONE").dispatch(1, 1) is None


def test_graphs_are_the_default_on_a_gpu_alone() -> None:
    config = VllmConfig()
    assert resolve_cudagraph_mode(config, "cuda") == "FULL"
    assert resolve_cudagraph_mode(config, "cpu") == "NONE"
    config.model_config.enforce_eager = True
    assert resolve_cudagraph_mode(config, "cuda") == "NONE"
    config.compilation_config.cudagraph_mode = "FULL_DECODE_ONLY"
    with pytest.raises(UserError, match="need a GPU"):
        resolve_cudagraph_mode(config, "cpu")

# SPDX-License-Identifier: Apache-2.0
"""How a GPU's memory is divided, with readings that are made up."""

import inspect
import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from memory_readings import GIB, Readings, free

from vllmx.config import VllmConfig
from vllmx.exceptions import UserError
from vllmx.worker import cudagraph_utils, device_memory, gpu_worker
from vllmx.worker.device_memory import (
    CURES,
    CudaMemory,
    MemoryProfile,
    MemorySnapshot,
    check_profile,
    explained,
    request_memory,
)


def config() -> VllmConfig:
    made = VllmConfig()
    made.scheduler_config.max_num_batched_tokens = 8192
    made.scheduler_config.max_num_seqs = 256
    made.model_config.max_model_len = 4096
    return made


PROFILE = MemoryProfile(
    requested=72 * GIB,
    weights=16 * GIB,
    activations=4 * GIB,
    non_torch=GIB,
    graphs=2 * GIB,
    free_before=79 * GIB,
    free_after=60 * GIB,
)


def test_the_share_is_of_the_whole_device() -> None:
    assert request_memory(Readings(free(79)), free(79), 0.9) == 72 * GIB


def test_a_device_that_others_use_is_refused_at_the_start() -> None:
    with pytest.raises(UserError) as error:
        request_memory(Readings(free(50)), free(50), 0.9)
    text = str(error.value)
    for part in ("50.00/80.00 GiB", "gpu_memory_utilization=0.9", "72.00 GiB", "Made-up GPU"):
        assert part in text


def test_memory_shared_with_the_system_gives_a_share_of_what_is_free() -> None:
    start = free(50, total=120)
    assert request_memory(Readings(start, is_unified=True), start, 0.9) == 45 * GIB


def test_the_cache_gets_what_the_largest_step_leaves(caplog) -> None:
    caplog.set_level(logging.INFO)
    assert PROFILE.kv_cache == (72 - 16 - 4 - 1 - 2) * GIB
    assert check_profile(PROFILE, Readings(free(60)), config()) == 49 * GIB
    for words in ("weights 16.00", "activations 4.00", "graphs 2.00", "kv_cache 49.00"):
        assert words in caplog.text


def test_what_is_not_torchs_counts_from_the_start() -> None:
    start, after = free(78), free(60, torch_memory=16)
    assert (start.non_torch_memory, after.non_torch_memory) == (2 * GIB, 4 * GIB)


def test_no_room_for_a_cache_says_where_the_memory_went_and_what_to_lower() -> None:
    tight = replace(PROFILE, weights=66 * GIB)
    with pytest.raises(UserError) as error:
        check_profile(tight, Readings(free(10)), config())
    text = str(error.value)
    for part in (
        *("72.00 GiB", "weights take 66.00", "largest step 4.00", "CUDA graphs 2.00"),
        *("max_num_batched_tokens (now 8192)", "max_num_seqs (256)", "max_model_len (4096)"),
        "raise cache.gpu_memory_utilization",
    ):
        assert part in text


def test_memory_that_grew_meanwhile_makes_the_figures_void() -> None:
    grown = replace(PROFILE, free_after=79 * GIB + 1)
    with pytest.raises(UserError, match="another process gave memory back"):
        check_profile(grown, Readings(free(79)), config())
    shared = replace(grown, is_unified=True)
    assert check_profile(shared, Readings(free(79), is_unified=True), config()) == 49 * GIB


@pytest.mark.parametrize(
    ("free_after", "gib"),
    [
        (80, 49),
        (62, 49),
        # Of 60 that are left, 4 and 2 are to come, and 7 were not asked for at the start.
        (60, 47),
        (20, 7),
    ],
)
def test_memory_of_the_system_is_never_promised_twice(free_after, gib) -> None:
    shared = replace(PROFILE, is_unified=True, free_after=free_after * GIB)
    assert shared.kv_cache == gib * GIB


# ---------------------------------------------------------------- out of memory


@pytest.mark.parametrize("stage", CURES)
def test_out_of_memory_says_at_what_with_which_figures_and_what_to_lower(stage: str) -> None:
    made = config()
    with (
        pytest.raises(UserError) as error,
        explained(stage, made, Readings(free(3, allocated=70))),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
    text = str(error.value)
    assert f"Out of GPU memory while {stage}" in text
    assert "3.00 of 80.00 GiB free, torch uses 70.00" in text
    assert "{" not in text
    named = {
        "loading the weights": ["smaller or quantised"],
        "compiling kernels": ["max_num_batched_tokens (now 8192)", "max_num_seqs (256)"],
        "running the largest step": ["max_num_batched_tokens (now 8192)", "max_num_seqs (256)"],
        "allocating the KV cache": ["gpu_memory_utilization (now 0.92)"],
        "capturing CUDA graphs": ["max_num_seqs (256)", "cudagraph_mode=NONE"],
    }
    assert all(words in text for words in named[stage])
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)


def test_every_stage_of_a_start_has_a_cure() -> None:
    """The worker names a stage in the words that CURES has."""
    source = Path(inspect.getfile(gpu_worker)).read_text()
    named = re.findall(r"explained\(\s*\"([^\"]+)\"", source)
    assert sorted(set(named)) == sorted(CURES) and source.count("explained(") == len(named)


def test_other_errors_pass_as_they_are() -> None:
    with pytest.raises(KeyError), explained("loading the weights", config(), None):
        raise KeyError("a")


# ---------------------------------------------------------------- readings


def test_readings_of_a_device_with_memory_of_its_own_and_of_one_without(monkeypatch) -> None:
    cuda = torch.cuda
    stats = {"allocated_bytes.all.current": 3, "allocated_bytes.all.peak": 7}
    for name, answer in {
        "current_device": 0,
        "synchronize": None,
        "mem_get_info": (10, 100),
        "memory_stats": stats,
        "memory_reserved": 5,
    }.items():
        monkeypatch.setattr(cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(device_memory, "available_memory", lambda device: {"cpu": 60}[device])
    for integrated, left in ((False, 10), (True, 60)):
        made = SimpleNamespace(name="GPU", is_integrated=integrated)
        monkeypatch.setattr(cuda, "get_device_properties", lambda device, made=made: made)
        memory = CudaMemory()
        assert memory.is_unified is integrated
        assert memory.snapshot() == MemorySnapshot(left, 100, 5, 3, 7)


# ---------------------------------------------------------------- graphs


class Graph:
    def __init__(self) -> None:
        self.open = False

    def capture_begin(self, pool) -> None:
        self.open = True

    def capture_end(self) -> None:
        self.open = False


@pytest.fixture
def device(monkeypatch):
    """device(left): what the device has left before and after each capture, in MiB."""

    def make(left: list[int]) -> None:
        readings = iter(left)
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "graph_pool_handle", lambda: "pool")
        monkeypatch.setattr(cuda, "Stream", lambda: "stream")
        monkeypatch.setattr(cuda, "stream", lambda stream: explained("", None, None))
        monkeypatch.setattr(cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(cuda, "synchronize", lambda: None)
        monkeypatch.setattr(cuda, "mem_get_info", lambda: (next(readings) << 20, 0))

    return make


def manager(max_num_seqs: int) -> cudagraph_utils.ModelCudaGraphManager:
    made = config()
    made.scheduler_config.max_num_seqs = max_num_seqs
    return cudagraph_utils.ModelCudaGraphManager(
        made, "FULL_DECODE_ONLY", lambda size: None, lambda size: torch.zeros(size)
    )


@pytest.mark.parametrize(
    ("max_num_seqs", "left", "mib"),
    [
        (1, [900, 800], 100),
        (2, [900, 800, 800, 790], 110),
        # 7 sizes: the largest takes 100, the three after it 4, 0 and 8.
        (32, [900, 800, 800, 796, 796, 796, 796, 788], 100 + 6 * 4),
        # Another process that gives memory back must not make graphs look like a gain.
        (2, [900, 950, 950, 940], 10),
    ],
)
def test_a_few_graphs_tell_what_all_will_take(device, max_num_seqs, left, mib) -> None:
    device(left)
    made = manager(max_num_seqs)
    assert len(made.sizes) in (1, 2, 7)
    assert made.profile_memory() == mib << 20
    assert not made.graphs and not made.hidden_states


def test_captured_graphs_stay_and_are_counted(device) -> None:
    device([900, 800, 800, 790, 790, 785])
    made = manager(4)
    assert made.capture() == 115 << 20
    assert sorted(made.graphs) == made.sizes == [1, 2, 4]
    assert {n: len(rows) for n, rows in made.hidden_states.items()} == {1: 1, 2: 2, 4: 4}

# SPDX-License-Identifier: Apache-2.0
"""A worker without a model: it returns scripted tokens and needs no torch.

It keeps to the runner's side of the protocol, so it stands in for a model in tests of everything
else and shows what the engine itself costs. With `check=True` it also plays the KV cache: it knows
which token every slot was written for, and so notices when a request would attend to another's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllmx.config import DEFAULT_BLOCK_SIZE
from vllmx.core.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllmx.core.output import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    GrammarOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from vllmx.exceptions import UserError

if TYPE_CHECKING:
    import numpy as np

    from vllmx.config import VllmConfig

Script = Callable[[str, int], int]
"""script(req_id, position): the token id a request gets at `position`, the prompt included."""

NUM_BLOCKS = 4096


def cyclic_script(req_id: str, position: int) -> int:
    """The same 97 token ids over and over, for every request."""
    return 3 + position % 97


class _Row:
    """What the runner remembers of a request."""

    __slots__ = ("block_ids", "num_computed_tokens", "num_tokens", "token_ids")

    def __init__(
        self, token_ids: list[int], num_computed_tokens: int, block_ids: tuple[list[int], ...]
    ) -> None:
        # Copies: the scheduler goes on with its own lists.
        self.token_ids = token_ids.copy()
        self.num_tokens = len(token_ids)
        self.num_computed_tokens = num_computed_tokens
        self.block_ids = tuple(group.copy() for group in block_ids)


class NullModelRunner:
    """Keeps rows like a real runner and takes its tokens from a script."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        script: Script = cyclic_script,
        delay: float = 0.0,
        fail_at_step: int | None = None,
        check: bool = False,
    ) -> None:
        """`delay`: seconds that a step takes; `fail_at_step`: non-empty step, counted from 1, that
        raises RuntimeError; `check`: verify what the scheduler sends (slow)."""
        self.script = script
        self.delay = delay
        self.fail_at_step = fail_at_step
        self.check = check
        self.num_steps = 0
        self.rows: dict[str, _Row] = {}
        self.max_num_tokens = vllm_config.scheduler_config.max_num_batched_tokens or 0
        self._kv_cache: _CheckedKVCache | None = None
        self._scheduled: dict[str, int] | None = None

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Lay out the cache that is checked, if it is to be."""
        if self.check:
            self._kv_cache = _CheckedKVCache(kv_cache_config)

    def forget_requests(self) -> None:
        """Drop all rows, and the step that was begun."""
        self.rows.clear()
        self._scheduled = None

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Take the step in; None if `sample_tokens` has to follow."""
        assert self._scheduled is None, "sample_tokens was not called for the step before"
        rows = self.rows
        for req_id in scheduler_output.finished_req_ids:
            rows.pop(req_id, None)
        for req_id in scheduler_output.preempted_req_ids or ():
            rows.pop(req_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            assert new.prefill_token_ids is not None
            rows[new.req_id] = _Row(new.prefill_token_ids, new.num_computed_tokens, new.block_ids)
        self._append_blocks(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens == 0:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self.num_steps += 1
        if self.num_steps == self.fail_at_step:
            raise RuntimeError(f"scripted failure of step {self.num_steps}")
        if self._kv_cache is not None:
            self._check(scheduler_output, self._kv_cache)
        if self.delay:
            time.sleep(self.delay)
        self._scheduled = scheduler_output.num_scheduled_tokens
        return None

    def _append_blocks(self, scheduler_output: SchedulerOutput) -> None:
        cached = scheduler_output.scheduled_cached_reqs
        if not any(cached.new_block_ids):
            return
        for req_id, new_block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new_block_ids is not None:
                for table, ids in zip(self.rows[req_id].block_ids, new_block_ids, strict=True):
                    table.extend(ids)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """The script's next token for every request whose known tokens are all computed; where a
        grammar forbids it, the next id that is allowed, the first one coming after the last."""
        scheduled = self._scheduled
        assert scheduled is not None, "execute_model was not called"
        self._scheduled = None
        rows = self.rows
        script = self.script
        sampled: list[list[int]] = []
        masks = {} if grammar_output is None else _masks(grammar_output)
        for req_id, num_tokens in scheduled.items():
            row = rows[req_id]
            row.num_computed_tokens += num_tokens
            if row.num_computed_tokens < row.num_tokens:
                sampled.append([])
                continue
            token_id = script(req_id, row.num_tokens)
            if req_id in masks:
                token_id = _next_allowed(masks[req_id], token_id)
            row.num_tokens += 1
            if self.check:
                row.token_ids.append(token_id)
            sampled.append([token_id])
        req_ids = list(scheduled)
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index=dict(zip(req_ids, range(len(req_ids)), strict=True)),
            sampled_token_ids=sampled,
        )

    def _check(self, scheduler_output: SchedulerOutput, kv_cache: _CheckedKVCache) -> None:
        scheduled = scheduler_output.num_scheduled_tokens
        total = scheduler_output.total_num_scheduled_tokens
        assert total == sum(scheduled.values())
        assert total <= self.max_num_tokens, "the step is over its token budget"
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, num_computed_tokens in zip(
            cached.req_ids, cached.num_computed_tokens, strict=True
        ):
            assert self.rows[req_id].num_computed_tokens == num_computed_tokens, req_id
        known = {new.req_id for new in scheduler_output.scheduled_new_reqs} | set(cached.req_ids)
        assert known == set(scheduled), "scheduled and sent requests differ"
        kv_cache.start_step()
        for req_id, num_tokens in scheduled.items():
            row = self.rows[req_id]
            assert 0 < num_tokens <= row.num_tokens - row.num_computed_tokens, req_id
            kv_cache.write(req_id, row, num_tokens)
        # A request may hit blocks that another one computes in this very step, so reads come last.
        for req_id, num_tokens in scheduled.items():
            kv_cache.read(req_id, self.rows[req_id], num_tokens)


@dataclass
class _CheckedKVCache:
    """Holds in every slot which tokens led up to it, as a hash of that prefix."""

    config: KVCacheConfig
    slots: list[dict[int, int]] = field(init=False)
    written: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.slots = [{} for _ in self.config.kv_cache_groups]

    def start_step(self) -> None:
        self.written.clear()

    def write(self, req_id: str, row: _Row, num_tokens: int) -> None:
        start = row.num_computed_tokens
        prefixes = _prefix_hashes(row.token_ids, start + num_tokens)
        for group_id, group in enumerate(self.config.kv_cache_groups):
            block_size = group.kv_cache_spec.block_size
            table = row.block_ids[group_id]
            assert len(table) * block_size >= start + num_tokens, f"{req_id}: too few blocks"
            for position in range(start, start + num_tokens):
                block_id = table[position // block_size]
                assert 0 < block_id < self.config.num_blocks, f"{req_id}: block {block_id}"
                slot = block_id * block_size + position % block_size
                assert (group_id, slot) not in self.written, f"{req_id}: slot written twice"
                self.written.add((group_id, slot))
                self.slots[group_id][slot] = prefixes[position]

    def read(self, req_id: str, row: _Row, num_tokens: int) -> None:
        prefixes = _prefix_hashes(row.token_ids, row.num_computed_tokens + num_tokens)
        for group_id, group in enumerate(self.config.kv_cache_groups):
            spec = group.kv_cache_spec
            first = 0
            if isinstance(spec, SlidingWindowSpec):
                first = max(0, row.num_computed_tokens - spec.sliding_window + 1)
            table = row.block_ids[group_id]
            for position in range(first, len(prefixes)):
                block_id, offset = divmod(position, spec.block_size)
                slot = table[block_id] * spec.block_size + offset
                assert self.slots[group_id].get(slot) == prefixes[position], (
                    f"{req_id}: position {position} reads what another prefix wrote"
                )


def _masks(grammar_output: GrammarOutput) -> dict[str, np.ndarray]:
    req_ids = grammar_output.structured_output_request_ids
    return dict(zip(req_ids, grammar_output.grammar_bitmask, strict=True))


def _next_allowed(mask: np.ndarray, token_id: int) -> int:
    import numpy

    allowed = numpy.flatnonzero(numpy.unpackbits(mask.view(numpy.uint8), bitorder="little"))
    assert len(allowed), "the grammar allows nothing"
    return int(allowed[numpy.searchsorted(allowed, token_id) % len(allowed)])


def _prefix_hashes(token_ids: list[int], length: int) -> list[int]:
    hashes = []
    prefix = 0
    for token_id in token_ids[:length]:
        prefix = hash((prefix, token_id))
        hashes.append(prefix)
    return hashes


class NullWorker:
    """Worker of NullModelRunner: parallel.worker_cls=vllmx.worker.null_runner.NullWorker."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_spec: dict[str, KVCacheSpec] | None = None,
        script: Script = cyclic_script,
        delay: float = 0.0,
        fail_at_step: int | None = None,
        check: bool = False,
    ) -> None:
        """`kv_cache_spec` by layer name, one full-attention layer by default; for the rest see
        NullModelRunner."""
        if vllm_config.kv_transfer_config is not None:
            raise UserError("NullWorker has no KV entries to move: leave kv_transfer unset.")
        self.vllm_config = vllm_config
        self.kv_cache_spec = kv_cache_spec
        self.model_runner = NullModelRunner(vllm_config, script, delay, fail_at_step, check)
        self.execute_model = self.model_runner.execute_model
        self.sample_tokens = self.model_runner.sample_tokens

    def init_device(self) -> None:
        """There is no device."""

    def load_model(self) -> None:
        """There is no model."""

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """The layers it pretends to have."""
        if self.kv_cache_spec is None:
            spec = FullAttentionSpec(
                block_size=self.vllm_config.cache_config.block_size or DEFAULT_BLOCK_SIZE,
                num_kv_heads=1,
                head_size=1,
                dtype="float32",
            )
            self.kv_cache_spec = {"layers.0": spec}
        return self.kv_cache_spec

    def determine_available_memory(self) -> int:
        """Bytes for NUM_BLOCKS blocks, or what the config says."""
        pages = sum(spec.page_size_bytes for spec in self.get_kv_cache_spec().values())
        return self.vllm_config.cache_config.kv_cache_memory_bytes or NUM_BLOCKS * pages

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Take note of the block layout."""
        self.model_runner.initialize_kv_cache(kv_cache_config)

    def compile_or_warm_up_model(self) -> None:
        """Nothing to warm up."""

    def check_health(self) -> None:
        """Always well."""

    def forget_requests(self) -> None:
        """Drop all requests, after an interrupted step."""
        self.model_runner.forget_requests()

    def shutdown(self) -> None:
        """Forget the requests."""
        self.model_runner.forget_requests()

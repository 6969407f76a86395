# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/model_runner.py @ v0.25.0
"""The model runner: keeps request rows up to date, runs the model on a batch, samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllmx.config import VllmConfig
from vllmx.core.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllmx.core.output import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    CachedRequestData,
    GrammarOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from vllmx.forward_context import ForwardContext, set_forward_context
from vllmx.ir.select import OpTable
from vllmx.layers.attention import attention_layers
from vllmx.model_loader.loader import load_model
from vllmx.sample.prompt_logprob import PromptLogprobsWorker
from vllmx.sample.sampler import Sampler
from vllmx.worker.attn_utils import AttnMetadataBuilders, init_kv_cache
from vllmx.worker.block_table import BlockTables
from vllmx.worker.input_batch import InputBatch, make_input_batch
from vllmx.worker.states import RequestState


class GPUModelRunner:
    """Runs one model on one device. A step is `execute_model`, then `sample_tokens`."""

    def __init__(self, vllm_config: VllmConfig, device: str, dtype: torch.dtype) -> None:
        self.vllm_config = vllm_config
        self.device = device
        self.ops = OpTable(vllm_config.kernel_config, device, dtype)
        self.model: Any = None
        self.execute_model_state: tuple[InputBatch, Tensor] | None = None

    def load_model(self) -> None:
        """Build the model and pack its weights."""
        self.model = load_model(self.vllm_config, self.ops)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """What each attention layer keeps, by layer name."""
        layers = attention_layers(self.model)
        return {name: layer.get_kv_cache_spec(self.vllm_config) for name, layer in layers.items()}

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the cache; max_model_len is final by now."""
        layers = attention_layers(self.model)
        init_kv_cache(kv_cache_config, layers, self.device)
        self.attn_builders = AttnMetadataBuilders(kv_cache_config, layers, self.device)
        self.block_sizes = [g.kv_cache_spec.block_size for g in kv_cache_config.kv_cache_groups]
        self.forget_requests()

    def forget_requests(self) -> None:
        """Allocate empty request rows, at the start and after an interrupted step."""
        self.execute_model_state = None
        model_config = self.vllm_config.model_config
        max_num_reqs = self.vllm_config.scheduler_config.max_num_seqs
        max_model_len = model_config.max_model_len
        assert max_model_len is not None
        self.req_states = RequestState(
            max_num_reqs, max_model_len, model_config.get_vocab_size(), self.device
        )
        self.block_tables = BlockTables(self.block_sizes, max_num_reqs, max_model_len, self.device)
        self.sampler = Sampler(self.req_states, model_config.logprobs_mode, model_config.seed)
        self.prompt_logprobs_worker = PromptLogprobsWorker(self.req_states)

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the model on this step's tokens; None, since `sample_tokens` has the output.

        A step without tokens returns the empty output at once.
        """
        self.finish_requests(scheduler_output)
        self.add_requests(scheduler_output.scheduled_new_reqs)
        self.update_requests(scheduler_output.scheduled_cached_reqs)
        if scheduler_output.total_num_scheduled_tokens == 0:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self.block_tables.apply_staged_writes()
        self.req_states.all_token_ids.apply_write()
        batch = make_input_batch(scheduler_output, self.req_states)
        with set_forward_context(ForwardContext(self.prepare_attn(batch))):
            hidden_states = self.model(batch.input_ids, batch.positions)
        self.execute_model_state = (batch, hidden_states)
        return None

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample a token for each request whose known tokens have all been computed."""
        assert self.execute_model_state is not None, "sample_tokens needs an execute_model first"
        assert grammar_output is None, "structured outputs are refused before they get here"
        batch, hidden_states = self.execute_model_state
        self.execute_model_state = None
        prompt_logprobs = self.prompt_logprobs_worker.compute(
            self.model.compute_logits, hidden_states, batch
        )
        output = ModelRunnerOutput(
            req_ids=batch.req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(batch.req_ids)},
            prompt_logprobs_dict=prompt_logprobs,
        )
        self._sample(batch, hidden_states, output)
        self.req_states.num_computed_tokens[batch.idx_mapping_np] += batch.num_scheduled_tokens
        return output

    def _sample(self, batch: InputBatch, hidden_states: Tensor, output: ModelRunnerOutput) -> None:
        sampling = batch.sample_reqs
        if len(sampling) == 0:
            output.sampled_token_ids = [[] for _ in batch.req_ids]
            return
        every = len(sampling) == batch.num_reqs
        rows = batch.idx_mapping_np if every else batch.idx_mapping_np[sampling]
        positions = batch.seq_lens_np[sampling].astype("int64") - 1
        # In a pure decode batch every row is a request's last token.
        last = (
            hidden_states
            if every and batch.num_tokens == batch.num_reqs
            else hidden_states.index_select(0, batch.logits_indices)
        )
        sampled = self.sampler(self.model.compute_logits(last), rows, positions)
        token_ids = sampled.sampled_token_ids.cpu().numpy()
        states = self.req_states
        states.all_token_ids.np[rows, states.total_len[rows]] = token_ids
        if self.device != "cpu":
            index = (torch.from_numpy(rows), torch.from_numpy(states.total_len[rows]))
            states.all_token_ids.gpu[index] = sampled.sampled_token_ids.int()
        states.total_len[rows] += 1
        if every:
            output.sampled_token_ids = token_ids[:, None].tolist()
            output.logprobs = sampled.logprobs
            return
        output.sampled_token_ids = [[] for _ in batch.req_ids]
        for i, token_id in zip(sampling.tolist(), token_ids.tolist(), strict=True):
            output.sampled_token_ids[i] = [token_id]
        if sampled.logprobs is not None:
            # Requests still in their prompt have no row: number the rows by request.
            starts = [0] * batch.num_reqs
            for row, i in enumerate(sampling.tolist()):
                starts[i] = row
            output.logprobs = sampled.logprobs._replace(cu_num_generated_tokens=starts)

    def prepare_attn(self, batch: InputBatch) -> dict[str, Any]:
        """Attention metadata of each layer for this batch."""
        tables = self.block_tables.gather_block_tables(
            batch.idx_mapping, int(batch.seq_lens_np.max())
        )
        slots = self.block_tables.compute_slot_mappings(batch.token_rows, batch.positions_np)
        return self.attn_builders.build(batch, tables, slots)

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Free the rows of requests that ended or lost their cache."""
        ended = scheduler_output.finished_req_ids
        if scheduler_output.preempted_req_ids:
            ended = ended | scheduler_output.preempted_req_ids
        for req_id in ended:
            self.req_states.remove_request(req_id)
            self.prompt_logprobs_worker.remove_request(req_id)

    def add_requests(self, new_requests: list[NewRequestData]) -> None:
        """Give new and resumed requests a row."""
        for data in new_requests:
            assert data.prompt_token_ids is not None and data.sampling_params is not None
            prompt_len = len(data.prompt_token_ids)
            row = self.req_states.add_request(
                data.req_id,
                prompt_len,
                data.prefill_token_ids or data.prompt_token_ids,
                data.num_computed_tokens,
            )
            self.block_tables.append_block_ids(row, data.block_ids, overwrite=True)
            self.sampler.add_request(row, prompt_len, data.sampling_params)
            self.prompt_logprobs_worker.add_request(
                data.req_id, data.sampling_params.prompt_logprobs
            )

    def update_requests(self, cached: CachedRequestData) -> None:
        """Append the blocks that known requests were given."""
        index_of = self.req_states.req_id_to_index
        for req_id, new_block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new_block_ids is not None:
                self.block_tables.append_block_ids(index_of[req_id], new_block_ids, overwrite=False)

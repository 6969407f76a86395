# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/model_runner.py @ v0.25.0
"""The model runner: keeps request rows up to date, runs the model on a batch, samples."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from vllmx.config import VllmConfig
from vllmx.core.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllmx.core.output import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    CachedRequestData,
    GrammarOutput,
    LogprobsLists,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from vllmx.forward_context import ForwardContext, set_forward_context
from vllmx.ir.select import OpTable
from vllmx.layers.attention import Attention, attention_layers
from vllmx.layers.mamba_base import MambaBase, mamba_layers
from vllmx.model_loader.loader import load_model
from vllmx.sample.logits_processor import build_logitsprocs
from vllmx.sample.ops import get_sampler_ops
from vllmx.sample.prompt_logprob import PromptLogprobsWorker
from vllmx.sample.sampler import Sampler
from vllmx.worker.attn_utils import (
    AttnMetadataBuilders,
    add_kv_sharing_layers_to_kv_cache_groups,
    cache_layers,
    init_kv_cache,
    shared_kv_cache_layers,
    state_groups,
    zero_blocks,
)
from vllmx.worker.block_table import BlockTables, HybridBlockTables
from vllmx.worker.gpu_steps import GPUSteps
from vllmx.worker.input_batch import InputBatch, make_input_batch
from vllmx.worker.kv_connector import ActiveKVConnector
from vllmx.worker.mamba_config import verify_and_update_config
from vllmx.worker.model_states import MambaHybridModelState
from vllmx.worker.states import RequestState
from vllmx.worker.structured_outputs import StructuredOutputsWorker


class GPUModelRunner:
    """Runs one model on one device. A step is `execute_model`, then `sample_tokens`."""

    def __init__(self, vllm_config: VllmConfig, device: str, dtype: torch.dtype) -> None:
        self.vllm_config = vllm_config
        self.device = device
        self.ops = OpTable(vllm_config.kernel_config, device, dtype)
        self.model: Any = None
        self.execute_model_state: tuple[InputBatch, Tensor] | None = None
        self.gpu_steps: GPUSteps | None = None
        self.kv_connector: ActiveKVConnector | None = None
        self.model_state: MambaHybridModelState | None = None
        # Requests whose end a KV connector is to hear of after the step that runs.
        self._finished_req_ids: set[str] = set()

    def load_model(self) -> None:
        """Build the model and pack its weights."""
        self.model = load_model(self.vllm_config, self.ops)
        states = mamba_layers(self.model)
        if states:
            verify_and_update_config(self.vllm_config, attention_layers(self.model), states)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """What each layer with a part of the cache keeps, by layer name."""
        return {
            name: layer.get_kv_cache_spec(self.vllm_config)
            for name, layer in cache_layers(self.model).items()
            if isinstance(layer, MambaBase) or layer.kv_sharing_target_layer_name is None
        }

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, is_profiling: bool = False
    ) -> None:
        """Allocate the cache; max_model_len is final by now, unless it is to be profiled."""
        layers = cache_layers(self.model)
        self.attn_layers = [layer for layer in layers.values() if isinstance(layer, Attention)]
        shared = shared_kv_cache_layers(layers)
        pages = init_kv_cache(kv_cache_config, layers, self.device)
        kv_cache_config = copy.deepcopy(kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        add_kv_sharing_layers_to_kv_cache_groups(shared, groups)
        self.attn_builders = AttnMetadataBuilders(kv_cache_config, layers, self.device)
        if self.vllm_config.kv_transfer_config is not None and not is_profiling:
            self.kv_connector = ActiveKVConnector(
                self.vllm_config, kv_cache_config, attention_layers(self.model)
            )
        self.block_sizes = [group.kv_cache_spec.block_size for group in groups]
        model_config = self.vllm_config.model_config
        max_num_reqs = self.vllm_config.scheduler_config.max_num_seqs
        max_model_len = model_config.max_model_len
        assert max_model_len is not None
        self.req_states = RequestState(
            max_num_reqs, max_model_len, model_config.get_vocab_size(), self.device
        )
        sizes = (self.block_sizes, max_num_reqs, max_model_len, self.device)
        self.structured_outputs = StructuredOutputsWorker(
            max_num_reqs, model_config.get_vocab_size(), self.device
        )
        self.block_tables: BlockTables
        if kv_cache_config.has_mamba_layers:
            self.block_tables = tables = HybridBlockTables(*sizes, state_groups(groups))
            self.model_state = MambaHybridModelState(kv_cache_config, pages, tables, self.device)
        else:
            self.block_tables = BlockTables(*sizes)
        self.forget_requests()
        if self.device != "cpu":
            self.gpu_steps = GPUSteps(self)

    def release_kv_cache(self) -> None:
        """Let go of the cache, of the tables, and of graphs that read them."""
        self.execute_model_state = None
        self.gpu_steps = self.model_state = None
        for layer in cache_layers(self.model).values():
            layer.release_kv_cache()
        del self.attn_builders, self.req_states, self.block_tables
        del self.sampler, self.prompt_logprobs_worker

    def profile_cudagraph_memory(self) -> int:
        """Bytes that the CUDA graphs will take, from a few of them; they are let go of."""
        return 0 if self.gpu_steps is None else self.gpu_steps.profile_cudagraph_memory()

    def rehearse_cudagraphs(self) -> None:
        """Run once, without a graph, each step that is to be captured at the start."""
        if self.gpu_steps is not None:
            self.gpu_steps.rehearse()

    def capture_model(self) -> int:
        """Capture CUDA graphs, if there are to be any; the bytes that they take."""
        return 0 if self.gpu_steps is None else self.gpu_steps.capture_model()

    def forget_requests(self) -> None:
        """Drop all requests, at the start and after an interrupted step."""
        self.execute_model_state = None
        if self.gpu_steps is not None:
            self.gpu_steps.reset()
        self.req_states.reset()
        self.block_tables.reset()
        model_config = self.vllm_config.model_config
        kernel_config = self.vllm_config.kernel_config
        invariant = kernel_config.batch_invariant
        self.sampler = Sampler(
            self.req_states,
            model_config.logprobs_mode,
            model_config.seed,
            invariant,
            use_fp64_gumbel=model_config.use_fp64_gumbel,
            reasoning_config=self.vllm_config.reasoning_config,
            processors=build_logitsprocs(
                self.vllm_config,
                torch.device(self.device),
                is_pin_memory=self.device != "cpu",
                custom_logitsprocs=model_config.logits_processors,
            ),
            ops=get_sampler_ops(self.device, invariant, priority=kernel_config.default_priority),
        )
        self.prompt_logprobs_worker = PromptLogprobsWorker(self.req_states, self.sampler.ops)

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the model on this step's tokens; None, since `sample_tokens` has the output.

        A step without tokens returns the empty output at once.
        """
        self.finish_requests(scheduler_output)
        self.add_requests(scheduler_output.scheduled_new_reqs)
        self.update_requests(scheduler_output.scheduled_cached_reqs)
        if scheduler_output.total_num_scheduled_tokens == 0:
            if self.kv_connector is not None:
                return self.kv_connector.no_forward(scheduler_output)
            return EMPTY_MODEL_RUNNER_OUTPUT
        if scheduler_output.new_block_ids_to_zero:
            zero_blocks(self.attn_layers, scheduler_output.new_block_ids_to_zero, self.device)
        if self.gpu_steps is not None:
            self.execute_model_state = self.gpu_steps.execute(scheduler_output)
            return None
        batch = make_input_batch(scheduler_output, self.req_states)
        if self.model_state is not None:
            self.model_state.preprocess_state(batch)
        hidden_states = self.forward(batch, self.prepare_attn(batch), scheduler_output)
        self.execute_model_state = (batch, hidden_states)
        return None

    def forward(
        self, batch: InputBatch, attn_metadata: dict[str, Any], scheduler_output: SchedulerOutput
    ) -> Tensor:
        """Hidden states [num_tokens, H] of the batch; a KV connector begins its work before."""
        context = ForwardContext(attn_metadata)
        if self.kv_connector is not None:
            self.kv_connector.pre_forward(scheduler_output, context)
            self._finished_req_ids = scheduler_output.finished_req_ids
        with set_forward_context(context):
            return self.model(batch.input_ids, batch.positions)

    @torch.inference_mode()
    def sample_tokens(
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Sample a token for each request whose known tokens have all been computed.

        With async scheduling on a GPU the tokens may still be on their way.
        """
        assert self.execute_model_state is not None, "sample_tokens needs an execute_model first"
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
        pending: AsyncModelRunnerOutput | None = None
        if self.gpu_steps is not None:
            pending = self.gpu_steps.sample(batch, hidden_states, output, grammar_output)
        else:
            self._sample(batch, hidden_states, output, grammar_output)
        if self.kv_connector is not None:
            output.kv_connector_output = self.kv_connector.post_forward(self._finished_req_ids)
        self.req_states.num_computed_tokens[batch.idx_mapping_np] += batch.num_scheduled_tokens
        if pending is None:
            return output
        is_async = self.vllm_config.scheduler_config.async_scheduling
        return pending if is_async else pending.get_output()

    def _sample(
        self,
        batch: InputBatch,
        hidden_states: Tensor,
        output: ModelRunnerOutput,
        grammar_output: GrammarOutput | None,
    ) -> None:
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
        logits = self.model.compute_logits(last)
        constrained = None
        if grammar_output is not None:
            constrained = self.structured_outputs.apply_grammar_bitmask(
                logits, batch, grammar_output
            )
        sampled = self.sampler(logits, rows, positions, constrained)
        token_ids = sampled.sampled_token_ids.cpu().numpy()
        states = self.req_states
        states.all_token_ids.np[rows, states.total_len[rows]] = token_ids
        states.total_len[rows] += 1
        self.place_logprobs(batch, sampled.logprobs, output)
        if every:
            output.sampled_token_ids = token_ids[:, None].tolist()
            return
        output.sampled_token_ids = [[] for _ in batch.req_ids]
        for i, token_id in zip(sampling.tolist(), token_ids.tolist(), strict=True):
            output.sampled_token_ids[i] = [token_id]

    def place_logprobs(
        self, batch: InputBatch, logprobs: LogprobsLists | None, output: ModelRunnerOutput
    ) -> None:
        """Put the log-probabilities of the requests that were sampled into `output`."""
        if logprobs is None or len(batch.sample_reqs) == batch.num_reqs:
            output.logprobs = logprobs
            return
        # Requests still in their prompt have no row: number the rows by request.
        starts = [0] * batch.num_reqs
        for row, i in enumerate(batch.sample_reqs.tolist()):
            starts[i] = row
        output.logprobs = logprobs._replace(cu_num_generated_tokens=starts)

    def prepare_attn(self, batch: InputBatch) -> dict[str, Any]:
        """Attention metadata of each layer for this batch, on a CPU."""
        tables = self.block_tables.gather_block_tables(batch)
        slots = self.block_tables.compute_slot_mappings(batch)
        return self.attn_builders.build(batch, tables, slots)

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Free the rows of requests that ended or lost their cache."""
        ended = scheduler_output.finished_req_ids
        if scheduler_output.preempted_req_ids:
            ended = ended | scheduler_output.preempted_req_ids
        for req_id in ended:
            row = self.req_states.remove_request(req_id)
            if row is not None:
                self.sampler.remove_request(row)
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

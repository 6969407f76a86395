# SPDX-License-Identifier: Apache-2.0
"""Runs a hybrid model without an engine: caches and states of its own, any mix of requests."""

from pathlib import Path

import numpy as np
import torch

from vllmx.attention.backend import CommonAttentionMetadata
from vllmx.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllmx.config import finalize
from vllmx.engine.arg_utils import engine_args_to_config
from vllmx.forward_context import ForwardContext, set_forward_context
from vllmx.ir.select import OpTable
from vllmx.layers.attention import attention_layers
from vllmx.layers.mamba_base import mamba_layers
from vllmx.model_loader.loader import load_model
from vllmx.model_loader.resolve import resolve_model

BLOCK_SIZE = 16
BLOCKS_EACH = 16
"""Blocks of each request: its tokens go to its own, its states lie in the first of them."""


class HybridDriver:
    """One model with room for a few requests, each known by its number."""

    def __init__(
        self,
        folder: Path,
        requests: int = 4,
        dtype: torch.dtype = torch.float32,
        ir_op_priority: dict[str, list[str]] | None = None,
    ) -> None:
        run = engine_args_to_config(model=str(folder), skip_tokenizer_init=True)
        run.kernel.default_priority = ["torch"]
        run.kernel.ir_op_priority = ir_op_priority or {}
        run.load.use_tqdm_on_load = False
        config = finalize(run)
        resolve_model(config)
        config.cache_config.block_size = BLOCK_SIZE
        self.model = load_model(config, OpTable(config.kernel_config, "cpu", dtype))
        self.attention = attention_layers(self.model)
        self.recurrent = mamba_layers(self.model)
        blocks = 1 + requests * BLOCKS_EACH
        for layer in self.attention.values():
            shape = layer.backend.get_kv_cache_shape(
                blocks, BLOCK_SIZE, layer.num_kv_heads, layer.head_size
            )
            layer.bind_kv_cache(torch.full(shape, float("nan"), dtype=dtype))
        for layer in self.recurrent.values():
            layer.bind_kv_cache(
                tuple(
                    torch.full((blocks, *shape), float("nan"), dtype=kind)
                    for shape, kind in zip(layer.get_state_shape(), layer.get_state_dtype())
                )
            )
        self.computed = [0] * requests

    @torch.inference_mode()
    def step(self, batch: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        """Compute new tokens of some requests: request -> tokens; returns their logits."""
        order = sorted(batch, key=lambda request: len(batch[request]))
        lengths = np.array([len(batch[r]) for r in order])
        before = np.array([self.computed[r] for r in order])
        starts = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
        first = np.array([1 + r * BLOCKS_EACH for r in order])
        positions = np.concatenate([np.arange(b, b + n) for b, n in zip(before, lengths)])
        rows = np.repeat(np.arange(len(order)), lengths)
        slots = (first[rows] + positions // BLOCK_SIZE) * BLOCK_SIZE + positions % BLOCK_SIZE
        common = CommonAttentionMetadata(
            query_start_loc=torch.from_numpy(starts),
            query_start_loc_np=starts,
            seq_lens=torch.from_numpy((before + lengths).astype(np.int32)),
            seq_lens_np=before + lengths,
            num_reqs=len(order),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(lengths.max()),
            max_seq_len=int((before + lengths).max()),
            block_table_tensor=torch.from_numpy(
                (first[:, None] + np.arange(BLOCKS_EACH)).astype(np.int32)
            ),
            slot_mapping=torch.from_numpy(slots),
        )
        device = torch.device("cpu")
        metadata = dict.fromkeys(
            self.recurrent, GDNAttentionMetadataBuilder(BLOCK_SIZE, device).build(common)
        )
        for name, layer in self.attention.items():
            metadata[name] = layer.backend.get_builder_cls()(BLOCK_SIZE, device).build(common)
        tokens = torch.tensor([t for r in order for t in batch[r]])
        with set_forward_context(ForwardContext(metadata)):
            hidden = self.model(tokens, torch.from_numpy(positions))
        logits = self.model.compute_logits(hidden)
        for r in order:
            self.computed[r] += len(batch[r])
        return {r: logits[starts[i] : starts[i + 1]] for i, r in enumerate(order)}

# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/mamba/abstract.py @ v0.25.0
"""What recurrent layers share: states of fixed size in place of a cache that grows with tokens."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from vllmx.config import VllmConfig
from vllmx.core.kv_cache_interface import MambaSpec


class MambaBase(nn.Module):
    """A layer that keeps one set of states a request. `prefix` names it and its states.

    The runner sets `kv_cache`, one tensor a state, [num_blocks, *shape]: a block of the KV cache
    holds one set.
    """

    kv_cache: tuple[Tensor, ...]

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.layer_name = prefix

    @abstractmethod
    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each state of one request."""

    @abstractmethod
    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Dtype of each state."""

    @property
    def supports_cudagraph(self) -> bool:
        """Whether a batch of decodes may be recorded once and replayed for others: the layer takes
        state_indices, which stay in place, from the device alone and leaves state 0 to padding."""
        return False

    @property
    @abstractmethod
    def mamba_type(self) -> str:
        """Which metadata the layer reads, by upstream's name of its attention backend."""

    def bind_kv_cache(self, states: tuple[Tensor, ...]) -> None:
        """Use `states`, [num_blocks, *shape] in the order of get_state_shape, from now on."""
        self.kv_cache = states

    def release_kv_cache(self) -> None:
        """Let go of the states, until others are bound."""
        del self.kv_cache

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MambaSpec:
        """What this layer keeps of a request, and after how many tokens."""
        cache_config = vllm_config.cache_config
        assert cache_config.mamba_block_size is not None
        return MambaSpec(
            block_size=cache_config.mamba_block_size,
            shapes=self.get_state_shape(),
            dtypes=tuple(str(d).removeprefix("torch.") for d in self.get_state_dtype()),
            page_size_padded=cache_config.mamba_page_size_padded,
            mamba_type=self.mamba_type,
            mamba_cache_mode=cache_config.mamba_cache_mode,
        )


def mamba_layers(model: nn.Module) -> dict[str, MambaBase]:
    """The recurrent layers of a model by name, in order."""
    return {m.layer_name: m for m in model.modules() if isinstance(m, MambaBase)}

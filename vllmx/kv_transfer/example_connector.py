# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/distributed/kv_transfer/kv_connector/v1/example_connector.py @ v0.25.0
"""A connector that keeps the KV entries of prompts in a folder, for tests and as an example.

One safetensors file holds one full block of a prompt, all layers, under a name that stands for the
block's tokens and all before them. So any engine with the same model that sees the folder can load
the part of a prompt that some engine has computed before.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllmx.kv_transfer.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

if TYPE_CHECKING:
    from torch import Tensor

    from vllmx.config import VllmConfig
    from vllmx.core.kv_cache_interface import KVCacheConfig
    from vllmx.core.kv_cache_manager import KVCacheBlocks
    from vllmx.core.output import SchedulerOutput
    from vllmx.forward_context import ForwardContext
    from vllmx.request import Request

logger = logging.getLogger(__name__)


@dataclass
class ReqMeta:
    """What a step moves for one request; each entry is (name of the file, block id)."""

    req_id: str
    loads: list[tuple[str, int]] = field(default_factory=list)
    saves: list[tuple[str, int]] = field(default_factory=list)


@dataclass
class ExampleConnectorMetadata(KVConnectorMetadata):
    """What a step moves."""

    requests: list[ReqMeta] = field(default_factory=list)


@dataclass
class _Prompt:
    """A running request whose prompt is saved as it is computed."""

    names: list[str]
    block_ids: list[int]
    num_saved: int = 0


class ExampleConnector(KVConnectorBase_V1):
    """Saves full blocks of prompts to a folder and loads them, within the step that needs them.

    `kv_connector_extra_config.shared_storage_path` is the folder, by default that for temporary
    files. Prompts with images or sound, or given as embeddings, are left alone.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        block_size = vllm_config.cache_config.block_size
        assert block_size is not None
        self._block_size = block_size
        self._storage_path = Path(
            self._kv_transfer_config.get_from_extra_config(
                "shared_storage_path", tempfile.gettempdir()
            )
        )
        # Blocks of other models, or of other shapes, have other names.
        identity = [
            vllm_config.model_config.model,
            *[group.kv_cache_spec for group in kv_cache_config.kv_cache_groups],
        ]
        self._identity = hashlib.sha256(repr(identity).encode()).digest()
        # Scheduler's side.
        self._names: dict[str, list[str]] = {}
        self._first_matched: dict[str, int] = {}
        self._loads: dict[str, list[tuple[str, int]]] = {}
        self._prompts: dict[str, _Prompt] = {}
        # Worker's side.
        self._kv_caches: dict[str, Tensor] = {}
        self._pending: dict[str, dict[str, Tensor]] = {}
        self._failed_blocks: set[int] = set()
        self._steps_without_saves = 0

    # ------------------------------------------------------------------ scheduler's side

    def on_new_request(self, request: Request) -> None:
        """Work out the names of its prompt's blocks."""
        if request.mm_features or request.prompt_embeds is not None:
            return
        lora = request.lora_request
        extra = (request.cache_salt, lora.lora_name if lora is not None else None)
        digest = hashlib.sha256(self._identity + repr(extra).encode()).digest()
        tokens = array("q", request.prompt_token_ids or ())
        names = []
        for start in range(0, len(tokens) - self._block_size + 1, self._block_size):
            block = tokens[start : start + self._block_size].tobytes()
            digest = hashlib.sha256(digest + block).digest()
            names.append(digest.hex())
        self._names[request.request_id] = names

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens of the blocks after `num_computed_tokens` whose files are there."""
        if not self._kv_transfer_config.is_kv_consumer:
            return 0, False
        first = num_computed_tokens // self._block_size
        # One token at least is computed here, as its logits are needed.
        last = (request.num_tokens - 1) // self._block_size
        names = self._names.get(request.request_id, [])[first:last]
        num_found = 0
        while num_found < len(names) and self._file(names[num_found]).exists():
            num_found += 1
        self._first_matched[request.request_id] = first
        return num_found * self._block_size, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Note which blocks this step has to load."""
        if num_external_tokens == 0:
            return
        req_id = request.request_id
        first = self._first_matched[req_id]
        # A prompt that is matched to its last token is allocated one token less.
        found = slice(first, first - (-num_external_tokens // self._block_size))
        (block_ids,) = blocks.get_block_ids()
        self._loads[req_id] = list(zip(self._names[req_id][found], block_ids[found], strict=True))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The loads that were noted, and the blocks of prompts that this step completes."""
        computed = {}
        for req_id in scheduler_output.preempted_req_ids or ():
            self._prompts.pop(req_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            names = self._names.get(new.req_id)
            if names and self._kv_transfer_config.is_kv_producer:
                self._prompts[new.req_id] = _Prompt(names, new.block_ids[0].copy())
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, num_computed, new_block_ids in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            computed[req_id] = num_computed
            if new_block_ids is not None and req_id in self._prompts:
                self._prompts[req_id].block_ids += new_block_ids[0]
        metadata = ExampleConnectorMetadata()
        for req_id, num_computed in computed.items():
            num_tokens = num_computed + scheduler_output.num_scheduled_tokens[req_id]
            request = ReqMeta(
                req_id, self._loads.pop(req_id, []), self._completed_blocks(req_id, num_tokens)
            )
            if request.loads or request.saves:
                metadata.requests.append(request)
        return metadata

    def _completed_blocks(self, req_id: str, num_tokens: int) -> list[tuple[str, int]]:
        """Blocks of a prompt that are full once `num_tokens` are computed, and not saved yet."""
        prompt = self._prompts.get(req_id)
        if prompt is None:
            return []
        num_full = min(num_tokens // self._block_size, len(prompt.names))
        blocks = zip(prompt.names[:num_full], prompt.block_ids[:num_full], strict=True)
        saves = [
            (name, block_id)
            for name, block_id in list(blocks)[prompt.num_saved :]
            if not self._file(name).exists()
        ]
        prompt.num_saved = num_full
        if num_full == len(prompt.names):
            del self._prompts[req_id]
        return saves

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; everything is saved within the steps."""
        for known in (self._names, self._first_matched, self._loads, self._prompts):
            known.pop(request.request_id, None)
        return False, None

    # ------------------------------------------------------------------ worker's side

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Learn where each layer's cache is, [num_blocks, block_size, ...]."""
        self._kv_caches = kv_caches
        self._storage_path.mkdir(parents=True, exist_ok=True)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Fill this step's blocks from their files, all layers at once."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ExampleConnectorMetadata)
        self._pending.clear()  # of a step that did not come to its end
        for request in metadata.requests:
            for name, block_id in request.loads:
                self._load(name, block_id)
        if self._failed_blocks:
            # What this step computes, and one that is planned on top of it, may be wrong.
            self._steps_without_saves = 2

    def _load(self, name: str, block_id: int) -> None:
        """Fill a block from its file, or note that this failed; a damaged file is removed, so that
        the block can be saved again."""
        try:
            self._read(name, block_id)
        except (OSError, ValueError, KeyError) as error:
            logger.error("Can't load the KV entries in %s: %s", self._file(name), error)
            self._failed_blocks.add(block_id)
            if not isinstance(error, OSError):
                self._file(name).unlink(missing_ok=True)

    def _read(self, name: str, block_id: int) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            saved = load_file(self._file(name))
        except SafetensorError as error:
            raise ValueError(error) from error
        for layer_name, kv_cache in self._kv_caches.items():
            if saved[layer_name].shape != kv_cache[block_id].shape:
                raise ValueError(f"{layer_name} has the shape {tuple(saved[layer_name].shape)}")
        for layer_name, kv_cache in self._kv_caches.items():
            kv_cache[block_id].copy_(saved[layer_name])

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything was loaded before the first layer."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Copy a layer's part of the blocks that this step completes to the host."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ExampleConnectorMetadata)
        if self._steps_without_saves:
            return
        for request in metadata.requests:
            for name, block_id in request.saves:
                copied = kv_layer[block_id].detach().to("cpu", copy=True)
                self._pending.setdefault(name, {})[layer_name] = copied

    def wait_for_save(self) -> None:
        """Write the files; each appears under its name when it is complete."""
        from safetensors.torch import save_file

        self._steps_without_saves = max(self._steps_without_saves - 1, 0)
        for name, tensors in self._pending.items():
            path = self._file(name)
            part = path.with_suffix(f".part{os.getpid()}")
            save_file(tensors, part)
            part.replace(path)
        self._pending.clear()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose file could not be read."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    # ------------------------------------------------------------------ files

    def _file(self, name: str) -> Path:
        return self._storage_path / f"{name}.safetensors"

# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/distributed/ec_transfer/ec_connector/example_connector.py @ v0.25.0
"""Encoder outputs as files of a folder that all engines see: for tests and for finding faults."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllmx.ec_transfer.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole

if TYPE_CHECKING:
    from vllmx.config import VllmConfig
    from vllmx.core.output import SchedulerOutput
    from vllmx.request import Request

FILENAME = "encoder_cache.safetensors"
# Users may name their items, and a name must not lead out of the folder.
_PLAIN_NAME = re.compile(r"(?!\.)[\w.=@+-]{1,200}", re.ASCII)


@dataclass
class MMMeta:
    """An output to fetch."""

    mm_hash: str
    num_token: int
    """Embeddings in it."""

    @staticmethod
    def make_meta(mm_hash: str, num_token: int) -> MMMeta:
        """The output called `mm_hash`."""
        return MMMeta(mm_hash, num_token)


@dataclass
class ECExampleConnectorMetadata(ECConnectorMetadata):
    """The outputs that a step fetches."""

    mm_datas: list[MMMeta] = field(default_factory=list)

    def add_mm_data(self, mm_data: MMMeta) -> None:
        """Fetch one more."""
        self.mm_datas.append(mm_data)


class ECExampleConnector(ECConnectorBase):
    """`shared_storage_path` of `ec_connector_extra_config` is the folder; each output is a
    safetensors file in a folder of its name."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        assert vllm_config.ec_transfer_config is not None
        self._storage_path: str = vllm_config.ec_transfer_config.get_from_extra_config(
            "shared_storage_path", tempfile.gettempdir()
        )
        # Identifier -> embeddings, of what the next step fetches.
        self._mm_datas_need_loads: dict[str, int] = {}

    # ------------------------------------------------------------------ the scheduler's half

    def has_cache_item(self, identifier: str) -> bool:
        """Whether there is a file of `identifier`."""
        return os.path.exists(os.path.join(self._folder(identifier), FILENAME))

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """Have item `index` fetched if this engine is a consumer and there is a file of it."""
        mm_hash = request.mm_features[index].identifier
        if self.is_consumer and self.has_cache_item(mm_hash):
            self._mm_datas_need_loads[mm_hash] = request.get_num_encoder_embeds(index)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        """The outputs to fetch in this step."""
        to_load, self._mm_datas_need_loads = self._mm_datas_need_loads, {}
        return ECExampleConnectorMetadata([MMMeta(*item) for item in to_load.items()])

    # ------------------------------------------------------------------ the worker's half

    def start_load_caches(self, encoder_cache: dict[str, Any], **kwargs: Any) -> None:
        """Read the files of the bound step; those in `encoder_cache` already are left alone.

        `device` in `kwargs`: where to put the tensors, "cpu" by default. FileNotFoundError for an
        output that has gone since the step was planned.
        """
        import safetensors.torch

        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ECExampleConnectorMetadata)
        for mm_data in metadata.mm_datas:
            if mm_data.mm_hash in encoder_cache:
                continue
            path = os.path.join(self._folder(mm_data.mm_hash), FILENAME)
            tensors = safetensors.torch.load_file(path, device=kwargs.get("device", "cpu"))
            encoder_cache[mm_data.mm_hash] = tensors["ec_cache"]

    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **kwargs: Any) -> None:
        """Write the file of an output if this engine is a producer.

        It appears at its place when it is complete, so that nobody reads a part of it.
        """
        if not self.is_producer:
            return
        import safetensors.torch

        path = self._generate_filename_debug(mm_hash)
        part = f"{path}.part{os.getpid()}"
        tensor = encoder_cache[mm_hash].detach().cpu().contiguous()
        safetensors.torch.save_file({"ec_cache": tensor}, part)
        os.replace(part, path)

    # ------------------------------------------------------------------ places

    def _folder(self, mm_hash: str) -> str:
        if not _PLAIN_NAME.fullmatch(mm_hash):
            mm_hash = hashlib.sha256(mm_hash.encode()).hexdigest()
        return os.path.join(self._storage_path, mm_hash)

    def _generate_foldername_debug(self, mm_hash: str, create_folder: bool = True) -> str:
        folder = self._folder(mm_hash)
        if create_folder:
            os.makedirs(folder, exist_ok=True)
        return folder

    def _generate_filename_debug(self, mm_hash: str) -> str:
        return os.path.join(self._generate_foldername_debug(mm_hash), FILENAME)

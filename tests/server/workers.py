# SPDX-License-Identifier: Apache-2.0
"""Workers without a model, for parallel.worker_cls: slow, faulty, slow to load."""

from __future__ import annotations

import time

from vllmx.config import VllmConfig
from vllmx.worker.null_runner import NullWorker

TEXT_IDS = range(64, 90)
"""Ids of the letters a to z in the byte tokenizer of helpers."""


def letters(req_id: str, position: int) -> int:
    """The alphabet over and over."""
    return TEXT_IDS[position % len(TEXT_IDS)]


class LetterWorker(NullWorker):
    """Says the alphabet at once."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config, script=letters, check=True)


class SlowWorker(NullWorker):
    """Says the alphabet, 20 ms a step."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config, script=letters, delay=0.02)


class FaultyWorker(NullWorker):
    """Fails in its fifth step."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config, script=letters, delay=0.05, fail_at_step=5)


class LoadingWorker(NullWorker):
    """Takes a minute to load."""

    def load_model(self) -> None:
        """Wait."""
        time.sleep(60)

# SPDX-License-Identifier: Apache-2.0
"""What every kernel of ours asks of the device."""

from __future__ import annotations

from vllmx.ir.op import OpContext


def on_gpu(context: OpContext) -> bool | str:
    """A `supports` for kernels that any GPU can run."""
    return True if context.device == "cuda" else f"runs on a GPU, not on {context.device}"

# SPDX-License-Identifier: Apache-2.0
"""Kernels that begin while the one before them ends (programmatic dependent launch).

Such a kernel has a parameter `DEPENDENT_LAUNCH`. Where that is true it calls `gdc_wait` before it
reads or writes what another kernel may hold, and what it does before that costs no time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def after_the_last(device: torch.device) -> dict[str, Any]:
    """The arguments of a launch on `device`: GPUs can do it from Hopper on."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9:
        return {"DEPENDENT_LAUNCH": True, "launch_pdl": True}
    return {"DEPENDENT_LAUNCH": False}

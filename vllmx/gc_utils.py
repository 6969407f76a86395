# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/utils/gc_utils.py @ v0.25.0
"""Keeping the garbage collector away from what lives as long as the engine."""

from __future__ import annotations

import gc


def freeze_gc_heap() -> None:
    """Collect once, then hide everything that is left from later collections.

    A vocabulary and a model are hundreds of thousands of objects; a full collection that walks
    them in the middle of decoding doubles the host's time of those steps. Undone by
    `gc.unfreeze()`, which must follow when the engine is let go of, or its tensors stay.
    """
    gc.collect()
    gc.freeze()

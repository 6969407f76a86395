# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/utils/gc_utils.py @ v0.25.0
"""Keeping the garbage collector away from what lives as long as the engine."""

from __future__ import annotations

import gc

FIRST_THRESHOLD = 20_000
"""New objects between two collections of the youngest. Python's 700 are made by two steps of a few
hundred requests and are alive when they are looked at: a sixth of the host's time at 256 requests
(reports/engine_overhead.md measures with this)."""

_DEFAULT = gc.get_threshold()


def freeze_gc_heap() -> None:
    """Collect once, hide what is left from later collections, and collect less often from now on.

    A vocabulary and a model are hundreds of thousands of objects; a full collection that walks
    them in the middle of decoding doubles the host's time of those steps. `unfreeze_gc_heap` must
    follow when the engine is let go of, or its tensors stay.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(FIRST_THRESHOLD, *_DEFAULT[1:])


def unfreeze_gc_heap() -> None:
    """Let the collector see everything again, as often as before."""
    gc.unfreeze()
    gc.set_threshold(*_DEFAULT)

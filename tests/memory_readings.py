# SPDX-License-Identifier: Apache-2.0
"""A device whose memory reads as a test wants it."""

from vllmx.worker.device_memory import MemorySnapshot

GIB = 1 << 30


class Readings:
    """A device that answers with the snapshots it was given, one after another."""

    def __init__(self, *snapshots: MemorySnapshot, is_unified: bool = False) -> None:
        self.name, self.is_unified = "Made-up GPU", is_unified
        self.snapshots = list(snapshots)
        self.calls: list[str] = []

    def snapshot(self) -> MemorySnapshot:
        self.calls.append("snapshot")
        return self.snapshots.pop(0) if len(self.snapshots) > 1 else self.snapshots[0]

    def reset_peak(self) -> None:
        self.calls.append("reset_peak")

    def release(self) -> None:
        self.calls.append("release")


def free(gib: float, total: float = 80, **others: float) -> MemorySnapshot:
    sizes = {name: int(size * GIB) for name, size in others.items()}
    return MemorySnapshot(int(gib * GIB), int(total * GIB), **sizes)

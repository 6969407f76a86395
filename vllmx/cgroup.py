# SPDX-License-Identifier: Apache-2.0
"""Limits that a container or a batch system sets on this process: Linux control groups, v1 and v2.

`root` is where /proc and /sys are looked for. A system without control groups has no limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def free_memory(root: Path = ROOT) -> int | None:
    """Bytes until the nearest memory limit; None without one.

    File pages that nobody has used lately don't count as taken: the kernel drops them first.
    """
    rooms = []
    for folder, is_v2 in _folders("memory", root):
        limit = _number(folder / ("memory.max" if is_v2 else "memory.limit_in_bytes"))
        used = _number(folder / ("memory.current" if is_v2 else "memory.usage_in_bytes"))
        if limit is None or used is None:
            continue
        idle = _entry(folder / "memory.stat", "inactive_file" if is_v2 else "total_inactive_file")
        rooms.append(max(0, limit - max(0, used - idle)))
    return min(rooms, default=None)


def cpu_limit(root: Path = ROOT) -> int | None:
    """Whole CPUs that the time quota is worth, at least 1; None without a quota.

    Rounded down: the threads of an op wait for each other, so the one without a turn slows all.
    """
    limits = []
    for folder, is_v2 in _folders("cpu", root):
        if is_v2:
            quota, period = _number(folder / "cpu.max"), _number(folder / "cpu.max", 1)
        else:
            quota = _number(folder / "cpu.cfs_quota_us")
            period = _number(folder / "cpu.cfs_period_us")
        if quota is not None and period:
            limits.append(max(1, quota // period))
    return min(limits, default=None)


def _folders(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """The folder of this process's group and those of the groups it is in; True for v2.

    A container may be shown the host's path of its group where only its own part is mounted, so
    not all of them need to exist.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        mount = root / "sys/fs/cgroup"
        if controllers:
            if controller not in controllers.split(","):
                continue
            mount /= controller
        group = PurePosixPath(path.strip("/"))
        for inner in (group, *group.parents):
            if ".." not in inner.parts:
                yield mount / inner, not controllers


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _number(path: Path, index: int = 0) -> int | None:
    """The number at `index` of a file; None for `max`, -1 and where there is none."""
    words = _read(path).split()
    return int(words[index]) if len(words) > index and words[index].isdigit() else None


def _entry(path: Path, name: str) -> int:
    """The number after `name` in a file of `name number` lines; 0 where there is none."""
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0

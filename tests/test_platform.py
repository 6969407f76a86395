# SPDX-License-Identifier: Apache-2.0
"""Memory and cores that this process may use, in a made-up /proc and /sys."""

import os
from pathlib import Path

import pytest

from vllmx.config import DeviceConfig
from vllmx.exceptions import UserError
from vllmx.platform import available_memory, num_threads

GIB = 1 << 30
MEMINFO = f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {32 * GIB // 1024} kB\n"


@pytest.fixture
def system(tmp_path: Path, monkeypatch):
    """system(files): a root folder with these files; the host has 32 GiB and 8 cores free."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))

    def make(files: dict[str, str]) -> Path:
        for name, text in {"proc/meminfo": MEMINFO, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


def v2(path: str, groups: dict[str, dict[str, str]]) -> dict[str, str]:
    files = {"proc/self/cgroup": f"0::{path}\n"}
    for group, values in groups.items():
        files |= {f"sys/fs/cgroup/{group}/{name}": text for name, text in values.items()}
    return files


def memory(limit: int | str, used: int, idle: int = 0) -> dict[str, str]:
    stat = f"anon {used - idle}\nfile {idle}\ninactive_file {idle}\n"
    return {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": stat}


V1 = {
    "proc/self/cgroup": "9:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/x\n",
    # Only the container's own part is mounted, so not at /docker/abc.
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
    "sys/fs/cgroup/memory/memory.stat": f"cache 5\ntotal_inactive_file {GIB}\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
}
V1_OFF = {
    **V1,
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
}


@pytest.mark.parametrize(
    ("files", "gib"),
    [
        ({}, 32),
        ({"proc/self/cgroup": "0::/\n"}, 32),
        (v2("/", {"": memory("max", GIB)}), 32),
        (v2("/", {"": memory(4 * GIB, GIB)}), 3),
        (v2("/", {"": memory(4 * GIB, 3 * GIB, idle=2 * GIB)}), 3),
        (v2("/", {"": memory(GIB, 2 * GIB)}), 0),
        (v2("/", {"": memory(64 * GIB, GIB)}), 32),
        (v2("/a/b", {"a/b": memory("max", GIB), "a": memory(6 * GIB, GIB)}), 5),
        (v2("/a/b", {"a/b": memory(3 * GIB, GIB), "a": memory(6 * GIB, GIB)}), 2),
        (v2("/../../host/b", {"": memory(4 * GIB, GIB)}), 3),
        (v2("/", {"": {"memory.max": f"{GIB}\n"}}), 32),
        (V1, 2),
        (V1_OFF, 32),
    ],
)
def test_memory_ends_at_the_nearest_limit(system, files, gib) -> None:
    assert available_memory("cpu", system(files)) == gib * GIB


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        (v2("/", {"": {"cpu.max": "max 100000\n"}}), 8),
        (v2("/", {"": {"cpu.max": "200000 100000\n"}}), 2),
        (v2("/", {"": {"cpu.max": "350000 100000\n"}}), 3),
        (v2("/", {"": {"cpu.max": "50000 100000\n"}}), 1),
        (v2("/", {"": {"cpu.max": "6400000 100000\n"}}), 8),
        (v2("/a/b", {"a/b": {"cpu.max": "max 100000\n"}, "a": {"cpu.max": "400000 100000\n"}}), 4),
        (V1, 2),
        (V1_OFF, 8),
    ],
)
def test_threads_are_no_more_than_the_quota_pays_for(system, files, cores) -> None:
    root = system(files)
    assert num_threads(DeviceConfig(), root) == cores
    assert num_threads(DeviceConfig(num_threads=5), root) == 5


def test_system_that_hides_its_free_memory_is_refused_with_the_cure(system) -> None:
    with pytest.raises(UserError, match="kv_cache_memory_bytes"):
        available_memory("cpu", system({"proc/meminfo": "MemTotal: 1 kB\n"}))


def test_this_system_has_memory_and_cores() -> None:
    assert available_memory("cpu") > 0 and num_threads(DeviceConfig()) >= 1

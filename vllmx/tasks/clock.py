# SPDX-License-Identifier: Apache-2.0
"""When this process started, for times that include the interpreter and every import."""

import os
import time

_IMPORTED = time.monotonic()
_LONGEST_START = 30.0


def process_start() -> float:
    """Start of the process on time.monotonic's clock; where the system can't say, of this import.

    Linux gives it in ticks since boot in /proc, exact to 10 ms.
    """
    try:
        with open("/proc/self/stat", encoding="utf-8") as stat:
            ticks = int(stat.read().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return _IMPORTED
    start = time.monotonic() - age
    return start if 0 <= _IMPORTED - start < _LONGEST_START else _IMPORTED

# SPDX-License-Identifier: Apache-2.0
"""What every test process needs set before vllmx or torch is imported."""

import os
from pathlib import Path

# Triton kernels are tested in its interpreter; CI has no GPU.
os.environ["TRITON_INTERPRET"] = "1"
# Two cores are shared with child processes: threads that spin for each other cost most.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from vllmx import platform

# Times that somebody measured on this machine would decide on the providers that are tested.
platform.KERNEL_CACHE = os.path.join(os.path.dirname(__file__), "no measured kernels")


def pytest_sessionstart(session) -> None:
    """A JUnit file says what tree it is of, without which `vllmx parity collect` refuses it. Only
    the process that writes it has one: under xdist not the workers."""
    from _pytest.junitxml import xml_key

    xml = session.config.stash.get(xml_key, None)
    if xml is not None:
        from parity import tree_stamp

        root = Path(__file__).resolve().parents[1]
        xml.add_global_property(tree_stamp.PROPERTY, tree_stamp.of(root))

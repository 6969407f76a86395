# SPDX-License-Identifier: Apache-2.0
"""The compiler takes every Triton kernel. The interpreter, in which their numbers are tested,
also takes what the compiler refuses: a variable of another shape after an `if`, say."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllmx.platform import has

ROOT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("compile_kernels.py")
KERNELS = ROOT / "vllmx" / "kernels"

pytestmark = pytest.mark.skipif(not has("triton"), reason="the package triton is not installed")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Errors by kernel and row, from a process without the interpreter and with an empty cache."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, str(CHILD)], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_compiler_takes_every_kernel(compiled):
    errors = {name: error for name, error in compiled.items() if error and name != "refused"}
    assert errors == {}


def test_the_compiler_refuses_what_the_interpreter_takes(compiled):
    assert "shape" in compiled["refused"] or "type" in compiled["refused"], compiled["refused"]


def test_no_kernel_is_left_out(compiled):
    there = set()
    for path in KERNELS.glob("triton_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                there.add(f"{path.stem}.{node.name}")
    assert there and there == {name.split()[0] for name in compiled if name != "refused"}

# SPDX-License-Identifier: Apache-2.0
"""pytest plugin of the child process: installs the map and writes a JSON line for each test."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import random
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from . import adapters, engines
from .finder import install
from .mapping import load_map
from .placeholder import MissingSymbol, Phase

UPSTREAM = load_map(Path(os.environ["UPSTREAM_MAP"]))
ROWS = Path(os.environ["UPSTREAM_ROWS"])
UNEXPECTED = re.compile(r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'")
MARKS = ("slow_test", "skip_global_cleanup", "cpu_test", "optional", "distributed", "asyncio")

install(UPSTREAM)  # here, as pytest imports a folder's conftest.py before it calls any hook


def pytest_configure(config: pytest.Config) -> None:
    """Declare upstream's markers, and take in what the map says of this file."""
    file = config.args[0].split("::")[0]
    adapters.current_platform.passes_for_cuda = UPSTREAM.runs_as_cuda(file)
    engines.SETTINGS.update(UPSTREAM.settings_for(file))
    logging.getLogger("vllmx").setLevel(logging.INFO)  # as upstream's is
    factor = UPSTREAM.patience.get(file, 1.0)
    asyncio.sleep = partial(_scaled_sleep, asyncio.sleep, factor)
    if factor != 1.0:
        real = time.sleep
        time.sleep = lambda delay: real(delay * factor)
    for mark in MARKS:
        config.addinivalue_line("markers", f"{mark}: of upstream")


async def _scaled_sleep(sleep: Any, factor: float, delay: float, result: Any = None) -> Any:
    return await sleep(delay * factor, result)


@pytest.fixture(scope="session")
def vllm_runner() -> type[engines.VllmRunner]:
    """Upstream's fixture of the same name."""
    return engines.VllmRunner


@pytest.fixture
def example_prompts(pytestconfig: pytest.Config) -> list[str]:
    """The prompts of upstream's file, a line each."""
    file = pytestconfig.rootpath / "tests" / "prompts" / "example.txt"
    return file.read_text(encoding="utf-8").splitlines(keepends=True)


def write(nodeid: str, status: str, reason: str = "", symbol: str = "") -> None:
    """Append one row."""
    row = {"id": nodeid, "status": status, "reason": reason, "symbol": symbol}
    with ROWS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the deselected tests out, each with its reason."""
    kept = []
    for item in items:
        reason = UPSTREAM.deselected(item.nodeid)
        if reason is None:
            kept.append(item)
        else:
            write(item.nodeid, "deselected", reason)
    items[:] = kept


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test, for which upstream has a plugin of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """From here on a missing symbol is an error. Chance is the same in every run."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    Phase.running = True
    try:
        return (yield)
    finally:
        Phase.running = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """One row a test: of the phase that went wrong, or of the call that passed."""
    report = yield
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "xfail"
        write(item.nodeid, "skipped", reason)
    elif report.failed:
        assert call.excinfo is not None
        _write_error(item.nodeid, call.excinfo.value)
    elif report.when == "call":
        write(item.nodeid, "passed")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[Any]:
    """A file that cannot be imported, or that skips itself, is a row of its own."""
    report = yield
    if report.skipped:
        write(collector.nodeid, "skipped", str(report.longrepr[2]))
    elif report.failed:
        error = getattr(report, "call", None)
        value = error.excinfo.value if error is not None and error.excinfo else None
        cause = value.__cause__ if value is not None and value.__cause__ is not None else value
        _write_error(collector.nodeid, cause or Exception(str(report.longrepr)))
    return report


def _write_error(nodeid: str, error: BaseException) -> None:
    explained = UPSTREAM.test(nodeid)
    symbol, absence = _missing(error)
    words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    if explained or absence:
        write(nodeid, "not applicable", explained or absence or "", symbol)
    elif symbol:
        write(nodeid, "missing symbol", words, symbol)
    else:
        write(nodeid, "failed", words)


def _missing(error: BaseException | None) -> tuple[str, str | None]:
    """(name that is not there, why not by the map) if that is what `error` is about."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, MissingSymbol):
            return error.symbol, UPSTREAM.absence(error.symbol)
        if isinstance(error, AttributeError) and (symbol := _placeholder(error)):
            return symbol, UPSTREAM.absence(symbol)
        if isinstance(error, AttributeError) and (member := _member(error)):
            return member, UPSTREAM.member(member)
        if isinstance(error, TypeError) and (match := UNEXPECTED.search(str(error))):
            name = f"{match[1]}({match[2]})"
            return name, UPSTREAM.member(name)
        error = error.__cause__ or error.__context__
    return "", None


def _placeholder(error: AttributeError) -> str:
    """The symbol that a placeholder stands for, of which the test made an object."""
    return getattr(type(error.obj), "_symbol_", "")


def _member(error: AttributeError) -> str:
    """`Class.name` of an attribute that an object of vllmx does not have."""
    if error.obj is None or not error.name:
        return ""
    owner = error.obj if isinstance(error.obj, type) else type(error.obj)
    for base in owner.__mro__:
        if base.__module__.split(".")[0] == "vllmx":
            return f"{base.__name__}.{error.name}"
    return ""

# SPDX-License-Identifier: Apache-2.0
"""What stands for a name that vllmx does not have.

While test files are imported a placeholder lets itself be named, subclassed, subscripted and used
as a decorator, so that the other tests of a file can run. While a test runs, any use of it raises
`MissingSymbol`.
"""

from __future__ import annotations

from abc import ABCMeta
from types import FunctionType
from typing import Any, NoReturn


class MissingSymbol(Exception):
    """A test used `symbol`, which nothing in vllmx stands for."""

    def __init__(self, symbol: str) -> None:
        super().__init__(symbol)
        self.symbol = symbol


class Phase:
    """Whether a test is running; before that, files are being imported."""

    running = False


def missing(symbol: str) -> type:
    """A placeholder for upstream's `symbol`."""
    return _Placeholder(symbol.rpartition(".")[2], (), {"_symbol_": symbol})


class _Placeholder(ABCMeta):
    _symbol_: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if Phase.running:
            raise MissingSymbol(cls._symbol_)
        if len(args) == 1 and not kwargs and isinstance(args[0], FunctionType):
            return args[0]  # used as a decorator
        return cls

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or name in ("_pytestfixturefunction", "pytestmark"):
            raise AttributeError(name)
        if Phase.running:
            raise MissingSymbol(cls._symbol_)
        return missing(f"{cls._symbol_}.{name}")

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def _use(cls, *args: Any) -> NoReturn:
        raise MissingSymbol(cls._symbol_)

    __iter__ = __enter__ = __exit__ = __len__ = __int__ = __float__ = __index__ = _use
    __add__ = __mul__ = __sub__ = __lt__ = __gt__ = __le__ = __ge__ = _use

    def __bool__(cls) -> bool:
        if Phase.running and "_symbol_" in cls.__dict__:
            raise MissingSymbol(cls._symbol_)
        return True

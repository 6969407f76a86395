# SPDX-License-Identifier: Apache-2.0
"""Errors that reach a user. Each message says what is wrong, where, and what to do."""

from typing import Any


def shown(value: Any) -> str:
    """`value` as text, in a message that must not fail: Python writes no integer of more than 4,300
    digits."""
    try:
        return str(value)
    except ValueError:
        return f"{type(value).__name__} too long to be shown"


class UserError(ValueError):
    """A mistake in a config, a file or a flag: one line on stderr and exit code 2, no traceback."""


class UnsupportedError(UserError, NotImplementedError):
    """Something that a backend or provider in use cannot do, where another one may."""


class ModelNotFoundError(UserError):
    """A model name, folder or cached file that is not there."""


class CheckpointError(UserError):
    """A checkpoint that is truncated, corrupt, or does not match its architecture."""


class WeightError(CheckpointError):
    """A weight that does not fit, called `weight` in the checkpoint."""

    def __init__(self, message: str, weight: str | None = None) -> None:
        super().__init__(message)
        self.weight = weight


class VLLMValidationError(ValueError):
    """A request parameter out of range; HTTP 400 with OpenAI's `param` set.

    Follows upstream vllm/exceptions.py.
    """

    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value

    def __str__(self) -> str:
        """The message, then the parameter and the value that are known."""
        known = (("parameter", self.parameter), ("value", self.value))
        said = ", ".join(f"{name}={shown(value)}" for name, value in known if value is not None)
        return f"{super().__str__()} ({said})" if said else super().__str__()


class VLLMNotFoundError(Exception):
    """Something a request names is not there; HTTP 404 with OpenAI's `param` set.

    Follows upstream vllm/exceptions.py.
    """

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class EngineDeadError(RuntimeError):
    """The engine core stopped and no request can be served any more.

    Follows upstream vllm/v1/engine/exceptions.py.
    """

    def __init__(
        self, message: str = "The engine core is dead; see its log for the cause."
    ) -> None:
        super().__init__(message)


class EngineGenerateError(RuntimeError):
    """One request failed inside the engine; the engine itself goes on.

    Follows upstream vllm/v1/engine/exceptions.py.
    """

# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/registry.py @ v0.25.0
"""Models are found by their class name, which equals `architectures` in config.json.

Those of vllmx are the files of vllmx/models; a package may register its own, see vllmx/plugins.py.
"""

from __future__ import annotations

import importlib
import logging
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllmx.exceptions import UserError

if TYPE_CHECKING:
    from vllmx.models.hf_config import HFConfig

logger = logging.getLogger(__name__)

_NAME = re.compile(r"^(?:class )?(\w+For\w+|\w+LMHeadModel|ChatGLMModel)(?=[(:]| = )", re.MULTILINE)


@cache
def own_architectures() -> dict[str, str]:
    """Architecture name -> module of vllmx.models, read from the text: nothing is imported."""
    folder = Path(__file__).parent / "models"
    return {
        name: path.stem
        for path in sorted(folder.glob("*.py"))
        for name in _NAME.findall(path.read_text(encoding="utf-8"))
    }


class _ModelRegistry:
    """The models that this process knows: vllmx's own, and those that were registered."""

    def __init__(self) -> None:
        self.registered: dict[str, type | str] = {}

    def register_model(self, model_arch: str, model_cls: type | str) -> None:
        """Serve checkpoints whose `architectures` name `model_arch` with `model_cls`.

        model_cls: a torch module that is built as vllmx's models are, or "module:Class", which is
        imported when it is needed. It stands in for a model of vllmx or of an earlier call of the
        same name. Raises TypeError or ValueError for anything else.
        """
        if not isinstance(model_arch, str):
            raise TypeError(f"model_arch must be a string, not a {type(model_arch).__name__}.")
        if isinstance(model_cls, str):
            parts = model_cls.split(":")
            if len(parts) != 2 or not all(parts):
                raise ValueError(f"model_cls {model_cls!r} is not of the form `<module>:<class>`.")
        elif not (isinstance(model_cls, type) and _is_module(model_cls)):
            raise TypeError(f"model_cls must be a torch module or a string, not {model_cls!r}.")
        before = self._serving(model_arch)
        self.registered[model_arch] = model_cls
        now = self._serving(model_arch)
        if before not in (None, now):
            logger.warning(
                "Architecture %s, which %s served, is now served by %s, as a plugin or the program "
                "has registered it.",
                *(model_arch, before, now),
            )

    def _serving(self, model_arch: str) -> str | None:
        """The class that serves `model_arch`, as `<module>:<class>`; None if none does."""
        found = self.registered.get(model_arch)
        if isinstance(found, type):
            return f"{found.__module__}:{found.__qualname__}"
        module = own_architectures().get(model_arch)
        return found or (module and f"vllmx.models.{module}:{model_arch}")

    def get_supported_archs(self) -> set[str]:
        """All names that a config's `architectures` may have."""
        return {*own_architectures(), *self.registered}

    def resolve_model_cls(self, model_arch: str) -> Any:
        """The class behind a supported name; UserError where a registered one can't be had."""
        found = self.registered.get(model_arch)
        if found is None:
            module = importlib.import_module(f"vllmx.models.{own_architectures()[model_arch]}")
            return getattr(module, model_arch)
        if not isinstance(found, str):
            return found
        module_name, _, class_name = found.partition(":")
        try:
            cls = getattr(importlib.import_module(module_name), class_name)
        except Exception as error:
            raise UserError(
                f"architecture {model_arch!r} is registered as {found}, which can't be imported: "
                f"{type(error).__name__}: {error}."
            ) from error
        if not (isinstance(cls, type) and _is_module(cls)):
            raise UserError(
                f"architecture {model_arch!r} is registered as {found}, which is no torch module."
            )
        return cls


ModelRegistry = _ModelRegistry()
"""The registry of this process."""


def architectures() -> set[str]:
    """Names that a config's `architectures` may have."""
    return ModelRegistry.get_supported_archs()


def get_model_cls(hf_config: HFConfig) -> Any:
    """The class of the first of the config's architectures that vllmx has.

    vllmx.model_loader.resolve has refused a config without one, by name.
    """
    known = ModelRegistry.get_supported_archs()
    name = next(name for name in hf_config.architectures if name in known)
    return ModelRegistry.resolve_model_cls(name)


def _is_module(cls: type) -> bool:
    """Whether `cls` is a torch module; told by name, so that torch need not be imported."""
    return any(f"{c.__module__}.{c.__qualname__}" == _MODULE for c in cls.__mro__)


_MODULE = "torch.nn.modules.module.Module"

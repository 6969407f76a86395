# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/registry.py @ v0.25.0
"""Models are found by their class name, which equals `architectures` in config.json."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllmx.models.hf_config import HFConfig

_NAME = re.compile(r"^(?:class )?(\w+For\w+|\w+LMHeadModel)(?=[(:]| = )", re.MULTILINE)


@cache
def architectures() -> dict[str, str]:
    """Architecture name -> module of vllmx.models, read from the text: nothing is imported."""
    folder = Path(__file__).parent / "models"
    return {
        name: path.stem
        for path in sorted(folder.glob("*.py"))
        for name in _NAME.findall(path.read_text(encoding="utf-8"))
    }


def get_model_cls(hf_config: HFConfig) -> Any:
    """The class of the first of the config's architectures that vllmx has.

    vllmx.model_loader.resolve has refused a config without one, by name.
    """
    known = architectures()
    name = next(name for name in hf_config.architectures if name in known)
    return getattr(importlib.import_module(f"vllmx.models.{known[name]}"), name)

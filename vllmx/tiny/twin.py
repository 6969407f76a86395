# SPDX-License-Identifier: Apache-2.0
"""What a twin of a tiny checkpoint is: the same weights as a family that transformers knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Twin:
    """config: what the twin's config.json says instead; renamed: part of a name -> the twin's;
    adapt: (name, tensor, config) -> tensors under the twin's names, before that."""

    config: dict[str, Any]
    renamed: dict[str, str]
    adapt: Callable[[str, np.ndarray, dict[str, Any]], Tensors] = lambda name, x, config: {name: x}

    def tensors(self, tensors: Tensors, config: dict[str, Any]) -> Tensors:
        """The twin's tensors."""
        found: Tensors = {}
        for source, tensor in tensors.items():
            for name, part in self.adapt(source, tensor, config).items():
                for theirs, ours in self.renamed.items():
                    name = name.replace(theirs, ours)
                found[name] = np.ascontiguousarray(part)
        return found

# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/entrypoints/openai/engine/protocol.py @ v0.25.0
"""What all bodies of the API have in common."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict


class OpenAIBaseModel(BaseModel):
    """A body or a part of one. Extra fields are kept; NaN and infinities are refused."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())

    def unknown_fields(self, prefix: str = "") -> Iterator[str]:
        """Dotted paths of the fields in this body that no model knows, in order."""
        for name in self.model_extra or ():
            yield f"{prefix}{name}"
        for name in type(self).model_fields:
            value = getattr(self, name)
            path = type(self).model_fields[name].alias or name
            if isinstance(value, OpenAIBaseModel):
                yield from value.unknown_fields(f"{prefix}{path}.")
            elif isinstance(value, list) and value and not isinstance(value[0], int | str):
                # A prompt is a list of numbers or texts, thousands of them.
                for i, item in enumerate(value):
                    if isinstance(item, OpenAIBaseModel):
                        yield from item.unknown_fields(f"{prefix}{path}[{i}].")

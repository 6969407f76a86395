# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/multimodal/inputs.py, vllm/multimodal/utils.py @ v0.25.0
"""Images, sound and the like as the engine core sees them: where they lie in a prompt, and a name.

What is in an item is the model's business. The core reads positions and identifiers, so nothing
here needs torch.
"""

from __future__ import annotations

import bisect
from collections import UserDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any


@dataclass(frozen=True, eq=False)
class PlaceholderRange:
    """The tokens of a prompt that stand for one item."""

    offset: int
    """Index of the first of them."""
    length: int
    """How many there are."""
    is_embed: Any = None
    """Which of them become an embedding of the encoder: `length` truth values in an array, tensor
    or list; None: all. The others are text, such as the breaks between rows of an image."""

    @cached_property
    def _mask(self) -> list[bool] | None:
        if self.is_embed is None:
            return None
        values = self.is_embed
        return list(values.tolist() if hasattr(values, "tolist") else values)

    @cached_property
    def embeds_cumsum(self) -> list[int] | None:
        """Embeddings up to and with each token; None: one a token."""
        return None if self._mask is None else list(accumulate(map(int, self._mask)))

    def get_num_embeds(self) -> int:
        """Embeddings of the item."""
        if self.embeds_cumsum is None:
            return self.length
        return self.embeds_cumsum[-1] if self.embeds_cumsum else 0

    def get_embeds_indices_in_range(self, start_idx: int, end_idx: int) -> tuple[int, int]:
        """Range of the item's embeddings that tokens [start_idx, end_idx) of it take."""
        cumsum = self.embeds_cumsum
        if cumsum is None:
            return start_idx, end_idx
        start, end = (cumsum[index - 1] if index > 0 else 0 for index in (start_idx, end_idx))
        return start, end

    def extract_embeds_range(self) -> list[tuple[int, int]]:
        """The runs of prompt tokens that become embeddings: first and last index of each."""
        if self._mask is None:
            return [(self.offset, self.offset + self.length - 1)]
        runs: list[tuple[int, int]] = []
        for index, is_embed in enumerate(self._mask, self.offset):
            if not is_embed:
                continue
            if runs and runs[-1][1] == index - 1:
                runs[-1] = (runs[-1][0], index)
            else:
                runs.append((index, index))
        return runs

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlaceholderRange):
            return NotImplemented
        mine = (self.offset, self.length, self._mask)
        return mine == (other.offset, other.length, other._mask)

    def __hash__(self) -> int:
        return hash((self.offset, self.length))


@dataclass
class MultiModalFieldElem:
    """One argument of the encoder for one item."""

    data: Any
    """An array or tensor, or a nest of them."""


class MultiModalKwargsItem(UserDict[str, MultiModalFieldElem]):
    """The arguments of the encoder for one item, by name."""

    @staticmethod
    def dummy(nbytes: int = 1) -> MultiModalKwargsItem:
        """An item of `nbytes` bytes that mean nothing, for tests."""
        return MultiModalKwargsItem({"dummy": MultiModalFieldElem(bytes(nbytes))})

    def get_data(self) -> dict[str, Any]:
        """The bare arguments."""
        return {name: element.data for name, element in self.items()}


@dataclass
class MultiModalFeatureSpec:
    """One item of a request."""

    data: MultiModalKwargsItem | None
    """What the encoder computes it from; None where the engine has it already."""
    modality: str
    """`image`, `audio`, `video`, ..."""
    identifier: str
    """Names the encoder's output: items of one identifier have the same one. An adapter that
    changes it is part of the name."""
    mm_position: PlaceholderRange
    """Where it lies in the prompt."""
    mm_hash: str | None = None
    """Names what the processor has made of it, whatever the adapter."""

    @staticmethod
    def gather_kwargs(features: list[MultiModalFeatureSpec], keys: set[str]) -> dict[str, Any]:
        """The arguments called `keys` of all features, a list each; features without are left
        out."""
        gathered: dict[str, Any] = {}
        for feature in features:
            for key in keys & set(feature.data or ()):
                assert feature.data is not None
                gathered.setdefault(key, []).append(feature.data[key].data)
        return gathered


def get_mm_features_in_window(
    mm_features: Sequence[MultiModalFeatureSpec], start: int, end: int
) -> tuple[int, int]:
    """Range of the features that overlap tokens [start, end).

    They have to be in the order of their offsets and apart from each other.
    """
    first = bisect.bisect_right(mm_features, start, key=_end_of)
    last = bisect.bisect_left(mm_features, end, key=_offset_of)
    return first, last


def _offset_of(feature: MultiModalFeatureSpec) -> int:
    return feature.mm_position.offset


def _end_of(feature: MultiModalFeatureSpec) -> int:
    return feature.mm_position.offset + feature.mm_position.length


def total_num_embeds(features: Iterable[MultiModalFeatureSpec]) -> int:
    """Embeddings of all `features` together."""
    return sum(feature.mm_position.get_num_embeds() for feature in features)

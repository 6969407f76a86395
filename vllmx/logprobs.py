# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/logprobs.py @ v0.25.0
"""Log-probabilities as users see them: a position is a dict from token id to `Logprob`.

The first entry of a position is the token that was sampled (or stands in the prompt), then come
the likeliest ones in order. A sampled token that is among them has one entry, not two.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, MutableSequence
from dataclasses import dataclass, field
from typing import Any, overload


@dataclass
class Logprob:
    """Log-probability of one token at one position."""

    logprob: float
    """Natural logarithm of the probability."""
    rank: int | None = None
    """1 for the likeliest token of the vocabulary."""
    decoded_token: str | None = None
    """The token's text; None without detokenizing."""


LogprobsOnePosition = dict[int, Logprob]


@dataclass
class FlatLogprobs(MutableSequence[LogprobsOnePosition | None]):
    """The positions of a request in six flat lists, readable like a list of dicts.

    However long the text, it is a constant number of objects for the garbage collector. Position
    i owns the entries from `start_indices[i]` to `end_indices[i]` of the other four lists; it
    owns none if it is empty, as the first position of a prompt is.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, logprobs_one_position: LogprobsOnePosition | None) -> None:
        """Add a position; None adds an empty one."""
        entries = (logprobs_one_position or {}).values()
        self.append_fast(
            list(logprobs_one_position or ()),
            [entry.logprob for entry in entries],
            [entry.rank for entry in entries],
            [entry.decoded_token for entry in entries],
        )

    def append_fast(
        self,
        token_ids: list[int],
        logprobs: list[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """Add a position from columns; as many entries as the shortest of them."""
        self.start_indices.append(len(self.token_ids))
        for token_id, logprob, rank, token in zip(
            token_ids, logprobs, ranks, decoded_tokens, strict=False
        ):
            self.token_ids.append(token_id)
            self.logprobs.append(logprob)
            self.ranks.append(rank)
            self.decoded_tokens.append(token)
        self.end_indices.append(len(self.token_ids))

    def extend(self, logprobs_multi_positions: Iterable[LogprobsOnePosition | None]) -> None:
        """Add several positions."""
        for logprobs_one_position in logprobs_multi_positions:
            self.append(logprobs_one_position)

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, position: int) -> LogprobsOnePosition: ...

    @overload
    def __getitem__(self, s: slice, /) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> LogprobsOnePosition | FlatLogprobs:
        if isinstance(index, int):
            entries = slice(self.start_indices[index], self.end_indices[index])
            return {
                token_id: Logprob(logprob, rank, token)
                for token_id, logprob, rank, token in zip(
                    self.token_ids[entries],
                    self.logprobs[entries],
                    self.ranks[entries],
                    self.decoded_tokens[entries],
                    strict=True,
                )
            }
        if not isinstance(index, slice):
            raise TypeError(f"Invalid index type: {type(index)}")
        starts, ends = self.start_indices[index], self.end_indices[index]
        if not starts:
            return FlatLogprobs()
        first, last = starts[0], ends[-1]
        return FlatLogprobs(
            [start - first for start in starts],
            [end - first for end in ends],
            self.token_ids[first:last],
            self.logprobs[first:last],
            self.ranks[first:last],
            self.decoded_tokens[first:last],
        )

    def __setitem__(self, item: Any, value: Any) -> None:
        raise TypeError("Cannot set logprobs in FlatLogprobs")

    def __delitem__(self, item: Any) -> None:
        raise TypeError("Cannot delete logprobs from FlatLogprobs")

    def insert(self, index: int, value: LogprobsOnePosition | None) -> None:
        """Refused with TypeError, as any change but appending is."""
        raise TypeError("Cannot insert logprobs to FlatLogprobs")

    def __iter__(self) -> Iterator[LogprobsOnePosition]:
        return (self[position] for position in range(len(self)))


PromptLogprobs = FlatLogprobs | list[LogprobsOnePosition | None]
"""One position for each prompt token; the first is None (empty in FlatLogprobs)."""
SampleLogprobs = FlatLogprobs | list[LogprobsOnePosition]
"""One position for each generated token."""


def create_prompt_logprobs(flat_logprobs: bool) -> PromptLogprobs:
    """A container that already holds the first prompt token, which nothing predicts."""
    logprobs: PromptLogprobs = FlatLogprobs() if flat_logprobs else []
    logprobs.append(None)
    return logprobs


def create_sample_logprobs(flat_logprobs: bool) -> SampleLogprobs:
    """An empty container for generated tokens."""
    return FlatLogprobs() if flat_logprobs else []


def append_logprobs_for_next_position(
    request_logprobs: PromptLogprobs | SampleLogprobs,
    token_ids: list[int],
    logprobs: list[float],
    decoded_tokens: Iterable[str | None],
    rank: int,
    num_logprobs: int,
    ranked: bool = True,
) -> None:
    """Add a position from columns whose first entry is the sampled token, of rank `rank`.

    The next `num_logprobs` entries (all of them for -1) are the likeliest in order; if not
    `ranked`, they are any tokens, whose ranks are not known.
    """
    if num_logprobs == -1:
        num_logprobs = len(logprobs)
    others = range(1, num_logprobs + 1) if ranked else itertools.repeat(None, num_logprobs)
    ranks: Iterable[int | None] = itertools.chain((rank,), others)
    if isinstance(request_logprobs, FlatLogprobs):
        request_logprobs.append_fast(token_ids, logprobs, ranks, decoded_tokens)
        return
    # A sampled token among the likeliest comes twice with the same values: one key in the dict.
    position = {
        token_id: Logprob(logprob, token_rank, token)
        for token_id, logprob, token_rank, token in zip(
            token_ids, logprobs, ranks, decoded_tokens, strict=False
        )
    }
    if not ranked:
        position[token_ids[0]].rank = rank
    request_logprobs.append(position)

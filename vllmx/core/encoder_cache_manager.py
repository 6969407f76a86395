# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/encoder_cache_manager.py @ v0.25.0
"""What the encoders' outputs in the runner's cache are, who needs them, and what may go.

The runner holds the outputs; here is the account of them, in embeddings. Outputs are shared by
identifier, so an image that several requests have is encoded once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllmx.exceptions import UserError

if TYPE_CHECKING:
    from vllmx.config import SchedulerConfig
    from vllmx.request import Request


class EncoderCacheManager:
    """Encoder outputs by identifier, the ones that nobody needs evicted oldest first.

    cached: identifier -> requests that need it; none of them: it stays until its place is needed.
    request_cached_ids: request -> indices of its items that it holds.
    freeable: identifier -> embeddings, of those that nobody needs, the first to go first.
    num_free_slots: embeddings that fit in without evicting anything; num_freeable_slots: with
    everything in `freeable` evicted. freed: evicted, and the runner has yet to be told.
    """

    def __init__(self, cache_size: int) -> None:
        """`cache_size`: embeddings that the runner's cache holds."""
        self.cache_size = cache_size
        self.num_free_slots = cache_size
        self.num_freeable_slots = cache_size
        self.cached: dict[str, set[str]] = {}
        self.request_cached_ids: dict[str, set[int]] = {}
        self.freeable: OrderedDict[str, int] = OrderedDict()
        self.freed: list[str] = []

    def reset(self) -> None:
        """Forget everything, as after a change of weights; the runner drops its outputs itself."""
        self.cached.clear()
        self.request_cached_ids.clear()
        self.freeable.clear()
        self.freed.clear()
        self.num_free_slots = self.cache_size
        self.num_freeable_slots = self.cache_size

    def check_and_update_cache(self, request: Request, input_id: int) -> bool:
        """Whether item `input_id` is in the cache; if so the request holds it from now on."""
        mm_hash = request.mm_features[input_id].identifier
        holders = self.cached.get(mm_hash)
        if holders is None:
            return False
        if not holders:
            self.num_freeable_slots -= self.freeable.pop(mm_hash)
        self._hold(request, input_id)
        return True

    def can_allocate(
        self,
        request: Request,
        input_id: int,
        encoder_compute_budget: int,
        num_embeds_to_schedule: int,
    ) -> bool:
        """Whether item `input_id` fits the budget and the cache, evicting for it if need be.

        `num_embeds_to_schedule`: embeddings that were found to fit and are not allocated yet.
        """
        num_embeds = request.get_num_encoder_embeds(input_id)
        if num_embeds > encoder_compute_budget:
            return False
        num_embeds += num_embeds_to_schedule
        if num_embeds > self.num_freeable_slots:
            return False
        while num_embeds > self.num_free_slots:
            mm_hash, num_freed = self.freeable.popitem(last=False)
            del self.cached[mm_hash]
            self.freed.append(mm_hash)
            self.num_free_slots += num_freed
        return True

    def allocate(self, request: Request, input_id: int) -> None:
        """Give item `input_id` its place, which `can_allocate` has found, and hold it."""
        num_embeds = request.get_num_encoder_embeds(input_id)
        assert num_embeds <= self.num_free_slots <= self.num_freeable_slots, (
            "an encoder input was allocated without asking can_allocate"
        )
        self.num_free_slots -= num_embeds
        self.num_freeable_slots -= num_embeds
        self._hold(request, input_id)

    def _hold(self, request: Request, input_id: int) -> None:
        mm_hash = request.mm_features[input_id].identifier
        self.cached.setdefault(mm_hash, set()).add(request.request_id)
        self.request_cached_ids.setdefault(request.request_id, set()).add(input_id)

    def get_cached_input_ids(self, request: Request) -> set[int]:
        """Indices of the items that the request holds."""
        return self.request_cached_ids.get(request.request_id, set())

    def free_encoder_input(self, request: Request, input_id: int) -> None:
        """The request needs item `input_id` no more; without another holder it may be evicted."""
        self._forget(request.request_id, input_id)
        mm_hash = request.mm_features[input_id].identifier
        holders = self.cached.get(mm_hash)
        if not holders:
            return  # evicted, or given back under another index already
        holders.discard(request.request_id)
        if not holders:
            num_embeds = request.get_num_encoder_embeds(input_id)
            self.freeable[mm_hash] = num_embeds
            self.num_freeable_slots += num_embeds

    def _forget(self, request_id: str, input_id: int) -> None:
        input_ids = self.request_cached_ids.get(request_id)
        if input_ids is None:
            return
        input_ids.discard(input_id)
        if not input_ids:
            del self.request_cached_ids[request_id]

    def free(self, request: Request) -> None:
        """The request, ended or preempted, needs none of its items; they stay in the cache."""
        for input_id in list(self.get_cached_input_ids(request)):
            self.free_encoder_input(request, input_id)

    def take_back(self, request: Request, input_id: int) -> set[str]:
        """Undo the allocation of an item that will not be computed; its other holders are returned.

        With a holder left the place stays allocated: one of them has to compute it.
        """
        self._forget(request.request_id, input_id)
        mm_hash = request.mm_features[input_id].identifier
        holders = self.cached.get(mm_hash, set())
        holders.discard(request.request_id)
        if not holders and self.cached.pop(mm_hash, None) is not None:
            num_embeds = request.get_num_encoder_embeds(input_id)
            self.num_free_slots += num_embeds
            self.num_freeable_slots += num_embeds
        return holders

    def get_freed_mm_hashes(self) -> list[str]:
        """Identifiers that were evicted since the last call, for the runner to drop."""
        freed, self.freed = self.freed, []
        return freed


class EncoderDecoderCacheManager(EncoderCacheManager):
    """For models whose decoder attends to the encoder: outputs are used once and not shared.

    The first decoder step writes the cross-attention entries, so an output is needed in that step
    alone, and the runner drops it before the next.
    """

    def __init__(self, cache_size: int) -> None:
        super().__init__(cache_size)
        self.allocated: list[str] = []
        self.to_free: list[str] = []

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.allocated.clear()
        self.to_free.clear()

    def check_and_update_cache(self, request: Request, input_id: int) -> bool:
        """False: nothing is shared."""
        return False

    def can_allocate(
        self,
        request: Request,
        input_id: int,
        encoder_compute_budget: int,
        num_embeds_to_schedule: int,
    ) -> bool:
        """Whether item `input_id` fits the budget and the cache; nothing can be evicted."""
        num_embeds = request.get_num_encoder_embeds(input_id)
        if num_embeds > encoder_compute_budget:
            return False
        return num_embeds + num_embeds_to_schedule <= self.num_free_slots

    def allocate(self, request: Request, input_id: int) -> None:
        """Give item `input_id` its place."""
        self.num_free_slots -= request.get_num_encoder_embeds(input_id)
        self.request_cached_ids.setdefault(request.request_id, set()).add(input_id)
        self.allocated.append(request.mm_features[input_id].identifier)

    def free_encoder_input(self, request: Request, input_id: int) -> None:
        """Give the place of item `input_id` back, once however often this is called."""
        if input_id in self.get_cached_input_ids(request):
            self._forget(request.request_id, input_id)
            self.num_free_slots += request.get_num_encoder_embeds(input_id)

    def take_back(self, request: Request, input_id: int) -> set[str]:
        """Give the place back; nobody else holds the item."""
        self.free_encoder_input(request, input_id)
        return set()

    def get_freed_mm_hashes(self) -> list[str]:
        """What was allocated in the step before this one: the runner drops it first of all."""
        to_free, self.to_free = self.to_free, self.allocated
        self.allocated = []
        return to_free


def compute_mm_encoder_budget(
    scheduler_config: SchedulerConfig, mm_max_toks_per_item: Mapping[str, int]
) -> tuple[int, int]:
    """Embeddings that a step may compute, and that the cache holds; both take the largest item.

    `mm_max_toks_per_item`: embeddings of one item at most, by modality; empty for a model that
    takes text alone. UserError if an item has to be in one step and no step is large enough.
    """
    if not mm_max_toks_per_item:
        return 0, 0
    largest = max(mm_max_toks_per_item.values())
    budget = scheduler_config.max_num_batched_tokens
    assert budget is not None, "resolve_scheduler_limits has to run before"
    if scheduler_config.disable_chunked_mm_input and largest > budget:
        raise UserError(
            f"scheduler.disable_chunked_mm_input=true: an item has up to {largest} tokens, "
            f"scheduler.max_num_batched_tokens={budget} is less. Raise it, or let items be split."
        )
    return (
        max(scheduler_config.max_num_encoder_input_tokens, largest),
        max(scheduler_config.encoder_cache_size, largest),
    )

# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/sched/request_queue.py @ v0.25.0
"""The order in which waiting requests get their turn."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum

from vllmx.request import Request


class SchedulingPolicy(Enum):
    """How waiting requests are ordered."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class RequestQueue(ABC):
    """Waiting requests; iteration goes in the order in which they would be popped."""

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Put in a request that has just arrived."""

    @abstractmethod
    def pop_request(self) -> Request:
        """Take out the next request; IndexError on an empty queue."""

    @abstractmethod
    def peek_request(self) -> Request:
        """The next request, left in place; IndexError on an empty queue."""

    @abstractmethod
    def prepend_request(self, request: Request) -> None:
        """Put a request back whose turn had come."""

    @abstractmethod
    def prepend_requests(self, requests: RequestQueue) -> None:
        """Put back all of `requests`, the last one ending up in front."""

    @abstractmethod
    def remove_request(self, request: Request) -> None:
        """Take out `request`, wherever it stands; ValueError if it isn't here."""

    @abstractmethod
    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Take out those of `requests` that are here."""

    @abstractmethod
    def __bool__(self) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...


class FCFSRequestQueue(deque[Request], RequestQueue):
    """First come, first served."""

    def add_request(self, request: Request) -> None:
        """Put `request` at the end."""
        self.append(request)

    def pop_request(self) -> Request:
        """Take out the request that came first."""
        return self.popleft()

    def peek_request(self) -> Request:
        """The request that came first."""
        if not self:
            raise IndexError("peek from an empty queue")
        return self[0]

    def prepend_request(self, request: Request) -> None:
        """Put `request` in front."""
        self.appendleft(request)

    def prepend_requests(self, requests: RequestQueue) -> None:
        """Put all of `requests` in front, the last one first."""
        self.extendleft(requests)

    def remove_request(self, request: Request) -> None:
        """Take out `request`; ValueError if it isn't here."""
        self.remove(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Take out those of `requests` that are here."""
        to_remove = set(requests)
        kept = [request for request in self if request not in to_remove]
        self.clear()
        self.extend(kept)

    def __bool__(self) -> bool:
        return len(self) > 0


class PriorityRequestQueue(RequestQueue):
    """Lowest `priority` first, the earlier arrival among equals; a heap ordered by Request.__lt__.

    There is no front to put a request back to: it goes where its priority says.
    """

    def __init__(self) -> None:
        self._heap: list[Request] = []

    def add_request(self, request: Request) -> None:
        """Put in `request`."""
        heapq.heappush(self._heap, request)

    def pop_request(self) -> Request:
        """Take out the most urgent request."""
        if not self._heap:
            raise IndexError("pop from empty heap")
        return heapq.heappop(self._heap)

    def peek_request(self) -> Request:
        """The most urgent request."""
        if not self._heap:
            raise IndexError("peek from empty heap")
        return self._heap[0]

    def prepend_request(self, request: Request) -> None:
        """Same as add_request."""
        self.add_request(request)

    def prepend_requests(self, requests: RequestQueue) -> None:
        """Put in all of `requests`."""
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: Request) -> None:
        """Take out `request`; ValueError if it isn't here."""
        self._heap.remove(request)
        heapq.heapify(self._heap)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Take out those of `requests` that are here."""
        to_remove = set(requests)
        self._heap = [request for request in self._heap if request not in to_remove]
        heapq.heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._heap))


def create_request_queue(policy: SchedulingPolicy) -> RequestQueue:
    """An empty queue that orders by `policy`."""
    if policy == SchedulingPolicy.PRIORITY:
        return PriorityRequestQueue()
    if policy == SchedulingPolicy.FCFS:
        return FCFSRequestQueue()
    raise ValueError(f"Unknown scheduling policy: {policy}")

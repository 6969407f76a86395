# SPDX-License-Identifier: Apache-2.0
import random

import pytest
from engine_helpers import make_request

from vllmx.core.request_queue import (
    FCFSRequestQueue,
    PriorityRequestQueue,
    SchedulingPolicy,
    create_request_queue,
)

POLICIES = list(SchedulingPolicy)


def ids(queue):
    return [request.request_id for request in queue]


@pytest.mark.parametrize("policy", POLICIES)
def test_pops_in_the_order_in_which_it_iterates(policy):
    queue = create_request_queue(policy)
    rng = random.Random(0)
    for i in range(50):
        queue.add_request(make_request(f"r{i}", priority=rng.randint(0, 3), arrival_time=i))
    expected = ids(queue)
    assert [queue.pop_request().request_id for _ in range(50)] == expected
    assert not queue and len(queue) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_empty_queue_has_nothing_to_peek_at_or_pop(policy):
    queue = create_request_queue(policy)
    with pytest.raises(IndexError):
        queue.peek_request()
    with pytest.raises(IndexError):
        queue.pop_request()


@pytest.mark.parametrize("policy", POLICIES)
def test_removes_those_that_are_there_and_ignores_others(policy):
    queue = create_request_queue(policy)
    requests = [make_request(f"r{i}", arrival_time=i) for i in range(5)]
    for request in requests:
        queue.add_request(request)
    queue.remove_requests([requests[1], requests[3], make_request("stranger")])
    queue.remove_request(requests[0])
    assert ids(queue) == ["r2", "r4"]
    with pytest.raises(ValueError):
        queue.remove_request(requests[0])


def test_fcfs_puts_back_in_front():
    queue = FCFSRequestQueue()
    queue.add_request(make_request("a"))
    queue.prepend_request(make_request("b"))
    other = FCFSRequestQueue([make_request("c"), make_request("d")])
    queue.prepend_requests(other)
    assert ids(queue) == ["d", "c", "b", "a"]


def test_priority_orders_by_priority_then_arrival_then_id():
    queue = PriorityRequestQueue()
    for name, priority, arrival in [("d", 1, 0), ("c", 0, 2), ("b", 0, 1), ("a", 0, 1)]:
        queue.add_request(make_request(name, priority=priority, arrival_time=arrival))
    assert ids(queue) == ["a", "b", "c", "d"]


def test_priority_has_no_front_to_put_back_to():
    queue = PriorityRequestQueue()
    queue.add_request(make_request("urgent", priority=-1))
    queue.prepend_request(make_request("idle", priority=5))
    assert queue.peek_request().request_id == "urgent"


def test_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="Unknown scheduling policy"):
        create_request_queue("lifo")

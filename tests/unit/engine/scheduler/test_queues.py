"""Order of waiting requests, and of those that give way."""

import pytest

from pagemill.engine.request import Request
from pagemill.engine.scheduler.queues import make_queue
from tests.fakes.engine_setup import core_request


def request(name, sequence, **options):
    return Request(core_request(name, 3, **options), sequence=sequence, max_model_len=100)


def drain(queue):
    names = []
    while len(queue):
        names.append(queue.peek().request_id)
        queue.remove(queue.peek())
    return names


def test_fcfs_ignores_priority_and_gives_returned_requests_their_place_again():
    queue = make_queue("fcfs")
    a, b, c = request("a", 0, priority=9), request("b", 1), request("c", 2, priority=-1)
    for item in (a, b, c):
        queue.push(item)
    queue.remove(b)
    queue.push(b)
    assert drain(queue) == ["a", "b", "c"]


def test_priority_goes_by_value_then_arrival_then_sequence():
    queue = make_queue("priority")
    for item in (
        request("late", 0, priority=1, arrival=2.0),
        request("low", 1, priority=5),
        request("early", 2, priority=1, arrival=1.0),
        request("high", 3, priority=-1, arrival=9.0),
        request("next", 4, priority=1, arrival=1.0),
    ):
        queue.push(item)
    assert drain(queue) == ["high", "early", "next", "late", "low"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_requests_leave_from_anywhere_and_their_ids_may_return(policy):
    queue = make_queue(policy)
    items = [request(str(index), index) for index in range(5)]
    for item in items:
        queue.push(item)
    queue.remove(items[3])
    queue.remove(items[0])
    again = request("3", 7)
    queue.push(again)
    assert len(queue) == 4
    assert drain(queue) == ["1", "2", "4", "3"]


def test_the_latest_or_the_lowest_gives_way_first():
    old, new = request("old", 0, priority=3, arrival=1.0), request("new", 1, priority=1, arrival=2.0)
    assert make_queue("fcfs").victims([new, old])[-1] is new
    assert make_queue("priority").victims([new, old])[-1] is old


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_first_of_a_call_comes_before_the_later_ones_of_others(policy):
    queue = make_queue(policy)
    calls = [("a", 3), ("b", 1), ("c", 2)]
    items = [request(f"{call}{rank}", len(call), rank=rank) for call, count in calls for rank in range(count)]
    for sequence, item in enumerate(items):
        item.sequence = sequence
        queue.push(item)
    assert queue.precedes(items[3], items[1]) and not queue.precedes(items[1], items[3])
    assert queue.victims(items)[-1] is items[2]
    assert drain(queue) == ["a0", "b0", "c0", "a1", "c1", "a2"]


def test_a_lower_priority_stays_behind_whatever_its_rank():
    queue = make_queue("priority")
    for item in (request("low", 0, priority=5), request("high", 1, priority=1, rank=9)):
        queue.push(item)
    assert drain(queue) == ["high", "low"]


def test_requests_that_left_do_not_pile_up():
    queue = make_queue("fcfs")
    queue.push(request("head", 0))
    for number in range(1, 2000):
        item = request(str(number), number)
        queue.push(item)
        queue.remove(item)
    assert len(queue._heap) < 100
    assert drain(queue) == ["head"]

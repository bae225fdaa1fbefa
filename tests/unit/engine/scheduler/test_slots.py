"""Slots are given, taken and given again without a trace of the request before."""

import numpy as np
import pytest

from pagemill.engine.request import Request, RequestStatus
from pagemill.engine.scheduler.slots import NO_TOKEN, SlotStates
from tests.fakes.engine_setup import core_request


def request(name, prompt=3, **options):
    return Request(core_request(name, prompt, **options), sequence=0, max_model_len=100)


def test_the_lowest_free_slot_is_given_and_order_of_admission_kept():
    states = SlotStates(3, 8)
    a, b, c = request("a"), request("b"), request("c")
    assert [states.assign(item, 0) for item in (a, b, c)] == [0, 1, 2]
    assert states.num_free == 0
    states.release([1, 0])
    assert states.running.tolist() == [2]
    assert (a.slot, b.slot, c.slot) == (None, None, 2)
    assert states.assign(request("d"), 0) == 1
    assert states.running.tolist() == [2, 1]
    with pytest.raises(RuntimeError, match="slot 0 is not in use"):
        states.occupant(0)


def test_tokens_reach_the_request_when_flushed_and_when_released():
    states = SlotStates(2, 4)
    a, b = request("a"), request("b")
    states.assign(a, 3)
    states.assign(b, 3)
    states.append(np.array([1, 0]), np.array([50, 60]))
    states.append(np.array([1]), np.array([51]))
    assert states.num_known[:2].tolist() == [4, 5]
    assert states.flush(1).token_ids.tolist() == [1, 2, 3, 50, 51]
    states.append(np.array([1]), np.array([52]))
    states.release([0, 1])
    assert a.token_ids.tolist() == [1, 2, 3, 60]
    assert b.token_ids.tolist() == [1, 2, 3, 50, 51, 52]


def test_a_reused_slot_equals_a_fresh_one_but_for_its_epoch():
    used, fresh = SlotStates(1, 4), SlotStates(1, 4)
    used.assign(request("a", 9, stop_token_ids=range(20, 32), max_tokens=9, min_tokens=5), 4)
    used.append(np.array([0]), np.array([5]))
    used.capacity[0] = used.next_commit[0] = 12
    used.release([0])
    for states in (used, fresh):
        states.assign(request("b", stop_token_ids=[7]), 2)
    for name in ("num_known", "num_expected", "num_computed", "capacity", "next_commit", "length_limit", "stop_from"):
        assert getattr(used, name).tolist() == getattr(fresh, name).tolist(), name
    assert used.stop_ids.tolist() == fresh.stop_ids.tolist() == [[7] + [NO_TOKEN] * 7]
    assert not used.many_stop_ids
    assert (used.epoch[0], fresh.epoch[0]) == (1, 0)
    assert used.occupant(0).status is RequestStatus.RUNNING


def test_a_request_is_announced_once_even_if_it_changes_slots():
    states, item = SlotStates(1, 4), request("a")
    states.assign(item, 0)
    states.release([0])
    assert not item.announced
    states.assign(item, 0)
    assert states.unannounced[0]
    states.unannounced[0] = False
    states.release([0])
    states.assign(item, 0)
    assert not states.unannounced[0]

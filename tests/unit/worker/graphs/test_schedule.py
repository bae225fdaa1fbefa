"""When graphs are captured."""

import pytest

from pagemill.config.capture_sizes import capture_sizes
from pagemill.config.graph_mode import GraphMode
from pagemill.model.forward_context import BatchDescriptor
from pagemill.worker.graphs.dispatcher import BatchLimits, Dispatcher
from pagemill.worker.graphs.schedule import CaptureSchedule

FULL, PIECEWISE = GraphMode.FULL, GraphMode.PIECEWISE


def make(lazy=True, mode=GraphMode.FULL_AND_PIECEWISE, small_step=0, sizes=(1, 2, 4, 8), **limits):
    keys = Dispatcher(mode, sizes, BatchLimits(max(sizes), **limits), small_step=small_step).graph_keys()
    return CaptureSchedule(keys, lazy=lazy), keys


def test_all_are_captured_at_the_start_the_largest_first():
    schedule, keys = make(lazy=False)
    assert schedule.at_start() == keys


def test_of_few_sizes_all_decode_steps_are():
    schedule, keys = make()
    assert [item for item in schedule.at_start() if item[0] is FULL] == [item for item in keys if item[0] is FULL]


def test_of_many_sizes_those_are_to_which_others_are_padded_cheaply():
    schedule, keys = make(mode=GraphMode.FULL_DECODE_ONLY, sizes=capture_sizes(600))
    sizes = [key.num_tokens for _, key in schedule.at_start()]
    assert sizes == [
        600, 512, 448, 384, 320, 256, 224, 192, 160, 128, 96, 64, 32, 16, 8, 4, 2, 1
    ]  # fmt: skip
    assert len(keys) > 40


@pytest.mark.parametrize("mode", [GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE])
def test_every_decode_step_has_a_graph_or_a_stand_in_after_the_start(mode):
    limits = BatchLimits(1024)
    dispatcher = Dispatcher(mode, capture_sizes(1024), limits, small_step=512)
    for item in CaptureSchedule(dispatcher.graph_keys(), lazy=True).at_start():
        dispatcher.captured(*item)
    for count in range(1, 513):
        wanted = dispatcher.dispatch(count, count, True)
        found = wanted if dispatcher.is_captured(wanted) else dispatcher.stand_in(count, count, True)
        assert found is not None and found[0] is FULL, count
        assert found[1].num_tokens >= count


def test_a_prompt_of_some_hundred_tokens_has_a_stand_in_after_the_start():
    """Launching its kernels one by one takes longer than computing 512 tokens."""
    dispatcher = Dispatcher(GraphMode.FULL_AND_PIECEWISE, capture_sizes(1024), BatchLimits(1024), small_step=512)
    for item in CaptureSchedule(dispatcher.graph_keys(), lazy=True).at_start():
        dispatcher.captured(*item)
    for count in (129, 200, 257, 300, 400, 512):
        found = dispatcher.stand_in(count, 1, False)
        assert found is not None and found[0] is FULL, count
        assert count <= found[1].num_tokens <= 2 * count


def test_whole_steps_that_do_more_than_decode_are_captured_where_they_are_frequent():
    schedule, _ = make(small_step=512, sizes=capture_sizes(1024))
    mixed = [(key.num_tokens, key.num_requests) for mode, key in schedule.at_start() if not key.uniform]
    assert mixed == [
        (512, 128), (256, 128), (256, 1), (192, 128), (192, 1),
        (128, 128), (128, 16), (128, 1), (64, 64), (64, 16), (64, 1), (32, 16), (32, 1), (16, 1),
    ]  # fmt: skip


def test_pieces_come_before_the_first_request_only_where_no_step_but_decoding_is_replayed_whole():
    schedule, _ = make(sizes=(1, 2, 3, 4, 8, 12))
    assert [key.num_tokens for mode, key in schedule.at_start() if mode is PIECEWISE] == [12, 8, 4, 2, 1]
    schedule, _ = make(small_step=12, sizes=(1, 2, 3, 4, 8, 12))
    assert not [key for mode, key in schedule.at_start() if mode is PIECEWISE]


def test_idle_time_goes_to_decode_steps_first_and_to_small_ones():
    schedule, _ = make(small_step=8)
    order = []
    while (found := schedule.next_idle()) is not None:
        order.append(found[1])
        schedule.done(found)
    mixed = [BatchDescriptor(*shape) for shape in ((2, 1), (2, 2), (4, 1), (4, 4), (8, 1), (8, 8))]
    assert [key for key in order if not key.uniform and key.num_requests] == mixed
    assert [key.num_tokens for key in order if key.uniform] == [1, 2, 4, 8]
    assert [key.uniform for key in order] == [True] * 4 + [False] * 10
    assert not len(schedule)


def test_what_a_step_did_without_comes_before_all_others():
    schedule, _ = make()
    wanted = [(PIECEWISE, BatchDescriptor(8, None)), (FULL, BatchDescriptor(4, 4, True))]
    for item in (*wanted, wanted[0], (FULL, BatchDescriptor(99, 99, True))):
        schedule.miss(item)
    for item in wanted:
        assert schedule.next_idle() == item
        schedule.done(item)
    assert schedule.next_idle() == (FULL, BatchDescriptor(1, 1, True))
    assert wanted[0] not in schedule and len(schedule) == 6


def test_dropped_graphs_are_not_captured():
    schedule, keys = make()
    for item in keys:
        schedule.done(item)
    assert schedule.next_idle() is None

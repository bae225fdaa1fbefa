"""When graphs are captured."""

from pagemill.config.graph_mode import GraphMode
from pagemill.model.forward_context import BatchDescriptor
from pagemill.worker.graphs.dispatcher import BatchLimits, Dispatcher
from pagemill.worker.graphs.schedule import CaptureSchedule

FULL, PIECEWISE, NONE = GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.NONE


def make(lazy=True, warm_ups=1, mode=GraphMode.FULL_AND_PIECEWISE, small_step=0, **limits):
    keys = Dispatcher(mode, (1, 2, 4, 8), BatchLimits(8, **limits), small_step=small_step).graph_keys()
    return CaptureSchedule(keys, num_warm_ups=warm_ups, lazy=lazy), keys


def test_a_shape_warms_up_before_it_is_captured():
    schedule, _ = make(warm_ups=2)
    key = BatchDescriptor(4, 4, True)
    assert [schedule.admit(FULL, key) for _ in range(4)] == [NONE, NONE, FULL, FULL]
    assert len(schedule) == 7


def test_all_are_captured_at_the_start_the_largest_first():
    schedule, keys = make(lazy=False)
    assert schedule.at_start() == keys


def test_lazily_the_largest_of_each_kind_and_the_smallest_decode_step_are():
    schedule, _ = make()
    assert schedule.at_start() == [
        (FULL, BatchDescriptor(8, 8, True)),
        (PIECEWISE, BatchDescriptor(8, None)),
        (FULL, BatchDescriptor(1, 1, True)),
    ]


def test_whole_steps_that_do_more_than_decode_are_a_kind_of_their_own():
    schedule, _ = make(small_step=8)
    assert schedule.at_start() == [
        (FULL, BatchDescriptor(8, 8, True)),
        (FULL, BatchDescriptor(8, 8)),
        (PIECEWISE, BatchDescriptor(8, None)),
        (FULL, BatchDescriptor(1, 1, True)),
    ]
    order = []
    while (found := schedule.next_idle()) is not None:
        order.append(found[1])
        schedule.drop(*found)
    mixed = [BatchDescriptor(*shape) for shape in ((2, 1), (2, 2), (4, 1), (4, 4), (8, 1), (8, 8))]
    assert [key for key in order if not key.uniform and key.num_requests] == mixed
    assert [key.uniform for key in order] == [True] * 4 + [False] * 10


def test_idle_time_goes_to_decode_steps_first_and_to_small_ones():
    schedule, keys = make()
    order = []
    while (found := schedule.next_idle()) is not None:
        order.append(found)
        schedule.admit(*found)
        schedule.admit(*found)
    full = [item for item in reversed(keys) if item[0] is FULL]
    pieces = [item for item in reversed(keys) if item[0] is PIECEWISE]
    assert order == full + pieces
    assert len(schedule) == 0


def test_a_step_without_a_graph_needs_no_warm_up():
    schedule, _ = make()
    assert schedule.admit(NONE, BatchDescriptor(99, 3)) is NONE
    assert len(schedule) == 8


def test_dropped_graphs_are_not_captured():
    schedule, keys = make()
    for mode, key in keys:
        schedule.drop(mode, key)
    assert schedule.next_idle() is None

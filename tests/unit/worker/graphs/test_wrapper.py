"""Capture, replay and pass through, on fake graphs that behave like CUDA's."""

import pytest
import torch

from pagemill.config.graph_mode import GraphMode
from pagemill.errors import PagemillError
from pagemill.model.forward_context import BatchDescriptor, ForwardContext, forward_context
from pagemill.worker.graphs.wrapper import GraphWrapper
from tests.fakes.fake_graphs import FakeGraphMaker

KEY = BatchDescriptor(4, 4, True)
OTHER = BatchDescriptor(8, 8, True)


class Step:
    """Doubles what lies in a buffer, and counts on the device and on the host."""

    def __init__(self):
        self.buffer = torch.arange(8.0)
        self.count = torch.zeros(())
        self.calls = 0

    def __call__(self, rows):
        self.calls += 1
        self.count.add_(1)
        return rows * 2


def run(wrapper, rows, mode=GraphMode.FULL, key=KEY):
    with torch.inference_mode(), forward_context(ForwardContext({}, mode, key)):
        return wrapper(rows)


def test_the_first_call_captures_and_computes_and_the_others_replay():
    step, maker = Step(), FakeGraphMaker()
    wrapper = GraphWrapper(step, GraphMode.FULL, maker)
    for turn in range(1, 4):
        step.buffer.copy_(torch.arange(8.0) * turn)
        assert torch.equal(run(wrapper, step.buffer[:4]), torch.arange(4.0) * 2 * turn)
        assert step.count == turn
    assert step.calls == 1 and len(maker.graphs) == 1 and maker.num_replays == 3
    assert wrapper.captured() == (KEY,)


def test_every_key_has_a_graph_of_its_own():
    step, maker = Step(), FakeGraphMaker()
    wrapper = GraphWrapper(step, GraphMode.FULL, maker)
    assert len(run(wrapper, step.buffer[:4])) == 4
    assert len(run(wrapper, step.buffer, key=OTHER)) == 8
    assert len(run(wrapper, step.buffer[:4])) == 4
    assert step.calls == 2 and len(maker.graphs) == 2


@pytest.mark.parametrize("mode", (GraphMode.NONE, GraphMode.PIECEWISE))
def test_a_step_of_another_mode_passes_through(mode):
    step, maker = Step(), FakeGraphMaker()
    wrapper = GraphWrapper(step, GraphMode.FULL, maker)
    run(wrapper, step.buffer[:4], mode)
    run(wrapper, step.buffer[:4], mode)
    assert step.calls == 2 and not maker.graphs


def test_the_mode_of_a_wrapper_is_one_that_steps_run_in():
    with pytest.raises(PagemillError, match="FULL or PIECEWISE, not FULL_AND_PIECEWISE"):
        GraphWrapper(Step(), GraphMode.FULL_AND_PIECEWISE, FakeGraphMaker())


def test_a_step_without_a_descriptor_is_refused():
    with pytest.raises(PagemillError, match="descriptor"):
        run(GraphWrapper(Step(), GraphMode.FULL, FakeGraphMaker()), torch.zeros(4), key=None)


def nested(maker):
    """A FULL wrapper over a function with two PIECEWISE wrappers and something eager between them."""
    log = []

    def first(x):
        log.append("first")
        return x + 1

    def second(x):
        log.append("second")
        return x * 2

    pieces = [GraphWrapper(fn, GraphMode.PIECEWISE, maker) for fn in (first, second)]
    between = torch.empty(4)

    def model(x):
        hidden = pieces[0](x)
        log.append("between")
        between.copy_(hidden - 3)
        return pieces[1](between)

    return GraphWrapper(model, GraphMode.FULL, maker), pieces, log


def test_a_full_graph_holds_the_pieces_and_never_activates_them():
    maker = FakeGraphMaker()
    full, pieces, log = nested(maker)
    x = torch.ones(4)
    for turn in range(3):
        x.fill_(turn)
        assert torch.equal(run(full, x), torch.full((4,), (turn + 1.0 - 3) * 2))
    assert log == ["first", "between", "second"] and len(maker.graphs) == 1
    assert not pieces[0].captured() and not pieces[1].captured()


def test_piecewise_steps_capture_the_pieces_and_run_what_is_between():
    maker = FakeGraphMaker()
    full, _, log = nested(maker)
    x = torch.ones(4)
    for turn in range(3):
        x.fill_(turn)
        assert torch.equal(run(full, x, GraphMode.PIECEWISE), torch.full((4,), (turn + 1.0 - 3) * 2))
    assert log == ["first", "between", "second", "between", "between"] and len(maker.graphs) == 2
    assert not full.captured()


def test_both_modes_live_side_by_side():
    maker = FakeGraphMaker()
    full, _, _ = nested(maker)
    x = torch.ones(4)
    for turn, mode in enumerate((GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.NONE) * 3):
        x.fill_(turn)
        assert torch.equal(run(full, x, mode), torch.full((4,), (turn + 1.0 - 3) * 2))
    assert len(maker.graphs) == 3


def test_in_debugging_a_moved_argument_is_found():
    step, buffer = Step(), torch.arange(8.0)
    wrapper = GraphWrapper(step, GraphMode.FULL, FakeGraphMaker(), check_addresses=True)
    run(wrapper, buffer[:4])
    run(wrapper, buffer[:4])
    with pytest.raises(PagemillError, match=r"argument 0 of the graph for .*num_tokens=4.* lies at 0x\w+ and was"):
        run(wrapper, buffer[4:])


def test_otherwise_addresses_are_not_looked_at():
    step, buffer = Step(), torch.arange(8.0)
    wrapper = GraphWrapper(step, GraphMode.FULL, FakeGraphMaker())
    first = run(wrapper, buffer[:4]).clone()
    assert torch.equal(run(wrapper, buffer[4:]), first)


def test_an_error_in_a_capture_leaves_nothing_behind():
    maker = FakeGraphMaker()
    step = Step()
    fails = [True]

    def sometimes(rows):
        doubled = step(rows)
        if fails.pop() if fails else False:
            raise KeyError("once")
        return doubled

    wrapper = GraphWrapper(sometimes, GraphMode.FULL, maker)
    with pytest.raises(KeyError):
        run(wrapper, step.buffer[:4])
    assert step.count == 0 and not wrapper.captured()
    assert torch.equal(run(wrapper, step.buffer[:4]), torch.arange(4.0) * 2)


def test_without_memory_for_a_graph_the_step_runs_without():
    step, told = Step(), []
    wrapper = GraphWrapper(
        step, GraphMode.FULL, FakeGraphMaker(room=0), on_no_memory=lambda mode, key: told.append((mode, key))
    )
    assert torch.equal(run(wrapper, step.buffer[:4]), torch.arange(4.0) * 2)
    assert told == [(GraphMode.FULL, KEY)] and not wrapper.captured() and step.count == 1


def test_without_memory_and_nobody_to_tell_it_raises():
    with pytest.raises(torch.OutOfMemoryError):
        run(GraphWrapper(Step(), GraphMode.FULL, FakeGraphMaker(room=0)), torch.zeros(4))


def test_cleared_graphs_are_captured_again():
    step, maker = Step(), FakeGraphMaker()
    wrapper = GraphWrapper(step, GraphMode.FULL, maker)
    run(wrapper, step.buffer[:4])
    wrapper.clear()
    run(wrapper, step.buffer[:4])
    assert len(maker.graphs) == 2

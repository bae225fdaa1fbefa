"""Graphs of a runner: capture at start and while idle; figures; lack of memory."""

import logging

import pytest
import torch

from pagemill.config.graph_mode import GraphMode
from pagemill.model.forward_context import BatchDescriptor, ForwardContext, forward_context
from pagemill.worker.graphs import graph_runner
from pagemill.worker.graphs.dispatcher import BatchLimits, Dispatcher
from pagemill.worker.graphs.graph_runner import GraphRunner, NoGraphs
from tests.fakes.fake_graphs import FakeGraphMaker

FULL, NONE = GraphMode.FULL, GraphMode.NONE


class Toy:
    """A runner of steps that add one to a buffer."""

    def __init__(self, room=1000, sizes=(1, 2, 4, 8), **options):
        self.maker = FakeGraphMaker(room)
        dispatcher = Dispatcher(GraphMode.FULL_AND_PIECEWISE, sizes, BatchLimits(max(sizes)))
        self.graphs = GraphRunner(dispatcher, self.maker, **options)
        self.buffer = torch.zeros(max(sizes))
        self.fails = False
        """Whether the next capture does."""
        self.model = self.graphs.wrap_model(lambda x: x + 1)
        self.step = self.graphs.wrap_step(lambda x: self.model(x))
        self.ran = []

    def run(self, mode, key):
        self.ran.append((mode, key))
        if mode is FULL and self.fails:
            self.fails = False
            raise RuntimeError("not in a capture")
        with torch.inference_mode(), forward_context(ForwardContext({}, mode, key)):
            return self.step(self.buffer[: key.num_tokens])

    def decode(self, count):
        self.buffer[:count] = torch.arange(count)
        result = self.run(*self.graphs.choose(count, count, True))
        assert torch.equal(result[:count], torch.arange(count) + 1.0)


def test_no_step_captures():
    toy = Toy()
    for _ in range(4):
        toy.decode(3)
    key = BatchDescriptor(4, 4, True)
    assert toy.ran == [(NONE, key)] * 4
    assert not toy.maker.graphs
    assert toy.graphs.capture_one(toy.run)
    assert toy.graphs.dispatcher.is_captured((FULL, key)), "what a step did without comes first"
    toy.decode(3)
    assert toy.ran[-1] == (FULL, key) and len(toy.maker.graphs) == 1


def test_a_step_without_its_graph_runs_in_a_larger_one():
    toy = Toy()
    toy.graphs.schedule.miss((FULL, BatchDescriptor(8, 8, True)))
    toy.graphs.capture_one(toy.run)
    toy.decode(4)
    assert toy.ran[-1] == (FULL, BatchDescriptor(8, 8, True))
    toy.decode(3)
    assert toy.ran[-1] == (NONE, BatchDescriptor(4, 4, True)), "8 is more than twice as many"


def test_a_lazy_start_leaves_sizes_for_later(caplog):
    toy = Toy(sizes=range(1, 31))
    with caplog.at_level(logging.INFO, logger="pagemill"):
        toy.graphs.capture_at_start(toy.run)
    assert "captured 12 graphs" in caplog.text and "48 more while there is nothing to do" in caplog.text
    toy.decode(1)
    assert toy.ran[-1] == (FULL, BatchDescriptor(1, 1, True))
    toy.decode(13)
    assert toy.ran[-1] == (FULL, BatchDescriptor(16, 16, True))


@pytest.mark.parametrize("lazy", [True, False])
def test_the_keys_at_start_are_those_that_are_captured(lazy):
    toy = Toy(lazy=lazy)
    keys = toy.graphs.keys_at_start()
    assert not toy.ran
    toy.graphs.capture_at_start(toy.run)
    assert keys == [key for mode, key in toy.ran if mode is not NONE]


def test_a_start_that_is_not_lazy_captures_all():
    toy = Toy(lazy=False)
    toy.graphs.capture_at_start(toy.run)
    assert len(toy.maker.graphs) == 8 and not toy.graphs.capture_one(toy.run)
    toy.ran.clear()
    toy.decode(5)
    assert toy.ran == [(FULL, BatchDescriptor(8, 8, True))]


def test_warm_ups_run_outside_the_wrapper():
    toy = Toy(num_warm_ups=2)
    toy.graphs.capture_one(toy.run)
    key = BatchDescriptor(1, 1, True)
    assert toy.ran == [(NONE, key), (NONE, key), (FULL, key)]


def test_only_the_first_of_a_kind_has_a_warm_up():
    toy = Toy()
    for _ in range(2):
        toy.graphs.capture_one(toy.run)
    first, second = BatchDescriptor(1, 1, True), BatchDescriptor(2, 2, True)
    assert toy.ran == [(NONE, first), (FULL, first), (FULL, second)]


def test_a_capture_that_fails_is_tried_again_after_a_warm_up():
    toy = Toy()
    toy.graphs.capture_one(toy.run)
    toy.ran.clear()
    toy.fails = True
    toy.graphs.capture_one(toy.run)
    key = BatchDescriptor(2, 2, True)
    assert toy.ran == [(FULL, key), (NONE, key), (FULL, key)]
    toy.decode(2)
    assert toy.ran[-1] == (FULL, key)


def test_a_capture_that_fails_after_its_warm_up_raises():
    toy = Toy(num_warm_ups=1)
    toy.fails = True
    with pytest.raises(RuntimeError, match="not in a capture"):
        toy.graphs.capture_one(toy.run)


def test_idle_time_captures_one_at_a_time_until_all_are():
    toy = Toy()
    count = 0
    while toy.graphs.capture_one(toy.run):
        count += 1
        assert len(toy.maker.graphs) == count
    assert count == 8


def test_figures_of_steps_and_captures():
    toy = Toy()
    toy.decode(3)
    toy.graphs.capture_one(toy.run)
    for _ in range(3):
        toy.decode(3)
    toy.graphs.choose(100, 2, False)
    stats = toy.graphs.stats
    assert stats.steps == {FULL: 3, NONE: 2} and stats.num_missed == 1 and stats.num_captured == 1
    assert stats.padding(FULL) == pytest.approx(0.25) and stats.padding(GraphMode.PIECEWISE) == 0
    assert "FULL 3 steps (25% padding)" in stats.line() and "1 steps did without" in stats.line()


def test_figures_are_logged_when_asked_for(caplog, monkeypatch):
    monkeypatch.setattr(graph_runner, "REPORT_SECONDS", -1.0)
    with caplog.at_level(logging.INFO, logger="pagemill"):
        Toy().decode(3)
        assert "CUDA graphs:" not in caplog.text
        Toy(reports=True).decode(3)
        assert "CUDA graphs: NONE 1 steps" in caplog.text


def test_without_memory_steps_go_on_in_the_next_mode(caplog):
    toy = Toy(room=0)
    while toy.graphs.capture_one(toy.run):
        pass
    assert "no memory for the FULL graph of 4 tokens" in caplog.text
    toy.decode(3)
    assert toy.ran[-1][0] is NONE
    assert not toy.graphs.schedule.next_idle()


def test_without_memory_the_start_goes_on():
    toy = Toy(room=1)
    toy.graphs.capture_at_start(toy.run)
    toy.decode(8)
    assert toy.ran[-1][0] is FULL
    toy.decode(1)


def test_no_graphs_leaves_everything_as_it_is():
    graphs = NoGraphs()
    assert graphs.choose(3, 2, False) == (NONE, BatchDescriptor(3, 2, False))
    assert graphs.wrap_step(len) is len and graphs.wrap_model(len) is len
    graphs.capture_at_start(lambda mode, key: pytest.fail("nothing is captured"))
    assert not graphs.capture_one(lambda mode, key: pytest.fail("nothing is captured"))

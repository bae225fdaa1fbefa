"""Graphs of a runner: capture at start, on first need and while idle; figures; lack of memory."""

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

    def __init__(self, room=1000, **options):
        self.maker = FakeGraphMaker(room)
        dispatcher = Dispatcher(GraphMode.FULL_AND_PIECEWISE, (1, 2, 4, 8), BatchLimits(8))
        self.graphs = GraphRunner(dispatcher, self.maker, **options)
        self.buffer = torch.zeros(8)
        self.model = self.graphs.wrap_model(lambda x: x + 1)
        self.step = self.graphs.wrap_step(lambda x: self.model(x))
        self.ran = []

    def run(self, mode, key):
        self.ran.append((mode, key))
        with torch.inference_mode(), forward_context(ForwardContext({}, mode, key)):
            return self.step(self.buffer[: key.num_tokens])

    def decode(self, count):
        self.buffer[:count] = torch.arange(count)
        result = self.run(*self.graphs.choose(count, count, True))
        assert torch.equal(result[:count], torch.arange(count) + 1.0)


def test_a_size_is_captured_at_its_first_need():
    toy = Toy()
    for _ in range(4):
        toy.decode(3)
    key = BatchDescriptor(4, 4, True)
    assert toy.ran == [(NONE, key), (FULL, key), (FULL, key), (FULL, key)]
    assert len(toy.maker.graphs) == 1 and toy.maker.num_replays == 3


def test_a_lazy_start_leaves_sizes_for_later(caplog):
    toy = Toy()
    with caplog.at_level(logging.INFO, logger="pagemill"):
        toy.graphs.capture_at_start(toy.run)
    assert len(toy.maker.graphs) == 3
    assert "captured 3 graphs" in caplog.text and "5 more when they are needed" in caplog.text
    toy.decode(1)
    assert toy.ran[-1] == (FULL, BatchDescriptor(1, 1, True))


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


def test_idle_time_captures_one_at_a_time_until_all_are():
    toy = Toy()
    toy.decode(3)
    toy.decode(3)
    count = 0
    while toy.graphs.capture_one(toy.run):
        count += 1
        assert len(toy.maker.graphs) == count + 1
    assert count == 7


def test_figures_of_steps_and_captures():
    toy = Toy()
    for _ in range(4):
        toy.decode(3)
    toy.graphs.choose(100, 2, False)
    stats = toy.graphs.stats
    assert stats.steps == {FULL: 3, NONE: 2} and stats.num_warm_ups == 1 and stats.num_captured == 1
    assert stats.padding(FULL) == pytest.approx(0.25) and stats.padding(GraphMode.PIECEWISE) == 0
    assert "FULL 3 steps (25% padding)" in stats.line()


def test_figures_are_logged_when_asked_for(caplog, monkeypatch):
    monkeypatch.setattr(graph_runner, "REPORT_SECONDS", -1.0)
    with caplog.at_level(logging.INFO, logger="pagemill"):
        Toy().decode(3)
        assert "CUDA graphs:" not in caplog.text
        Toy(reports=True).decode(3)
        assert "CUDA graphs: NONE 1 steps" in caplog.text


def test_without_memory_steps_go_on_in_the_next_mode(caplog):
    toy = Toy(room=0)
    for _ in range(6):
        toy.decode(3)
    assert [mode for mode, _ in toy.ran] == [NONE, FULL, NONE, GraphMode.PIECEWISE, NONE, NONE]
    assert "no memory for the FULL graph of 4 tokens" in caplog.text


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

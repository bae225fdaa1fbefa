"""Engines that step together: as many steps in each wave, whatever comes when, and no request is left behind."""

import random
from collections import deque

import pytest

from pagemill.engine.waves import ROUND_STEPS, NoWaves, WaveMember
from pagemill.fleet.dp_coordinator import WaveState
from pagemill.messages.waves import JoinWaves, RoundDecision, RoundDone, StartWave, WaveStarted

pytestmark = pytest.mark.cases(one_in=6)


class Engine:
    """A member with work that is a number of steps."""

    def __init__(self):
        self.work = 0
        self.num_executed = self.num_dummy = 0
        self.said = deque()
        self.orders = deque()
        self.member = WaveMember(lambda: self.work > 0, self.said.append)

    def step(self):
        """A step if one is due; whether it was."""
        if not self.member.due():
            return False
        self.num_dummy += not self.work
        self.work -= self.work > 0
        self.num_executed += 1
        self.member.stepped(self.num_executed)
        return True

    def steps(self, count=10_000):
        return sum(1 for _ in range(count) if self.step())


class Net:
    """Engines and their coordinator, with mail that is delivered when the test says so, in order on each way."""

    def __init__(self, count):
        self.state = WaveState()
        self.engines = {}
        for index in range(count):
            self.come(index)

    def come(self, index):
        engine = self.engines[index] = Engine()
        engine.orders.append(self.state.join(index))

    def go(self, index):
        del self.engines[index]
        self.broadcast(self.state.leave(index))

    def report(self, index, report):
        self.broadcast(self.state.on_report(index, report))

    def cut(self, index):
        """The connection of an engine is lost, with all that is under way, and made again."""
        engine = self.engines[index]
        engine.said.clear()
        engine.orders.clear()
        engine.orders.append(self.state.resume())

    def restart(self):
        """Another coordinator, which knows of no wave, in the place of the former."""
        self.state = WaveState()
        for index, engine in self.engines.items():
            engine.said.clear()
            engine.orders.clear()
            engine.orders.append(self.state.join(index))

    def broadcast(self, order):
        if order is not None:
            for engine in self.engines.values():
                engine.orders.append(order)

    def ways(self):
        """Mail that can be delivered."""
        for index, engine in self.engines.items():
            if engine.said:
                yield lambda index=index, engine=engine: self.broadcast(
                    self.state.on_report(index, engine.said.popleft())
                )
            if engine.orders:
                yield lambda engine=engine: engine.member.on_order(engine.orders.popleft())

    def deliver_all(self):
        while ways := list(self.ways()):
            ways[0]()

    def run(self):
        """Until nothing happens any more."""
        for _ in range(10_000):
            self.deliver_all()
            if not any([engine.step() for engine in self.engines.values()]):
                return
        raise AssertionError("a wave does not end")


def test_without_waves_a_step_is_due_when_there_is_work():
    work = []
    waves = NoWaves(lambda: bool(work))
    assert not waves.due()
    work.append(1)
    assert waves.due()


def test_an_idle_engine_steps_with_a_busy_one_and_both_pause_after_the_same_step():
    net = Net(2)
    net.run()
    assert [engine.num_executed for engine in net.engines.values()] == [0, 0]
    net.engines[0].work = 40
    net.run()
    # Busy at the ends of the first two rounds, idle at the third's: they pause after the fourth.
    assert [engine.num_executed for engine in net.engines.values()] == [4 * ROUND_STEPS] * 2
    assert [engine.num_dummy for engine in net.engines.values()] == [4 * ROUND_STEPS - 40, 4 * ROUND_STEPS]
    net.engines[1].work = 1
    net.run()
    assert [engine.num_executed for engine in net.engines.values()] == [6 * ROUND_STEPS] * 2


def test_no_step_is_taken_before_the_coordinator_came():
    engine = Engine()
    engine.work = 1
    assert not engine.step()
    engine.member.on_order(JoinWaves(7, None))
    assert engine.step()
    assert list(engine.said) == [WaveStarted(8)]


def test_the_verdict_is_awaited_a_round_later_and_not_before():
    engine = Engine()
    engine.member.on_order(JoinWaves(0, None))
    engine.work = 1000
    assert engine.steps() == 2 * ROUND_STEPS
    assert list(engine.said) == [WaveStarted(1), RoundDone(1, 0, True)]
    engine.member.on_order(RoundDecision(1, 7, False))  # of another round
    engine.member.on_order(RoundDecision(0, 0, False))  # and of another wave
    assert engine.steps() == 0
    engine.member.on_order(RoundDecision(1, 0, True))
    assert engine.said[-1] == RoundDone(1, 1, True)
    engine.member.on_order(RoundDecision(1, 1, True))
    assert engine.steps() == 2 * ROUND_STEPS


def test_a_request_that_races_with_the_end_of_a_wave_begins_the_next():
    net = Net(2)
    net.engines[0].work = 1
    for engine in list(net.engines.values()) * ROUND_STEPS:
        net.deliver_all()
        assert engine.step()
    net.deliver_all()  # both reported that they have nothing, and know by now that they will pause
    net.engines[1].work = 5
    assert net.engines[1].steps(ROUND_STEPS) == ROUND_STEPS
    assert net.engines[1].work == 0, "it was served in the last round"
    net.engines[1].work = 5
    assert net.engines[1].step(), "the next wave begins at once"
    net.deliver_all()
    assert net.engines[0].steps(ROUND_STEPS) == ROUND_STEPS, "the other finishes its round first"
    net.run()
    assert net.engines[1].work == 0
    assert net.engines[0].num_executed == net.engines[1].num_executed == 4 * ROUND_STEPS


def test_two_engines_that_start_at_once_start_one_wave():
    net = Net(3)
    net.deliver_all()
    for index in (0, 2):
        net.engines[index].work = 3
        net.engines[index].step()
    net.run()
    assert {engine.num_executed for engine in net.engines.values()} == {2 * ROUND_STEPS}


def test_collecting_earlier_steps_is_no_step():
    engine = Engine()
    engine.member.on_order(JoinWaves(0, None))
    engine.work = 1000
    engine.step()
    for _ in range(100):
        engine.member.stepped(engine.num_executed)
    assert engine.steps() == 2 * ROUND_STEPS - 1


def test_an_engine_that_goes_is_not_awaited_and_one_that_comes_joins_the_wave():
    net = Net(2)
    net.engines[0].work = 500
    net.deliver_all()
    assert net.engines[0].steps() == 2 * ROUND_STEPS, "then it waits for the other"
    net.deliver_all()
    net.go(1)
    net.deliver_all()
    assert net.engines[0].steps(10) == 10
    net.come(1)
    net.run()
    assert net.engines[0].work == 0
    assert 0 < net.engines[1].num_executed == net.engines[1].num_dummy < net.engines[0].num_executed
    before = net.engines[0].num_executed
    net.engines[1].work = 1
    net.run()
    assert net.engines[0].num_executed == before + 2 * ROUND_STEPS


def test_a_member_whose_report_was_lost_gives_it_again():
    net = Net(2)
    net.engines[0].work = 100
    net.deliver_all()
    assert net.engines[0].steps() == 2 * ROUND_STEPS
    net.cut(0)  # that a wave has started, and the report of its first round, are lost
    net.run()
    assert [engine.num_executed for engine in net.engines.values()] == [8 * ROUND_STEPS] * 2


def test_when_all_have_gone_the_next_to_come_finds_a_pause():
    net = Net(2)
    net.engines[0].work = net.engines[1].work = 100
    net.deliver_all()
    for index in (0, 1):
        net.engines[index].steps(5)
    net.deliver_all()
    net.go(0)
    net.go(1)
    assert net.state.join(0) == JoinWaves(1, None)
    assert net.state.on_report(0, WaveStarted(1)) is None
    assert net.state.on_report(0, WaveStarted(2)) == StartWave(2)


def test_waves_go_on_with_a_coordinator_that_was_started_again():
    net = Net(2)
    for _ in range(3):
        net.engines[0].work = 20
        net.run()
    net.restart()
    before = net.engines[0].num_executed
    net.engines[1].work = 5 * ROUND_STEPS
    net.run()
    assert net.engines[1].work == 0
    assert net.engines[0].num_executed == net.engines[1].num_executed > before


@pytest.mark.parametrize("has_cuts", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_waves_hold_in_any_order_of_events(seed, has_cuts):
    rng = random.Random(seed)
    net = Net(rng.randrange(2, 5))
    deaths = seed % 2
    for _ in range(5000):
        ways = list(net.ways())
        match rng.random():
            case luck if luck < 0.4:
                if ways:
                    rng.choice(ways)()
            case luck if luck < 0.405:
                rng.choice(list(net.engines.values())).work += rng.randrange(1, 30)
            case luck if luck < 0.407 and deaths:
                index = rng.choice(list(net.engines))
                net.go(index)
                net.come(index)
            case luck if luck < 0.415 and has_cuts:
                net.cut(rng.choice(list(net.engines)))
            case _:
                rng.choice(list(net.engines.values())).step()
    net.run()
    assert net.state.join(99).wave > 3, "there were several waves"
    assert all(engine.work == 0 for engine in net.engines.values()), "work is left behind"
    if not deaths:
        assert len({engine.num_executed for engine in net.engines.values()}) == 1, "they did not step together"
        assert net.engines[0].num_executed % ROUND_STEPS == 0

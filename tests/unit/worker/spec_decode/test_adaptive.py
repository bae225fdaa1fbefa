"""How many drafts are verified, over a simulated cost of steps: none where they do not pay, and again where they do."""

import copy
import logging

import numpy as np
import pytest

from pagemill.messages.step import SchedulerOutput
from pagemill.model.distributed.group import SoloGroup
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.spec_decode import adaptive
from pagemill.worker.spec_decode.adaptive import IDLE_STEPS, PATIENCE, AdaptiveCounts
from pagemill.worker.spec_decode.drafts import SlotDrafts
from pagemill.worker.spec_decode.interface import Proposer, Speculation
from tests.marks import slow

MOST = 4


def memory_bound(num_tokens):
    """Seconds: tokens cost little beside the weights."""
    return 0.02 + 0.001 * num_tokens


def compute_bound(num_tokens):
    """Seconds: each token costs as much."""
    return 0.0005 + 0.003 * num_tokens


class Simulation:
    """Requests whose next tokens are always guessed; `right(position)`: whether the guess of a token is right."""

    def __init__(self, num_slots, cost, right, seed=0, noise=0.02):
        self.states = RequestStates(num_slots, 20_000)
        self.states.num_tokens[:] = 10
        self.adaptive = AdaptiveCounts(self.states, MOST)
        self.cost = cost
        self.right = right
        self.slots = np.arange(num_slots, dtype=np.int32)
        self.rng = np.random.default_rng(seed)
        self.noise = noise
        self.counts = np.zeros(num_slots, np.int32)
        self.seconds = 0.0
        self.num_tokens = 0
        self.guessed = 0
        for slot in range(num_slots):
            self.adaptive.begin(slot)

    def step(self):
        """Verify what was chosen, and choose again."""
        states, slots = self.states, self.slots
        rows = len(slots) + int(self.counts.sum())
        accepted = np.zeros(len(slots), np.int32)
        for slot, count in enumerate(self.counts.tolist()):
            known = int(states.num_tokens[slot])
            guess = self.guess(slot, known)
            while accepted[slot] < count and guess[accepted[slot]] == self.token(slot, known + accepted[slot]):
                accepted[slot] += 1
            for place in range(known, known + accepted[slot] + 1):
                states.token_ids[slot, place] = self.token(slot, place)
        states.num_tokens[slots] += accepted + 1
        measured = self.cost(rows) * (1 + self.noise * self.rng.standard_normal())
        self.adaptive.costs.add(rows, measured)
        self.seconds += self.cost(rows)
        self.num_tokens += int(accepted.sum()) + len(slots)
        if self.counts.any():
            self.adaptive.verified(slots, self.counts, accepted)
        due = self.adaptive.due(slots)
        self.guessed += int(due.sum())
        guesses = [
            self.guess(slot, int(states.num_tokens[slot])) if due[slot] else np.zeros(0, np.int32)
            for slot in slots.tolist()
        ]
        self.counts = self.adaptive.choose(slots, guesses)

    def run(self, num_steps):
        """The speed beside that of plain steps, of these steps."""
        before, began = self.num_tokens, self.seconds
        for _ in range(num_steps):
            self.step()
        plain = len(self.slots) / self.cost(len(self.slots))
        return (self.num_tokens - before) / (self.seconds - began) / plain

    def token(self, slot, place):
        return (place * 31 + slot) % 1000

    def guess(self, slot, known):
        places = range(known, known + MOST)
        return np.array([self.token(slot, place) + (not self.right(place)) for place in places], np.int32)


@pytest.mark.parametrize("num_slots", [1, 8, slow(64)])
@pytest.mark.parametrize("cost", [memory_bound, compute_bound])
def test_guesses_that_are_always_wrong_cost_at_most_three_percent(num_slots, cost):
    simulation = Simulation(num_slots, cost, right=lambda place: False)
    assert simulation.run(500) > 0.97
    assert not simulation.counts.any()
    assert simulation.run(500) > 0.997  # what is guessed and not verified costs no step anything
    assert simulation.guessed < 0.5 * 1000 * num_slots


def test_drafts_return_when_the_text_can_be_guessed_and_go_when_it_cannot():
    change = [2000, 4000]
    simulation = Simulation(4, memory_bound, right=lambda place: change[0] <= place < change[1])
    while (simulation.states.num_tokens < change[0]).any():
        simulation.step()
    assert len(simulation.adaptive._resting) < 4 or not simulation.counts.any()
    for _ in range(40):
        simulation.step()
    assert (simulation.counts == MOST).all()
    assert simulation.run(200) > 2
    while (simulation.states.num_tokens < change[1] + 50).any():
        simulation.step()
    assert not simulation.counts.any()


def test_the_best_number_follows_the_cost_of_a_step():
    cheap = Simulation(1, memory_bound, right=lambda place: place % 3 != 0)
    dear = Simulation(1, compute_bound, right=lambda place: place % 3 != 0)
    assert cheap.run(1000) > 1.5
    assert dear.run(1000) > 0.97
    assert dear.guessed < 1000


@pytest.mark.parametrize("cost", [memory_bound, compute_bound])
def test_lists_and_arrays_choose_alike(cost, monkeypatch):
    chosen, rates = [], []
    for few in (0, 1000):
        monkeypatch.setattr(adaptive, "FEW_ROWS", few)
        simulation = Simulation(7, cost, lambda place: place % 5 > 1)
        counts = []
        for _ in range(60):
            simulation.step()
            counts.append(simulation.counts.tolist())
        chosen.append(counts)
        rates.append((simulation.adaptive._rates, simulation.adaptive._shared))
    assert chosen[0] == chosen[1]
    for lists, arrays in zip(*rates, strict=True):
        np.testing.assert_allclose(lists, arrays, rtol=1e-9)
    assert any(map(any, chosen[0]))


def test_drafts_go_to_the_requests_whose_guesses_come_true():
    simulation = Simulation(8, memory_bound, right=lambda place: True)
    wrong = simulation.guess

    def guess(slot, known):
        return wrong(slot, known) + (slot >= 2)

    simulation.guess = guess
    simulation.run(300)
    for _ in range(3):  # now and then there is a step without any
        simulation.step()
        if simulation.counts.any():
            break
    assert simulation.counts[:2].tolist() == [MOST, MOST]
    assert not simulation.counts[2:].any()


def test_most_of_a_guess_is_left_out_where_its_end_is_never_right():
    simulation = Simulation(1, memory_bound, right=lambda place: True)
    right = simulation.guess
    simulation.guess = lambda slot, known: right(slot, known) + np.array([0, 0, 1, 1], np.int32)
    simulation.run(200)
    counts = set()
    for _ in range(20):
        simulation.step()
        counts |= set(simulation.counts.tolist())
    assert 2 in counts
    assert MOST not in counts


@pytest.mark.parametrize("num_slots", [1, 3, slow(40)])
def test_it_is_known_without_their_drafts_when_slots_verify_all_of_them(num_slots):
    simulation = Simulation(num_slots, memory_bound, right=lambda place: place < 2000)
    adaptive, slots = simulation.adaptive, simulation.slots
    choose, most, known = adaptive.choose, np.full(num_slots, MOST, np.int32), []

    def noted(slots, guesses):
        early = copy.copy(adaptive)
        asks, kept = adaptive.asks_all(slots), early.keep_all(slots, most)
        found = choose(slots, guesses)
        assert asks or kept is None
        if kept is not None:
            assert kept.tolist() == found.tolist()
            assert early._num_drafted_steps == adaptive._num_drafted_steps
            assert early._num_idle_steps == adaptive._num_idle_steps == 0
            known.append(kept.any())
        return found

    adaptive.choose = noted
    while (simulation.states.num_tokens < 3000).any():
        simulation.step()
    assert sum(known) > 100
    assert not all(known)  # now and then there is a step without any
    assert not adaptive.asks_all(slots)
    assert adaptive.keep_all(slots, most) is None


def test_slots_without_room_verify_none_of_their_drafts():
    simulation = Simulation(2, memory_bound, right=lambda place: True)
    while not simulation.counts.any():
        simulation.step()
    kept = simulation.adaptive.keep_all(simulation.slots, np.zeros(2, np.int32))
    assert kept.tolist() == [0, 0]
    assert simulation.adaptive._num_drafted_steps == 0


def test_a_new_request_begins_with_what_is_known_of_others():
    simulation = Simulation(2, memory_bound, right=lambda place: False)
    simulation.run(200)
    simulation.adaptive.begin(0)
    assert simulation.adaptive._rates[0][0] < 0.2
    assert 0 not in simulation.adaptive._resting
    states = simulation.states
    counts = simulation.adaptive.choose(simulation.slots[:1], [simulation.guess(0, int(states.num_tokens[0]))])
    assert counts.tolist() == [0]


def test_other_tokens_make_a_guess_void():
    simulation = Simulation(1, compute_bound, right=lambda place: False)
    simulation.run(100)
    while 0 not in simulation.adaptive._guesses:
        simulation.step()
    simulation.adaptive.replace(0)
    assert simulation.adaptive.due(simulation.slots).all()


def test_it_is_said_once_that_nothing_comes_true(caplog):
    simulation = Simulation(8, memory_bound, right=lambda place: False)
    with caplog.at_level(logging.INFO):
        simulation.run(2000)
    assert sum("what the model samples" in record.message for record in caplog.records) == 1


def test_nothing_is_said_of_drafts_that_come_true(caplog):
    simulation = Simulation(8, memory_bound, right=lambda place: place % 5 != 0)
    with caplog.at_level(logging.INFO):
        simulation.run(500)
    assert not caplog.records


class Wrong(Proposer):
    """Guesses, and never right."""

    def __init__(self, states):
        self.states = states

    def propose(self, slots):
        return [np.full(MOST, 7, np.int32) for _ in slots]


class Ranks(SoloGroup):
    """Two ranks, of which the other one took a second longer."""

    def __init__(self):
        super().__init__()
        self.size = 2

    def all_reduce(self, tensor):
        return tensor.add_(1.0)


def drafts_of(states, ranks=None, **settings):
    return SlotDrafts(states, Wrong(states), Speculation("wrong", MOST, **settings), ranks)


def test_slots_have_no_more_drafts_than_are_worth_it():
    states = RequestStates(2, 100)
    slots = np.arange(2, dtype=np.int32)
    states.num_tokens[:] = 10
    every, some = drafts_of(states, adaptive=False), drafts_of(states)
    for _ in range(20):
        some._adaptive.verified(slots, np.full(2, MOST, np.int32), np.zeros(2, np.int32))
    assert every.propose(slots).counts.tolist() == [MOST, MOST]
    assert some.propose(slots) is None
    step = SchedulerOutput(0, slots, np.full(2, 1 + MOST, np.int32))
    states.num_computed[:] = 9
    assert every.num_tokens(step).tolist() == [1 + MOST] * 2
    assert some.num_tokens(step).tolist() == [1, 1]


def test_ranks_agree_on_the_time_of_a_step():
    states = RequestStates(2, 100)
    alone, together = drafts_of(states), drafts_of(states, Ranks())
    for drafts in (alone, together):
        with drafts.clock:
            pass
        drafts.computed(num_tokens=3, num_rows=1)  # tokens of prompts say nothing
        assert drafts._adaptive.costs.num_steps == 0
        with drafts.clock:
            pass
        drafts.computed(num_tokens=2, num_rows=2)
        assert drafts._adaptive.costs.num_steps == 1
    assert together._adaptive.costs.seconds(2, 2)[0] >= 1.0


def test_where_nothing_is_guessed_for_long_few_steps_ask():
    """And a new request is asked at once."""
    states = RequestStates(2, 2000)
    adaptive = AdaptiveCounts(states, MOST)
    asked = [not adaptive.pauses() for _ in range(IDLE_STEPS + 10 * PATIENCE)]
    assert all(asked[:IDLE_STEPS])
    assert sum(asked[IDLE_STEPS:]) == 10
    adaptive.begin(1)
    assert not any(adaptive.pauses() for _ in range(IDLE_STEPS))


def test_drafts_that_are_verified_end_the_pause():
    sim = Simulation(1, memory_bound, lambda position: True)
    for _ in range(60):
        assert not sim.adaptive.pauses() or not sim.counts.any()
        sim.step()
    assert sim.counts.any()
    assert not sim.adaptive.pauses()


def test_steps_after_which_nobody_is_asked_are_not_measured():
    states = RequestStates(2, 2000)
    drafts = drafts_of(states)
    steps = IDLE_STEPS + 10 * PATIENCE
    asked = 0
    for _ in range(steps):
        with drafts.clock:
            pass
        asked += not drafts._adaptive.pauses()
        drafts.computed(num_tokens=2, num_rows=2)
    assert drafts._adaptive.costs.num_steps == asked == IDLE_STEPS + 10

"""The engine's halves of step extensions: when they are asked, what steps carry, and who gets the answers."""

import numpy as np
import pytest

from pagemill.catalog.step_extensions import STEP_EXTENSIONS
from pagemill.engine.extensions.interface import EngineExtension
from pagemill.engine.kv_cache.manager import KVCacheManager
from pagemill.engine.scheduler.limits import SchedulerLimits
from pagemill.engine.scheduler.scheduler import Scheduler
from pagemill.errors import ConfigError
from pagemill.messages.extensions import StepAnswers, StepExtension
from pagemill.messages.kv_spec import KVCacheConfig, KVCacheGroup
from pagemill.messages.step import ModelRunnerOutput
from tests.fakes.engine_setup import core_request, full

MADE = []


class Toy(EngineExtension):
    """Says which requests begin in which slots."""

    def __init__(self, context):
        self.context = context
        self.asked = []
        self.answers = []
        self.every_step = False
        MADE.append(self)

    def payload(self, step, sampled):
        self.asked.append((step, sampled.tolist()))
        return {new.slot: self.context.occupant(new.slot).request_id for new in step.new} or None

    def joins_every_step(self, slots):
        return self.every_step

    def receive(self, answer, slots, live):
        self.answers.append((answer, slots.tolist(), live.tolist()))


TOY = StepExtension(engine=f"{__name__}:Toy", worker=f"{__name__}:Toy", payload=dict, answer=str)
ABSENT = StepExtension(engine=f"{__name__}:Absent", worker=f"{__name__}:Toy", payload=dict)


def make(*requests):
    plan = KVCacheConfig(64, (KVCacheGroup(("layer",), full(16)),))
    scheduler = Scheduler(SchedulerLimits(64, 4, 64), KVCacheManager(plan, "sha256"), depth=2)
    for request in requests:
        scheduler.add(request)
    return scheduler


@pytest.fixture
def toy():
    """A scheduler with two requests, and its toy extension."""
    STEP_EXTENSIONS.add("toy", f"{__name__}:TOY")
    MADE.clear()
    try:
        scheduler = make(core_request("a", 3, max_tokens=30), core_request("b", 3, max_tokens=30))
    finally:
        STEP_EXTENSIONS.remove("toy")
    [extension] = MADE
    return scheduler, extension


def deliver(scheduler, step, answer=None):
    answers = None if answer is None else StepAnswers(toy=answer)
    tokens = np.full(len(step.slots), 9, np.int32)
    return scheduler.update(ModelRunnerOutput(step.step_id, step.slots, tokens, answers=answers))


def test_a_step_carries_what_is_said_to_it_and_none_where_nothing_is(toy):
    scheduler, extension = toy
    step = scheduler.schedule()
    assert step.extensions == {"toy": {0: "a", 1: "b"}}
    deliver(scheduler, step)
    step = scheduler.schedule()
    assert step.extensions is None
    assert [sampled for _, sampled in extension.asked] == [[0, 1], [0, 1]]


def test_it_sees_the_step_that_is_sent(toy):
    scheduler, extension = toy
    step = scheduler.schedule()
    [(seen, _)] = extension.asked
    assert (seen.step_id, seen.new, seen.extensions) == (step.step_id, step.new, None)
    assert np.array_equal(seen.slots, step.slots)


@pytest.mark.parametrize("every_step", [False, True])
def test_repeated_steps_do_not_ask_unless_it_joins_them(toy, every_step):
    scheduler, extension = toy
    extension.every_step = every_step
    for _ in range(8):
        deliver(scheduler, scheduler.schedule())
    assert len(extension.asked) == (8 if every_step else 2)


def test_answers_come_before_the_tokens_and_say_whose_request_is_gone(toy):
    scheduler, extension = toy
    first, second = scheduler.schedule(), scheduler.schedule()
    deliver(scheduler, first, "one")
    scheduler.abort(["a"])
    outputs = deliver(scheduler, second, "two")
    assert extension.answers == [("one", [0, 1], [True, True]), ("two", [0, 1], [False, True])]
    assert outputs.request_ids == ["b"]
    scheduler.check_integrity()


def test_an_answer_to_a_repeated_step_is_received(toy):
    scheduler, extension = toy
    for _ in range(6):
        step = scheduler.schedule()
        outputs = deliver(scheduler, step, str(step.step_id))
    assert [answer for answer, _, _ in extension.answers] == ["0", "1", "2", "3", "4", "5"]
    assert outputs.token_ids == [9, 9]
    scheduler.check_integrity()


def test_a_half_that_cannot_be_found_is_named():
    STEP_EXTENSIONS.add("toy", f"{__name__}:ABSENT")
    try:
        with pytest.raises(ConfigError, match="engine's half of step extension 'toy'"):
            make()
    finally:
        STEP_EXTENSIONS.remove("toy")

"""A steady step is the one before once more, for as long as nothing else is due. That it changes nothing else is for
the random schedules of tests/unit/engine: they run through it whenever they can."""

import itertools

import numpy as np

from pagemill.engine.kv_cache.manager import KVCacheManager
from pagemill.engine.scheduler.limits import SchedulerLimits
from pagemill.engine.scheduler.scheduler import Scheduler
from pagemill.messages.engine_io import FinishReason
from pagemill.messages.kv_spec import KVCacheConfig, KVCacheGroup
from pagemill.messages.step import NO_TOKEN, ModelRunnerOutput
from tests.fakes.engine_setup import BLOCK_SIZE, core_request, full


def make(*requests):
    plan = KVCacheConfig(64, (KVCacheGroup(("layer",), full()),))
    scheduler = Scheduler(SchedulerLimits(64, 4, 64), KVCacheManager(plan, "sha256"))
    for request in requests:
        scheduler.add(request)
    return scheduler


def deliver(scheduler, step, token=9):
    return scheduler.update(ModelRunnerOutput(step.step_id, step.slots, np.full(len(step.slots), token, np.int32)))


def run(scheduler, num_steps, token=9):
    """(step, outputs) of each."""
    done = []
    for _ in range(num_steps):
        step = scheduler.schedule()
        done.append((step, deliver(scheduler, step, token)))
    return done


def test_steps_repeat_until_a_block_is_full():
    scheduler = make(core_request("a", 3, max_tokens=30), core_request("b", 3, max_tokens=30))
    steps = [step for step, _ in run(scheduler, 12)]
    repeated = [before.slots is step.slots for before, step in itertools.pairwise(steps)]
    # Of each block, the first position needs it and the last fills it; the two between have the same arrays.
    assert [bool(step.grown) for step in steps[1:]] == [index % BLOCK_SIZE == 1 for index in range(11)]
    assert repeated == [False, False] + [False, True, False, False] * 2 + [False]
    scheduler.check_integrity()


def test_requests_end_at_their_length_and_at_a_stop_id():
    scheduler = make(core_request("a", 3, max_tokens=7), core_request("b", 3, max_tokens=30, stop_token_ids=[5]))
    finished = {}
    for token in (9, 9, 9, 9, 9, 9, 9, 9, 5):
        for output in run(scheduler, 1, token)[0][1].outputs:
            if output.finish is not None:
                finished[output.request_id] = output.finish.reason
    assert finished == {"a": FinishReason.LENGTH, "b": FinishReason.STOP}
    assert not scheduler.has_work()
    scheduler.check_integrity()


def test_who_leaves_while_a_steady_step_is_in_flight_gets_no_token():
    scheduler = make(core_request("a", 5, max_tokens=30), core_request("b", 5, max_tokens=30))
    first = run(scheduler, 2)[1][0]
    step = scheduler.schedule()
    assert step.slots is not first.slots
    deliver(scheduler, step)
    step = scheduler.schedule()
    scheduler.abort(["a"])
    outputs = deliver(scheduler, step)
    assert (outputs.request_ids, outputs.token_ids) == (["b"], [9])
    step, _ = run(scheduler, 1)[0]
    assert step.released == [0]
    scheduler.check_integrity()


def test_a_request_that_comes_is_admitted_at_once():
    scheduler = make(core_request("a", 2, max_tokens=30))
    run(scheduler, 1)
    scheduler.add(core_request("b", 2, max_tokens=30))
    assert [new.request_id for new in scheduler.schedule().new] == ["b"]


def test_more_stop_ids_than_the_array_holds_are_looked_up():
    stops = range(20, 40)
    scheduler = make(core_request("a", 5, max_tokens=30, stop_token_ids=stops))
    run(scheduler, 2)
    assert run(scheduler, 1, token=33)[0][1].outputs[0].finish.reason is FinishReason.STOP


def test_a_steady_step_without_a_token_ends_that_request_alone():
    scheduler = make(core_request("a", 3, max_tokens=30), core_request("b", 3, max_tokens=30))
    run(scheduler, 4)
    step = scheduler.schedule()
    assert scheduler._in_flight[0].steady is not None
    tokens = np.array([9, NO_TOKEN], np.int32)
    outputs = scheduler.update(ModelRunnerOutput(step.step_id, step.slots, tokens))
    assert (outputs.request_ids, outputs.token_ids) == (["a"], [9])
    assert [(output.request_id, output.finish.reason) for output in outputs.outputs] == [("b", FinishReason.ERROR)]
    scheduler.check_integrity()
    assert [outputs.request_ids for _, outputs in run(scheduler, 3)] == [["a"]] * 3

"""When what goes with the call that samples a step is made, and of which slots, as a scheduler of forms sees it."""

import numpy as np
import pytest

from pagemill.engine.kv_cache.manager import KVCacheManager
from pagemill.engine.scheduler.limits import SchedulerLimits
from pagemill.engine.scheduler.scheduler import Scheduler
from pagemill.engine.structured_output.following import FollowedGrammar
from pagemill.messages.kv_spec import KVCacheConfig, KVCacheGroup
from pagemill.messages.step import ModelRunnerOutput
from pagemill.messages.structured_outputs import StructuredOutputsParams
from tests.fakes.engine_setup import core_request, full
from tests.fakes.masked_worker import forms

FORMS = {"digits": {"regex": "[0-9]{9}"}, "word": {"choice": ["ab", "cd"]}, "forced": {"regex": "[ab]xyz[ab]"}}
FORMS |= {"pairs": {"regex": "[ab][cd][ef][ghij]"}, "letters": {"regex": "[pqrs]{20}"}}


@pytest.fixture(scope="module")
def grammar_of():
    return forms({name: StructuredOutputsParams(**form) for name, form in FORMS.items()})


@pytest.fixture
def make(grammar_of):
    def make(*names, depth=2):
        plan = KVCacheConfig(64, (KVCacheGroup(("layer",), full(16)),))
        kv = KVCacheManager(plan, "sha256")
        scheduler = Scheduler(SchedulerLimits(64, 4, 64), kv, depth=depth, grammar_of=grammar_of)
        for name in names:
            scheduler.add(core_request(name, 3, max_tokens=30))
        return scheduler

    return make


def deliver(scheduler, step, *tokens):
    return scheduler.update(ModelRunnerOutput(step.step_id, step.slots, np.array(tokens, np.int32)))


def allowed(scheduler):
    """Slot -> the tokens that may come."""
    masks = scheduler.sampling.take()["grammar_masks"]
    bits = np.unpackbits(masks.masks.view(np.uint8), axis=1, bitorder="little") if len(masks.slots) else []
    return {slot: set(np.flatnonzero(row).tolist()) for slot, row in zip(masks.slots, bits, strict=True)}


def test_nothing_is_said_where_nobody_has_a_form(make):
    scheduler = make("free")
    for _ in range(3):
        step = scheduler.schedule()
        assert not scheduler.sampling.awaits_tokens()
        assert scheduler.sampling.take() is None
        deliver(scheduler, step, 5)


def test_what_depends_on_a_token_in_flight_waits_for_it(make):
    scheduler = make("digits", "free")
    first = scheduler.schedule()
    assert not scheduler.sampling.awaits_tokens()
    digits = set(b"0123456789")
    assert allowed(scheduler) == {0: digits}
    second = scheduler.schedule()
    assert scheduler.sampling.awaits_tokens()
    deliver(scheduler, first, ord("7"), 5)
    assert not scheduler.sampling.awaits_tokens()
    assert allowed(scheduler) == {0: digits}
    deliver(scheduler, second, ord("8"), 5)


def test_a_request_that_is_complete_needs_no_mask_in_the_step_under_way(make):
    scheduler = make("word", "digits")
    first = scheduler.schedule()
    assert allowed(scheduler) == {0: set(b"ac"), 1: set(b"0123456789")}
    second = scheduler.schedule()
    outputs = deliver(scheduler, first, ord("a"), ord("1"))  # "b" is forced, and the word complete
    assert [output.finish is not None for output in outputs.outputs] == [True, False]
    assert list(allowed(scheduler)) == [1]
    deliver(scheduler, second, 5, ord("2"))
    scheduler.check_integrity()


def test_what_is_under_way_before_a_forced_stretch_has_no_mask_and_does_not_count(make):
    scheduler = make("forced")
    first = scheduler.schedule()
    assert allowed(scheduler) == {0: set(b"ab")}
    second = scheduler.schedule()
    deliver(scheduler, first, ord("a"))
    assert allowed(scheduler) == {}
    third = scheduler.schedule()
    assert [known.token_ids.tolist() for known in third.known] == [list(b"xyz")]
    assert not scheduler.sampling.awaits_tokens()
    assert allowed(scheduler) == {0: set(b"ab")}
    assert deliver(scheduler, second, 9).token_ids == []
    deliver(scheduler, third, ord("b"))
    assert not scheduler.has_work()


def test_a_request_that_is_gone_is_not_waited_for(make):
    scheduler = make("digits", "free")
    first = scheduler.schedule()
    allowed(scheduler)
    second = scheduler.schedule()
    scheduler.abort(["digits"])
    assert not scheduler.sampling.awaits_tokens()
    assert allowed(scheduler) == {}
    deliver(scheduler, first, 5, 5)
    deliver(scheduler, second, 5, 5)


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_that_repeat_are_told_of_each_token(make, depth):
    """Until one ends, and with it the batch that repeated."""
    scheduler = make("pairs", "letters", depth=depth)
    repeated, before, output = 0, None, {"pairs": [], "letters": []}
    pairs = [b"ab", b"cd", b"ef", b"ghij"]
    for tokens in (b"ap", b"dq", b"fr", b"hs"):
        step = scheduler.schedule()
        repeated += before is not None and step.slots is before.slots
        masks = allowed(scheduler)
        assert masks[1] == set(b"pqrs")
        assert masks[0] == set(pairs.pop(0))
        given = deliver(scheduler, step, *tokens[: len(step.slots)])
        before = step
        for name, token in zip(given.request_ids, given.token_ids, strict=True):
            output[name].append(token)
        for other in given.outputs:
            output[other.request_id] += other.new_token_ids
    assert repeated
    assert bytes(output["pairs"]) == b"adfh"
    assert bytes(output["letters"]) == b"pqrs"
    assert scheduler.request_ids == {"letters"}
    scheduler.check_integrity()


def test_masks_are_made_before_a_step_that_is_computed_at_once_and_beside_any_other(make, monkeypatch):
    made = []
    fill = FollowedGrammar.fill
    monkeypatch.setattr(FollowedGrammar, "fill", staticmethod(lambda *given: made.append(1) or fill(*given)))
    for depth in (1, 2):
        scheduler = make("letters", depth=depth)
        step = scheduler.schedule()
        assert len(made) == (depth == 1)
        assert allowed(scheduler) == {0: set(b"pqrs")}
        assert len(made) == 1
        deliver(scheduler, step, ord("p"))
        made.clear()


def test_where_more_steps_are_in_flight_none_repeats_for_a_form(make):
    """It runs in every other step: its mask needs the token before."""
    scheduler = make("letters", depth=3)
    steps = []
    for _ in range(3):
        steps.append(scheduler.schedule())
        allowed(scheduler)
        deliver(scheduler, steps[-1], ord("p"))
    first, second, third = scheduler.schedule(), scheduler.schedule(), scheduler.schedule()
    assert first.slots is not steps[-1].slots
    assert second.slots is not first.slots
    assert third is None

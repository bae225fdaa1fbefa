"""Nobody starves: whoever comes before or after, a request ends within steps that depend on the work before it alone.

The driver checks after every step that running requests which want one token get it before chunks of prompts do, that
no token of the budget is left while somebody could use it, and that the latest or least important one gives way.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.engine.scheduler.limits import SchedulerLimits
from tests.examples import examples
from tests.fakes.engine_setup import core_request, full, sliding
from tests.fakes.scheduler_driver import SchedulerDriver, Setup

LENGTH = 120
"""max_model_len of these engines."""
DEPTHS = st.sampled_from([1, 2, 3])
POLICIES = st.sampled_from(["fcfs", "priority"])
FEW = settings(max_examples=examples(8), deadline=None)
ONE_GROUP = (full(),)


def driver(*, spare=0, depth=1, budget=16, slots=4, specs=ONE_GROUP, caching=True, **limits):
    """The pool holds one request of LENGTH tokens and `spare` blocks more."""
    chosen = SchedulerLimits(budget, slots, LENGTH, **limits)
    return SchedulerDriver(Setup(specs, chosen, spare, depth, "sha256" if caching else None))


def prompt(number, length):
    """A prompt that shares no block with those of other numbers."""
    return [1 + number % 9, number // 9 % 10, number // 90 % 10, *range(length)][:length]


class Stream:
    """Requests that never end to come: before each step, so many that some of them always wait."""

    def __init__(self, engine, length, max_tokens, **options):
        self.engine, self.length, self.options = engine, length, {"max_tokens": max_tokens} | options
        self.count = 0

    def fill(self):
        names = [name for name in self.engine.waiting if name.startswith("stream")]
        for _ in range(2 - len(names)):
            self.count += 1
            self.engine.arrive(core_request(f"stream{self.count}", prompt(self.count, self.length), **self.options))

    def steps_until(self, done, limit):
        """Step under the stream until `done()`; more than `limit` steps are too many."""
        start = self.engine.num_steps
        while not done():
            self.fill()
            self.engine.step()
            assert self.engine.num_steps - start <= limit, f"not done after {limit} steps"
        return self.engine.num_steps - start


@pytest.mark.slow
@FEW
@given(
    depth=DEPTHS,
    policy=POLICIES,
    spare=st.sampled_from([0, 5, 60]),
    budget=st.sampled_from([4, 9, 32]),
    threshold=st.sampled_from([0, 2, 8]),
    chunked=st.booleans(),
    short=st.integers(1, 12),
    output=st.integers(1, 20),
    long=st.integers(60, LENGTH - 10),
)
def test_a_long_prompt_ends_under_an_endless_stream_of_short_ones(
    depth, policy, spare, budget, threshold, chunked, short, output, long
):
    engine = driver(
        spare=spare,
        depth=depth,
        budget=budget if chunked else LENGTH,
        policy=policy,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=threshold,
    )
    stream = Stream(engine, short, output)
    stream.steps_until(lambda: engine.num_steps > 20, 30)
    engine.arrive(core_request("long", prompt(0, long), max_tokens=5))
    stream.steps_until(lambda: engine.lives["long"].finish, engine.work_left())
    engine.drain()


@pytest.mark.slow
@FEW
@given(
    depth=DEPTHS,
    policy=POLICIES,
    spare=st.sampled_from([0, 40, 200]),
    threshold=st.sampled_from([0, 4]),
    long=st.integers(40, LENGTH - 10),
    output=st.integers(1, 10),
)
def test_short_prompts_end_under_an_endless_stream_of_long_ones(depth, policy, spare, threshold, long, output):
    engine = driver(spare=spare, depth=depth, policy=policy, long_prefill_token_threshold=threshold)
    stream = Stream(engine, long, output)
    stream.steps_until(lambda: engine.num_steps > 20, 30)
    for number in range(3):
        name = f"short{number}"
        engine.arrive(core_request(name, prompt(10_000 + number, 3), max_tokens=4))
        stream.steps_until(lambda name=name: engine.lives[name].finish, engine.work_left())
    engine.drain()


@FEW
@given(depth=DEPTHS, budget=st.sampled_from([16, 40]), long=st.integers(40, LENGTH - 10), length=st.integers(1, 6))
def test_with_a_threshold_a_short_prompt_waits_for_no_long_one(depth, budget, long, length):
    """Two long prompts are computed, and what they leave of the budget is enough: its first token is in the next
    step, the others in those after it."""
    engine = driver(spare=200, depth=depth, budget=budget, long_prefill_token_threshold=5)
    for number in range(2):
        engine.arrive(core_request(f"long{number}", prompt(number, long), max_tokens=2))
    engine.step()
    engine.arrive(core_request("short", prompt(5, length), max_tokens=3))
    start = engine.num_steps
    while not engine.lives["short"].finish:
        engine.step()
    chunks = -(-length // 5)
    assert engine.num_steps - start <= chunks + 2 + depth - 1
    engine.drain()


@pytest.mark.slow
@FEW
@given(
    depth=DEPTHS,
    budget=st.sampled_from([4, 7, 32]),
    threshold=st.sampled_from([0, 3]),
    long=st.integers(40, LENGTH - 10),
)
def test_whoever_generates_gets_a_token_in_every_step_while_prompts_are_computed(depth, budget, threshold, long):
    engine = driver(spare=300, depth=depth, budget=budget, long_prefill_token_threshold=threshold)
    names = [f"r{number}" for number in range(3)]
    for number, name in enumerate(names):
        engine.arrive(core_request(name, prompt(500 + number, 2), max_tokens=60))
    while not all(engine.lives[name].tokens for name in names):
        engine.step()
    stream = Stream(engine, long, 2)
    before = [len(engine.lives[name].tokens) for name in names]
    start = engine.num_steps
    stream.steps_until(lambda: engine.num_steps == start + 30, 30)
    for name, count in zip(names, before, strict=True):
        assert len(engine.lives[name].tokens) - count == 30
    engine.drain()


@pytest.mark.slow
@FEW
@given(
    depth=DEPTHS,
    spare=st.sampled_from([0, 10]),
    slots=st.integers(1, 4),
    low=st.integers(1, LENGTH - 30),
    high=st.integers(1, LENGTH - 30),
    output=st.integers(1, 25),
)
def test_the_least_important_request_ends_once_the_others_stop_to_come(depth, spare, slots, low, high, output):
    engine = driver(spare=spare, depth=depth, slots=slots, policy="priority")
    stream = Stream(engine, high, output, priority=-1)
    stream.fill()
    engine.arrive(core_request("low", prompt(0, low), max_tokens=25, priority=7))
    stream.steps_until(lambda: engine.num_steps > 30, 40)
    engine.drain()  # within a bound that follows from the work


@pytest.mark.slow
@settings(max_examples=examples(16), deadline=None)
@given(
    depth=DEPTHS,
    policy=POLICIES,
    specs=st.sampled_from([(full(),), (full(), sliding(20)), (sliding(30),)]),
    first=st.integers(1, LENGTH - 1),
    second=st.integers(1, LENGTH - 1),
    budget=st.sampled_from([2, 16, 128]),
    caching=st.booleans(),
)
def test_two_requests_that_fit_one_at_a_time_both_end(depth, policy, specs, first, second, budget, caching):
    """The pool holds one request of the greatest length and no block more."""
    engine = driver(depth=depth, policy=policy, specs=specs, budget=budget, slots=2, caching=caching)
    engine.arrive(core_request("a", prompt(0, first), max_tokens=LENGTH, priority=1))
    engine.arrive(core_request("b", prompt(1, second), max_tokens=LENGTH))
    engine.drain()


def test_at_a_full_pool_the_later_request_gives_way_and_ends_after_the_earlier():
    """30 blocks of 4; both prompts fit together, their outputs do not."""
    engine = driver(depth=2, slots=2)
    engine.arrive(core_request("a", prompt(0, 56), max_tokens=60))
    engine.arrive(core_request("b", prompt(1, 56), max_tokens=60))
    ends = []
    while engine.scheduler.has_work():
        engine.step()
        ends += [name for name, life in engine.lives.items() if life.finish and name not in ends]
    assert ends == ["a", "b"]
    assert engine.seen["pool full"]
    preempted = engine.seen["preempted"] + engine.seen["preempted with a token in flight"]
    assert preempted >= 1
    assert engine.lives["a"].num_admissions == 1
    assert engine.lives["b"].num_admissions == preempted + 1
    engine.drain()

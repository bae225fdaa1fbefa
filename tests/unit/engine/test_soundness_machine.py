"""The scheduler and the KV cache under whatever hypothesis thinks of, against a model that shares none of their code.

What must hold after every step is in `SchedulerDriver`; this file only says what may happen.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pagemill.messages.engine_io import MultimodalItem
from tests.examples import examples
from tests.fakes.engine_setup import core_request
from tests.fakes.random_traffic import ADAPTERS, ALGORITHMS, PREFIXES, SPECS, setup_from
from tests.fakes.scheduler_driver import VOCAB_SIZE, SchedulerDriver

TOKENS = st.integers(0, VOCAB_SIZE - 1)
SETUPS = st.builds(
    setup_from,
    specs=st.sampled_from(SPECS),
    spare_blocks=st.integers(0, 6),
    depth=st.sampled_from([1, 2, 3]),
    algorithm=st.sampled_from(ALGORITHMS),
    partial_reuse=st.booleans(),
    budget=st.sampled_from([2, 3, 8, 40, 64]),
    slots=st.integers(1, 5),
    chunked=st.booleans(),
    threshold=st.sampled_from([0, 0, 5]),
    policy=st.sampled_from(["fcfs", "priority"]),
    prefill=st.sampled_from([0, 0, 9]),
)
STATES = ("waiting", "running", "half prefilled", "sampled in flight", "preempted", "finished")


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, aborts, resets, and steps scheduled and delivered in any order that the pipeline allows."""

    @initialize(setup=SETUPS)
    def start(self, setup):
        self.driver = SchedulerDriver(setup)
        self.count = 0

    @rule(
        prefix=st.sampled_from(PREFIXES),
        shared=st.integers(0, 26),
        own=st.lists(TOKENS, max_size=6),
        max_tokens=st.integers(1, 26),
        min_tokens=st.integers(0, 3),
        stop=st.one_of(st.lists(TOKENS, max_size=2), st.lists(st.integers(0, 30), min_size=9, max_size=12)),
        emitted=st.lists(TOKENS, max_size=3),
        priority=st.integers(0, 2),
        arrival=st.sampled_from([0.0, 1.0]),
        salt=st.sampled_from([None, None, "a", "b"]),
        lora=st.sampled_from([None, None, *ADAPTERS]),
        image=st.sampled_from([None, None, "cat", "dog"]),
        siblings=st.sampled_from([1, 1, 2, 3]),
    )
    def arrive(self, prefix, shared, own, image, siblings, min_tokens, max_tokens, stop, **options):
        prompt = prefix[:shared] + own or [0]
        for seed in range(siblings):
            self.count += 1
            request = core_request(
                f"r{self.count}",
                prompt,
                mm_items=[MultimodalItem(2, 6, image)] if image and len(prompt) >= 8 else [],
                max_tokens=max_tokens,
                min_tokens=min(min_tokens, max_tokens),
                stop_token_ids=stop,
                seed=seed,
                **options,
            )
            self.driver.arrive(request)

    @precondition(lambda self: self.driver.lives)
    @rule(state=st.sampled_from(STATES), data=st.data())
    def abort(self, state, data):
        names = [name for name in self.driver.lives if self.driver.state(name) == state]
        if names:
            self.driver.abort(data.draw(st.sampled_from(names)))

    @rule(count=st.integers(1, 8))
    def step(self, count):
        for _ in range(count):
            self.driver.step()

    @precondition(lambda self: len(self.driver.in_flight) < self.driver.setup.depth)
    @rule()
    def schedule(self):
        self.driver.schedule()

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def deliver(self):
        self.driver.deliver()

    @rule()
    def reset_prefix_cache(self):
        self.driver.reset()

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.drain()


def machine(max_examples):
    """The machine as a test, with that many runs."""

    class TestCase(SchedulerMachine.TestCase):
        settings = settings(
            max_examples=max_examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        )

    return TestCase


TestScheduler = machine(examples(30))
TestSchedulerLonger = pytest.mark.slow(machine(300))

"""Copied blocks hold what their readers should find in them, whatever happens between the copy and its source.

The scripted worker copies cells, and fails when a token reads what is not its history. Prompts here branch off each
other within a block, conversations go on, and the pool is hardly larger than two requests, so that sources are taken
for other things all the time.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.fakes.engine_setup import Client, chunked, core_request, full, make_core, sliding
from tests.fakes.scripted_worker import alone

VOCAB_SIZE = 13
MAX_MODEL_LEN = 32

LAYERS = (
    {"full": full()},
    {"full": full()},
    {"sliding": sliding(5)},
    {"full": full(), "sliding": sliding(7)},
    {"full": full(), "narrow": sliding(1)},
    {"full": full(), "chunked": chunked(6)},
    {"full": full(), "half": sliding(6, head_size=2)},
)
PREFIX = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


class Branches(RuleBasedStateMachine):
    """Arrivals that share beginnings, against an engine that reuses them to the token."""

    @initialize(
        layers=st.sampled_from(LAYERS),
        depth=st.sampled_from([1, 2]),
        blocks=st.integers(9, 20),
        budget=st.sampled_from([3, 8, 64]),
        slots=st.integers(1, 4),
    )
    def start(self, layers, depth, blocks, budget, slots):
        core, self.worker = make_core(
            layers,
            depth=depth,
            partial=True,
            max_model_len=MAX_MODEL_LEN,
            budget=budget,
            num_blocks=len(layers) * blocks + 1,
            max_num_seqs=slots,
        )
        self.client = Client(core)
        self.requests = {}
        self.expected = {}
        self.aborted = set()

    @rule(
        shared=st.integers(1, len(PREFIX)),
        own=st.lists(st.integers(0, 1), max_size=6),
        max_tokens=st.integers(1, 5),
        salt=st.sampled_from([None, None, None, "a"]),
        steps=st.integers(0, 3),
    )
    def branch(self, shared, own, max_tokens, salt, steps):
        self.send(PREFIX[:shared] + own, max_tokens, salt, steps)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), kept=st.integers(1, 9), own=st.lists(st.integers(0, 1), max_size=3))
    def go_on(self, data, kept, own):
        """With some or all of what was said before, as far as it is known by now."""
        name = data.draw(st.sampled_from(sorted(self.requests)))
        before = self.requests[name]
        said = [*before.prompt_token_ids, *self.client.tokens.get(name, [])]
        prompt = (said if kept > 5 else said[: max(1, len(said) - kept)]) + own
        self.send(prompt[: MAX_MODEL_LEN - 2], 3, before.cache_salt, 2)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.client.core.abort([name])
        if name not in self.client.finish:
            self.aborted.add(name)
        self.client.core.check_integrity()

    @rule(count=st.integers(1, 5))
    def step(self, count):
        for _ in range(count):
            self.client.step()

    @rule()
    def reset_prefix_cache(self):
        self.client.core.call("reset_prefix_cache")

    def send(self, prompt, max_tokens, salt, steps):
        request = core_request(f"r{len(self.requests)}", prompt, max_tokens=max_tokens, salt=salt)
        self.client.add(request)
        self.requests[request.request_id] = request
        specs = self.worker.group_specs
        self.expected[request.request_id] = alone(request, specs, VOCAB_SIZE, MAX_MODEL_LEN)
        self.step(steps)

    def teardown(self):
        if not hasattr(self, "client"):
            return
        self.client.run()
        for name, tokens in self.expected.items():
            if name not in self.aborted:
                assert self.client.tokens[name] == tokens
                assert self.client.cached[name] < len(self.requests[name].prompt_token_ids)


TestBranches = Branches.TestCase
TestBranches.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

"""Whatever arrives, in whatever order, in however little memory: every request gets the tokens it gets alone."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.examples import examples
from tests.fakes.engine_setup import Client, chunked, core_request, full, make_core, mamba, sliding
from tests.fakes.scripted_worker import alone

VOCAB_SIZE = 13
MAX_MODEL_LEN = 40

LAYERS = (
    {"full": full()},
    {"sliding": sliding(5)},
    {"full": full(), "sliding": sliding(7)},
    {"full": full(), "wide": sliding(9), "narrow": sliding(2)},
    {"full": full(), "half": sliding(6, head_size=2)},
    {"chunked": chunked(8)},
    {"full": full(), "chunked": chunked(6), "sliding": sliding(5)},
    {"full": full(), "mamba": mamba()},
    {"full": full(), "wide": sliding(9), "chunked": chunked(12), "mamba": mamba(14)},
)
PREFIX = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]


class Engine(RuleBasedStateMachine):
    """Arrivals, aborts and steps against an engine whose pool is hardly larger than one request."""

    @initialize(
        layers=st.sampled_from(LAYERS),
        depth=st.sampled_from([1, 1, 2]),
        extra_blocks=st.integers(0, 6),
        budget=st.sampled_from([3, 8, 40, 64]),
        threshold=st.sampled_from([0, 0, 5]),
        prefill=st.sampled_from([0, 0, 9]),
        slots=st.integers(1, 5),
        chunked=st.booleans(),
        caching=st.sampled_from(["partial", "partial", "blocks", "none"]),
        policy=st.sampled_from(["fcfs", "priority"]),
    )
    def start(self, layers, depth, extra_blocks, budget, threshold, prefill, slots, chunked, caching, policy):
        budget = budget if chunked else max(budget, MAX_MODEL_LEN)
        core, self.worker = make_core(
            layers,
            depth=depth,
            max_model_len=MAX_MODEL_LEN,
            budget=budget,
            num_blocks=len(layers) * 10 + 1 + extra_blocks,
            caching=caching != "none",
            partial=caching == "partial" and "mamba" not in layers,
            max_num_seqs=slots,
            max_prefill_tokens=prefill,
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=threshold,
            scheduling_policy=policy,
        )
        self.client = Client(core)
        self.budget = budget
        self.expected = {}
        self.aborted = set()
        self.count = 0

    @rule(
        shared=st.integers(0, len(PREFIX)),
        own=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8),
        max_tokens=st.integers(1, 26),
        min_tokens=st.integers(0, 3),
        stop=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2),
        num_emitted=st.integers(0, 4),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "a", "b"]),
    )
    def arrive(self, shared, own, max_tokens, min_tokens, stop, num_emitted, priority, salt):
        self.count += 1
        options = {
            "max_tokens": max_tokens,
            "min_tokens": min(min_tokens, max_tokens),
            "stop_token_ids": stop,
            "seed": self.count % 3,
        }
        fresh = core_request(f"r{self.count}", (PREFIX[:shared] + own or [0]), priority=priority, salt=salt, **options)
        whole = alone(fresh, self.specs(), VOCAB_SIZE, MAX_MODEL_LEN)
        emitted = whole[: min(num_emitted, len(whole) - 1)]
        self.client.add(
            core_request(
                fresh.request_id, fresh.prompt_token_ids, emitted=emitted, priority=priority, salt=salt, **options
            )
        )
        self.expected[fresh.request_id] = (whole[len(emitted) :], len(emitted) + len(fresh.prompt_token_ids))

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.expected)))
        self.client.core.abort([name, "unknown"])
        if name not in self.client.finish:
            self.aborted.add(name)
        self.client.core.check_integrity()

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.client.step()

    @rule()
    def reset_prefix_cache(self):
        idle = not self.client.core.has_work()
        assert self.client.core.call("reset_prefix_cache") or not idle

    @invariant()
    def budget_holds(self):
        if hasattr(self, "worker") and self.worker.steps:
            assert self.worker.steps[-1].total_tokens <= self.budget

    @invariant()
    def tokens_are_a_prefix_of_those_alone(self):
        if hasattr(self, "expected"):
            for name, (tokens, _) in self.expected.items():
                got = self.client.tokens.get(name, [])
                assert got == tokens[: len(got)]

    def specs(self):
        return self.worker.group_specs

    def teardown(self):
        if not hasattr(self, "client"):
            return
        self.client.run()
        for name, (tokens, known) in self.expected.items():
            if name in self.aborted:
                continue
            assert self.client.tokens[name] == tokens
            assert (self.client.finish[name].reason.value == "stop") == (
                self.client.finish[name].stop_token_id is not None
            )
            assert self.client.cached[name] <= known - 1
        assert self.client.core.call("reset_prefix_cache")


TestEngine = Engine.TestCase
TestEngine.settings = settings(
    max_examples=examples(30), stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

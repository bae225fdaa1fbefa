"""Events of a whole engine: a subscriber holds what the block pool finds, live, late, or after a gap."""

import itertools
import socket
import threading
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pagemill.config.kv_events_config import KVEventsConfig
from pagemill.errors import ConfigError
from tests.examples import examples
from tests.fakes.engine_setup import Client, chunked, core_request, full, make_core, mamba, sliding
from tests.fakes.kv_subscriber import StrictSubscriber, documented_subscriber, findable
from tests.fakes.ports import free_port

Subscriber = documented_subscriber()
LAYERS = (
    {"full": full()},
    {"full": full(), "sliding": sliding(7)},
    {"full": full(), "half": sliding(6, head_size=2)},
    {"full": full(), "chunked": chunked(6), "sliding": sliding(5)},
    {"full": full(), "mamba": mamba()},
)
NUMBERS = itertools.count()
PREFIX = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]


class ListSink:
    """Keeps what is published."""

    def __init__(self):
        self.events = []

    def publish(self, events):
        assert events
        self.events += events

    def shutdown(self):
        pass


class Engine(RuleBasedStateMachine):
    """Arrivals, aborts, steps and resets in a pool that is always too small: after every call, the subscriber knows
    exactly what the pool finds."""

    @initialize(
        layers=st.sampled_from(LAYERS),
        depth=st.sampled_from([1, 2]),
        extra_blocks=st.integers(0, 6),
        partial=st.booleans(),
    )
    def start(self, layers, depth, extra_blocks, partial):
        self.sink, self.subscriber, self.count = ListSink(), StrictSubscriber(), 0
        with mock.patch("pagemill.engine.core._event_sink", return_value=self.sink):
            core, _ = make_core(
                layers,
                depth=depth,
                max_model_len=32,
                budget=16,
                num_blocks=len(layers) * 8 + 1 + extra_blocks,
                max_num_seqs=4,
                partial=partial and "mamba" not in layers,
                kv_events=KVEventsConfig(enable_kv_cache_events=True),
            )
        self.client = Client(core)

    @rule(
        shared=st.integers(0, len(PREFIX)),
        own=st.lists(st.integers(0, 12), max_size=5),
        max_tokens=st.integers(1, 14),
        salt=st.sampled_from([None, None, "a"]),
    )
    def arrive(self, shared, own, max_tokens, salt):
        self.count += 1
        prompt = PREFIX[:shared] + own or [0]
        self.client.add(core_request(f"r{self.count}", prompt, max_tokens=max_tokens, salt=salt))

    @rule(count=st.integers(1, 8))
    def step(self, count):
        for _ in range(count):
            self.client.step()
            self.compare()

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def abort(self, data):
        self.client.core.abort([f"r{data.draw(st.integers(1, self.count))}"])
        self.compare()

    @rule()
    def reset(self):
        self.client.core.call("reset_prefix_cache")
        self.compare()

    def compare(self):
        self.subscriber.apply(self.sink.events)
        self.sink.events.clear()
        assert set(self.subscriber.cached) == findable(self.client.core._kv.pool)


TestEngine = Engine.TestCase
TestEngine.settings = settings(
    max_examples=examples(25), stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture
def started():
    """An engine whose pool is too small for its requests, and its endpoints."""
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"tcp://127.0.0.1:{free_port()}",
        replay_endpoint=f"tcp://127.0.0.1:{free_port()}",
    )
    core, _ = make_core({"full": full(), "sliding": sliding(7)}, num_blocks=40, kv_events=config)
    yield Client(core), config
    core.shutdown()


@pytest.fixture
def subscribe(started):
    """Connects documented subscribers to the engine."""
    _, config = started
    subscribers = []

    def connect():
        subscribers.append(Subscriber(config.endpoint, config.replay_endpoint))
        return subscribers[-1]

    yield connect
    for subscriber in subscribers:
        subscriber.close()


def traffic(client, count):
    """Requests with common beginnings and ends of their own, some of them aborted; the pool evicts all the time."""
    for _ in range(count):
        number = next(NUMBERS)
        client.add(core_request(f"t{number}", PREFIX[: number % 14 + 1] + [number] * 5))
        client.step()
        if number % 5 == 4:
            client.core.abort([f"t{number}"])
    client.run()


def join(client, subscriber):
    """A subscription takes a moment: the first message that arrives says that it is there."""
    for _ in range(200):
        traffic(client, 2)
        if subscriber.receive(20):
            return
    raise AssertionError("nothing arrives")


def read_until_level(client, subscriber):
    """Receive live messages until the subscriber has the last batch of the engine."""
    last = client.core._sink._next_sequence - 1
    while subscriber.last_applied < last:
        assert subscriber.receive(5000), f"{subscriber.last_applied} of {last}"
    assert set(subscriber.cached) == findable(client.core._kv.pool)


def test_a_live_subscriber_and_a_late_one_know_what_is_cached(started, subscribe):
    client, _ = started
    early = subscribe()
    join(client, early)
    traffic(client, 40)
    read_until_level(client, early)
    assert early.cached
    late = subscribe()
    join(client, late)
    read_until_level(client, late)
    read_until_level(client, early)
    assert late.cached == early.cached


def test_a_subscriber_fills_a_gap_by_replay(started, subscribe):
    client, _ = started
    subscriber = subscribe()
    join(client, subscriber)
    traffic(client, 20)
    for _ in range(10):  # messages that never reach it
        assert subscriber.live.poll(5000)
        subscriber.live.recv_multipart()
    read_until_level(client, subscriber)


def test_a_reset_of_an_idle_engine_is_published_at_once(started, subscribe):
    client, _ = started
    subscriber = subscribe()
    join(client, subscriber)
    read_until_level(client, subscriber)
    assert subscriber.cached
    assert client.core.call("reset_prefix_cache")
    read_until_level(client, subscriber)
    assert subscriber.cached == {}


def test_token_ids_are_those_of_the_blocks(started, subscribe):
    client, _ = started
    subscriber = subscribe()
    client.add(core_request("a", PREFIX[:9], max_tokens=8))
    client.run()
    subscriber.catch_up()
    tokens = PREFIX[:9] + client.tokens["a"]
    blocks = [tokens[start : start + 4] for start in range(0, 16, 4)]
    full_group = [block for (group, _), block in subscriber.cached.items() if group == 0]
    assert full_group == blocks


def test_shutdown_frees_the_ports_and_ends_the_thread(started):
    client, config = started
    traffic(client, 3)
    client.core.shutdown()
    client.core.shutdown()
    for address in (config.endpoint, config.replay_endpoint):
        with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
            pass
    assert not [thread for thread in threading.enumerate() if thread.name == "pagemill-kv-events"]


def test_a_port_in_use_is_a_config_error(started):
    _, config = started
    with pytest.raises(ConfigError, match=r"endpoint='tcp://127\.0\.0\.1:\d+' cannot be used: Address already in use"):
        make_core(kv_events=config)


@pytest.mark.parametrize(
    "config", [KVEventsConfig(), KVEventsConfig(enable_kv_cache_events=True, publisher="null")], ids=["off", "null"]
)
def test_engines_that_publish_nothing_record_nothing(config):
    core, _ = make_core(kv_events=config)
    client = Client(core)
    traffic(client, 3)
    assert core._kv.take_events() == ()
    assert not [thread for thread in threading.enumerate() if thread.name == "pagemill-kv-events"]

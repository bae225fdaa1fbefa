"""Publishers of KV cache events and the sockets of their subscribers, closed when a test is over."""

import pytest
import zmq

from pagemill.config.kv_events_config import KVEventsConfig
from pagemill.transport.kv_event_publisher import KVEventPublisher
from tests.fakes.ports import free_port


def address() -> str:
    """One that nobody listens on."""
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def context():
    opened = []

    class Remembering(zmq.Context):
        """Keeps its sockets, until the test is over."""

        def socket(self, kind):
            opened.append(super().socket(kind))
            return opened[-1]

    context = Remembering()
    yield context
    context.destroy(0)


@pytest.fixture
def publish():
    """Starts publishers, and stops them."""
    started = []

    def start(rank=0, **settings):
        settings = {"endpoint": address(), "replay_endpoint": address()} | settings
        started.append(KVEventPublisher(KVEventsConfig(enable_kv_cache_events=True, **settings), rank))
        started[-1].settings = settings
        return started[-1]

    yield start
    for publisher in started:
        publisher.shutdown()

"""Which endpoints are allowed, and what they become per rank."""

import pytest

from pagemill.config.event_endpoints import check_endpoints, publish_endpoint, replay_endpoint
from pagemill.config.kv_events_config import KVEventsConfig
from pagemill.errors import ConfigError


def events(endpoint="tcp://*:5557", replay=None):
    return KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint, replay_endpoint=replay)


@pytest.mark.parametrize(
    ("given", "address", "binds", "every_network"),
    [
        ("tcp://*:5557", "tcp://*:5559", True, True),
        ("tcp://0.0.0.0:1", "tcp://0.0.0.0:3", True, True),
        ("tcp://[::]:5557", "tcp://[::]:5559", True, True),
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5559", True, False),
        ("tcp://[::1]:5557", "tcp://[::1]:5559", True, False),
        ("tcp://indexer.svc.local:5557", "tcp://indexer.svc.local:5559", False, False),
        ("ipc:///tmp/events", "ipc:///tmp/events_dp2", True, False),
    ],
)
def test_the_rank_is_added_to_port_or_path(given, address, binds, every_network):
    endpoint = publish_endpoint(events(given), data_parallel_rank=2)
    assert (endpoint.address, endpoint.binds, endpoint.every_network) == (address, binds, every_network)
    assert publish_endpoint(events(given), data_parallel_rank=0).address == given


@pytest.mark.parametrize(
    "given",
    [
        *("", "5557", "localhost:5557", "tcp://*", "tcp://*:", "tcp://:5557", "tcp://*:http", "tcp://a b:1"),
        *("udp://*:5557", "inproc://events", "ipc://", "tcp://*:123456", "tcp://[::1:5557", "tcp://*:5557/path"),
    ],
)
def test_what_is_no_endpoint_is_named(given):
    with pytest.raises(ConfigError, match=r"kv_events_config: endpoint='.*' is not an endpoint; tcp://ADDRESS:PORT"):
        publish_endpoint(events(given), data_parallel_rank=0)
    with pytest.raises(ConfigError, match="kv_events_config: replay_endpoint="):
        replay_endpoint(events(replay=given), data_parallel_rank=0)


def test_ports_end_at_65535():
    with pytest.raises(ConfigError, match=r"the port of endpoint='tcp://\*:0' is not one of 1 to 65535"):
        publish_endpoint(events("tcp://*:0"), data_parallel_rank=0)
    with pytest.raises(ConfigError, match=r"'tcp://\*:65535' plus data-parallel rank 1 is not one of 1 to 65535"):
        check_endpoints(events("tcp://*:65535"), 2)


def test_replay_is_where_subscribers_can_connect():
    assert replay_endpoint(events(), data_parallel_rank=1) is None
    with pytest.raises(ConfigError, match="replay_endpoint='tcp://router:5558' names another host"):
        replay_endpoint(events(replay="tcp://router:5558"), data_parallel_rank=0)


@pytest.mark.parametrize(("replay", "size"), [("tcp://*:5557", 1), ("tcp://*:5558", 2), ("tcp://*:5556", 2)])
def test_no_two_sockets_share_a_port(replay, size):
    with pytest.raises(ConfigError, match=f"must be {size} apart, one per rank"):
        check_endpoints(events(replay=replay), size)
    check_endpoints(KVEventsConfig(replay_endpoint=replay), size)


def test_ports_far_enough_apart_are_fine():
    check_endpoints(events(replay="tcp://*:5559"), 2)
    check_endpoints(events("ipc:///tmp/events", "ipc:///tmp/replay"), 8)

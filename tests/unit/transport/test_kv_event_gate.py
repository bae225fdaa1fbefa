"""Subscribers to KV cache events that nobody trusts: limits, keys, and connections that are cut."""

import threading
import time

import pytest
import zmq

from pagemill.config.kv_events_config import KVEventsConfig
from pagemill.errors import ConfigError
from pagemill.messages.kv_events import BlockRemoved
from pagemill.transport import kv_event_publisher
from pagemill.transport.kv_event_publisher import KVEventPublisher
from tests.fakes.proxy import Proxy
from tests.unit.transport.conftest import address

WAIT_MS = 20_000


def subscriber(context, endpoint, topic=b"", keys=None):
    sub = context.socket(zmq.SUB)
    with_keys(sub, keys)
    sub.subscribe(topic)
    sub.connect(endpoint)
    return sub


def with_keys(socket, keys):
    if keys is not None:
        server, (public, private) = keys
        socket.set(zmq.CURVE_SERVERKEY, server)
        socket.set(zmq.CURVE_PUBLICKEY, public)
        socket.set(zmq.CURVE_SECRETKEY, private)


def hears(publisher, sub, patience_ms=WAIT_MS):
    """Whether something arrives that is published from now on."""
    while sub.poll(0):
        sub.recv_multipart()
    for _ in range(patience_ms // 25):
        publisher.publish([BlockRemoved([1], "GPU", 0)])
        if sub.poll(25):
            return True
    return False


def replay(context, endpoint, first, keys=None):
    """The numbers of the batches that are sent again; None when nobody answers."""
    with context.socket(zmq.DEALER) as client:
        client.linger = 0
        with_keys(client, keys)
        client.connect(endpoint)
        client.send_multipart([b"", first.to_bytes(8, "big")])
        numbers = []
        while client.poll(WAIT_MS if keys is None or keys[1] else 500):
            _, _, number, payload = client.recv_multipart()
            if not payload:
                return numbers
            numbers.append(int.from_bytes(number, "big"))
    return None


def test_too_many_topics_hang_up_all_and_whoever_is_honest_comes_back(context, publish, monkeypatch, caplog):
    monkeypatch.setattr(kv_event_publisher, "MAX_SUBSCRIPTIONS", 50)
    publisher = publish()
    honest = subscriber(context, publisher.settings["endpoint"])
    assert hears(publisher, honest)
    greedy = context.socket(zmq.SUB)
    greedy.connect(publisher.settings["endpoint"])
    for number in range(60):
        greedy.subscribe(b"%d" % number)
    deadline = time.monotonic() + 120
    first = publisher._pub
    while publisher._pub is first:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    greedy.close(0)
    assert hears(publisher, honest)
    assert replay(context, publisher.settings["replay_endpoint"], 0)[0] == 0, "what was missed is there"


def test_a_port_that_another_process_has_meanwhile_is_waited_for(context, publish, monkeypatch, caplog):
    monkeypatch.setattr(kv_event_publisher, "MAX_SUBSCRIPTIONS", 3)
    monkeypatch.setattr(kv_event_publisher, "REOPEN_S", 0.1)
    publisher, taken, opened = publish(), threading.Event(), []

    def open_again(*arguments):
        opened.append(arguments)
        if not taken.is_set():
            raise ConfigError("it is in use")
        return type(publisher)._open(publisher, *arguments)

    monkeypatch.setattr(publisher, "_open", open_again)
    greedy = context.socket(zmq.SUB)
    greedy.connect(publisher.settings["endpoint"])
    for number in range(5):
        greedy.subscribe(b"%d" % number)
    deadline = time.monotonic() + 120
    while "it is in use; trying again" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    greedy.close(0)
    taken.set()
    assert hears(publisher, subscriber(context, publisher.settings["endpoint"]))
    assert len(opened) > 1


def test_a_publisher_without_its_port_can_be_stopped(context, publish, monkeypatch):
    monkeypatch.setattr(kv_event_publisher, "MAX_SUBSCRIPTIONS", 0)
    publisher, tried = publish(), threading.Event()

    def fail(*arguments):
        tried.set()
        raise ConfigError("it is in use")

    monkeypatch.setattr(publisher, "_open", fail)
    subscriber(context, publisher.settings["endpoint"])
    assert tried.wait(60)
    publisher.shutdown()
    assert not publisher._thread.is_alive()


def test_a_topic_that_is_too_long_ends_its_connection_only(context, publish):
    publisher = publish()
    honest = subscriber(context, publisher.settings["endpoint"])
    subscriber(context, publisher.settings["endpoint"], b"x" * 100_000)
    assert hears(publisher, honest)
    for _ in range(WAIT_MS // 25):  # the count follows the message
        if publisher._num_subscriptions == 1:
            break
        time.sleep(0.025)
    assert publisher._num_subscriptions == 1


@pytest.fixture
def keys(tmp_path):
    """Settings with files, the server's public key and a client's pair."""
    server_public, server_private = zmq.curve_keypair()
    client = zmq.curve_keypair()
    (tmp_path / "server").write_bytes(server_private + b"\n")
    (tmp_path / "clients").write_bytes(zmq.curve_keypair()[0] + b"\n\n" + client[0] + b"\n")
    files = {"curve_secret_key_file": str(tmp_path / "server"), "curve_client_keys_file": str(tmp_path / "clients")}
    return files, server_public, client


@pytest.mark.slow
def test_with_keys_only_those_who_are_listed_come_in(context, publish, keys):
    files, server, client = keys
    publisher = publish(**files)
    endpoint, replay_endpoint = publisher.settings["endpoint"], publisher.settings["replay_endpoint"]
    assert hears(publisher, subscriber(context, endpoint, keys=(server, client)))
    assert replay(context, replay_endpoint, 0, keys=(server, client))
    for others in (None, (server, zmq.curve_keypair()), (zmq.curve_keypair()[0], client)):
        assert not hears(publisher, subscriber(context, endpoint, keys=others), patience_ms=500)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"curve_secret_key_file": "k"}, "belong together: the latter is missing"),
        ({"curve_client_keys_file": "k"}, "belong together: the former is missing"),
        (
            {"curve_secret_key_file": "nowhere", "curve_client_keys_file": "nowhere"},
            "curve_secret_key_file='nowhere' cannot be read: No such file",
        ),
    ],
)
def test_files_that_are_none_are_refused(settings, problem):
    with pytest.raises(ConfigError, match=problem):
        KVEventPublisher(KVEventsConfig(enable_kv_cache_events=True, endpoint=address(), **settings))


def test_what_is_no_key_is_refused(keys, tmp_path):
    files, _, _ = keys
    (tmp_path / "clients").write_bytes(b"too short\n")
    with pytest.raises(ConfigError, match=r"key 1 of curve_client_keys_file=.* is not 40 characters of Z85"):
        KVEventPublisher(KVEventsConfig(enable_kv_cache_events=True, endpoint=address(), **files))


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["reset", "silence"])
def test_a_subscriber_that_was_cut_off_asks_for_what_it_missed(context, publish, cut):
    publisher = publish()
    with Proxy("tcp://127.0.0.1:0", lambda: publisher.settings["endpoint"]) as proxy:
        sub = subscriber(context, proxy.address)
        assert hears(publisher, sub)
        if cut == "reset":
            proxy.reset()
        else:
            proxy.silence()
        for number in range(100):
            publisher.publish([BlockRemoved([number], "GPU", 0)])
        time.sleep(0.5)
        proxy.go_on()
        assert hears(publisher, sub), "the library connects again by itself"
        missed = replay(context, publisher.settings["replay_endpoint"], 0)
        assert missed == list(range(len(missed))) and len(missed) > 100

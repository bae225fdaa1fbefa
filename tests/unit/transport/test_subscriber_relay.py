"""What strangers say to a socket behind the relay is bounded, and what they are told comes through."""

import contextlib
import gc
import socket
import threading
import warnings

import pytest

from pagemill.transport import subscriber_relay
from pagemill.transport.subscriber_relay import MAX_BURST_BYTES, SubscriberRelay
from tests.fakes.ports import free_port

WAIT_S = 120


@pytest.fixture
def inner(tmp_path):
    """A unix socket that listens, and where."""
    path = str(tmp_path / "inner")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(WAIT_S)
        listener.bind(path)
        listener.listen()
        yield listener, path


@pytest.fixture
def relay(inner):
    port = free_port()
    relay = SubscriberRelay("127.0.0.1", port, inner[1])
    relay.port = port
    yield relay
    relay.close()


def connect(relay):
    return socket.create_connection(("127.0.0.1", relay.port), timeout=WAIT_S)


def accept(inner):
    end = inner[0].accept()[0]
    end.settimeout(WAIT_S)
    return end


def read(end, count=1 << 30):
    """So many bytes, or all up to the end."""
    found = b""
    while len(found) < count and (more := end.recv(1 << 16)):
        found += more
    return found


def test_both_ends_hear_each_other_and_an_end_of_one_is_one_of_the_other(inner, relay):
    with connect(relay) as peer, accept(inner) as end:
        peer.sendall(b"topic")
        assert read(end, 5) == b"topic"
        whole = bytes(range(256)) * 4000
        threading.Thread(target=end.sendall, args=(whole,)).start()
        assert read(peer, len(whole)) == whole
        peer.close()
        assert read(end) == b""
    with connect(relay) as peer:
        accept(inner).close()
        assert read(peer) == b""


def test_a_peer_that_says_too_much_is_hung_up_on_alone(inner, relay, caplog):
    with connect(relay) as quiet, accept(inner) as quiet_end, connect(relay) as loud, accept(inner) as loud_end:
        with pytest.raises(OSError):
            while True:
                loud.sendall(b"x" * 10_000)
        assert len(read(loud_end)) <= MAX_BURST_BYTES
        quiet.sendall(b"x" * 1000)
        quiet_end.sendall(b"y")
        assert (len(read(quiet_end, 1000)), read(quiet, 1)) == (1000, b"y")


def test_more_peers_than_are_allowed_are_hung_up_on(inner, relay, monkeypatch):
    monkeypatch.setattr(subscriber_relay, "MAX_SUBSCRIBERS", 1)
    with connect(relay), accept(inner) as first:
        with connect(relay) as second, contextlib.suppress(ConnectionResetError):
            assert second.recv(1) == b""
        assert first.fileno() >= 0


def test_who_does_not_read_holds_up_nobody_else(inner, relay):
    with connect(relay), accept(inner) as stuck, connect(relay) as peer, accept(inner) as end:
        stuck.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                stuck.send(b"x" * 65536)
        end.sendall(b"y")
        assert read(peer, 1) == b"y"


def test_what_was_sent_before_the_end_is_passed_on_and_the_port_is_free(inner, relay):
    with connect(relay) as peer, accept(inner) as end:
        end.sendall(b"x" * 100_000)
        end.close()
        relay.close(linger_s=WAIT_S)
        assert len(read(peer)) == 100_000
    relay.close()
    with socket.create_server(("127.0.0.1", relay.port)):
        pass


def fill(end):
    """Send until nobody takes more in; how many bytes that was."""
    count = 0
    end.settimeout(0.5)
    with contextlib.suppress(TimeoutError):
        while True:
            count += end.send(b"x" * 65536)
    return count


@pytest.mark.slow
def test_it_leaves_no_connection_open_when_peers_do_not_read(inner, relay):
    with connect(relay) as peer, accept(inner) as end, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fill(end)
        relay.close()
        gc.collect()
        with contextlib.suppress(ConnectionResetError):
            read(peer)
    assert not [str(warning.message) for warning in caught]


def test_who_comes_while_it_is_closed_is_hung_up_on(inner, relay):
    """Accepted by the loop, perhaps, and not known as a peer yet."""
    with contextlib.ExitStack() as opened, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        peers = [opened.enter_context(connect(relay)) for _ in range(20)]
        relay.close()
        gc.collect()
        for peer in peers:
            with contextlib.suppress(ConnectionResetError):
                assert read(peer) == b""
    assert not [str(warning.message) for warning in caught]


def test_a_port_in_use_is_an_error(inner):
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(OSError):
        SubscriberRelay("127.0.0.1", other.getsockname()[1], inner[1])


def test_nobody_inside_is_the_end_of_the_connection(relay, inner):
    inner[0].close()
    with connect(relay) as peer:
        assert read(peer) == b""

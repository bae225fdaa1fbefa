"""Frames, replay, overflow and ports of the publisher, with real sockets."""

import logging
import socket
import threading
import time
from itertools import pairwise

import msgspec
import pytest
import zmq

from pagemill.errors import ConfigError
from pagemill.messages.kv_events import AllBlocksCleared, BlockRemoved, KVEventBatch
from pagemill.transport import kv_event_publisher
from pagemill.transport.kv_event_publisher import END_OF_REPLAY
from tests.fakes.ports import free_port

WAIT_MS = 60_000


def removed(number):
    return [BlockRemoved([number], "GPU", 0)]


def numbers(payload):
    """The blocks that a batch removes."""
    return [block for event in msgspec.msgpack.decode(payload)[1] for block in event[1]]


@pytest.fixture
def warnings(caplog):
    """The log of the package, which does not propagate."""
    root = logging.getLogger("pagemill")
    root.addHandler(caplog.handler)
    yield caplog
    root.removeHandler(caplog.handler)


def subscribe(context, publisher, topic=b""):
    """A socket that surely is subscribed: it got a first message."""
    sub = context.socket(zmq.SUB)
    sub.subscribe(topic)
    sub.connect(publisher.settings["endpoint"])
    for _ in range(2400):
        publisher.publish([AllBlocksCleared()])
        if sub.poll(25):
            return sub
    raise AssertionError("nothing arrives")


def receive_removals(sub, count):
    """The next `count` messages with removals."""
    found = []
    while len(found) < count:
        assert sub.poll(WAIT_MS)
        frames = sub.recv_multipart()
        if b"BlockRemoved" in frames[2]:
            found.append(frames)
    return found


def ask(context, publisher, first, kind=zmq.DEALER):
    """A replay from `first` on: [(topic, sequence, payload)]. Fails unless it ends with the end marker."""
    with context.socket(kind) as client:
        client.linger = 0
        client.connect(publisher.settings["replay_endpoint"])
        client.send_multipart([b"", first.to_bytes(8, "big")])
        replies = []
        while client.poll(WAIT_MS):
            empty, topic, number, payload = client.recv_multipart()
            assert empty == b""
            if number == END_OF_REPLAY:
                assert (topic, payload) == (b"", b"")
                return replies
            replies.append((topic, int.from_bytes(number, "big"), payload))
    raise AssertionError("no end marker")


def test_a_message_is_topic_number_and_batch(context, publish):
    publisher = publish(rank=0, topic="kv@here")
    sub = subscribe(context, publisher, b"kv@")
    before = time.time()
    publisher.publish(removed(7))
    publisher.publish(removed(8))
    first, second = receive_removals(sub, 2)
    assert len(first) == 3
    assert first[0] == b"kv@here"
    assert int.from_bytes(second[1], "big") == int.from_bytes(first[1], "big") + 1
    batch = msgspec.msgpack.decode(first[2], type=KVEventBatch)
    assert before <= batch.ts <= time.time()
    assert batch.events == removed(7)
    assert batch.data_parallel_rank == 0


def test_replay_begins_where_it_is_asked_to_and_ends_with_the_marker(context, publish):
    publisher = publish(topic="t")
    for number in range(10):
        publisher.publish(removed(number))
    assert [(sequence, *numbers(payload)) for _, sequence, payload in ask(context, publisher, 0)] == [
        (number, number) for number in range(10)
    ]
    assert [(topic, sequence) for topic, sequence, _ in ask(context, publisher, 7)] == [(b"t", n) for n in (7, 8, 9)]
    assert ask(context, publisher, 10) == []
    assert ask(context, publisher, 2**63) == []


def test_replay_goes_back_as_far_as_the_buffer(context, publish):
    publisher = publish(buffer_steps=3)
    for number in range(10):
        publisher.publish(removed(number))
    assert [sequence for _, sequence, _ in ask(context, publisher, 0)] == [7, 8, 9]


def test_a_client_that_takes_one_reply_gets_one(context, publish):
    publisher = publish()
    publisher.publish(removed(3))
    with context.socket(zmq.REQ) as client:
        client.connect(publisher.settings["replay_endpoint"])
        client.send((0).to_bytes(8, "big"))
        assert client.poll(WAIT_MS)
        assert numbers(client.recv_multipart()[2]) == [3]


def test_requests_that_are_none_are_ignored(context, publish):
    publisher = publish()
    publisher.publish(removed(0))
    with context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.connect(publisher.settings["replay_endpoint"])
        for frames in ([b""], [b"", b"1"], [b"", b"", bytes(8)], [b"x", bytes(8)], [b"", bytes(9)], [bytes(8)] * 4):
            client.send_multipart(frames)
        client.send_multipart([b"", b"x" * 10_000])  # closes the connection
        assert not client.poll(100)
    assert len(ask(context, publisher, 0)) == 1


@pytest.mark.slow
def test_a_client_that_does_not_read_its_replay_holds_up_nobody(context, publish):
    publisher = publish(buffer_steps=2000)
    sub = subscribe(context, publisher)
    large = [BlockRemoved([2**63 + number for number in range(500)], "GPU", 0)]
    for _ in range(2000):
        publisher.publish(large)
    receive_removals(sub, 2000)
    with context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.rcvhwm = 1
        client.connect(publisher.settings["replay_endpoint"])
        for _ in range(20):
            client.send_multipart([b"", bytes(8)])
        time.sleep(0.2)
        publisher.publish(removed(1))
        assert numbers(receive_removals(sub, 1)[0][2]) == [1]
        got = []
        while client.poll(100):
            got.append(client.recv_multipart()[2])
    assert len(got) < 20 * 2000
    sequences = [int.from_bytes(number, "big") for number in got if number != END_OF_REPLAY]
    # Replays that were given up end early, and have no holes.
    assert all(after in (before + 1, sequences[0], sequences[0] + 1) for before, after in pairwise(sequences))


def test_without_a_replay_endpoint_nothing_is_kept(context, publish):
    publisher = publish(replay_endpoint=None)
    sub = subscribe(context, publisher)
    publisher.publish(removed(1))
    receive_removals(sub, 1)
    assert not publisher._sent


class HeldEncoder:
    """Encodes when it is allowed to: a publisher that cannot keep up."""

    def __init__(self):
        self.go = threading.Event()

    def encode(self, batch):
        assert self.go.wait(300)
        return msgspec.msgpack.encode(batch)


def test_a_full_queue_drops_counts_warns_and_leaves_a_gap(context, publish, warnings):
    publisher = publish(max_queue_size=3)
    publisher._encoder = held = HeldEncoder()
    publisher.publish(removed(0))
    while publisher._queue:
        time.sleep(0.001)
    started = time.monotonic()
    for number in range(1, 7):
        publisher.publish(removed(number))
    assert time.monotonic() - started < 60
    assert publisher.num_dropped == 3
    held.go.set()
    while publisher._queue:
        time.sleep(0.001)
    publisher.publish(removed(7))
    assert [sequence for _, sequence, _ in ask(context, publisher, 0)] == [0, 1, 2, 3, 7]
    (warning,) = [record for record in warnings.records if record.levelname == "WARNING"]
    assert "dropped, 1 so far: the queue is full" in warning.getMessage()


def test_a_batch_that_cannot_be_encoded_is_lost_alone(context, publish, warnings):
    publisher = publish()
    publisher.publish([object()])
    publisher.publish(removed(1))
    assert [sequence for _, sequence, _ in ask(context, publisher, 0)] == [1]
    assert publisher.num_dropped == 1
    assert "dropped, 1 so far: TypeError" in warnings.text


def test_the_rank_is_in_the_batch_and_in_the_port(context, publish):
    port = free_port()
    publisher = publish(rank=1, endpoint=f"tcp://127.0.0.1:{port - 1}", replay_endpoint=None)
    publisher.settings["endpoint"] = f"tcp://127.0.0.1:{port}"
    sub = subscribe(context, publisher)
    publisher.publish(removed(1))
    assert msgspec.msgpack.decode(receive_removals(sub, 1)[0][2])[2] == 1


def test_a_host_name_makes_the_publisher_connect(context, publish):
    port = free_port()
    sub = context.socket(zmq.SUB)
    sub.subscribe(b"")
    sub.bind(f"tcp://127.0.0.1:{port}")
    publisher = publish(endpoint=f"tcp://localhost:{port}", replay_endpoint=None)
    for _ in range(200):
        publisher.publish(removed(4))
        if sub.poll(25):
            break
    assert numbers(sub.recv_multipart()[2]) == [4]


@pytest.mark.parametrize("which", ["endpoint", "replay_endpoint"])
def test_a_port_in_use_is_said_and_nothing_is_left_open(publish, which):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        free = f"tcp://127.0.0.1:{free_port()}"
        settings = {"endpoint": free, "replay_endpoint": free} | {which: taken}
        with pytest.raises(ConfigError, match=f"{which}='{taken}' cannot be used: Address already in use"):
            publish(**settings)
    publish(endpoint=free)


def test_shutdown_delivers_what_was_published_and_frees_the_ports(context, publish):
    publisher = publish()
    sub = subscribe(context, publisher)
    for number in range(100):
        publisher.publish(removed(number))
    publisher.shutdown()
    publisher.shutdown()
    publisher.publish(removed(100))
    assert [numbers(frames[2]) for frames in receive_removals(sub, 100)] == [[number] for number in range(100)]
    for name in ("endpoint", "replay_endpoint"):
        with socket.create_server(("127.0.0.1", int(publisher.settings[name].rpartition(":")[2]))):
            pass
    assert not [thread for thread in threading.enumerate() if thread.name == "pagemill-kv-events"]


def test_listening_on_every_network_is_a_warning(publish, warnings):
    publish(endpoint=f"tcp://*:{free_port()}")
    assert "every network can read them" in warnings.text


@pytest.mark.parametrize("which", ["endpoint", "replay_endpoint"])
def test_a_flood_is_cut_off_before_the_library_takes_it_in(context, publish, which):
    """Frames of a message that never ends, after ZMTP's greeting and handshake."""
    publisher = publish()
    sub = subscribe(context, publisher)
    host, port = publisher.settings[which].removeprefix("tcp://").split(":")
    kind = b"SUB" if which == "endpoint" else b"DEALER"
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY" + b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    said = 0
    with socket.create_connection((host, int(port)), timeout=WAIT_MS / 1000) as stranger:
        stranger.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
        with pytest.raises(OSError):
            while said < 50_000_000:
                said += stranger.send((b"\x01\xff" + b"x" * 255) * 100)
    assert said < 50_000_000
    publisher.publish(removed(7))
    assert numbers(receive_removals(sub, 1)[0][2]) == [7]


def test_all_may_come_back_after_they_named_too_many_topics(context, publish, monkeypatch):
    monkeypatch.setattr(kv_event_publisher, "MAX_SUBSCRIPTIONS", 20)
    publisher = publish()
    sub = subscribe(context, publisher)
    with context.socket(zmq.SUB) as many:
        many.linger = 0
        many.connect(publisher.settings["endpoint"])
        for number in range(30):
            many.subscribe(f"topic {number}")
        for _ in range(2400):
            if publisher._num_inner > 1:
                break
            time.sleep(0.025)
    assert publisher._num_inner > 1
    for number in range(2400):
        publisher.publish(removed(number))
        if sub.poll(25) and b"BlockRemoved" in sub.recv_multipart()[2]:
            return
    raise AssertionError("it did not come back")

"""Whoever does not know the secret of a deployment costs its tcp sockets no memory, and the log a few lines."""

import contextlib
import socket
import struct
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import zmq

from pagemill.config.kv_events_config import KVEventsConfig
from pagemill.fleet.head import NodeRegistry
from pagemill.messages.nodes import HeadMessage, NodeHello, NodeMessage, NodeWelcome
from pagemill.transport.addresses import tcp_address
from pagemill.transport.codec import Codec
from pagemill.transport.curve import protect
from pagemill.transport.handshake import Hello, Role, hello_frames
from pagemill.transport.kv_event_publisher import KVEventPublisher
from pagemill.transport.sockets import ClientSocket, ServerSocket
from pagemill.utils.processes import Child
from tests.fakes.ports import free_port

SECRET = "a secret of the test's"
PATIENCE_S = 120
MEGABYTE = 1 << 20
NULL = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
CURVE = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""How clients of ZMTP begin."""
READY = b"\x05READY\x0bSocket-Type" + struct.pack("!I", 6) + b"DEALER"


def head(payload, report):
    """A process with the desk of a head."""
    desk = NodeRegistry(tcp_address(), SECRET, range(1, 2), 2, {}, lambda event: None, 30)
    report(desk.address.encode())
    time.sleep(3600)


def core(payload, report):
    """A process with the socket of a core."""
    server = ServerSocket(tcp_address(), SECRET, accepts=(Role.API_SERVER, Role.NODE))
    report(server.address.encode())
    while True:
        server.receive(1.0)


def events(payload, report):
    """A process that publishes KV cache events to those who have a key."""
    folder = Path(payload.decode())
    (folder / "server").write_bytes(zmq.curve_keypair()[1])
    (folder / "clients").write_bytes(zmq.curve_keypair()[0])
    files = {"curve_secret_key_file": str(folder / "server"), "curve_client_keys_file": str(folder / "clients")}
    endpoints = {"endpoint": f"tcp://127.0.0.1:{free_port()}", "replay_endpoint": f"tcp://127.0.0.1:{free_port()}"}
    KVEventPublisher(KVEventsConfig(enable_kv_cache_events=True, **endpoints, **files))
    for address in endpoints.values():
        report(address.encode())
    time.sleep(3600)


@pytest.fixture(params=["head", "core"])
def victim(request):
    with Child(f"tests.security.test_strangers:{request.param}", request.param, b"") as child:
        yield child, child.report(PATIENCE_S).decode()
        child.kill()


def connect(address):
    where = urlsplit(address)
    connection = socket.create_connection((where.hostname, where.port))
    connection.settimeout(2)
    return connection


def frame(content, flags=0):
    return bytes([flags | 2]) + struct.pack("!Q", len(content)) + content


def parts_without_end(connection):
    connection.sendall(NULL + bytes([4, len(READY)]) + READY)
    for _ in range(200):
        connection.sendall(frame(bytes(MEGABYTE), flags=1))


def one_frame_that_is_huge(connection):
    connection.sendall(NULL + bytes([4, len(READY)]) + READY)
    connection.sendall(b"\x02" + struct.pack("!Q", 900 * MEGABYTE))
    for _ in range(200):
        connection.sendall(bytes(MEGABYTE))


def a_proof_that_is_huge(connection):
    connection.sendall(CURVE + b"\x06" + struct.pack("!Q", 900 * MEGABYTE))
    for _ in range(200):
        connection.sendall(bytes(MEGABYTE))


def proofs_without_end(connection):
    connection.sendall(CURVE)
    for _ in range(200):
        connection.sendall(frame(bytes(MEGABYTE), flags=4))


def silence(connection):
    """Hung up after the time that a proof may take."""
    time.sleep(6)
    while connection.recv(1 << 16):
        pass
    raise BrokenPipeError


def topics_without_end(connection):
    subscriber = READY.replace(b"\x06DEALER", b"\x03SUB")
    connection.sendall(NULL + bytes([4, len(subscriber)]) + subscriber)
    for number in range(1_000_000):
        connection.sendall(b"\0\x21\x01" + number.to_bytes(32))


ATTACKS = [parts_without_end, one_frame_that_is_huge, a_proof_that_is_huge, proofs_without_end]


@pytest.mark.parametrize("attack", [*ATTACKS, topics_without_end])
def test_a_stranger_cannot_flood_events_that_have_keys(tmp_path, attack):
    with Child("tests.security.test_strangers:events", "events", str(tmp_path).encode()) as child:
        for address in [child.report(PATIENCE_S).decode() for _ in range(2)]:
            before = psutil.Process(child.pid).memory_info().rss
            with connect(address) as connection, pytest.raises(OSError):
                attack(connection)
            assert psutil.Process(child.pid).memory_info().rss - before < 8 * MEGABYTE
        child.kill()


@pytest.mark.parametrize("attack", [*ATTACKS, silence])
def test_a_stranger_is_hung_up(victim, attack):
    child, address = victim
    process = psutil.Process(child.pid)
    before = process.memory_info().rss
    with connect(address) as connection, contextlib.suppress(TimeoutError), pytest.raises(OSError):
        attack(connection)
    assert process.memory_info().rss - before < 8 * MEGABYTE
    welcome(address)


def test_wrong_secrets_get_nowhere(victim, capfd):
    child, address = victim
    before = psutil.Process(child.pid).memory_info().rss
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(context.socket(zmq.DEALER)) for _ in range(40)]
        for number, stranger in enumerate(strangers):
            stranger.set(zmq.LINGER, 0)
            if number % 2:
                protect(stranger, address, "another secret, as long", serves=False)
            stranger.connect(address)
            with contextlib.suppress(zmq.Again):  # it was hung up, and the library does not try again
                for _ in range(500):
                    stranger.send_multipart(hello_frames(Hello(secret=SECRET, role=Role.NODE, index=1)), zmq.NOBLOCK)
        time.sleep(2)
        assert not any(stranger.poll(0) for stranger in strangers), "the right words, without the key"
    assert psutil.Process(child.pid).memory_info().rss - before < 8 * MEGABYTE
    assert len(capfd.readouterr().err.splitlines()) < 20
    welcome(address)


def welcome(address):
    """Who belongs here still comes in."""
    with contextlib.closing(ClientSocket(address, Hello(secret=SECRET, role=Role.NODE, index=1), timeout_s=PATIENCE_S)):
        pass


def test_what_is_said_cannot_be_read_on_the_way():
    """The secret and all else are encrypted: a relay sees neither."""
    desk = NodeRegistry(tcp_address(), SECRET, range(1, 2), 2, {}, lambda event: None, 30)
    with contextlib.closing(desk), contextlib.closing(Relay(desk.address)) as relay:
        client = ClientSocket(relay.address, Hello(secret=SECRET, role=Role.NODE, index=1), timeout_s=PATIENCE_S)
        with contextlib.closing(client):
            client.send(Codec(NodeMessage).encode(NodeHello("id", "a-telling-name", 2, 1, 1, {})))
            answer = client.receive(PATIENCE_S)
            assert Codec(HeadMessage).decode(answer) == NodeWelcome()
        seen = bytes(relay.seen)
    assert len(seen) > 500
    for words in (SECRET.encode(), b"a-telling-name", b"node_welcome", b"pagemill"):
        assert words not in seen


class Relay:
    """Passes one connection on, and keeps what it saw."""

    def __init__(self, target):
        self.seen = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._target = target
        self._ends = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        near, _ = self._listener.accept()
        far = connect(self._target)
        far.settimeout(None)
        self._ends = [near, far]
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source, sink):
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 16):
                self.seen += part
                sink.sendall(part)

    def close(self):
        for end in (self._listener, *self._ends):
            end.close()

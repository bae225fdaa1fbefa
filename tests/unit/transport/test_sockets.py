import asyncio
import contextlib
import errno
import logging
import os
import threading
import time

import pytest
import zmq

from pagemill.errors import ConfigError, HandshakeError, NoAnswerError, NotLetInError, PeerGoneError
from pagemill.transport.addresses import PrivateDirectory, tcp_address
from pagemill.transport.async_client import AsyncClientSocket
from pagemill.transport.codec import Limits
from pagemill.transport.curve import protect
from pagemill.transport.handshake import MAGIC, Hello, Role, hello_frames, new_secret
from pagemill.transport.sockets import ClientSocket, ServerSocket

SECRET = new_secret()
LIMITS = Limits(max_frames=4, max_frame_bytes=1 << 20, max_message_bytes=1 << 20)


def hello(index=0, **changes):
    return Hello(**({"secret": SECRET, "role": Role.API_SERVER, "index": index} | changes))


@pytest.fixture
def folder(tmp_path):
    with PrivateDirectory() as folder:
        yield folder


@pytest.fixture(params=["ipc", "tcp"])
def server(request, folder):
    address = folder.ipc("core") if request.param == "ipc" else tcp_address()
    with contextlib.closing(ServerSocket(address, SECRET, accepts=[Role.API_SERVER], limits=LIMITS)) as server:
        yield server


@contextlib.contextmanager
def running(server, answer=True):
    """The server in a thread; what it received."""
    received, stop = [], threading.Event()

    def run():
        while not stop.is_set():
            message = server.receive(60)
            if message is not None:
                received.append(message)
                if answer:
                    server.send(*message)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield received
    finally:
        stop.set()
        server.wake()
        thread.join(60)
        assert not thread.is_alive()


@contextlib.contextmanager
def raw_dealer(server, has_key=True):
    """Somebody with a socket of its own, who knows the secret where it is needed, or not."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        if has_key:
            protect(socket, server.address, SECRET, serves=False)
        socket.connect(server.address)
        yield socket


def wait_for(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_messages_go_both_ways(server):
    with running(server), contextlib.closing(ClientSocket(server.address, hello(3), timeout_s=60)) as client:
        client.send([b"body", bytes(200_000)])
        assert [bytes(frame) for frame in client.receive(60)] == [b"body", bytes(200_000)]
        assert [(peer.role, peer.index) for peer in server.peers] == [(Role.API_SERVER, 3)]
        assert client.receive(0.01) is None
    assert not server.dropped


async def test_from_an_event_loop(server):
    with running(server):
        client = await AsyncClientSocket.connect(server.address, hello(), timeout_s=60)
        for size in (1, 100_000):
            await client.send([b"body", bytes(size)])
            assert [bytes(frame) for frame in await client.receive()] == [b"body", bytes(size)]
        client.close()


async def test_several_front_ends_and_several_cores(folder):
    servers = [ServerSocket(folder.ipc(f"core-{i}"), SECRET, accepts=[Role.API_SERVER]) for i in range(2)]
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.close)
            stack.enter_context(running(server))
        pairs = [(index, server) for index in range(3) for server in servers]
        clients = [await AsyncClientSocket.connect(s.address, hello(index), timeout_s=60) for index, s in pairs]
        for number, client in enumerate(clients):
            await client.send([b"%d" % number])
        answers = await asyncio.gather(*(client.receive() for client in clients))
        assert [bytes(frames[0]) for frames in answers] == [b"%d" % number for number in range(6)]
        for client in clients:
            client.close()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"role": Role.WORKER}, "not accepted"),
        ({"version": 77}, "version 77"),
    ],
)
def test_who_does_not_belong_is_refused_on_both_sides(server, changes, says, caplog):
    logging.getLogger("pagemill").addHandler(caplog.handler)
    try:
        with running(server), pytest.raises(HandshakeError, match=says):
            ClientSocket(server.address, hello(**changes), timeout_s=60)
    finally:
        logging.getLogger("pagemill").removeHandler(caplog.handler)
    assert server.peers == [] and server.dropped == {"refused": 1}
    assert says.split()[-1] in caplog.text and SECRET not in caplog.text


@pytest.mark.slow
async def test_who_has_another_secret_does_not_get_in(server):
    """Through a file it is told why; over tcp nothing of it arrives."""
    is_file = server.address.startswith("ipc")
    patience_s = 60 if is_file else 1  # over tcp there is no answer to wait for
    says = "secret is wrong" if is_file else "does not answer who has this secret"
    with running(server):
        with pytest.raises(HandshakeError if is_file else NotLetInError, match=says):
            ClientSocket(server.address, hello(secret="wrong"), timeout_s=patience_s)
        with pytest.raises(HandshakeError, match="secret is wrong" if is_file else "did not answer"):
            await AsyncClientSocket.connect(server.address, hello(secret="wrong"), timeout_s=patience_s)
        with raw_dealer(server, has_key=False) as stranger:
            stranger.send_multipart(hello_frames(hello()))
            assert bool(stranger.poll(60_000 if is_file else 1000)) == is_file, "the right secret, and no key"
    assert server.dropped == ({"refused": 2} if is_file else {})


def test_wrong_secrets_do_not_fill_the_log(folder, caplog):
    logging.getLogger("pagemill").addHandler(caplog.handler)
    try:
        with contextlib.closing(ServerSocket(folder.ipc("core"), SECRET, accepts=[Role.API_SERVER])) as server:
            with running(server), raw_dealer(server) as stranger:
                for _ in range(300):
                    stranger.send_multipart(hello_frames(hello(secret="wrong")))
                for _ in range(300):
                    assert stranger.poll(60_000)
                    stranger.recv_multipart()
            assert server.dropped == {"refused": 300}
    finally:
        logging.getLogger("pagemill").removeHandler(caplog.handler)
    assert caplog.text.count("secret is wrong") == 9, "the 1st, 2nd, 4th and so on"


async def test_nobody_answers(folder):
    with pytest.raises(HandshakeError, match="did not answer"):
        ClientSocket(folder.ipc("nobody"), hello(), timeout_s=0.05)
    with pytest.raises(HandshakeError, match="did not answer"):
        await AsyncClientSocket.connect(folder.ipc("nobody"), hello(), timeout_s=0.05)


def test_strangers_and_noise_are_dropped_and_counted(server):
    with running(server) as received, raw_dealer(server) as stranger:
        stranger.send_multipart([b"add", b"request"])
        stranger.send(b"")
        stranger.send_multipart([MAGIC, b"\xc1garbage"])
        stranger.send_multipart([MAGIC, os.urandom(100)])
        stranger.send_multipart([b"part"] * 1000)
        stranger.send_multipart([bytes(LIMITS.max_frame_bytes // 2)] * 3)
        wait_for(lambda: server.dropped.total() == 6)
        assert server.dropped == {"stranger": 2, "refused": 2, "oversized": 2}
        assert received == []
        with contextlib.closing(ClientSocket(server.address, hello(), timeout_s=60)) as client:
            client.send([b"still here"])
            assert bytes(client.receive(60)[0]) == b"still here"


def test_a_peer_that_sends_too_much_loses_the_message_only(server):
    with running(server) as received, contextlib.closing(ClientSocket(server.address, hello(), timeout_s=60)) as client:
        client.send([b"x"] * (LIMITS.max_frames + 1))
        client.send([b"fine"])
        assert bytes(client.receive(60)[0]) == b"fine"
    assert len(received) == 1 and server.dropped == {"oversized": 1}


@pytest.mark.parametrize("server", ["tcp"], indirect=True)
def test_bytes_that_are_not_zmq(server):
    """Over tcp only: the same parser reads ipc."""
    import socket

    host, port = server.address.removeprefix("tcp://").split(":")
    with running(server):
        for noise in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" + bytes(8) + b"\x7f" * 100):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(noise)
        with contextlib.closing(ClientSocket(server.address, hello(), timeout_s=60)) as client:
            client.send([b"still here"])
            assert bytes(client.receive(60)[0]) == b"still here"


def test_a_frame_over_the_limit_ends_the_connection(server):
    with running(server) as received, raw_dealer(server) as peer:
        peer.send_multipart(hello_frames(hello()))
        wait_for(lambda: server.peers)
        peer.send(bytes(LIMITS.max_frame_bytes + 1))
        with contextlib.closing(ClientSocket(server.address, hello(1), timeout_s=60)) as client:
            client.send([b"still here"])
            assert bytes(client.receive(60)[0]) == b"still here"
        assert len(received) == 1


def test_a_peer_that_is_gone(server):
    client = ClientSocketInThread(server)
    peer = server.peers[0]
    client.close()

    def gone():
        try:
            server.send(peer, [b"x"])
        except PeerGoneError:
            return True
        return False

    wait_for(gone)
    assert server.peers == []
    with pytest.raises(PeerGoneError, match="api server 0 is gone"):
        server.send(peer, [b"x"])


@pytest.mark.slow
def test_a_peer_that_does_not_read_blocks_nobody_for_long(folder):
    options = {"accepts": [Role.API_SERVER], "high_water_mark": 2, "send_timeout_s": 0.05}
    with contextlib.closing(ServerSocket(folder.ipc("core"), SECRET, **options)) as server, raw_dealer(server) as peer:
        peer.close()
        with zmq.Context() as context, context.socket(zmq.DEALER) as lazy:
            lazy.set(zmq.LINGER, 0)
            lazy.set(zmq.RCVHWM, 1)
            lazy.connect(server.address)
            lazy.send_multipart(hello_frames(hello()))
            server.receive(0.2)
            started = time.monotonic()
            with pytest.raises(PeerGoneError, match="takes nothing"):
                for _ in range(10_000):
                    server.send(server.peers[0], [bytes(100_000)])
            assert time.monotonic() - started < 60


def test_a_server_that_is_stuck_blocks_no_client_for_long(folder):
    with contextlib.closing(
        ServerSocket(folder.ipc("core"), SECRET, accepts=[Role.API_SERVER], high_water_mark=2)
    ) as server:
        with running(server):
            client = ClientSocket(server.address, hello(), timeout_s=60, high_water_mark=2, send_timeout_s=0.05)
        with pytest.raises(PeerGoneError, match="takes nothing"):
            for _ in range(10_000):
                client.send([bytes(100_000)])
        client.close()


def test_a_process_that_connects_again_is_another_peer(server):
    with running(server):
        for _ in range(2):
            ClientSocket(server.address, hello(), timeout_s=60).close()
    assert len({peer.routing_id for peer in server.peers}) == 2


def test_a_process_that_connects_again_and_again_leaves_room_for_others(server, monkeypatch):
    monkeypatch.setattr("pagemill.transport.sockets.MAX_PEERS", 3)
    with running(server), contextlib.ExitStack() as stack:
        for index in (0, 1, 1, 1, 1, 2):
            client = stack.enter_context(contextlib.closing(ClientSocket(server.address, hello(index), timeout_s=60)))
        assert [peer.index for peer in server.peers] == [0, 1, 2]
        client.send([b"still here"])
        assert bytes(client.receive(60)[0]) == b"still here"
        with pytest.raises(HandshakeError, match="3 processes are connected"):
            ClientSocket(server.address, hello(3), timeout_s=60)


def test_an_address_in_use_and_an_open_folder(server, folder):
    if server.address.startswith("tcp"):
        with pytest.raises(ConfigError, match="cannot be bound"):
            ServerSocket(server.address, SECRET, accepts=[])
    folder.path.chmod(0o755)
    with pytest.raises(ConfigError, match="0700"):
        ServerSocket(folder.ipc("open"), SECRET, accepts=[])


def test_waiting_ends_early_when_woken(server):
    thread = threading.Timer(0.05, server.wake)
    thread.start()
    started = time.monotonic()
    assert server.receive(300) is None
    assert time.monotonic() - started < 60
    thread.join()


def ClientSocketInThread(server):
    with running(server):
        return ClientSocket(server.address, hello(), timeout_s=60)


def test_a_server_without_descriptors_leaves_none(folder, monkeypatch):
    def fail():
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("pagemill.utils.wake_pipe.os.pipe", fail)
        with pytest.raises(ConfigError, match=r"cannot be bound: .*Too many open files"):
            ServerSocket(folder.ipc("core"), SECRET, accepts=[Role.API_SERVER])
    ServerSocket(folder.ipc("core"), SECRET, accepts=[Role.API_SERVER]).close()


async def test_a_client_without_descriptors_may_try_again(server):
    class Exhausted:
        def socket(self, kind):
            raise zmq.ZMQError(errno.EMFILE)

    with pytest.raises(NoAnswerError, match="Too many open files"):
        ClientSocket(server.address, hello(), timeout_s=60, context=Exhausted())
    with pytest.raises(NoAnswerError, match="Too many open files"):
        await AsyncClientSocket.connect(server.address, hello(), timeout_s=60, context=Exhausted())

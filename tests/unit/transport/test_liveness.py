"""Connections that are lost are noticed at both ends, and made anew by whoever owns them."""

import asyncio
import contextlib
import threading
import time

import pytest
import zmq

from pagemill.errors import PeerGoneError
from pagemill.transport.addresses import PrivateDirectory, tcp_address
from pagemill.transport.async_client import AsyncClientSocket
from pagemill.transport.codec import Limits
from pagemill.transport.handshake import Hello, Role, hello_frames
from pagemill.transport.liveness import Introductions, Silence
from pagemill.transport.sockets import ClientSocket, ServerSocket
from tests.fakes.proxy import Proxy

HELLO = Hello(secret="s", role=Role.API_SERVER, index=3)
PATIENCE_S = 120
SILENT_S = 5.0


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Pulses that come fast, so that silence is short."""
    monkeypatch.setattr("pagemill.transport.liveness.PULSE_S", 0.05)
    monkeypatch.setattr("pagemill.transport.sockets.PULSE_S", 0.05)
    monkeypatch.setattr("pagemill.transport.async_client.PULSE_S", 0.05)


class Echo:
    """A server on a thread that sends everything back, and notes who comes and goes."""

    def __init__(self, address, **options):
        self.server = ServerSocket(address, "s", accepts=[Role.API_SERVER], **options)
        self.events = []
        self.server.watch(
            joined=lambda peer: self.events.append(("joined", peer.attempt)),
            lost=lambda peer, why: self.events.append(("lost", peer.attempt, why)),
        )
        self.calls = []
        self._closing = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._closing = True
        self.server.wake()
        self._thread.join()
        self.server.close()

    def _run(self):
        while not self._closing:
            received = self.server.receive(5)
            if received is not None:
                with contextlib.suppress(PeerGoneError):
                    self.server.send(*received)
            while self.calls:
                self.calls.pop()()

    def forget_all(self):
        self.calls.append(lambda: [self.server.forget(peer) for peer in self.server.peers])
        self.server.wake()

    def wait_for(self, *event):
        deadline = time.monotonic() + PATIENCE_S
        while not any(known[: len(event)] == event for known in self.events):
            assert time.monotonic() < deadline, (event, self.events)
            time.sleep(0.005)


@pytest.fixture(params=["ipc", "tcp"])
def link(request, tmp_path):
    """A server, and a proxy before it."""
    with PrivateDirectory(tmp_path) as folder:
        is_ipc = request.param == "ipc"
        with (
            Echo(folder.ipc("server") if is_ipc else tcp_address(), silent_s=SILENT_S) as echo,
            Proxy(folder.ipc("proxy") if is_ipc else "tcp://127.0.0.1:0", lambda: echo.server.address) as proxy,
        ):
            yield echo, proxy


async def connect(proxy, introductions):
    return await AsyncClientSocket.connect(proxy.address, introductions.next(), timeout_s=PATIENCE_S, silent_s=SILENT_S)


async def say(client, words):
    await client.send([words])
    return bytes((await asyncio.wait_for(client.receive(), PATIENCE_S))[0])


async def lost(client):
    """The error of a receive that waits."""
    with pytest.raises(PeerGoneError) as caught:
        await asyncio.wait_for(client.receive(), PATIENCE_S)
    with pytest.raises(PeerGoneError):
        await client.send([b"more"])
    with pytest.raises(PeerGoneError):
        await client.receive()
    client.close()
    return str(caught.value)


DISTURBANCES = {
    "reset": lambda proxy: proxy.reset(),
    "silence": lambda proxy: proxy.silence(),
    "the server is gone": lambda proxy: proxy.half_open("server"),
    "the client is gone": lambda proxy: proxy.half_open("client"),
}


@pytest.mark.slow
@pytest.mark.parametrize("disturbance", DISTURBANCES)
async def test_both_ends_notice_and_the_next_connection_works(link, disturbance):
    echo, proxy = link
    introductions = Introductions(HELLO)
    first = await connect(proxy, introductions)
    assert await say(first, b"one") == b"one"
    DISTURBANCES[disturbance](proxy)
    assert "lost" in await lost(first)
    echo.wait_for("lost", 1)
    proxy.go_on()
    second = await connect(proxy, introductions)
    assert await say(second, b"two") == b"two"
    echo.wait_for("joined", 2)
    assert [(peer.index, peer.attempt) for peer in echo.server.peers] == [(3, 2)]
    second.close()
    echo.wait_for("lost", 2, "it is gone")


@pytest.mark.slow
async def test_a_slow_connection_is_not_lost(link):
    echo, proxy = link
    proxy.slow_down(0.05)
    client = await connect(proxy, Introductions(HELLO))
    for number in range(20):
        assert await say(client, b"%d" % number) == b"%d" % number
    await asyncio.sleep(1)
    assert await say(client, b"end") == b"end"
    assert echo.events == [("joined", 1)]
    client.close()


async def test_who_was_forgotten_is_told_so(link):
    echo, proxy = link
    client = await connect(proxy, Introductions(HELLO))
    assert await say(client, b"one") == b"one"
    echo.forget_all()
    assert "introduce yourself" in await lost(client)


def test_a_client_without_an_event_loop_notices_too(link):
    echo, proxy = link
    with contextlib.closing(ClientSocket(proxy.address, HELLO, timeout_s=PATIENCE_S, silent_s=SILENT_S)) as client:
        client.send([b"one"])
        assert bytes(client.receive(PATIENCE_S)[0]) == b"one"
        assert client.receive(0.3) is None
        echo.forget_all()
        with pytest.raises(PeerGoneError, match="introduce yourself"):
            client.receive(PATIENCE_S)


@pytest.mark.slow
def test_a_client_without_an_event_loop_notices_silence(link):
    _, proxy = link
    with contextlib.closing(ClientSocket(proxy.address, HELLO, timeout_s=PATIENCE_S, silent_s=SILENT_S)) as client:
        proxy.silence()
        with pytest.raises(PeerGoneError, match="nothing was heard for 5 s"):
            client.receive(PATIENCE_S)


async def test_a_message_over_the_limits_does_not_go_missing(tmp_path):
    """The sender of a request is told at once; a receiver gives up the connection, for what it held is unknown."""
    limits = Limits(max_frames=2)
    with PrivateDirectory(tmp_path) as folder, Echo(folder.ipc("server")) as echo:
        client = await AsyncClientSocket.connect(echo.server.address, HELLO, timeout_s=PATIENCE_S, limits=limits)
        with pytest.raises(ValueError, match="3 frames"):
            await client.send([b"x"] * 3)
        peer = echo.server.peers[0]
        echo.calls.append(lambda: echo.server.send(peer, [b"x"] * 3))
        echo.server.wake()
        assert "over the limits" in await lost(client)


def test_the_introduction_of_an_attempt_that_was_given_up_changes_nothing(tmp_path):
    introductions = Introductions(HELLO)
    early, late = introductions.next(), introductions.next()
    with PrivateDirectory(tmp_path) as folder, Echo(folder.ipc("server")) as echo:
        with contextlib.closing(ClientSocket(echo.server.address, late, timeout_s=PATIENCE_S)) as client:
            with zmq.Context() as context, context.socket(zmq.DEALER) as other:
                other.linger = 1000
                other.connect(echo.server.address)
                other.send_multipart(hello_frames(early))
                deadline = time.monotonic() + PATIENCE_S
                while not echo.server.dropped["late"]:
                    assert time.monotonic() < deadline
                    time.sleep(0.005)
            client.send([b"still here"])
            assert bytes(client.receive(PATIENCE_S)[0]) == b"still here"
        assert echo.events[0] == ("joined", 2)
        other_link = ClientSocket(echo.server.address, Introductions(HELLO).next(), timeout_s=PATIENCE_S)
        other_link.close()  # another series replaces none: whoever watches decides
        echo.wait_for("joined", 1)


def test_silence_is_counted_in_pulses_of_ones_own():
    silence = Silence(0.1)  # two pulses
    assert not silence.lasts_too_long()
    assert not silence.lasts_too_long()
    assert silence.lasts_too_long()
    silence.end()
    assert not silence.lasts_too_long()

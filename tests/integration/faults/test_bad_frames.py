"""What strangers and broken peers send to the sockets is dropped and logged; nothing else happens.

The queues between a core and its workers have no name that anybody could open (docs/processes.md); what they do with
malformed content is tested in tests/unit/transport.
"""

import random
import socket
import struct

import msgspec
import psutil
import pytest
import zmq

from pagemill.messages.core_calls import AddRequests, CoreCall, EngineCall, FrontEndGone
from pagemill.transport.codec import Codec
from pagemill.transport.handshake import MAGIC, PROTOCOL_VERSION, Hello, Role, hello_frames
from pagemill.transport.liveness import is_pulse
from tests.fakes.engine_setup import core_request
from tests.integration.faults.lab import Server, wait_for
from tests.integration.faults.traffic import Traffic, ask_all, asks, same

SECRET = "5" * 64
CALLS = Codec(EngineCall)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type" + struct.pack("!I", 6) + b"DEALER"
HANDSHAKE = GREETING + bytes([4, len(READY)]) + READY
"""Of ZMTP, as a DEALER socket begins."""


@pytest.fixture(scope="module")
def server(checkpoint):
    with Server(checkpoint, "--api-server-count", 2, scripted=True, LAB_STEP_S=0.01, LAB_SECRET=SECRET) as server:
        yield server


def raw(path, *parts):
    """Bytes straight into the socket; its end is awaited, or not."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(0.2)
        sock.connect(str(path))
        for part in parts:
            try:
                sock.sendall(part)
            except OSError:  # it was hung up: that is the idea
                return


def below_the_messages(path):
    """Garbage for the library that carries the messages."""
    rng = random.Random(1)
    for size in (0, 1, 10, 64, 100, 5000):
        raw(path, rng.randbytes(size))
        raw(path, HANDSHAKE, rng.randbytes(size))
    raw(path, GREETING[:30])
    raw(path, HANDSHAKE, b"\x02" + struct.pack("!Q", 1 << 40), bytes(1000))  # a frame of a terabyte
    raw(path, HANDSHAKE, b"\x02" + struct.pack("!Q", 1 << 29), bytes(1000))  # one that is allowed, and never comes


def talk(path, messages, num_answers=0):
    """Send messages as a peer would; the answers that come, pulses not counted: at least so many."""
    with zmq.Context.instance().socket(zmq.DEALER) as dealer:
        dealer.linger = 60_000
        dealer.connect(f"ipc://{path}")
        for frames in messages:
            dealer.send_multipart(frames)
        answers = []
        while dealer.poll(50 if len(answers) >= num_answers else 120_000):
            frames = dealer.recv_multipart()
            if not is_pulse(frames):
                answers.append(frames)
        return answers


def hello(**changes):
    known = {"secret": SECRET, "role": Role.API_SERVER, "index": 9}
    return hello_frames(Hello(**(known | changes)))


def strangers(path):
    """Those that may not come in, and go on talking."""
    rng = random.Random(2)
    valid = CALLS.encode(AddRequests([core_request("intruder", [1, 2, 3])]))
    noise = [[rng.randbytes(rng.randrange(300)) for _ in range(rng.randrange(1, 5))] for _ in range(200)]
    refused = [
        hello(secret="6" * 64),
        hello(secret=""),
        hello(role=Role.WORKER),
        hello(version=77),
        hello(index=-1),
        [MAGIC, b"no msgpack"],
        [MAGIC, msgspec.msgpack.encode({"version": PROTOCOL_VERSION})],
        [MAGIC, bytes(100_000)],
    ]
    assert talk(path, [*noise, valid, [b""], [b"x"] * 2000]) == []
    for introduction in refused:
        answers = talk(path, [introduction, valid], 1)
        assert len(answers) == 1
        assert b"error" in answers[0][1]
        assert SECRET.encode() not in answers[0][1]


def broken_peers(path):
    """Those that may come in, and then talk nonsense."""
    rng = random.Random(3)
    body = CALLS.encode(AddRequests([core_request("broken", [1, 2, 3])]))[0]
    nonsense = [
        CALLS.encode(FrontEndGone(0)),  # only the supervisor may say so
        *([body[:length]] for length in range(len(body))),
        [body, b"an array that nobody refers to"],
        [b"x"] * 2000,
        [b""],
        *([rng.randbytes(rng.randrange(1, 200))] for _ in range(300)),
        *([bytes(b ^ (rng.random() < 0.02) * rng.randrange(256) for b in body[:1]) + b"\xc1"] for _ in range(50)),
    ]
    talk(path, [hello(), *nonsense])
    (welcome, *answers) = talk(path, [hello(), CALLS.encode(CoreCall(1, "shutdown"))], 1 + ("core" in path.name))
    assert b"error" in welcome[1] and msgspec.msgpack.decode(welcome[1])["error"] is None
    if "core" in path.name:
        assert b"unknown call" in answers[0][0]


async def test_nothing_happens(server):
    requests = asks(12, max_tokens=150)
    calm = await ask_all(server, requests)
    paths = sorted(server.folder.glob("s/*/*"))
    assert [path.name for path in paths if path.is_socket()] == ["core-0-0", "feed"]
    processes = server.tree()
    core = psutil.Process(server.pid("engine core 0"))
    before = core.memory_info().rss
    async with Traffic(server, requests) as traffic:
        await traffic.until(3)
        for path in filter(lambda path: path.is_socket(), paths):
            for attack in (below_the_messages, strangers, broken_peers):
                attack(path)
        assert same(await traffic.answers(), calm)
    assert server.tree() == processes, "nobody died"
    assert server.status() == 200
    server.wait_empty()
    for words in ("the shared secret is wrong", "protocol version 77", "a stranger", "only the supervisor may say"):
        wait_for(lambda words=words: words in server.log, words)
    assert server.log.count("\n") < 2000
    # What is allowed to be large is made room for when it comes, not when it is announced.
    wait_for(lambda: core.memory_info().rss - before < 200 << 20, "memory is given back", 60)
    assert same(await ask_all(server, requests), calm)

"""`CoreServer`: the thread that owns the socket of a core."""

import time

import msgspec
import pytest

from pagemill.engine.core_loop import CoreLoop
from pagemill.engine.process import CoreServer
from pagemill.errors import PeerGoneError
from pagemill.messages.core_calls import AddRequests, CallResult, CoreCall, EngineCall, EngineReport, FrontEndGone
from pagemill.messages.engine_io import FinishReason
from pagemill.transport import liveness, sockets
from pagemill.transport.addresses import PrivateDirectory
from pagemill.transport.codec import Codec
from pagemill.transport.handshake import Hello, Role
from pagemill.transport.sockets import ClientSocket, ServerSocket
from tests.fakes.engine_setup import core_request

CALLS, REPORTS = Codec(EngineCall), Codec(EngineReport)


class NoCore:
    num_executed = 0

    def has_work(self):
        return False


@pytest.fixture(autouse=True)
def _pulses_come_fast(monkeypatch):
    """Whoever waits for nothing else sees with the next pulse what has become of a connection."""
    monkeypatch.setattr(liveness, "PULSE_S", 0.1)
    monkeypatch.setattr(sockets, "PULSE_S", 0.1)


@pytest.fixture
def case(tmp_path):
    with PrivateDirectory(tmp_path) as folder:
        socket = ServerSocket(folder.ipc("core"), "s", accepts=(Role.API_SERVER, Role.SUPERVISOR))
        server = CoreServer(socket)
        loop = CoreLoop(NoCore(), server.send)
        server.start(loop)
        yield server, loop, socket.address
        server.close()


def connect(address, role=Role.API_SERVER, index=0):
    return ClientSocket(address, Hello(secret="s", role=role, index=index), timeout_s=60)


def say(connection, call):
    connection.send(CALLS.encode(call))


def test_a_front_end_that_connects_again_has_forgotten_what_it_asked_for(case):
    """So the engine does, too, even if nobody could tell it of the death."""
    _, loop, address = case
    first, other = connect(address), connect(address, index=1)
    say(first, CoreCall(1, "a"))
    assert loop.inbox.get(timeout=60) == (0, CoreCall(1, "a"))
    say(other, CoreCall(2, "b"))
    assert loop.inbox.get(timeout=60) == (1, CoreCall(2, "b"))
    second = connect(address)
    say(second, CoreCall(3, "c"))
    assert loop.inbox.get(timeout=60) == (0, FrontEndGone(0))
    assert loop.inbox.get(timeout=60) == (2, CoreCall(3, "c"))
    say(first, CoreCall(4, "late, from the dead"))
    time.sleep(0.1)
    assert loop.inbox.empty()
    with pytest.raises(PeerGoneError, match="introduce yourself"):
        first.receive(10)
    for connection in (first, second, other):
        connection.close()


def test_only_the_supervisor_says_who_is_gone(case):
    _, loop, address = case
    other, liar = connect(address, index=7), connect(address, index=1)
    supervisor = connect(address, Role.SUPERVISOR)
    say(liar, FrontEndGone(7))
    say(liar, CoreCall(1, "a"))
    assert loop.inbox.get(timeout=60) == (1, CoreCall(1, "a"))
    say(supervisor, FrontEndGone(7))
    assert loop.inbox.get(timeout=60) == (0, FrontEndGone(0))
    say(supervisor, FrontEndGone(8))
    say(supervisor, CoreCall(1, "the answer would go to a front end"))
    time.sleep(0.1)
    assert loop.inbox.empty()
    other.close()
    liar.close()
    supervisor.close()


def test_what_a_lost_connection_had_asked_for_is_aborted_and_answered_to_nobody(case):
    server, loop, address = case
    first = connect(address)
    say(first, CoreCall(1, "a"))
    number, _ = loop.inbox.get(timeout=60)
    second = connect(address)
    assert loop.inbox.get(timeout=60) == (number, FrontEndGone(number))
    server.send(number, CallResult(1, value="for the one before"))
    say(second, CoreCall(2, "b"))
    new_number, _ = loop.inbox.get(timeout=60)
    server.send(new_number, CallResult(2, value="for this one"))
    assert REPORTS.decode(second.receive(10)) == CallResult(2, value="for this one")
    second.close()
    assert loop.inbox.get(timeout=60) == (new_number, FrontEndGone(new_number))
    first.close()


def test_whoever_sent_what_cannot_be_read_is_told(case):
    _, loop, address = case
    front_end = connect(address)
    valid = msgspec.msgpack.decode(CALLS.encode(AddRequests([core_request("a", 3)]))[0])
    valid["requests"][0][1] = "no list of tokens"
    front_end.send([msgspec.msgpack.encode(valid)])
    report = REPORTS.decode(front_end.receive(10))
    (output,) = report.outputs.outputs
    assert (output.request_id, output.finish.reason) == ("a", FinishReason.ERROR)
    front_end.send([msgspec.msgpack.encode({"type": "call", "call_id": 7, "method": 3})])
    assert "could not read" in REPORTS.decode(front_end.receive(10)).error
    assert loop.inbox.empty()
    front_end.send([b"\xc1 no message at all"])
    assert loop.inbox.get(timeout=60) == (0, FrontEndGone(0))
    with pytest.raises(PeerGoneError, match="introduce yourself"):
        front_end.receive(10)
    front_end.close()


def test_a_core_whose_mail_fails_ends(case):
    server, loop, address = case
    connection = connect(address)
    say(connection, CoreCall(1, "a"))
    loop.inbox.get(timeout=60)
    server.send(0, CallResult(1, value=object()))
    deadline = time.monotonic() + 10
    while loop._failure is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "TypeError" in str(loop._failure)
    connection.close()

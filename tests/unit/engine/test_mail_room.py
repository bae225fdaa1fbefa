"""The thread that carries the mail of a core (engine/process.py)."""

import time

import pytest

from pagemill.engine.core_loop import CoreLoop
from pagemill.engine.process import MailRoom
from pagemill.messages.core_calls import CallResult, CoreCall, EngineCall, FrontEndGone
from pagemill.transport.addresses import PrivateDirectory
from pagemill.transport.codec import Codec
from pagemill.transport.handshake import Hello, Role
from pagemill.transport.sockets import ClientSocket, ServerSocket

CALLS = Codec(EngineCall)


class NoCore:
    num_executed = 0

    def has_work(self):
        return False


@pytest.fixture
def room(tmp_path):
    with PrivateDirectory(tmp_path) as folder:
        socket = ServerSocket(folder.ipc("core"), "s", accepts=(Role.API_SERVER, Role.SUPERVISOR))
        mail = MailRoom(socket)
        loop = CoreLoop(NoCore(), mail.post)
        mail.open(loop)
        yield mail, loop, socket.address
        mail.close()


def connect(address, role=Role.API_SERVER, index=0):
    return ClientSocket(address, Hello(secret="s", role=role, index=index), timeout_s=10)


def say(connection, call):
    connection.send(CALLS.encode(call))


def test_a_front_end_that_connects_again_has_forgotten_what_it_asked_for(room):
    """So the engine does, too, even if nobody could tell it of the death."""
    _, loop, address = room
    first, other = connect(address), connect(address, index=1)
    say(first, CoreCall(1, "a"))
    assert loop.inbox.get(timeout=10) == (0, CoreCall(1, "a"))
    say(other, CoreCall(2, "b"))
    assert loop.inbox.get(timeout=10) == (1, CoreCall(2, "b"))
    second = connect(address)
    say(second, CoreCall(3, "c"))
    assert loop.inbox.get(timeout=10) == (0, FrontEndGone(0))
    assert loop.inbox.get(timeout=10) == (0, CoreCall(3, "c"))
    say(first, CoreCall(4, "late mail of the dead"))
    time.sleep(0.1)
    assert loop.inbox.empty()
    for connection in (first, second, other):
        connection.close()


def test_only_the_supervisor_says_who_is_gone(room):
    _, loop, address = room
    liar, supervisor = connect(address), connect(address, Role.SUPERVISOR)
    say(liar, FrontEndGone(1))
    say(supervisor, FrontEndGone(2))
    assert loop.inbox.get(timeout=10) == (0, FrontEndGone(2))
    assert loop.inbox.empty()
    liar.close()
    supervisor.close()


def test_a_core_whose_mail_fails_ends(room):
    mail, loop, address = room
    connection = connect(address)
    say(connection, CoreCall(1, "a"))
    loop.inbox.get(timeout=10)
    mail.post(0, CallResult(1, value=object()))
    deadline = time.monotonic() + 10
    while loop._failure is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "TypeError" in str(loop._failure)
    connection.close()

"""The coordinator's hold on its engines, whatever goes wrong with one of them."""

import contextlib
import threading

import pytest

from pagemill.errors import PeerGoneError
from pagemill.fleet import dp_coordinator
from pagemill.fleet.dp_coordinator import WaveCoordinator
from pagemill.messages.engine_io import EngineReady
from pagemill.messages.fleet import EngineUp
from pagemill.messages.waves import StartWave
from pagemill.transport.handshake import new_secret

PATIENCE_S = 120
UP = EngineUp(0, 0, "ipc:///nowhere", EngineReady(max_model_len=64, vocab_size=8, num_blocks=9, block_size=16))


@pytest.mark.slow
def test_a_defect_does_not_leave_an_engine_without_its_coordinator(monkeypatch):
    attempts, again = [], threading.Event()

    async def connect(*args, **kwargs):
        attempts.append(args)
        if len(attempts) > 1:
            again.set()
        raise ZeroDivisionError("a defect of ours")

    monkeypatch.setattr(dp_coordinator.AsyncClientSocket, "connect", connect)
    with contextlib.closing(WaveCoordinator(new_secret())) as coordinator:
        coordinator.notify(UP)
        assert again.wait(PATIENCE_S)


async def test_an_order_reaches_the_others_while_an_engine_goes():
    with contextlib.closing(WaveCoordinator(new_secret())) as coordinator:
        members, sent = coordinator._members, []

        class Socket:
            def __init__(self, index):
                self.index = index

            async def send(self, frames):
                if members.pop(1, None) is None and self.index == 1:
                    raise PeerGoneError("it was closed")
                sent.append(self.index)

        members.update({index: Socket(index) for index in range(3)})
        await coordinator._broadcast(StartWave(1))
        assert sent == [0, 2]

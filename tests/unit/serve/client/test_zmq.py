"""A connection that is given up while somebody waits for it."""

import asyncio

import pytest

from pagemill.errors import EngineDeadError
from pagemill.messages.engine_io import EngineReady
from pagemill.messages.fleet import EngineUp
from pagemill.serve.client.zmq import ZmqClient
from pagemill.transport.addresses import PrivateDirectory
from pagemill.transport.handshake import Hello, Role
from tests.fakes.engine_setup import core_request

READY = EngineReady(max_model_len=64, vocab_size=100, num_blocks=10, block_size=4)
HELLO = Hello(secret="s", role=Role.API_SERVER, index=0)


@pytest.fixture
def folder(tmp_path):
    with PrivateDirectory(tmp_path) as folder:
        yield folder


def client_of_nobody(folder):
    return ZmqClient(EngineUp(0, 0, folder.ipc("core"), READY), HELLO)


async def test_who_waits_to_send_learns_that_the_engine_is_gone(folder):
    """And is not cancelled itself: it is the task of an HTTP request, which goes on elsewhere."""
    client = client_of_nobody(folder)
    adding = asyncio.create_task(client.add(core_request("a", 3)))
    calling = asyncio.create_task(client.call("reset_prefix_cache"))
    waiting = asyncio.create_task(client.outputs())
    await asyncio.sleep(0.01)
    await client.close()
    for task in (adding, calling, waiting):
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(task, 60)


async def test_who_is_cancelled_stays_cancelled(folder):
    client = client_of_nobody(folder)
    adding = asyncio.create_task(client.add(core_request("a", 3)))
    await asyncio.sleep(0.01)
    adding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adding
    await client.close()


async def test_nobody_answers(folder, monkeypatch):
    monkeypatch.setattr("pagemill.serve.client.zmq.CONNECT_S", 0.05)
    client = client_of_nobody(folder)
    with pytest.raises(EngineDeadError, match="did not answer"):
        await client.add(core_request("a", 3))
    with pytest.raises(EngineDeadError, match="did not answer"):
        await client.outputs()
    await client.close()

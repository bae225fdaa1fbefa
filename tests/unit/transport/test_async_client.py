import asyncio
import contextlib
import threading

import pytest
import zmq

from pagemill.errors import PeerGoneError
from pagemill.transport.addresses import PrivateDirectory
from pagemill.transport.async_client import AsyncClientSocket
from pagemill.transport.handshake import Hello, Role, new_secret
from pagemill.transport.sockets import ServerSocket

SECRET = new_secret()
HELLO = Hello(secret=SECRET, role=Role.API_SERVER, index=0)
LARGE = bytes(1 << 20)
PATIENCE_S = 120


@pytest.fixture
def server():
    with (
        PrivateDirectory() as folder,
        contextlib.closing(
            ServerSocket(
                folder.ipc("server"),
                SECRET,
                accepts=[Role.API_SERVER],
                high_water_mark=2,
                send_timeout_s=PATIENCE_S,
            )
        ) as server,
    ):
        yield server


@contextlib.asynccontextmanager
async def connected(server, **options):
    """A client; the server has said hello, and does nothing more."""

    def greet():
        while not server.peers:
            server.receive(0.1)

    client, _ = await asyncio.gather(
        AsyncClientSocket.connect(server.address, HELLO, timeout_s=PATIENCE_S, high_water_mark=2, **options),
        asyncio.to_thread(greet),
    )
    try:
        yield client
    finally:
        client.close()


async def test_senders_wait_for_room_together_and_every_message_arrives_once(server):
    received = []

    def serve():
        while len(received) < 40:
            message = server.receive(PATIENCE_S)
            received.append(bytes(message[1][0]))
            server.send(message[0], [received[-1]])

    async with connected(server, send_timeout_s=PATIENCE_S) as client:
        sending = [asyncio.create_task(client.send([b"%d" % number, LARGE])) for number in range(40)]
        await asyncio.sleep(0.1)
        assert not all(task.done() for task in sending), "there is room for a few"
        thread = threading.Thread(target=serve)
        thread.start()
        answers = [bytes((await asyncio.wait_for(client.receive(), PATIENCE_S))[0]) for _ in range(40)]
        await asyncio.gather(*sending)
        await asyncio.to_thread(thread.join)
    assert sorted(received) == sorted(b"%d" % number for number in range(40)) and answers == received


async def test_a_server_that_takes_nothing_is_gone(server):
    async with connected(server, send_timeout_s=0.05) as client:
        with pytest.raises(PeerGoneError, match="takes nothing any more"):
            while True:
                await client.send([LARGE])
        with pytest.raises(PeerGoneError, match="takes nothing any more"):
            await client.receive()


async def test_what_is_there_is_received_without_a_turn_of_the_event_loop(server):
    async with connected(server) as client:
        await client.send([b"hello"])
        peer = (await asyncio.to_thread(server.receive, PATIENCE_S))[0]
        server.send(peer, [b"first"])
        server.send(peer, [b"second"])
        assert bytes((await asyncio.wait_for(client.receive(), PATIENCE_S))[0]) == b"first"
        while not client._look() & zmq.POLLIN:  # it is on its way
            await asyncio.sleep(0.01)
        turns = []
        asyncio.get_running_loop().call_soon(turns.append, None)
        assert bytes((await client.receive())[0]) == b"second" and not turns


async def test_closing_ends_who_receives(server):
    async with connected(server) as client:
        receiving = asyncio.create_task(client.receive())
        await asyncio.sleep(0)
        client.close()
        client.close()
        with pytest.raises(PeerGoneError, match="is closed"):
            await asyncio.wait_for(receiving, PATIENCE_S)


async def test_a_receive_that_was_cancelled_loses_no_message(server):
    async with connected(server) as client:
        await client.send([b"hello"])
        peer = (await asyncio.to_thread(server.receive, PATIENCE_S))[0]
        for number in range(20):
            receiving = asyncio.create_task(client.receive())
            await asyncio.sleep(0)
            receiving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await receiving
            server.send(peer, [b"%d" % number])
            assert bytes((await asyncio.wait_for(client.receive(), PATIENCE_S))[0]) == b"%d" % number

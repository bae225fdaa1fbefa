"""What one API server has stored is found through every other one."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagemill.config.server_config import ServerConfig
from pagemill.serve.http.app import build_app
from pagemill.serve.http.peers import Peers
from tests.fakes.engine import endpoints, make_engine
from tests.fakes.fake_core import FakeCore, say
from tests.fakes.fake_tokenizer import EOS
from tests.unit.serve.http.routes.test_responses import BODY, PATH, events

CONVERSATIONS = "/v1/conversations"
NUM_SERVERS = 3
A, B = {"x-api-key": "a"}, {"x-api-key": "b"}
SLOW_S = 0.002


@pytest.fixture
def folder() -> Any:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a short path
        yield Path(folder)


@pytest.fixture
async def clients(folder: Path) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Of as many API servers with an engine each; each has a store of its own."""
    paths = [str(folder / f"peer-{number}") for number in range(NUM_SERVERS)]
    config = ServerConfig(response_store_bytes=3 << 20, api_key=("a", "b"))
    async with AsyncExitStack() as stack:
        found = []
        for index in range(NUM_SERVERS):
            engine = make_engine(FakeCore(say("hello", EOS), max_model_len=1024, step_s=SLOW_S))
            stack.push_async_callback(engine.shutdown)
            peers = Peers(paths, index)
            app = build_app(engine, config, endpoints(), peers=peers)
            await stack.enter_async_context(peers.running(app))
            transport = httpx.ASGITransport(app)
            client = httpx.AsyncClient(transport=transport, base_url="http://test", headers=A)
            found.append(await stack.enter_async_context(client))
        yield found


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_an_id_says_whose_it_is(count: int) -> None:
    servers = [Peers(["path"] * count, index) for index in range(count)]
    for index, server in enumerate(servers):
        for _ in range(50):
            name = server.new_id("resp")
            assert len(name) == len("resp_") + 48
            asked = [other.are_asked({}, name) for other in servers]
            assert asked == [other != index for other in range(count)]
    assert not servers[0].are_asked({}, "resp_not-one-of-ours")
    assert not servers[0].are_asked({}, None)


async def test_every_server_finds_what_one_has_stored(clients: list[httpx.AsyncClient]) -> None:
    for owner in clients:
        whole = (await owner.post(PATH, json=BODY)).json()
        path = f"{PATH}/{whole['id']}"
        for client in clients:
            answer = await client.get(path, headers={"x-request-id": "mine"})
            assert answer.json() == whole
            assert answer.headers.get_list("x-request-id") == ["mine"]
            listed = (await client.get(f"{path}/input_items?limit=1")).json()
            assert [item["content"] for item in listed["data"]] == [[{"type": "input_text", "text": "hi"}]]
            assert (await client.get(path, headers=B)).status_code == 404, "another key's"
            assert (await client.get(path, headers={"x-api-key": "no"})).status_code == 401
            assert (await client.get(f"{path}/input_items?limit=0")).json()["error"]["param"] == "limit"
        assert (await clients[0].delete(path)).json() == {"id": whole["id"], "object": "response", "deleted": True}
        assert [(await client.get(path)).status_code for client in clients] == [404] * NUM_SERVERS


async def test_every_server_goes_on_with_it(clients: list[httpx.AsyncClient]) -> None:
    name = (await clients[0].post(PATH, json=BODY)).json()["id"]
    for number, client in enumerate(clients):
        answer = await client.post(PATH, json=BODY | {"previous_response_id": name, "stream": number % 2 == 1})
        whole = events(answer)[-1]["response"] if number % 2 else answer.json()
        assert whole["previous_response_id"] == name
        assert whole["output"][-1]["content"][0]["text"] == "hello"
        name = whole["id"]
    listed = (await clients[1].get(f"{PATH}/{name}/input_items")).json()
    assert len(listed["data"]) == 2 * NUM_SERVERS + 1, "all that was said before"


async def test_conversations(clients: list[httpx.AsyncClient]) -> None:
    name = (await clients[0].post(CONVERSATIONS, json={"metadata": {"a": "b"}})).json()["id"]
    for client in clients:
        assert (await client.get(f"{CONVERSATIONS}/{name}")).json()["metadata"] == {"a": "b"}
        assert (await client.post(PATH, json=BODY | {"conversation": name})).json()["status"] == "completed"
    item = {"type": "message", "role": "user", "content": "more"}
    added = (await clients[2].post(f"{CONVERSATIONS}/{name}/items", json={"items": [item]})).json()["data"]
    items = (await clients[1].get(f"{CONVERSATIONS}/{name}/items")).json()["data"]
    assert len(items) == 2 * NUM_SERVERS + 1
    assert items[0] == added[0]
    path = f"{CONVERSATIONS}/{name}/items/{added[0]['id']}"
    assert [(await client.get(path)).status_code for client in clients] == [200] * NUM_SERVERS
    assert (await clients[1].delete(path)).status_code == 200
    assert (await clients[1].post(f"{CONVERSATIONS}/{name}", json={"metadata": {"c": "d"}})).status_code == 200
    assert (await clients[2].get(f"{CONVERSATIONS}/{name}")).json()["metadata"] == {"c": "d"}
    assert (await clients[1].delete(f"{CONVERSATIONS}/{name}")).json()["deleted"]
    answer = await clients[2].post(PATH, json=BODY | {"conversation": {"id": name}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "conversation")


async def test_background_responses_are_followed_and_cancelled_anywhere(clients: list[httpx.AsyncClient]) -> None:
    endless = BODY | {"background": True, "stream": True, "max_output_tokens": 900, "ignore_eos": True}
    begun = await clients[0].post(PATH, json=BODY | {"background": True, "stream": True})
    name = events(begun)[0]["response"]["id"]
    followed = [await client.get(f"{PATH}/{name}?stream=true") for client in clients]
    assert [events(answer)[-1]["type"] for answer in followed] == ["response.completed"] * NUM_SERVERS
    assert len({answer.content for answer in followed}) == 1
    later = [await client.get(f"{PATH}/{name}?stream=true&starting_after=2") for client in clients]
    whole = followed[0].content
    rest = b"\n\n".join(whole.split(b"\n\n")[3:])
    assert [answer.content for answer in later] == [rest] * NUM_SERVERS
    started = (await clients[1].post(PATH, json=endless | {"stream": False})).json()
    cancelled = await clients[2].post(f"{PATH}/{started['id']}/cancel")
    assert cancelled.json()["status"] == "cancelled"
    assert (await clients[0].get(f"{PATH}/{started['id']}")).json()["status"] == "cancelled"


async def test_a_client_that_leaves_ends_what_it_asked_another_server_for(clients: list[httpx.AsyncClient]) -> None:
    name = (await clients[0].post(PATH, json=BODY)).json()["id"]
    more = BODY | {"previous_response_id": name, "max_output_tokens": 900, "ignore_eos": True}
    asking = asyncio.create_task(clients[1].post(PATH, json=more))
    owner = clients[0]._transport.app.state.services.engine  # type: ignore[attr-defined]
    async with asyncio.timeout(120):
        while not owner.num_in_flight:
            await asyncio.sleep(0.005)
        asking.cancel()
        while owner.num_in_flight:
            await asyncio.sleep(0.005)


async def test_who_is_not_there_is_said_to_come_back(clients: list[httpx.AsyncClient], folder: Path) -> None:
    name = (await clients[0].post(PATH, json=BODY)).json()["id"]
    (folder / "peer-0").unlink()
    answer = await clients[1].get(f"{PATH}/{name}")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "being started again" in answer.json()["error"]["message"]
    assert str(folder) not in answer.text
    assert (await clients[0].get(f"{PATH}/{name}")).status_code == 200


@pytest.mark.parametrize(
    "sent", [b"", b"\xff" * 4, b"\x00\x00\x00\x02\xff\xff\x00\x00\x00\x00", b"\x00\x00\x00\x00" * 2]
)
async def test_garbage_on_the_socket_is_dropped(clients: list[httpx.AsyncClient], folder: Path, sent: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(str(folder / "peer-0"))
    writer.write(sent)
    writer.write_eof()
    async with asyncio.timeout(120):
        assert await reader.read() == b""
    writer.close()
    name = (await clients[0].post(PATH, json=BODY)).json()["id"]
    assert (await clients[1].get(f"{PATH}/{name}")).status_code == 200

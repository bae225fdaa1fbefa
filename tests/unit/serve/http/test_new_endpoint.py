"""An endpoint is one module and one line in the catalogue."""

from collections.abc import AsyncIterator

import httpx
import pytest

from pagemill.config.server_config import ServerConfig
from pagemill.serve.http.app import build_app
from tests.fakes.engine import endpoints, make_engine
from tests.fakes.fake_core import FakeCore, say
from tests.fakes.fake_tokenizer import EOS

KEY = {"authorization": "Bearer k"}


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """Of an app with the toy endpoint, which needs a key where a route does not say otherwise."""
    engine = make_engine(FakeCore(say("hello", EOS)))
    table = endpoints()
    table.add("toy", "tests.fakes.toy_endpoint:router")
    app = build_app(engine, ServerConfig(api_key=("k",)), table)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client
    await engine.shutdown()


async def test_a_route_needs_a_key_unless_it_says_otherwise(client: httpx.AsyncClient) -> None:
    assert (await client.post("/toy/completions", json={"prompt": "a"})).status_code == 401
    assert (await client.get("/toy/name")).json() == "fake"
    assert (await client.head("/toy/name")).status_code == 200
    assert (await client.post("/toy/name")).status_code == 401


async def test_it_generates_whole_and_streamed(client: httpx.AsyncClient) -> None:
    whole = await client.post("/toy/completions", json={"prompt": "a"}, headers=KEY)
    assert (whole.json()["id"], whole.json()["choices"][0]["text"]) == ("toy-1", "hello")
    streamed = await client.post("/toy/completions", json={"prompt": "a", "stream": True}, headers=KEY)
    assert streamed.text.endswith("data: [DONE]\n\n")


async def test_bad_bodies_are_refused_as_everywhere(client: httpx.AsyncClient) -> None:
    refused = await client.post("/toy/completions", json={"prompt": "a", "n": "many"}, headers=KEY)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")

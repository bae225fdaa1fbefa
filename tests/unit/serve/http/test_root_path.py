"""A prefix of all paths: with it and without, one route, behind one key check."""

import pytest
from starlette.types import Message, Scope

from pagemill.errors import ConfigError
from pagemill.serve.http.root_path import RootPathMiddleware, root_path_of
from tests.unit.serve.http.conftest import Connect


async def test_paths_with_the_prefix_and_without(connect: Connect) -> None:
    client = await connect(root_path="/llm/")
    assert (await client.get("/llm/v1/models")).json() == (await client.get("/v1/models")).json()
    answer = await client.post("/llm/v1/completions", json={"prompt": "hi", "max_tokens": 2})
    assert answer.status_code == 200
    assert (await client.get("/llmv1/models")).status_code == 404
    assert (await client.get("/llm/llm/v1/models")).status_code == 404, "it is taken off once"


async def test_the_key_is_asked_for_however_the_prefix_is_spelt(connect: Connect) -> None:
    client = await connect(root_path="/llm", api_key="k")
    for path in ("/llm/v1/models", "/%6clm/v1/models", "/llm//v1/models", "/llm/llm/v1/models"):
        assert (await client.get(path)).status_code == 401, path
    assert (await client.get("/llm/health")).status_code == 200
    assert (await client.get("/llm/v1/models", headers={"authorization": "Bearer k"})).status_code == 200


async def test_what_leads_elsewhere_keeps_it(connect: Connect) -> None:
    client = await connect(root_path="/llm")
    assert (await client.get("/llm")).headers["location"] == "/llm/"
    assert (await client.get("/llm/health/?a=b")).headers["location"] == "/llm/health?a=b"
    assert (await client.get("/llm/openapi.json")).json()["servers"] == [{"url": "/llm"}]
    assert "href='openapi.json'" in (await client.get("/llm/docs")).text
    plain = await connect()
    assert "servers" not in (await plain.get("/openapi.json")).json()


@pytest.mark.parametrize(("raw", "expected"), [(b"/llm/a%20b", b"/a%20b"), (b"/%6clm/a%20b", b"/a%20b")])
async def test_the_path_as_it_was_sent_follows(raw: bytes, expected: bytes) -> None:
    seen: list[Scope] = []

    async def app(scope: Scope, *_: object) -> None:
        seen.append(scope)

    async def receive() -> Message:
        raise AssertionError

    async def send(_: Message) -> None:
        raise AssertionError

    await RootPathMiddleware(app, "/llm")({"type": "http", "path": "/llm/a b", "raw_path": raw}, receive, send)
    assert (seen[0]["path"], seen[0]["raw_path"]) == ("/a b", expected)


@pytest.mark.parametrize(
    "given", ["llm", "/a b", "/a?b", "//evil.example", "/a/../b", "/a%2f", "/a\r\nb", "http://x/a"]
)
def test_what_is_no_path_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="root_path="):
        root_path_of(given)


async def test_a_prefix_with_which_routes_begin_is_refused(connect: Connect) -> None:
    with pytest.raises(ConfigError, match="root_path='/v1' is not allowed: /v1/"):
        await connect(root_path="/v1")

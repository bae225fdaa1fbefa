"""The small routes, request ids, CORS."""

import pagemill
from tests.unit.serve.http.conftest import Connect


async def test_models(connect: Connect) -> None:
    client = await connect(served_model_name="org/tiny")
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    card = listed["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("org/tiny", "model", 256)
    assert (await client.get("/v1/models/org/tiny")).json() == card
    assert (await client.get("/v1/models/other")).status_code == 404


async def test_served_name_defaults_to_the_models(connect: Connect) -> None:
    assert (await (await connect()).get("/v1/models")).json()["data"][0]["id"] == "fake"


async def test_health_ping_version(connect: Connect) -> None:
    client = await connect()
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/ping")).status_code == 200
    assert (await client.get("/version")).json() == {"version": pagemill.__version__}


async def test_request_ids(connect: Connect) -> None:
    client = await connect()
    assert (await client.get("/health", headers={"x-request-id": "abc.1"})).headers["x-request-id"] == "abc.1"
    made = (await client.get("/nothing", headers={"x-request-id": "bad id\u00e9".encode()})).headers["x-request-id"]
    assert len(made) == 32


async def test_cors(connect: Connect) -> None:
    client = await connect(allowed_origins="http://a.example, http://b.example", api_key="k")
    preflight = {"origin": "http://b.example", "access-control-request-method": "POST"}
    allowed = await client.options("/v1/completions", headers=preflight)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "http://b.example"
    refused = await client.get("/v1/models", headers={"origin": "http://b.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "http://b.example"
    other = await client.options("/v1/completions", headers=preflight | {"origin": "http://c.example"})
    assert other.status_code == 400
    assert "access-control-allow-origin" not in (await (await connect()).get("/health")).headers

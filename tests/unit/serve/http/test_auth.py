"""API keys: every route but the public ones, whatever the spelling."""

import httpx
import pytest
from starlette.routing import Mount, Route

from tests.fakes.engine import make_app, make_engine
from tests.unit.serve.http.conftest import Connect

KEY = "correct-horse"
GOOD = {"authorization": f"Bearer {KEY}"}
EXPECTED_PUBLIC = {"/", "/static/{name}", "/health", "/ping", "/health/live", "/health/ready", "/metrics"}


def all_routes() -> list[tuple[str, str]]:
    """(method, path) of every route of the app."""
    found = []
    for route in make_app(make_engine()).router.routes:
        assert not isinstance(route, Mount), "mounts hide their routes from this test"
        assert isinstance(route, Route)
        found += [(method, route.path.replace("{name:path}", "x")) for method in route.methods or ()]
    return found


async def test_every_route_needs_the_key_except_the_public_ones(connect: Connect) -> None:
    client = await connect(api_key=KEY)
    routes = all_routes()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/version"} <= {p for _, p in routes}
    for method, path in routes:
        answer = await client.request(method, path)
        public = path in EXPECTED_PUBLIC and method in ("GET", "HEAD")
        assert (answer.status_code != 401) is public, (method, path)
        assert (await client.request(method, path, headers=GOOD)).status_code != 401


@pytest.mark.parametrize("value", [
    "", KEY, "Bearer", "Bearer ", f"Bearer {KEY}x", f"Bearer x{KEY}", f"Basic {KEY}", "Bearer \u00e9",
])  # fmt: skip
async def test_wrong_keys(connect: Connect, value: str) -> None:
    client = await connect(api_key=KEY)
    answer = await client.get("/v1/models", headers={"authorization": value.encode()})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert KEY not in answer.text


async def test_right_keys(connect: Connect) -> None:
    client = await connect(api_key=KEY)
    assert (await client.get("/v1/models", headers=GOOD)).status_code == 200
    assert (await client.get("/v1/models", headers={"authorization": f"bearer {KEY}"})).status_code == 200
    twice = [("authorization", "Bearer wrong"), ("authorization", f"Bearer {KEY}")]
    assert (await client.get("/v1/models", headers=twice)).status_code == 401


async def test_a_key_may_come_as_anthropics_clients_send_it(connect: Connect) -> None:
    client = await connect(api_key=KEY)
    name = "x-api-key"
    wrong = {"authorization": "Bearer wrong"}
    assert (await client.get("/v1/models", headers={name: KEY})).status_code == 200
    assert (await client.get("/v1/models", headers={name: KEY} | wrong)).status_code == 200
    assert (await client.get("/v1/models", headers={name: "none"} | GOOD)).status_code == 200
    for headers in ([(name, KEY), (name, KEY)], [(name, f"Bearer {KEY}")], [(name, "")], [(name, KEY + "x")]):
        assert (await client.get("/v1/models", headers=headers)).status_code == 401


@pytest.mark.parametrize("path", [
    "//v1/models", "/health/../v1/models", "/v1/models/", "/health/", "/HEALTH", "/health%2f..%2fv1/models", "/nothing",
    "/v1/models?x=/health", "/v1/models/health", "/v1/models//health",
])  # fmt: skip
async def test_spellings_of_paths(connect: Connect, path: str) -> None:
    client = await connect(api_key=KEY)
    answer = await client.send(httpx.Request("GET", httpx.URL("http://test", raw_path=path.encode())))
    assert answer.status_code in (401, 404, 307)
    assert "data" not in answer.text


async def test_key_from_the_environment(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_API_KEY", KEY)
    client = await connect()
    assert (await client.get("/v1/models")).status_code == 401
    assert (await client.get("/v1/models", headers=GOOD)).status_code == 200


async def test_no_key_no_check(connect: Connect) -> None:
    assert (await (await connect()).get("/v1/models")).status_code == 200

"""/server_info, /reset_prefix_cache and /abort_requests."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from pagemill.config.server_config import ServerConfig
from pagemill.errors import ConfigError
from pagemill.messages.fleet import AbortOrder, DrainOrder, HaltOrder
from pagemill.serve.http.app import build_app
from pagemill.serve.http.orders import Orders
from tests.fakes.engine import endpoints, make_engine
from tests.fakes.fake_core import FakeCore
from tests.unit.serve.http.conftest import Connect

PATHS = {
    "/server_info": "GET", "/reset_prefix_cache": "POST", "/abort_requests": "POST", "/pause": "POST",
    "/resume": "POST", "/is_paused": "GET", "/start_profile": "POST", "/stop_profile": "POST",
    "/collective_rpc": "POST", "/drain": "POST",
}  # fmt: skip


@pytest.fixture
def dev_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")


class Resettable(FakeCore):
    """A core that says whether its cache was emptied."""

    is_busy = False
    is_paused = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.calls: list[str] = []

    def has_work(self) -> bool:
        return super().has_work() and not self.is_paused

    def call(self, name: str, *args: Any) -> Any:
        assert not args
        self.calls.append(name)
        if name == "is_done":
            return not self.has_work()
        if name == "hold":
            return True
        if name == "is_paused":
            return self.is_paused
        if name in ("pause", "resume"):
            self.is_paused = name == "pause"
            return True
        assert name == "reset_prefix_cache"
        return not self.is_busy


async def test_there_are_none_unless_the_switch_says_so(connect: Connect) -> None:
    client = await connect()
    for path, method in PATHS.items():
        assert (await client.request(method, path)).status_code == 404


@pytest.mark.usefixtures("dev_mode")
async def test_they_need_the_key(connect: Connect) -> None:
    client = await connect(Resettable(), api_key=("k",))
    for path, method in PATHS.items():
        assert (await client.request(method, path)).status_code == 401
        assert (await client.request(method, path, headers={"x-api-key": "k"})).status_code != 401


@pytest.mark.usefixtures("dev_mode")
async def test_the_prefix_cache_is_emptied_or_in_use(connect: Connect) -> None:
    core = Resettable()
    client = await connect(core)
    assert (await client.post("/reset_prefix_cache")).json() == {"success": True}
    core.is_busy = True
    refused = await client.post("/reset_prefix_cache")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "busy")


@pytest.mark.usefixtures("dev_mode")
async def test_engines_are_paused_and_go_on(connect: Connect) -> None:
    client = await connect(Resettable())
    assert (await client.get("/is_paused")).json() == {"is_paused": False}
    assert (await client.post("/pause?mode=keep")).json() == {"status": "paused"}
    assert (await client.get("/is_paused")).json() == {"is_paused": True}
    assert (await client.post("/resume")).json() == {"status": "resumed"}
    assert (await client.get("/is_paused")).json() == {"is_paused": False}
    for query, field in (("mode=nothing", "mode"), ("clear_cache=maybe", "clear_cache")):
        refused = await client.post(f"/pause?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


@pytest.mark.usefixtures("dev_mode")
async def test_a_pause_ends_what_runs_or_waits_for_it(connect: Connect) -> None:
    core = Resettable(step_s=0.002)
    client = await connect(core)
    body = {"prompt": "ab", "max_tokens": 100}

    async def start() -> "asyncio.Task[httpx.Response]":
        running = asyncio.create_task(client.post("/v1/completions", json=body))
        while not core.num_running:
            await asyncio.sleep(0.001)
        return running

    running = await start()
    assert (await client.post("/pause?mode=wait")).json() == {"status": "paused"}
    assert (await running).json()["choices"][0]["finish_reason"] == "length"
    assert core.calls[0] == "hold" and core.calls[-2:] == ["pause", "reset_prefix_cache"]
    await client.post("/resume")
    running = await start()
    core.calls.clear()
    assert (await client.post("/pause?clear_cache=false")).json() == {"status": "paused"}
    assert (await running).json()["choices"][0]["finish_reason"] == "abort"
    assert core.calls == ["pause"]
    await client.post("/resume")


@pytest.mark.usefixtures("dev_mode")
async def test_other_api_servers_are_told() -> None:
    told: list[Any] = []
    engine = make_engine(Resettable())
    app = build_app(engine, ServerConfig(), endpoints(), orders=Orders(engine, told.append))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        await client.post("/abort_requests", json={"request_ids": ["a"]})
        await client.post("/pause?mode=wait")
        await client.post("/resume")
        await client.post("/pause")
    await engine.shutdown()
    halts = [HaltOrder("hold"), HaltOrder("pause"), HaltOrder("resume"), HaltOrder("pause")]
    assert told == [AbortOrder(["a"]), *halts, AbortOrder(None)]


@pytest.mark.usefixtures("dev_mode")
async def test_a_request_is_ended_by_the_id_of_its_answer(connect: Connect) -> None:
    client = await connect(FakeCore(step_s=0.005))
    body = {"prompt": "a", "max_tokens": 200}
    running = asyncio.create_task(client.post("/v1/completions", json=body, headers={"x-request-id": "mine"}))
    while not (await client.get("/load")).json()["server_load"]:
        await asyncio.sleep(0.001)
    assert (await client.post("/abort_requests", json={"request_ids": ["other", "cmpl-mine"]})).status_code == 200
    assert (await running).json()["choices"][0]["finish_reason"] == "abort"


@pytest.mark.usefixtures("dev_mode")
@pytest.mark.parametrize("ids", [None, [], "a", [5], ["a"] * 1025])
async def test_what_is_no_list_of_ids_is_refused(connect: Connect, ids: Any) -> None:
    answer = await (await connect()).post("/abort_requests", json={"request_ids": ids})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_ids")


@pytest.mark.usefixtures("dev_mode")
async def test_settings_are_told(connect: Connect) -> None:
    engine = make_engine()
    app = build_app(engine, ServerConfig(), endpoints(), info={"cache": {"block_size": 16, "kinds": frozenset("a")}})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        info = (await client.get("/server_info")).json()
    await engine.shutdown()
    assert info["model"] == "fake"
    assert info["config"]["cache"]["block_size"] == 16


class Recording(FakeCore):
    """A core with one worker, which records."""

    prefix: str | None = None

    def call(self, name: str, *args: Any) -> Any:
        assert name == "collective_rpc"
        method, *rest = args
        if method == "start_profile":
            if self.prefix is not None:
                raise ConfigError("a profile is being recorded already, for /secret/path")
            (self.prefix,) = rest
            return "[null]"
        if method == "stop_profile":
            if self.prefix is None:
                raise ConfigError("no profile is being recorded")
            file, self.prefix = f"{self.prefix}-rank0.json.gz", None
            return json.dumps([file])
        return json.dumps([{"rank": 0}])


async def test_a_profile(connect: Connect, dev_mode: None, monkeypatch: pytest.MonkeyPatch) -> None:
    core = Recording()
    client = await connect(core)
    missing = await client.post("/start_profile", json={})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_supported")
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", "/some/folder")
    assert (await client.post("/start_profile", json={})).json() == {"status": "recording"}
    assert core.prefix == "/some/folder/pagemill-profile"
    again = await client.post("/start_profile", json={})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "busy")
    assert "/secret" not in again.text
    assert (await client.post("/stop_profile", json={})).json() == {"files": ["pagemill-profile-rank0.json.gz"]}
    assert (await client.post("/stop_profile", json={})).status_code == 409


@pytest.mark.parametrize(("body", "named"), [
    ({}, "method"), ({"method": "load_model"}, "method"), ({"method": "start_profile", "args": ["/x"]}, "method"),
    ({"method": ["describe"]}, "method"), ({"method": "describe", "args": [1]}, "args"),
    ({"method": "describe", "kwargs": {"a": 1}}, "kwargs"), ({"method": "describe", "timeout": 1}, "timeout"),
])  # fmt: skip
async def test_calls_of_workers_that_are_refused(
    connect: Connect, dev_mode: None, body: dict[str, Any], named: str
) -> None:
    answer = await (await connect(Recording())).post("/collective_rpc", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, named)


async def test_a_call_of_the_workers(connect: Connect, dev_mode: None) -> None:
    client = await connect(Recording())
    answer = await client.post("/collective_rpc", json={"method": "describe", "args": [], "kwargs": {}})
    assert answer.json() == {"results": [{"rank": 0}]}


@pytest.mark.slow
async def test_a_server_that_drains_completes_what_it_has(connect: Connect, dev_mode: None) -> None:
    core = FakeCore(step_s=0.002)
    client = await connect(core)
    body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True}
    running = asyncio.create_task(client.post("/v1/completions", json=body))
    while not core.num_running:
        await asyncio.sleep(0.005)
    assert (await client.post("/drain")).json() == {"status": "draining", "num_requests": 1}
    refused = await client.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
    assert refused.headers["retry-after"] == "1"
    assert [(await client.get(path)).status_code for path in ("/health/ready", "/health")] == [503, 200]
    assert (await running).json()["usage"]["completion_tokens"] == 100
    assert (await client.post("/drain?undo=true")).json() == {"status": "serving", "num_requests": 0}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert (await client.get("/health/ready")).status_code == 200


def test_other_api_servers_are_told_to_drain() -> None:
    told: list[Any] = []
    engine = make_engine()
    orders = Orders(engine, told.append)
    orders.take(DrainOrder(True))
    assert not engine.accepts()
    orders.take(DrainOrder(False))
    assert engine.accepts()
    assert told == []

"""Requests and tokens of a minute, and the queue's parts of several keys."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from pagemill.config.pooler_config import PoolerConfig
from pagemill.serve.http.auth import name_of_key
from pagemill.serve.http.client_limits import ClientLimits, ClientRows, RateLimitedError
from pagemill.serve.load_gate import LoadLimits
from pagemill.transport.shm_load import Load, SharedLoad, create_load
from tests.fakes.engine import make_app, make_engine
from tests.unit.serve.http.conftest import Connect


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_requests_of_a_minute() -> None:
    clock = Clock()
    limits = ClientLimits(requests_per_minute=2, keys="ab", clock=clock)
    limits.check("a")
    limits.check("a")
    with pytest.raises(RateLimitedError, match="at most 2") as raised:
        limits.check("a")
    assert raised.value.retry_after_s == 30
    limits.check("b")
    clock.now += 30
    limits.check("a")
    with pytest.raises(RateLimitedError):
        limits.check("a")


def test_tokens_of_prompts_and_answers() -> None:
    clock = Clock()
    limits = ClientLimits(tokens_per_minute=60, keys="ab", clock=clock)
    limits.check("a")
    limits.use_tokens("a", 50)
    with pytest.raises(RateLimitedError) as raised:
        limits.use_tokens("a", 20)
    assert raised.value.retry_after_s == 10
    with limits.running("a", Load(1, 50)) as running:
        running.generated(40)
    with pytest.raises(RateLimitedError):
        limits.check("a")
    limits.use_tokens("b", 10)
    clock.now += 31
    limits.check("a")


def test_more_than_a_minutes_worth_needs_a_whole_one() -> None:
    clock = Clock()
    limits = ClientLimits(tokens_per_minute=60, clock=clock)
    limits.use_tokens("a", 600)
    with pytest.raises(RateLimitedError) as raised:
        limits.check("a")
    assert raised.value.retry_after_s == 541
    clock.now += 541
    limits.check("a")


def test_one_key_does_not_take_the_places_of_another() -> None:
    """It may have all that is free, but for the parts that others have not used."""
    running: list[Load] = []
    stack = contextlib.ExitStack()

    def total() -> Load:
        return Load(sum(load.num_requests for load in running), sum(load.num_queued_tokens for load in running))

    limits = ClientLimits(keys="ab", shared=LoadLimits(10, 100), total=total)

    def start(key: str, load: Load) -> None:
        stack.enter_context(limits.running(key, load))
        running.append(load)

    with stack:
        flood(start)


def flood(start: Callable[[str, Load], None]) -> None:
    for _ in range(5):
        start("a", Load(1, 10))
    with pytest.raises(RateLimitedError, match="5 requests of this key"):
        start("a", Load(1, 0))
    for _ in range(5):
        start("b", Load(1, 10))
    with pytest.raises(RateLimitedError):
        start("b", Load(1, 0))


def test_queued_tokens_have_parts_too() -> None:
    now = Load(0, 0)
    limits = ClientLimits(keys="ab", shared=LoadLimits(None, 100), total=lambda: now)
    with limits.running("a", Load(1, 50)) as first:
        now = Load(1, 50)
        with pytest.raises(RateLimitedError, match="prompt tokens of this key"), limits.running("a", Load(1, 10)):
            pass
        first.begun(50)
        now = Load(1, 0)
        with limits.running("a", Load(1, 10)):
            pass
    with limits.running("a", Load(1, 90)):
        pass


def test_a_single_key_has_it_all() -> None:
    limits = ClientLimits(keys="a", shared=LoadLimits(1, 1), total=lambda: Load(9, 9))
    with limits.running("a", Load(5, 5)):
        pass


@pytest.fixture
def shared() -> Iterator[SharedLoad]:
    shared = SharedLoad(create_load(3, num_clients=2))
    yield shared
    shared.close()


def test_allowances_are_those_of_all_api_servers(shared: SharedLoad) -> None:
    clock = Clock()
    servers = [ClientLimits(2, 60, keys="ab", clock=clock, table=ClientRows(shared, row)) for row in range(3)]
    servers[0].check("a")
    servers[1].check("a")
    with pytest.raises(RateLimitedError, match="its requests of a minute: at most 2"):
        servers[2].check("a")
    servers[2].check("b")
    servers[0].use_tokens("b", 50)
    with servers[1].running("b", Load(1, 50)) as running:
        running.generated(40)
    with pytest.raises(RateLimitedError, match="its tokens of a minute: at most 60"):
        servers[2].check("b")
    shared.clear(1)  # a server that has died: what was used there stays used
    clock.now += 29
    with pytest.raises(RateLimitedError, match="tokens"):
        servers[0].check("b")
    clock.now += 2
    servers[0].check("b")


def test_parts_of_the_queue_are_those_of_all_api_servers(shared: SharedLoad) -> None:
    one, two, _ = (
        ClientLimits(keys="ab", shared=LoadLimits(4, None), table=ClientRows(shared, row)) for row in range(3)
    )
    with contextlib.ExitStack() as stack:
        for server in (one, two):
            stack.enter_context(server.running("a", Load(1, 5)))
        with pytest.raises(RateLimitedError, match="2 requests of this key"), two.running("a", Load(1, 5)):
            pass
        assert shared.client(0) == (2, 10), "what was refused is not counted"
        for server in (one, two):
            stack.enter_context(server.running("b", Load(1, 5)))
    assert shared.client(0) == shared.client(1) == (0, 0)
    with one.running("a", Load(2, 9)):
        shared.clear(0)
        stack.enter_context(two.running("a", Load(2, 9)))
        assert shared.client(0) == (2, 9), "what a server that has died had in flight does not count"


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/embeddings", {"input": "a"}), ("/pooling", {"input": "a"}), ("/api/embed", {"model": "fake", "input": "a"}),
    ("/api/embeddings", {"model": "fake", "prompt": "a"}), ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("/score", {"text_1": "a", "text_2": "b"}),
])  # fmt: skip
async def test_vectors_count_for_the_part_of_their_key(path: str, body: dict[str, Any]) -> None:
    pooler = PoolerConfig(pooling_type="LAST", normalize=False)
    engine = make_engine(pooler=pooler, max_num_seqs=1, max_num_queued_reqs=3)
    app = make_app(engine, api_key=("a", "b"))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        with app.state.services.limits.running(name_of_key("a"), Load(2, 0)):
            refused = await client.post(path, json=body, headers={"x-api-key": "a"})
            assert refused.status_code == 429, refused.text
            assert "2 requests of this key" in refused.text
            answer = await client.post(path, json=body, headers={"x-api-key": "b"})
            assert answer.status_code == 200, answer.text
        assert (await client.post(path, json=body, headers={"x-api-key": "a"})).status_code == 200
    await engine.shutdown()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat", "/tokenize"])
async def test_too_many_get_429(connect: Connect, path: str) -> None:
    client = await connect(api_key=("a", "b"), rate_limit_requests=1)
    body = {"model": "fake", "messages": [{"role": "user", "content": "a"}]}
    body |= {} if path == "/tokenize" else {"max_tokens": 1, "stream": False}
    assert (await client.post(path, json=body, headers={"x-api-key": "a"})).status_code == 200
    refused = await client.post(path, json=body, headers={"x-api-key": "a"})
    assert (refused.status_code, 0 < int(refused.headers["retry-after"]) <= 60) == (429, True)
    assert (await client.post(path, json=body, headers={"x-api-key": "b"})).status_code == 200


async def test_tokens_are_counted(connect: Connect) -> None:
    client = await connect(rate_limit_tokens=30)
    body = {"prompt": "abcd", "max_tokens": 40, "ignore_eos": True}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    refused = await client.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) > 20, "the answer's tokens count"

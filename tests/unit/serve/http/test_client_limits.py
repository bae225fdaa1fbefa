"""Requests and tokens of a minute, and the queue's parts of several keys."""

import contextlib
from collections.abc import Callable

import pytest

from pagemill.serve.http.client_limits import ClientLimits, RateLimitedError
from pagemill.serve.load_gate import LoadLimits
from pagemill.transport.shm_load import Load
from tests.unit.serve.http.conftest import Connect


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_requests_of_a_minute() -> None:
    clock = Clock()
    limits = ClientLimits(requests_per_minute=2, clock=clock)
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
    limits = ClientLimits(tokens_per_minute=60, clock=clock)
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

    limits = ClientLimits(num_keys=2, shared=LoadLimits(10, 100), total=total)

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
    limits = ClientLimits(num_keys=2, shared=LoadLimits(None, 100), total=lambda: now)
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
    limits = ClientLimits(num_keys=1, shared=LoadLimits(1, 1), total=lambda: Load(9, 9))
    with limits.running("a", Load(5, 5)):
        pass


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

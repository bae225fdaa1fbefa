"""Probes and metrics: what they say, and that they ask nobody."""

from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client import CONTENT_TYPE_LATEST

from pagemill.messages.sampling_params import SamplingParams
from pagemill.serve.async_llm import AsyncLLM
from tests.fakes.engine import make_app, make_engine
from tests.fakes.wire_metrics import wire_values

Served = tuple[AsyncLLM, httpx.AsyncClient]


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    llm = make_engine()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(llm)), base_url="http://test") as client:
        yield llm, client
    await llm.shutdown()


async def statuses(client: httpx.AsyncClient) -> dict[str, int]:
    return {path: (await client.get(path)).status_code for path in ("/health", "/health/live", "/health/ready")}


async def test_a_working_engine(served: Served) -> None:
    assert await statuses(served[1]) == {"/health": 200, "/health/live": 200, "/health/ready": 200}


async def test_a_dead_engine(served: Served) -> None:
    llm, client = served
    await llm.shutdown()
    assert await statuses(client) == {"/health": 503, "/health/live": 200, "/health/ready": 503}


async def test_a_draining_server_is_healthy_and_not_ready(served: Served) -> None:
    llm, client = served
    llm.drain()
    assert await statuses(client) == {"/health": 200, "/health/live": 200, "/health/ready": 503}
    refused = await client.post("/v1/completions", json={"model": llm.facts.name, "prompt": "x", "max_tokens": 1})
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert "shutting down" in refused.json()["error"]["message"]


async def test_metrics_of_what_was_served(served: Served) -> None:
    llm, client = served
    async for _ in llm.generate("abc", SamplingParams(max_tokens=4, temperature=0)):
        pass
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].lower() == CONTENT_TYPE_LATEST
    values = wire_values(answer.content)
    assert values["vllm:generation_tokens_total"] == 4
    assert values["vllm:request_success_total{finished_reason=length}"] == 1
    assert values["vllm:time_to_first_token_seconds_count"] == 1
    assert values["vllm:inter_token_latency_seconds_count"] == 3
    assert 'vllm:generation_tokens_total{engine="0",model_name="fake"}' in answer.text


async def test_probes_and_metrics_need_no_key() -> None:
    llm = make_engine()
    app = make_app(llm, api_key="secret")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.post("/metrics")).status_code == 401
        assert (await client.get("/v1/models")).status_code == 401
    await llm.shutdown()

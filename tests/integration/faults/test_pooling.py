"""An engine is killed while prompts become vectors: every request gets its own."""

import asyncio

import httpx
import pytest

from tests.fakes.scripted_pooling import vector_alone
from tests.integration.faults.lab import Server, wait_for

PROMPTS = [[1 + (number + place) % 9 for place in range(60 + number)] for number in range(24)]


@pytest.fixture(scope="module")
def server(checkpoint):
    flags = ("--runner", "pooling", "--pooler-config.normalize", "false", "--max-num-batched-tokens", 32)
    worker = "tests.integration.faults.worker:PoolingLabWorker"
    with Server(checkpoint, *flags, "--max-num-seqs", 16, LAB_WORKER=worker, LAB_STEP_S=0.02) as server:
        yield server


async def ask(client, server, prompt):
    answer = await client.post(server.url + "/v1/embeddings", json={"input": prompt, "dimensions": 4})
    assert answer.status_code == 200, answer.text
    return answer.json()["data"][0]["embedding"]


async def test_a_killed_core_loses_no_vector(server):
    async with httpx.AsyncClient(timeout=300) as client:
        with server.pace(0.25):
            tasks = [asyncio.ensure_future(ask(client, server, prompt)) for prompt in PROMPTS]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            assert sum(task.done() for task in tasks) < len(tasks)
            pid = server.kill("engine core 0")
        assert await asyncio.gather(*tasks) == [vector_alone(prompt) for prompt in PROMPTS]
    assert server.pid("engine core 0") != pid
    server.wait_empty()


async def test_who_goes_away_frees_the_engine(server):
    async with httpx.AsyncClient(timeout=0.3) as client:
        with pytest.raises(httpx.TimeoutException):
            await asyncio.gather(*(ask(client, server, prompt * 4) for prompt in PROMPTS))
    wait_for(lambda: server.figures()["in_flight"] == 0, "the aborts")
    server.wait_empty()

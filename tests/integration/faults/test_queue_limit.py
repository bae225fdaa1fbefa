"""The limit on requests is one of the whole deployment: engines and API servers in any number accept what they promise,
and a front end that dies takes nothing of it along."""

import asyncio
import os
import re
import signal
import time

import httpx
import pytest

from tests.integration.faults.lab import PATIENCE_S, Server, long_only, wait_for
from tests.integration.faults.traffic import Traffic, asks

WAITS_ONE = re.compile(r"^vllm:num_requests_waiting\{.*\} 1\.0$", re.MULTILINE)
LIMITS = ("--max-num-seqs", 4, "--max-num-queued-reqs", 1)


async def in_flight(server, traffic, num_refused):
    """Wait until so many were refused and the others run or wait; the refusals."""

    def refused():
        return [answer for answer in traffic.answers_so_far if answer.status == 503]

    deadline = time.monotonic() + PATIENCE_S
    while len(refused()) < num_refused:
        assert time.monotonic() < deadline, str(traffic.states())
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)
    return refused()


@pytest.mark.parametrize("counts", [(1, 3), (2, 2), *long_only((2, 1))], ids=str)
async def test_engines_and_api_servers_accept_exactly_what_they_promise(checkpoint, counts):
    num_engines, num_servers = counts
    room = 4 * num_engines + 1
    arguments = ("--data-parallel-size", num_engines, "--api-server-count", num_servers, *LIMITS)
    with Server(checkpoint, *arguments, scripted=True, LAB_STEP_S=0.2) as server:
        async with Traffic(server, asks(20, max_tokens=480, stream=True)) as traffic:
            refused = await in_flight(server, traffic, 20 - room)
            assert len(refused) == 20 - room
            assert all(answer.error["code"] == "engine_overloaded" for answer in refused)
            assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
            if num_servers > 1:
                await one_dies(server)
        server.wait_empty()
        wait_for(lambda: load_of(server) == 0, "that all API servers know it")
        async with Traffic(server, asks(room + 2, max_tokens=480, stream=True)) as traffic:
            assert len(await in_flight(server, traffic, 2)) == 2


def load_of(server):
    """Requests that run or wait, as the API servers count them together."""
    return httpx.get(server.url + "/load", timeout=300).json()["server_load"]


async def one_dies(server):
    """What an API server had in flight is free again."""
    victim = server.pid("api server 0")
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: server.pid("api server 0") not in (None, victim), "a new api server")


async def test_prompt_tokens_that_wait_are_limited(checkpoint):
    arguments = ("--max-num-seqs", 1, "--max-num-queued-tokens", 100)
    with Server(checkpoint, *arguments, scripted=True, LAB_STEP_S=0.2) as server:
        async with Traffic(server, asks(1, max_tokens=480, stream=True)) as traffic:
            await traffic.until(1)
            body = {"prompt": [7] * 60, "max_tokens": 1}
            async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
                waiting = asyncio.create_task(client.post("/v1/completions", json=body))
                async with asyncio.timeout(PATIENCE_S):
                    while not WAITS_ONE.search((await client.get("/metrics")).text):
                        await asyncio.sleep(0.05)
                refused = await client.post("/v1/completions", json=body)
                assert refused.status_code == 503 and "--max-num-queued-tokens" in refused.text
                metrics = (await client.get("/metrics")).text
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
        assert 'reason="queued_tokens"} 1.0' in metrics

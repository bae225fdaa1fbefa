"""Processes that are stopped, or hang: noticed, told, their stacks shown, replaced; nobody's request is lost."""

import re

import pytest

from tests.integration.faults.lab import Server, signal, wait_for
from tests.integration.faults.traffic import Traffic, ask_all, asks, same
from tests.integration.faults.worker import HANG

TIMEOUTS = ("--engine-stall-timeout", 2, "--engine-hang-timeout", 8)


@pytest.fixture(scope="module")
def server(checkpoint):
    backend = ("--distributed-executor-backend", "mp")
    with Server(checkpoint, *TIMEOUTS, *backend, scripted=True, LAB_STEP_S=0.01) as server:
        yield server


@pytest.mark.parametrize("victim", ["worker 0", "engine core 0"])
async def test_a_stopped_process_is_replaced(server, victim):
    requests = asks(12, max_tokens=60)
    calm = await ask_all(server, requests)
    pids = {server.pid("worker 0"), server.pid("engine core 0")}
    before = len(server.log)
    async with Traffic(server, requests) as traffic:
        await traffic.until(5)
        pid = server.kill(victim, signal.SIGSTOP)
        wait_for(lambda: server.status() == 503, "503")
        assert server.status("/health/live") == 200
        assert same(await traffic.answers(), calm)
    server.wait_healthy()
    assert not pids & {server.pid("worker 0"), server.pid("engine core 0")}
    log = server.log[before:]
    assert "engine core 0 has stalled" in log
    assert re.search(rf"stacks of process {pid} \(pagemill: {victim}, stopped\)", log)
    # A process that was stopped may be killed before it has written all of its stack.
    written = [where for where in ("core_loop.py", "worker/main.py", "supervisor.py") if f'{where}"' in log]
    assert len(written) >= 2, "stacks of the core, its worker, and the process that watches them"


@pytest.mark.faults
async def test_a_request_that_makes_the_worker_hang_is_given_up(server):
    requests = asks(6, max_tokens=60, first=9)
    calm = await ask_all(server, requests)
    hanging = {"prompt": [HANG], "max_tokens": 4, "stream": False}
    async with Traffic(server, requests) as traffic:
        await traffic.until(3)
        (answer,) = await ask_all(server, [hanging])
        assert (answer.status, answer.error["code"]) == (500, "generation_failed")
        assert same(await traffic.answers(), calm)

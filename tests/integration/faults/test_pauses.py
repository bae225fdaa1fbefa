"""A pause of the whole deployment kills nobody; an API server that is stopped alone is replaced."""

import signal
import time

import psutil
import pytest

from tests.integration.faults.lab import LONG, Server, long_only, wait_for
from tests.integration.faults.traffic import Traffic, ask_all, asks, same

SILENT_S = 10 if LONG else 3
PAUSE_S = 60 if LONG else 10
"""More than three times SILENT_S, after which a process that alone is silent would be killed."""
TWO = ("--api-server-count", 2, "--distributed-executor-backend", "mp")


def stop_all(server):
    """As a paused container: everybody, those who are watched first, so that no sign of life is left unread."""
    processes = server.tree()
    for process in reversed(processes):
        process.suspend()
        time.sleep(0.1)
    return processes


def go_on(processes):
    for process in processes:  # those who watch first: they see nobody for a while
        process.resume()
        time.sleep(0.1)


@pytest.mark.parametrize("case", [((), False), (TWO, True), *long_only(((), True), (TWO, False))], ids=str)
async def test_a_pause_of_everybody_kills_nobody(checkpoint, case):
    """One process that does it all, idle, and several, busy; the long form has all four."""
    arguments, busy = case
    limits = ("--engine-stall-timeout", SILENT_S, "--engine-hang-timeout", 3 * SILENT_S)
    with Server(checkpoint, *limits, *arguments, scripted=True, LAB_STEP_S=0.01, LAB_SILENT_S=SILENT_S) as server:
        requests = asks(32 if busy else 1, max_tokens=60)
        calm = await ask_all(server, requests)
        async with Traffic(server, requests) as traffic:
            if not busy:
                await traffic.answers()
            await traffic.until(5)
            processes = stop_all(server)
            time.sleep(PAUSE_S)
            go_on(processes)
            assert same(await traffic.answers(), calm)
        wait_for(lambda: server.status() == 200, "health", 60)
        time.sleep(4 * SILENT_S)  # whoever is killed for it is killed by now
        assert server.tree() == processes
        assert server.status() == 200
        server.wait_empty()


async def test_a_stopped_api_server_is_replaced(checkpoint):
    with Server(checkpoint, *TWO, scripted=True, LAB_STEP_S=0.01, LAB_SILENT_S=3) as server:
        calm = await ask_all(server, asks(8))
        stopped = server.kill("api server 0", signal.SIGSTOP)
        wait_for(lambda: not psutil.pid_exists(stopped), "its end")
        assert server.pid("api server 0") != stopped
        wait_for(lambda: server.log.count("api server 0 is gone") == 1, "a line in the log")
        assert "it gave no sign of life for 9 s and was killed" in server.log
        core = server.pid("engine core 0")
        server.wait_empty()
        assert same(await ask_all(server, asks(8)), calm)
        assert psutil.pid_exists(core), "the engine had nothing to do with it"

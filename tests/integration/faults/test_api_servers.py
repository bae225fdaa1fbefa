"""API servers are killed: the requests of the others go on, and the engine works for nobody who is gone."""

import os
import signal

import httpx
import pytest

from tests.integration.faults.lab import Server, long_only, wait_for
from tests.integration.faults.traffic import Traffic, ask_all, asks, same

TWO = ("--api-server-count", 2)


@pytest.fixture(scope="module")
def server(checkpoint):
    with Server(checkpoint, *TWO, scripted=True, LAB_STEP_S=0.02) as server:
        yield server


def front_ends(server):
    """What each of the two says, by process id. Every question is a connection of its own, and may reach either."""
    found = {}

    def both():
        figures = server.figures()
        found[figures["pid"]] = figures
        return len(found.keys() & {process.pid for process in server.tree()}) == 2

    wait_for(both, "an answer of both")
    return found


async def occupy_both(server, max_tokens):
    """Traffic that both front ends have a part of. Whoever wakes first takes all that wait, so they come
    one by one."""
    for _ in range(20):
        requests = asks(12, max_tokens=max_tokens, stream=True)
        traffic = await Traffic(server, requests, gap_s=0.01).__aenter__()
        await traffic.until(3)
        if all(figures["in_flight"] for figures in front_ends(server).values()):
            return traffic
        await traffic.__aexit__()
    raise AssertionError("one of the front ends never got a request")


async def test_a_killed_api_server_takes_only_its_own_requests_along(server):
    calm = await ask_all(server, asks(12, max_tokens=300, stream=True))
    traffic = await occupy_both(server, 300)
    victim = server.pid("api server 0")
    num_kept = sum(figures["in_flight"] for pid, figures in front_ends(server).items() if pid != victim)
    core = server.pid("engine core 0")
    os.kill(victim, signal.SIGKILL)
    outcomes = await traffic.outcomes()
    lost = [isinstance(outcome, httpx.TransportError) for outcome in outcomes]
    assert 0 < sum(lost) <= 12 - num_kept
    kept = [number for number, is_lost in enumerate(lost) if not is_lost]
    assert same([outcomes[number] for number in kept], [calm[number] for number in kept])
    await traffic.__aexit__()
    assert server.pid("api server 0") != victim
    assert server.pid("engine core 0") == core
    assert len(front_ends(server)) == 2
    server.wait_empty()


async def test_the_engine_forgets_what_a_killed_api_server_had_asked_for(server):
    with server.pace(0.25):  # so they would run for two minutes
        await leave_half(server)
    server.wait_empty()


async def leave_half(server):
    traffic = await occupy_both(server, 490)
    victim = server.pid("api server 1")
    os.kill(victim, signal.SIGKILL)
    survivor = next(pid for pid in front_ends(server) if pid != victim)

    def only_the_survivors_requests_run():
        figures = front_ends(server)[survivor]
        return 0 < figures["in_flight"] == figures["running"]

    wait_for(only_the_survivors_requests_run, "the abort", 100)
    await traffic.__aexit__()


@pytest.mark.faults
async def test_an_engine_that_could_not_be_told_learns_it_from_the_next_one(checkpoint):
    with Server(checkpoint, *TWO, scripted=True, LAB_STEP_S=0.2) as server:
        traffic = await occupy_both(server, 490)  # for 98 s
        victim = server.pid("api server 1")
        server.kill("engine core 0", signal.SIGSTOP)
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: "could not be told" in server.log, "the attempt to tell")
        wait_for(lambda: server.pid("api server 1") != victim, "a new front end")
        server.kill("engine core 0", signal.SIGCONT)
        await traffic.__aexit__()
        front_ends(server)
        wait_for(server.all_blocks_are_free, "that all blocks are free", 60)


@pytest.mark.parametrize("arguments", [TWO, *long_only(())], ids=["two", "one"])
async def test_ctrl_c_in_a_terminal_drains(checkpoint, arguments):
    with Server(checkpoint, *arguments, scripted=True, LAB_STEP_S=0.01) as server:
        requests = asks(8, max_tokens=60)
        calm = await ask_all(server, requests)
        processes = server.tree()
        async with Traffic(server, requests) as traffic:
            await traffic.until(3)
            os.killpg(server.process.pid, signal.SIGINT)
            assert same(await traffic.answers(), calm)
        assert server.wait_gone(processes) == 0

"""Engine cores and workers are killed under load: every request completes, with the tokens of an undisturbed run."""

import asyncio
import time

import pytest

from tests.integration.faults.lab import LONG, Server, long_only, wait_for
from tests.integration.faults.traffic import Traffic, ask_all, asks, same

SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 1234}


@pytest.fixture(scope="module")
def server(checkpoint):
    with Server(checkpoint) as server:
        yield server


async def disturbed(server, requests, *kills):
    """The answers, while each of `kills` happens in the middle of things. On a busy machine everything may have ended
    before this process sees it: then all is asked again."""
    for _ in range(5):
        async with Traffic(server, requests) as traffic:
            was_running = [await killed(traffic, 5 + 15 * number, kill) for number, kill in enumerate(kills)]
            answers = await traffic.answers()
        if all(was_running):
            return answers
    raise TimeoutError("the requests always ended before the kill")


async def killed(traffic, num_tokens, kill):
    """Whether requests still ran when it happened, behind so many tokens of each."""
    await traffic.until(num_tokens)
    was_running = traffic.is_running()
    kill()
    return was_running


async def test_a_killed_core_loses_no_request(server):
    requests = [*asks(32), *asks(32, first=9, **SAMPLED)]
    calm = await ask_all(server, requests)
    assert all(answer.finish == {0: "length"} and answer.num_tokens == 80 for answer in calm)
    for _ in range(10 if LONG else 1):
        pid = server.pid("engine core 0")
        answers = await disturbed(server, requests, lambda: server.kill("engine core 0"))
        assert same(answers, calm)
        assert server.pid("engine core 0") != pid
        assert all(answer.usage["completion_tokens"] == 80 for answer in answers)


async def test_a_core_killed_twice_loses_no_request(server):
    requests = asks(32, first=4)
    calm = await ask_all(server, requests)
    kill = lambda: server.kill("engine core 0")  # noqa: E731
    assert same(await disturbed(server, requests, kill, kill), calm)
    server.wait_empty()


@pytest.mark.parametrize("victim", ["worker 1", *long_only("worker 0")])
async def test_a_killed_rank_loses_no_request(two_ranks, victim):
    requests = asks(12, first=5, max_tokens=60) + asks(4, first=6, max_tokens=60, **SAMPLED)
    calm = await ask_all(two_ranks, requests)
    assert same(await disturbed(two_ranks, requests, lambda: two_ranks.kill(victim)), calm)
    two_ranks.wait_healthy()


@pytest.fixture(scope="module")
def two_ranks(checkpoint):
    with Server(checkpoint, "-tp", 2) as server:
        yield server


@pytest.fixture(scope="module")
def two_engines(checkpoint):
    with Server(checkpoint, "-dp", 2, "--api-server-count", 1, "--data-parallel-balancer", "round_robin") as server:
        yield server


@pytest.mark.parametrize("victims", [[0, 1], *long_only([1])], ids=["both", "one"])
async def test_of_two_engines_some_are_killed(two_engines, victims):
    requests = asks(16, first=7) + asks(16, first=8, **SAMPLED)
    calm = await ask_all(two_engines, requests)

    def kill():
        for index in victims:
            two_engines.kill(f"engine core {index}")

    assert same(await disturbed(two_engines, requests, kill), calm)
    two_engines.wait_healthy()
    two_engines.wait_empty()


async def test_restarts_are_told_and_leave_nothing_behind(checkpoint):
    """/health tells of a dead core, within a second in the long form, and nothing piles up however often it dies."""
    with Server(checkpoint, scripted=True) as server:
        before, delays_s = None, []
        for number in range(20 if LONG else 4):
            await ask_all(server, asks(2, max_tokens=4))
            assert (server.status(), server.status("/health/ready")) == (200, 200)
            (server.folder / "hold").touch()  # or the new core may be there before anybody asks
            killed = time.monotonic()
            server.kill("engine core 0")
            wait_for(lambda: server.status() == 503, "503")
            delays_s.append(time.monotonic() - killed)
            assert (server.status("/health/live"), server.status("/health/ready")) == (200, 503)
            (server.folder / "hold").unlink()
            server.wait_healthy()
            assert server.status("/health/ready") == 200
            if number == 1:  # the first restarts may load what was not needed before
                before = server.figures()
        print(f"503 after {1000 * min(delays_s):.0f} to {1000 * max(delays_s):.0f} ms")
        assert max(delays_s) < 1 or not LONG
        await ask_all(server, asks(2, max_tokens=4))
        fields = ("fds", "threads", "tasks", "remembered")
        wait_for(lambda: all(server.figures()[name] <= before[name] for name in fields), f"{fields} as in {before}", 60)
        assert len(list(server.folder.glob("s/*/core-*"))) == 1
        assert server.stop() == 0


async def test_a_core_that_dies_while_it_starts_again(checkpoint):
    with Server(checkpoint, scripted=True, LAB_STEP_S=0.005) as server:
        requests = asks(8, max_tokens=40)
        calm = await ask_all(server, requests)
        async with Traffic(server, requests) as traffic:
            await traffic.until(5)
            (server.folder / "hold").touch()
            starts = {server.kill("engine core 0")}
            for _ in range(2):  # of three, the third start may live
                new = await asyncio.to_thread(loading, server, starts)
                starts.add(new)
                assert server.status() == 503
                assert server.kill("engine core 0") == new
            (server.folder / "hold").unlink()
            assert same(await traffic.answers(), calm)


def loading(server, known):
    """A core that has begun to load its model, and is none of those known."""

    def found():
        pids = {int(path.name.partition("-")[2]) for path in server.folder.glob("loading-*")}
        alive = {process.pid for process in server.tree()}
        return next(iter((pids & alive) - known), None)

    return wait_for(found, "a start")


@pytest.mark.parametrize("num_api_servers", [1, *long_only(2)])
async def test_a_server_whose_engines_are_gone_for_good_ends_with_status_1(checkpoint, num_api_servers):
    arguments = ("--api-server-count", num_api_servers)
    # Seven starts fail, with a minute of pauses between them otherwise.
    with Server(checkpoint, *arguments, scripted=True, LAB_STEP_S=0.01, LAB_PAUSE_S=0.4) as server:
        processes = server.tree()
        async with Traffic(server, asks(4, max_tokens=400)) as traffic:
            await traffic.until(3)
            (server.folder / "broken").touch()
            server.kill("engine core 0")
            answers = await traffic.answers()
        assert all(answer.error for answer in answers)
        assert {answer.status for answer in answers} == {200, 503}
        assert await asyncio.to_thread(server.wait_gone, processes) == 1
        assert "no engine is left" in server.log
        assert "the weights are gone" in server.log

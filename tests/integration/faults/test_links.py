"""Connections between API servers and engines are cut, held up and slowed down: streams end with the tokens of an
undisturbed run, and health tells the truth meanwhile."""

import asyncio
import contextlib
import os
import signal
import time

import httpx
import pytest

from tests.fakes.proxy import Proxy
from tests.integration.faults.lab import LONG, PATIENCE_S, Server, long_only, wait_for
from tests.integration.faults.traffic import Traffic, ask_all, asks, same

STEP_S = 0.02
SILENT_S = 10
"""After so long, both ends give a silent connection up (transport/liveness.py)."""
TIMEOUTS = ("--engine-stall-timeout", 300, "--engine-hang-timeout", 600)


@contextlib.contextmanager
def served(checkpoint, folder, kind, *arguments, num_engines=1):
    """A server, and a proxy before each engine: unix sockets, or tcp up to the engines."""
    with contextlib.ExitStack() as stack:
        links = folder / "links"
        links.mkdir(mode=0o700)
        proxies = []
        for index in range(num_engines):
            target = lambda index=index: (links / f"target-{index}").read_text()  # noqa: E731
            address = f"ipc://{links}/proxy-{index}" if kind == "ipc" else "tcp://127.0.0.1:0"
            proxies.append(stack.enter_context(Proxy(address, target)))
        addresses = " ".join(proxy.address for proxy in proxies)
        env = {"LAB_STEP_S": STEP_S, "LAB_LINKS": addresses, "LAB_TARGETS": links, "LAB_SILENT_S": 60}
        if kind == "tcp":
            env["LAB_TCP"] = 1
        arguments = (*TIMEOUTS, "-dp", num_engines, *arguments)
        yield stack.enter_context(Server(checkpoint, *arguments, scripted=True, **env)), proxies


@pytest.fixture(scope="module")
def calm_of():
    """Answers of undisturbed runs, by number of tokens."""
    return {}


@pytest.fixture(scope="module", params=["tcp", *long_only("ipc")])
def linked(request, checkpoint, tmp_path_factory):
    with served(checkpoint, tmp_path_factory.mktemp("l"), request.param) as (server, (proxy,)):
        yield server, proxy


async def calm(server, calm_of, requests):
    key = requests[0]["max_tokens"]
    if key not in calm_of:
        calm_of[key] = await ask_all(server, requests)
    return calm_of[key]


def why(server, path):
    """The status of a GET, and what it says."""
    response = httpx.get(server.url + path, timeout=300)
    return response.status_code, response.text


def is_unreachable(server):
    """Whether both tell that the engine cannot be reached."""
    answers = [why(server, path) for path in ("/health", "/health/ready")]
    return all(status == 503 and "cannot be reached" in text for status, text in answers)


async def check_quiet(server, proxy):
    """Nothing is left behind, and new requests are answered."""
    proxy.go_on()
    proxy.slow_down(0)
    await asyncio.to_thread(server.wait_healthy)
    await asyncio.to_thread(wait_for, lambda: server.status("/health/ready") == 200, "an engine that can be asked")
    await ask_all(server, asks(2, max_tokens=3))
    await asyncio.to_thread(server.wait_empty)
    await asyncio.to_thread(wait_for, lambda: server.figures()["remembered"] == 0, "that clients that left are noticed")


CUTS = {
    "reset": lambda proxy: proxy.reset(),
    "the engine's end is gone": lambda proxy: proxy.half_open("server"),
    "the API server's end is gone": lambda proxy: proxy.half_open("client"),
}


@pytest.mark.parametrize("cut", CUTS)
async def test_a_cut_loses_no_token(linked, calm_of, cut):
    server, proxy = linked
    requests = asks(32, max_tokens=120)
    expected = await calm(server, calm_of, requests)
    core = server.pid("engine core 0")
    async with Traffic(server, requests) as traffic:
        await traffic.until(5)
        before = proxy.num_connections
        CUTS[cut](proxy)
        assert same(await traffic.answers(), expected)
    assert proxy.num_connections > before
    await check_quiet(server, proxy)
    assert server.pid("engine core 0") == core, "it was not restarted"


async def test_resets_again_and_again_lose_no_token(linked, calm_of):
    server, proxy = linked
    requests = asks(32, max_tokens=120)
    expected = await calm(server, calm_of, requests)
    async with Traffic(server, requests) as traffic:
        for _ in range(20 if LONG else 3):
            await traffic.until(5)
            proxy.reset()
            await asyncio.sleep(2)
        assert same(await traffic.answers(), expected)
    await check_quiet(server, proxy)


@pytest.mark.parametrize("silence_s", [5, 15, *long_only(30, 120)])
async def test_silence_loses_no_token_and_health_tells(linked, calm_of, silence_s):
    server, proxy = linked
    requests = asks(32, max_tokens=120)
    expected = await calm(server, calm_of, requests)
    async with Traffic(server, requests, patience_s=PATIENCE_S + silence_s) as traffic:
        await traffic.until(5)
        proxy.silence()
        began = time.monotonic()
        if silence_s > SILENT_S:
            await asyncio.to_thread(wait_for, lambda: is_unreachable(server), "503")
            assert server.status("/health/live") == 200
        await asyncio.sleep(max(0, began + silence_s - time.monotonic()))
        proxy.go_on()
        assert same(await traffic.answers(), expected)
    await check_quiet(server, proxy)


async def test_a_slow_connection_loses_no_token(linked, calm_of):
    server, proxy = linked
    requests = asks(32, max_tokens=120)
    expected = await calm(server, calm_of, requests)
    proxy.slow_down(0.05)
    async with Traffic(server, requests) as traffic:
        await traffic.until(5)
        assert server.status() == 200
        assert same(await traffic.answers(), expected)
    assert server.status() == 200
    await check_quiet(server, proxy)


@pytest.mark.parametrize("victim", ["api server 0", *long_only("engine core 0")])
async def test_who_was_stopped_for_a_while_goes_on_where_it_was(linked, calm_of, victim):
    """Longer than connections bear silence, with tokens all the while. Of few requests: of 32, the test itself would be
    reading tokens for half a minute."""
    server, proxy = linked
    requests = asks(32 if LONG else 6, max_tokens=450)
    expected = await calm(server, calm_of, requests)
    pid = server.process.pid if victim == "api server 0" else server.pid(victim)
    core = server.pid("engine core 0")
    async with Traffic(server, requests) as traffic:
        await traffic.until(5)
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(1.4 * SILENT_S)
        os.kill(pid, signal.SIGCONT)
        assert same(await traffic.answers(), expected)
    await check_quiet(server, proxy)
    assert server.pid("engine core 0") == core


async def test_requests_that_are_aborted_while_nothing_travels_do_not_run_on(linked):
    server, proxy = linked
    async with Traffic(server, asks(8, max_tokens=450)) as traffic:
        await traffic.until(5)
        proxy.reset()
        proxy.silence()
    await asyncio.sleep(0.5)
    await check_quiet(server, proxy)


@pytest.fixture(scope="module")
def two_linked(checkpoint, tmp_path_factory):
    arguments = ("--api-server-count", 1, "--data-parallel-balancer", "round_robin")
    with served(checkpoint, tmp_path_factory.mktemp("l"), "ipc", *arguments, num_engines=2) as linked:
        yield linked


async def test_another_engine_takes_over_from_one_that_cannot_be_reached(two_linked):
    server, (first, second) = two_linked
    requests = asks(32, max_tokens=120)
    expected = await ask_all(server, requests)
    async with Traffic(server, requests) as traffic:
        await traffic.until(5)
        first.silence()
        assert same(await traffic.answers(), expected)  # the silent one's, too, though it is silent still
    status, text = why(server, "/health")
    assert status == 503
    assert "engine 0 cannot be reached" in text
    assert server.status("/health/ready") == 200
    assert same(await ask_all(server, requests), expected)
    first.go_on()
    await check_quiet(server, second)

"""The end: SIGTERM at any time, twice, too late; and parents that are killed. Nothing is left."""

import signal
import socket
import time
from pathlib import Path

import httpx
import psutil
import pytest

from pagemill.transport.addresses import PREFIX
from tests.integration.faults.lab import Server, long_only, wait_for
from tests.integration.faults.traffic import Traffic, ask_all, asks, same

FRONT_ENDS = pytest.mark.parametrize("num_api_servers", [1, 2])
ENDLESS = {"prompt": [5, 6, 7], "max_tokens": 500, "ignore_eos": True}


def start(checkpoint, num_api_servers, *arguments, **options):
    return Server(checkpoint, "--api-server-count", num_api_servers, *arguments, scripted=True, **options)


def port_of(server):
    return httpx.URL(server.url).port


@FRONT_ENDS
async def test_sigterm_drains(checkpoint, num_api_servers):
    with start(checkpoint, num_api_servers, LAB_STEP_S=0.02) as server:
        requests = asks(16, max_tokens=60)
        calm = await ask_all(server, requests)
        processes = server.tree()
        async with Traffic(server, requests) as traffic:
            with server.pace(0.5):
                await traffic.until(3)
                server.process.send_signal(signal.SIGTERM)
                refused = wait_for(lambda: refusal(server), "503")
                assert refused.headers["retry-after"]
                assert traffic.is_running()
            assert same(await traffic.answers(), calm)
        assert server.wait_gone(processes) == 0
        with socket.create_server(("127.0.0.1", port_of(server))):
            pass


def refusal(server):
    answer = httpx.post(server.url + "/v1/completions", json={"prompt": [5], "max_tokens": 1}, timeout=300)
    return answer if answer.status_code == 503 else None


@FRONT_ENDS
async def test_a_second_signal_ends_at_once(checkpoint, num_api_servers):
    with start(checkpoint, num_api_servers, "--shutdown-timeout", 300, LAB_STEP_S=0.5) as server:
        processes = server.tree()
        async with Traffic(server, [ENDLESS | {"stream": True}] * 4) as traffic:
            await traffic.until(1)
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: refusal(server), "503")
            begin = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert server.wait_gone(processes) == 0
            assert time.monotonic() - begin < 120, "it would drain for 250 s"
        assert "Traceback" not in server.log


@pytest.mark.parametrize("num_api_servers", [1, *long_only(2)])
async def test_what_does_not_finish_in_time_is_ended(checkpoint, num_api_servers):
    with start(checkpoint, num_api_servers, "--shutdown-timeout", 0.5, LAB_STEP_S=0.1) as server:
        processes = server.tree()
        async with Traffic(server, [ENDLESS | {"stream": bool(number % 2)} for number in range(6)]) as traffic:
            await traffic.until(3)
            server.process.send_signal(signal.SIGTERM)
            answers = await traffic.answers()
        assert all(answer.error["code"] == "unavailable" for answer in answers), "their clients are told why"
        assert server.wait_gone(processes) == 0


@FRONT_ENDS
def test_sigterm_during_start_up(checkpoint, num_api_servers):
    with start(checkpoint, num_api_servers, ready=False) as server:
        (server.folder / "hold").touch()
        wait_for(lambda: list(server.folder.glob("loading-*")), "loading")
        assert server.stop() == 0
        assert "Traceback" not in server.log


@pytest.mark.parametrize("ready", [True, False], ids=["serving", "starting"])
@pytest.mark.parametrize("number", [signal.SIGHUP, *long_only(signal.SIGUSR2)])
def test_signals_that_do_what_sigterm_does(checkpoint, number, ready):
    previous = signal.signal(number, signal.SIG_DFL)  # or nohup, and all below it, would not hear of SIGHUP
    try:
        check_signal(checkpoint, number, ready)
    finally:
        signal.signal(number, previous)


def check_signal(checkpoint, number, ready):
    with start(checkpoint, 1, ready=ready) as server:
        if not ready:
            (server.folder / "hold").touch()
            wait_for(lambda: list(server.folder.glob("loading-*")), "loading")
        assert server.stop(number) == 0
        assert "Traceback" not in server.log
        assert not list((server.folder / "s").iterdir())


def test_many_signals_cut_nothing_short(checkpoint):
    with start(checkpoint, 1) as server:
        processes = server.tree()
        for number in (signal.SIGTERM, signal.SIGINT) * 10:
            server.process.send_signal(number)
            time.sleep(0.02)
        status = server.wait_gone(processes)
        assert status in (0, -signal.SIGINT, -signal.SIGTERM)  # once all is closed, it is any Python
        assert "Traceback" not in server.log
        assert not list((server.folder / "s").iterdir())


@pytest.mark.faults
def test_sigterm_at_any_moment_of_the_start(checkpoint):
    """The moments are spread over a start; at each, it ends in order: no trace, no process, no folder."""
    with start(checkpoint, 1) as server:
        begin = time.monotonic()
        server.stop()
    for part in range(1, 20):
        with start(checkpoint, 1, ready=False) as server:
            time.sleep(part / 20 * min(2.0, time.monotonic() - begin))
            status = server.stop()
            assert status in (0, -signal.SIGTERM), server.log  # before it is pagemill, it is any Python
            assert "Traceback" not in server.log


@pytest.mark.parametrize("arguments", [("-tp", 2), *long_only(("-dp", 2))], ids=["tp", "dp"])
async def test_children_die_with_a_parent_that_is_killed(checkpoint, arguments):
    with Server(checkpoint, *arguments, scripted=True, LAB_STEP_S=0.01) as server:
        async with Traffic(server, [ENDLESS | {"stream": True}] * 4) as traffic:
            await traffic.until(3)
            processes = server.tree()
            shared_memory = [path for process in processes for path in shared_by(process)]
            server.process.kill()
            _, alive = psutil.wait_procs(processes[1:], 60)
            assert not alive
        assert not [path for path in shared_memory if path.exists()]
        base = server.folder / "s"
        left = list(base.iterdir())
        with Server(checkpoint, scripted=True, PAGEMILL_RPC_BASE_PATH=base):
            assert not [folder for folder in left if folder.exists()]
            assert [folder.name.startswith(PREFIX) for folder in base.iterdir()] == [True]


def shared_by(process):
    """Files in /dev/shm that a process has mapped; what others have there is theirs."""
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return [Path(line.split(maxsplit=5)[5]) for line in lines if "/dev/shm/" in line]

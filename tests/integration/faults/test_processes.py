"""Which processes there are, what they are called, and that they need no place to write their logs to."""

import contextlib
from pathlib import Path

import httpx
import psutil
import pytest

from tests.integration.faults.lab import Server, wait_for
from tests.integration.faults.traffic import ask_all, asks, same


def names(**counts):
    return sorted(
        f"pagemill: {name.replace('_', ' ')} {index}" for name, count in counts.items() for index in range(count)
    )


@pytest.mark.parametrize(
    ("arguments", "titles"),
    [
        (["-tp", 4], names(api_server=1, engine_core=1, worker=4)),
        (
            ["-tp", 2, "-dp", 4],
            sorted([*names(api_server=4, engine_core=4, worker=8), "pagemill: supervisor"]),
        ),
    ],
    ids=["tp4", "tp2 dp4"],
)
async def test_counts_and_titles(checkpoint, arguments, titles):
    with Server(checkpoint, *arguments, scripted=True) as server:
        assert server.titles() == titles
        assert len(titles) in (6, 17)
        answers = await ask_all(server, asks(8, max_tokens=4))
        assert all(answer.num_tokens == 4 for answer in answers)


async def test_a_full_disk_for_logs(checkpoint):
    with (
        Path("/dev/full").open("wb") as full,
        Server(checkpoint, scripted=True, stderr=full, ready=False) as server,
    ):
        server.url = wait_for(lambda: url_of(server), "a port")
        wait_for(lambda: answers(server), "readiness")
        requests = asks(8, max_tokens=40)
        calm = await ask_all(server, requests)
        server.kill("engine core 0")  # which is logged
        wait_for(lambda: server.status() == 503, "503")
        server.wait_healthy()
        assert same(await ask_all(server, requests), calm)
        server.stop()


def url_of(server):
    """Where it listens, which no log tells."""
    with contextlib.suppress(psutil.Error):
        for end in psutil.Process(server.process.pid).net_connections("tcp"):
            if end.status == psutil.CONN_LISTEN:
                return f"http://127.0.0.1:{end.laddr.port}"
    return None


def answers(server):
    try:
        return server.status("/health/ready") == 200
    except httpx.TransportError:
        return False

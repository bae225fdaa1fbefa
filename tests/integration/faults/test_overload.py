"""Ten times more clients than the server has room for: it refuses some, serves the others as fast as ever, and says
at any time how it is."""

import asyncio
import subprocess
import sys
import time

import httpx
import psutil

from tests.integration.faults.lab import LONG, Server

ROOM = 12
"""Requests that may run and wait."""
PHASE_S = 15 if LONG else 2.5
MIN_RATIO = 0.9 if LONG else 0.5
MAX_HEALTH_P99_S = 0.05 if LONG else 1.0
BODY = {"prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True}

PROBE = """
import http.client, sys, time
connection, seconds = http.client.HTTPConnection(sys.argv[1]), []
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    start = time.monotonic()
    connection.request("GET", "/health")
    response = connection.getresponse()
    response.read()
    assert response.status == 200
    seconds.append(time.monotonic() - start)
    time.sleep(0.01)
print(sorted(seconds)[int(len(seconds) * 0.99)])
"""


class Load:
    """Clients that ask again and again; who is refused comes back a little later."""

    def __init__(self):
        self.num_done = self.num_refused = 0
        self.refusals = set()

    async def run(self, server, num_clients):
        """Requests per second that were answered."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            begin = time.monotonic()
            await asyncio.gather(*(self._ask(client, server.url, begin + PHASE_S) for _ in range(num_clients)))
            return self.num_done / (time.monotonic() - begin)

    async def _ask(self, client, url, until):
        while time.monotonic() < until:
            answer = await client.post(url + "/v1/completions", json=BODY)
            if answer.status_code == 200:
                assert answer.json()["usage"]["completion_tokens"] == 8
                self.num_done += 1
            else:
                self.num_refused += 1
                self.refusals.add((answer.status_code, "retry-after" in answer.headers))
                await asyncio.sleep(0.25)


async def test_overload_does_not_collapse(checkpoint):
    arguments = ("--max-num-seqs", 4, "--max-num-queued-reqs", ROOM - 4)
    with Server(checkpoint, *arguments, scripted=True, LAB_STEP_S=0.02) as server:
        processes = [psutil.Process(server.process.pid), psutil.Process(server.pid("engine core 0"))]
        peak = await Load().run(server, ROOM)
        before = sum(process.memory_info().rss for process in processes)
        probe = subprocess.Popen(
            [sys.executable, "-c", PROBE, server.url.removeprefix("http://"), str(PHASE_S)],
            stdout=subprocess.PIPE,
            text=True,
        )
        load = Load()
        goodput = await load.run(server, 10 * ROOM)
        p99_s = float(probe.communicate()[0])
        grown = sum(process.memory_info().rss for process in processes) - before
        print(
            f"goodput {goodput:.1f} of {peak:.1f} requests/s, {load.num_refused} refused; "
            f"/health p99 {1000 * p99_s:.1f} ms; {grown / 1e6:+.1f} MB"
        )
        assert load.refusals == {(429, True)}
        assert goodput > MIN_RATIO * peak
        assert p99_s < MAX_HEALTH_P99_S
        assert grown < 30e6
        server.wait_empty()

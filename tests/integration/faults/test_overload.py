"""Ten times more clients than the server has room for: it refuses some, serves the others as fast as ever, and says
at any time how it is."""

import asyncio
import json
import re
import subprocess
import sys
import time

import httpx
import psutil

from tests.integration.faults.lab import LONG, Server

ROOM = 12
"""Requests that may run and wait."""
PHASE_S = 15 if LONG else 1.5
MIN_RATIO = 0.9 if LONG else 0.0
MAX_HEALTH_P99_S = 0.2 if LONG else 60.0
"""The long form measures, on a machine that does nothing else; the short one shows that it goes on at all."""
RAMP_S = 0.5
STEP_S = 0.02 if LONG else 0.2
RETRY_S = 0.25
BODY = {"prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True}
CONTENT = json.dumps(BODY).encode()
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: lab\r\nContent-Length: %d\r\n\r\n%s" % (len(CONTENT), CONTENT)

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
    """Clients that ask again and again; who is refused comes back a little later. They speak as little HTTP as will do,
    so that the machine's time is the server's."""

    def __init__(self, server, num_clients):
        self.refusals = set()
        self.num_refused = 0
        self._address = httpx.URL(server.url).host, httpx.URL(server.url).port
        self._num_clients = num_clients
        self.ends = []

    async def run(self):
        """Requests per second that were answered, once all clients are at it."""
        until = time.monotonic() + RAMP_S + PHASE_S
        await asyncio.gather(*(self._ask_again_and_again(until) for _ in range(self._num_clients)))
        return sum(until - PHASE_S < end <= until for end in self.ends) / PHASE_S

    async def _ask_again_and_again(self, until):
        reader, writer = await asyncio.open_connection(*self._address)
        while time.monotonic() < until:
            writer.write(REQUEST)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            status = int(head.split()[1])
            body = json.loads(await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1])))
            if status == 200:
                assert body["usage"]["completion_tokens"] == BODY["max_tokens"]
                self.ends.append(time.monotonic())
            else:
                self.num_refused += 1
                self.refusals.add((status, b"retry-after: " in head))
                await asyncio.sleep(RETRY_S)
        writer.close()
        await writer.wait_closed()


async def test_overload_does_not_collapse(checkpoint):
    arguments = ("--max-num-seqs", 4, "--max-num-queued-reqs", ROOM - 4)
    with Server(checkpoint, *arguments, scripted=True, LAB_STEP_S=STEP_S) as server:
        processes = [psutil.Process(server.process.pid), psutil.Process(server.pid("engine core 0"))]
        peak = await Load(server, ROOM).run()
        before = sum(process.memory_info().rss for process in processes)
        probe = subprocess.Popen(
            [sys.executable, "-c", PROBE, server.url.removeprefix("http://"), str(RAMP_S + PHASE_S)],
            stdout=subprocess.PIPE,
            text=True,
        )
        load = Load(server, 10 * ROOM)
        goodput = await load.run()
        p99_s = float(probe.communicate()[0])
        grown = sum(process.memory_info().rss for process in processes) - before
        print(
            f"goodput {goodput:.1f} of {peak:.1f} requests/s, {load.num_refused} refused; "
            f"/health p99 {1000 * p99_s:.1f} ms; {grown / 1e6:+.1f} MB"
        )
        assert load.refusals == {(503, True)}
        assert load.ends and goodput >= MIN_RATIO * peak
        assert p99_s < MAX_HEALTH_P99_S
        assert grown < 30e6
        server.wait_empty()

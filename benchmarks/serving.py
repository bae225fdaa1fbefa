"""What the API server itself costs: many streams at once, and what a request waits for besides the model.

    PYTHONPATH=. python benchmarks/serving.py [--streams 1000] [--seconds 10] [--rounds 3] [--only overhead]
    PYTHONPATH=. python benchmarks/serving.py --url http://127.0.0.1:8001 --pid PID --model NAME     (another server)

The server is `pagemill serve` with one API process, pinned to one core, in front of an engine core in a process of its
own whose worker computes nothing (engines/idle_worker.py): scheduler, ZMQ, text and HTTP are what runs.

streams   N streams of /v1/chat/completions at once, counted from when all of them have begun. Events per second, of the
          clock and of the API process's own processor time, which other work on the machine adds little to; and a
          timer of 5 ms on its event loop. Steps of 10 ms have a token for every stream, which is more than is sent: an
          event has what came since the last one.
overhead  8 clients, one request after another each, of 8 tokens at 10 ms: the milliseconds that a client waited, less
          those that the engine had the request (the other server: all of them), whole and streamed; and the processor
          time of a request. Of clients that keep their connections, as SDKs do, and ask for 4 to 12 tokens (mixed) or
          all for 8, so that the requests of all of them end, and the next ones begin, in the same step; and of such
          that make a connection for each request.
"""

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import mmap
import os
import re
import select
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from ready_server import wait_ready

TICK_S = 0.005
PLACES = 1 << 16
COUNT, LATE = struct.Struct("q"), struct.Struct("d")
FILE_BYTES = COUNT.size + PLACES * LATE.size
BEGIN_BYTES = 500
"""Of an answer: what is kept of it has the status and the id."""
PATH = "/v1/chat/completions"
PROMPT = "Tell me, in a few words, what a paper mill does. " * 8
NUM_CLIENTS, NUM_ASKED, NUM_ASKED_TOKENS, STEP_S = 8, 50, 8, 0.010
STREAM_TOKENS, STREAM_STEP_S = 7000, 0.010
"""With faster steps, the first streams would end before the last ones have begun."""
WORKER = "benchmarks.engines.idle_worker:IdleWorker"


class Target(NamedTuple):
    """A server."""

    host: str
    port: int
    model: str
    process: psutil.Process | None
    """That of its API; None where nobody said."""
    late: "mmap.mmap | None"
    """Where its timer writes; None where it has none."""
    engine: Path | None
    """Where it notes how long the engine had each request; None where it does not."""


# --- the server -------------------------------------------------------------------------------------------------------


async def tick(figures: mmap.mmap) -> None:
    """Note for ever how late a timer is, in seconds."""
    while True:
        due = time.monotonic() + TICK_S
        await asyncio.sleep(TICK_S)
        (count,) = COUNT.unpack_from(figures)
        LATE.pack_into(figures, COUNT.size + count % PLACES * LATE.size, max(0.0, time.monotonic() - due))
        COUNT.pack_into(figures, 0, count + 1)


def note_engine_times(path: str) -> None:
    """Append a line for each request that ends: its id, and the seconds between handing it to the engine and having its
    last output."""
    from pagemill.serve.client.fleet import FleetClient
    from pagemill.serve.processing.output_processor import OutputProcessor

    began: dict[str, float] = {}
    file = Path(path).open("a", buffering=1)  # noqa: SIM115 - open until the server ends
    add, process = FleetClient.add, OutputProcessor.process

    async def noted_add(client: FleetClient, request: Any) -> None:
        began[request.request_id] = time.perf_counter()
        await add(client, request)

    def noted_process(processor: OutputProcessor, outputs: Any) -> list[str]:
        now = time.perf_counter()
        for output in outputs.outputs:
            if output.finish is not None and output.request_id in began:
                name = processor._completions[output.request_id].stream.external_id
                file.write(f"{name} {now - began.pop(output.request_id)}\n")
        return process(processor, outputs)

    FleetClient.add, OutputProcessor.process = noted_add, noted_process  # type: ignore[method-assign]


def serve(path: str, cpu: int, ticks: bool, arguments: list[str]) -> int:
    """`pagemill serve` on an idle worker, its front end on one core, with a timer on its event loop if it `ticks`."""
    from pagemill.cli.main import main
    from pagemill.fleet import serve as fleet
    from pagemill.serve.http.server import HttpServer

    with Path(path).open("r+b") as file:
        figures = mmap.mmap(file.fileno(), 0)
    startup = HttpServer.startup

    async def start(server: HttpServer, sockets: list[socket.socket] | None = None) -> None:
        for thread in psutil.Process().threads():  # the engine was started before, and keeps all cores
            os.sched_setaffinity(thread.id, {cpu})
        if ticks:
            server.timer = asyncio.create_task(tick(figures))  # type: ignore[attr-defined]
        await startup(server, sockets)

    HttpServer.startup = start  # type: ignore[method-assign]
    fleet.WORKER = WORKER
    if "BENCH_STEP_S" in os.environ:
        note_engine_times(path + ".engine")
    return main(["serve", *arguments])


@contextlib.contextmanager
def own_server(cpu: int, num_streams: int, step_s: float, ticks: bool, arguments: list[str]) -> Iterator[Target]:
    """Start it, and end it. `step_s`: what each step of its engine lasts. `ticks`: with a timer, which takes a tenth of
    the processor time where requests take little."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        path = Path(folder, "ticks")
        path.write_bytes(bytes(FILE_BYTES))
        flags = ["smollm2", "--port", "0", "--max-num-seqs", str(num_streams), "--max-model-len", "8192"]
        command = [
            sys.executable,
            __file__,
            "--serve",
            str(path),
            "--cpu",
            str(cpu),
            *(["--ticks"] if ticks else []),
            "--",
            *flags,
            *arguments,
        ]
        environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if step_s:
            environment["BENCH_STEP_S"] = str(step_s)
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # the server's processes begin with what this one has
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        try:
            with path.open("r+b") as file:
                figures = mmap.mmap(file.fileno(), 0)
            engine = Path(folder, "ticks.engine") if step_s else None
            port = wait_ready(process, log)
            os.sched_setaffinity(0, {*range(os.cpu_count() or 1)} - {cpu} or {cpu})
            yield Target("127.0.0.1", port, "smollm2", psutil.Process(process.pid), figures, engine)
        finally:
            process.terminate()
            process.wait()


# --- the clients ------------------------------------------------------------------------------------------------------


class Exchange(asyncio.Protocol):
    """One request, and when its answer was complete. Costs as little as it can: nothing is parsed on the way."""

    def __init__(self, request: bytes, done: "asyncio.Future[None]") -> None:
        self._request = request
        self.done = done
        self.num_events = 0
        self.begin = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        if len(self.begin) < BEGIN_BYTES:
            self.begin += data
        self.num_events += data.count(b"data: {")

    def leave(self) -> None:
        """Close the connection now."""
        self._transport.abort()  # type: ignore[attr-defined]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def request_of(target: Target, num_tokens: int, stream: bool, number: int, keeps: bool = False) -> bytes:
    """A chat that gets so many tokens; no two have the same prompt. `keeps`: the connection stays."""
    body = {
        "model": target.model, "messages": [{"role": "user", "content": f"{number}. {PROMPT}"}],
        "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": stream,
    }  # fmt: skip
    text = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: {target.host}\r\nContent-Type: application/json\r\n"
    head += "" if keeps else "Connection: close\r\n"
    return f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text


async def streams(target: Target, num_streams: int, measured_s: float, first: int) -> dict[str, float]:
    """So many streams at once, while all of them run."""
    loop = asyncio.get_running_loop()
    requests = [request_of(target, STREAM_TOKENS, True, first + number) for number in range(num_streams)]
    found: list[Exchange] = []
    for request in requests:
        make = functools.partial(Exchange, request, loop.create_future())
        found.append((await loop.create_connection(make, target.host, target.port))[1])
    while not all(answer.num_events for answer in found):
        await asyncio.sleep(0.01)
        for answer in found:
            check(answer.begin)
    print(f"all {num_streams} streams have begun", file=sys.stderr)
    begin, used, ticks = time.perf_counter(), used_s(target), num_ticks(target)
    before = sum(answer.num_events for answer in found)
    await asyncio.sleep(measured_s)
    seconds, used_then = time.perf_counter() - begin, used_s(target)
    num_events = sum(answer.num_events for answer in found) - before
    late = lateness(target, ticks)
    num_ended = sum(answer.done.done() for answer in found)
    for answer in found:
        answer.leave()
    if num_ended:
        raise RuntimeError(f"{num_ended} streams ended before the measurement did")
    figures = {"streams": num_streams, "events": num_events, "events_per_s": num_events / seconds}
    if target.process is not None:
        figures["events_per_cpu_s"] = num_events / (used_then - used)
    return figures | late


class Asker:
    """A client of `ask_in_turn`: its requests, one after another. Costs as little as it can."""

    def __init__(self, target: Target, requests: list[bytes], keeps: bool, poller: "select.epoll") -> None:
        self._address = target.host, target.port
        self._requests = iter(requests)
        self._keeps = keeps
        self._poller = poller
        self._sock: socket.socket | None = None
        self._parts: list[bytes] = []
        self._missing = 0
        """Bytes of a body whose length is known."""
        self._began = 0.0

    def ask(self) -> int | None:
        """Send the next request; the descriptor to wait for, or None where there are no more."""
        request = next(self._requests, None)
        if request is None:
            return None
        self._parts = []
        self._began = time.perf_counter()
        if self._sock is None:
            self._sock = socket.create_connection(self._address)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._poller.register(self._sock, select.EPOLLIN)
        self._sock.sendall(request)
        return self._sock.fileno()

    def take(self, now: float) -> tuple[bytes, float] | None:
        """What is there to be read since `now`; the answer and its seconds, once it is complete."""
        assert self._sock is not None
        part = self._sock.recv(1 << 16)
        self._parts.append(part)
        if not self._is_complete(part):
            return None
        if not self._keeps:
            self._sock.close()
            self._sock = None
        return b"".join(self._parts), now - self._began

    def _is_complete(self, part: bytes) -> bool:
        if not self._keeps:
            return not part
        if not part:
            raise RuntimeError(f"the server ended a connection in an answer: {b''.join(self._parts)[-500:]!r}")
        if len(self._parts) == 1:
            head, _, body = part.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            self._missing = int(length[1]) - len(body) if length else -1
        elif self._missing > 0:
            self._missing -= len(part)
        return not self._missing or (self._missing < 0 and b"".join(self._parts[-2:]).endswith(b"\r\n0\r\n\r\n"))


def ask_in_turn(target: Target, requests: list[list[bytes]], keeps: bool) -> list[tuple[bytes, float]]:
    """Requests of several clients at once; the answers, and the seconds that each took, from before the request is
    sent, or a connection is made for it, until the end of the answer is there to be read. `keeps`: a client's requests
    go over one connection. Without the first answer of each: all of them are asked for at once.

    Plain sockets and one `epoll`: clients on asyncio's streams wait for each other for a millisecond and more, which is
    no time of the server's. What is ready at once has one time.
    """
    answers: list[tuple[bytes, float]] = []
    begun: set[Asker] = set()
    """Those with an answer."""
    with select.epoll() as poller:
        clients = [Asker(target, own, keeps, poller) for own in requests]
        waiting = {client.ask(): client for client in clients}
        while waiting:
            ready = poller.poll()
            now = time.perf_counter()
            for place, _ in ready:
                answer = waiting[place].take(now)
                if answer is None:
                    continue
                client = waiting.pop(place)
                if client in begun:
                    answers.append(answer)
                begun.add(client)
                if (place := client.ask()) is not None:
                    waiting[place] = client
    return answers


def overhead(target: Target, stream: bool, first: int, keeps: bool = True, mixed: bool = False) -> dict[str, float]:
    """Milliseconds of requests of NUM_CLIENTS clients at once, less those of the engine. `mixed`: they ask for 4 to 12
    tokens, NUM_ASKED_TOKENS on average, instead of all for as many."""
    numbers = range(first, first + NUM_CLIENTS * (NUM_ASKED + 1))
    tokens = [NUM_ASKED_TOKENS + (number * 5 % 9 - 4 if mixed else 0) for number in numbers]
    made = [request_of(target, most, stream, number, keeps) for number, most in zip(numbers, tokens, strict=True)]
    used = used_s(target)
    answers = ask_in_turn(target, [made[client::NUM_CLIENTS] for client in range(NUM_CLIENTS)], keeps)
    used = used_s(target) - used
    times = {}
    for answer, seconds in answers:
        check(answer)
        times[request_id(answer)] = seconds
    if target.engine is not None:
        for line in target.engine.read_text().splitlines():
            name, engine_s = line.split()
            if name in times:
                times[name] -= float(engine_s)
    values = [1e3 * seconds for seconds in times.values()]
    figures = {"requests": len(values), "p50_ms": statistics.median(values), "p99_ms": quantile(values, 0.99)}
    return figures if target.process is None else figures | {"cpu_ms": 1e3 * used / len(made)}


def check(begin: bytes) -> None:
    """Raises RuntimeError when an answer begins with something else than success."""
    if begin and b" 200 " not in begin[:20]:
        raise RuntimeError(f"the server answered {begin[:500]!r}")


def request_id(answer: bytes) -> str:
    """What the server calls it."""
    found = re.search(rb'"id":"([^"]+)"', answer)
    return found[1].decode() if found else ""


def used_s(target: Target) -> float:
    """Processor time of the API process so far."""
    return 0.0 if target.process is None else sum(target.process.cpu_times()[:2])


def num_ticks(target: Target) -> int:
    """Of its timer, so far."""
    return 0 if target.late is None else COUNT.unpack_from(target.late)[0]


def lateness(target: Target, since: int) -> dict[str, float]:
    """How late its timer was from a tick on, in milliseconds."""
    until = num_ticks(target)
    if target.late is None or until == since:
        return {}
    late = [
        1e3 * LATE.unpack_from(target.late, COUNT.size + number % PLACES * LATE.size)[0]
        for number in range(max(since, until - PLACES), until)
    ]
    return {"late_p50_ms": statistics.median(late), "late_p99_ms": quantile(late, 0.99), "late_max_ms": max(late)}


def quantile(values: list[float], share: float) -> float:
    """The value below which this share of them is."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def measure_overhead(target: Target, rounds: int) -> list[dict[str, Any]]:
    """Rows of `overhead`."""
    overhead(target, False, 0)  # what only the first requests pay for
    number, rows = NUM_CLIENTS * (NUM_ASKED + 1), []
    kinds = (True, True), (True, False), (False, False)
    for (keeps, mixed), stream in itertools.product(kinds, (False, True) * rounds):
        row = {"row": "overhead", "keeps_connection": keeps, "mixed": mixed, "stream": stream}
        rows.append(shown(row | overhead(target, stream, number, keeps, mixed)))
        number += NUM_CLIENTS * (NUM_ASKED + 1)
    return rows


def measure_streams(target: Target, num_streams: int, measured_s: float, rounds: int) -> list[dict[str, Any]]:
    """Rows of `streams`."""
    asyncio.run(streams(target, 8, 1.0, 0))
    return [
        shown({"row": "streams"} | asyncio.run(streams(target, num_streams, measured_s, 8 + turn * num_streams)))
        for turn in range(rounds)
    ]


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row, printed."""
    print(json.dumps({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}))
    sys.stdout.flush()
    return row


def main() -> int:
    """Print the rows, and write them where --out says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0, help="for which streams are counted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("overhead", "streams"))
    parser.add_argument("--cpu", type=int, default=0, help="core of the API process; this process avoids it")
    parser.add_argument("--url", help="another server, which runs already")
    parser.add_argument("--model", default="smollm2", help="what that server calls its model")
    parser.add_argument("--pid", type=int, help="of that server's API process")
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    parser.add_argument("--serve", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--ticks", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help="of pagemill serve")
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve, args.cpu, args.ticks, args.arguments)
    if args.url:
        found = urllib.parse.urlsplit(args.url)
        process = psutil.Process(args.pid) if args.pid else None
        target = Target(found.hostname or "127.0.0.1", found.port or 80, args.model, process, None, None)
        rows = [] if args.only == "streams" else measure_overhead(target, args.rounds)
        rows += [] if args.only == "overhead" else measure_streams(target, args.streams, args.seconds, args.rounds)
    else:
        rows = []
        if args.only != "streams":
            with own_server(args.cpu, NUM_CLIENTS, STEP_S, False, args.arguments) as target:
                rows = measure_overhead(target, args.rounds)
        if args.only != "overhead":
            with own_server(args.cpu, args.streams, STREAM_STEP_S, True, args.arguments) as target:
                rows += measure_streams(target, args.streams, args.seconds, args.rounds)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

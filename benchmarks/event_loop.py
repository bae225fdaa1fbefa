"""How long one request keeps the API server from everything else, while the worst bodies arrive.

    python benchmarks/event_loop.py [--cases NAME ...] [--streams N] [-- further arguments of pagemill serve]

A timer of 5 ms runs on the event loop of the API server. Per case, a body arrives; beside it stand: the longest time
between two ticks beyond the 5 ms (`late`; on a busy machine also the time in which the process did not run at all), the
most processor time that the loop's thread took between two ticks (`busy`, which no other process adds to), ticks that
were more than 20 ms late, the slowest GET /health, the answer, with --streams N the median and the longest time between
two tokens of N streams that run beside, and the most memory that a process of the server held in MiB. Without bodies:
what the machine itself adds. Bodies that ask for expensive forms are measured by --cases forms.
"""

import argparse
import asyncio
import contextlib
import json
import mmap
import re
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from ready_server import wait_ready

from tests.fakes.expensive_forms import FORMS

TICK_S, LATE_S = 0.005, 0.020
FIGURES = struct.Struct("4d")
"""Longest delay and most processor time between ticks in seconds, late ticks, ticks."""
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "head_dim": 16,
    "max_position_embeddings": 8192,
}
"""The engine's work is not what is measured: a model of two small layers, under the tokenizer of the default one."""
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
Body = tuple[str, bytes]


def words(num_chars: int) -> str:
    """English text of this length."""
    return ("the quick brown fox jumps over the lazy dog " * (num_chars // 44 + 1))[:num_chars]


def text(prompt: Any, **fields: Any) -> Body:
    """A completion request."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 1} | fields
    return TEXT, json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


def chat(messages: Any, **fields: Any) -> Body:
    """A chat request."""
    return CHAT, json.dumps({"messages": messages, "max_tokens": 1} | fields, separators=(",", ":")).encode()


def filler(item: bytes, num_bytes: int) -> Body:
    """A field that nobody knows, full of small values."""
    return TEXT, b'{"x":[' + item * (num_bytes // len(item)) + b'1],"prompt":"a","max_tokens":1}'


def cjk(num_chars: int) -> str:
    """Characters that no tokenizer has many of."""
    return "".join(chr(0x4E00 + (index * 7919) % 20000) for index in range(num_chars))


def stops(num_chars: int) -> list[str]:
    """Different stop strings, which a text may always be the beginning of."""
    return ["the " + words(60)[index % 16 :] + str(index) for index in range(num_chars // 64)]


CASES: dict[str, Callable[[], Body]] = {
    "15 MB of empty lists in an unknown field": lambda: filler(b"[],", 15_000_000),
    "15 MB of empty objects in an unknown field": lambda: filler(b"{},", 15_000_000),
    "14 MB of numbers in logit_bias (400)": lambda: (
        TEXT,
        b'{"logit_bias":{"a":[' + b"1," * 7_000_000 + b'1]},"prompt":"a"}',
    ),
    "1,000 prompts of 16,000 characters, one wrong (400)": lambda: text([words(16_000)] * 999 + [""]),
    "1,000 prompts of 8,000 ids, one wrong (400)": lambda: text([[1] * 8000] * 999 + [[-1]]),
    "500 prompts of 2,000 ids, echoed": lambda: text([[28] * 2000] * 500, echo=True),
    "one prompt of 500,000 characters (400)": lambda: text(words(500_000)),
    "one prompt of 500,000 Chinese characters (400)": lambda: text(cjk(500_000)),
    "4,096 messages of 1,000 characters (400)": lambda: chat([{"role": "user", "content": "x" * 1000}] * 4096),
    "400,000 parts of a message (400)": lambda: chat(
        [{"role": "user", "content": [{"type": "text", "text": ""}] * 400_000}]
    ),
    "64 prompts with n=64": lambda: text(["a"] * 64, n=64),
    "1,024 prompts of one id with n=4": lambda: text([[1]] * 1024, n=4),
    "16 KB of empty lists in an unknown field": lambda: filler(b"[],", 16_000),
    "16 KB of objects in an unknown field": lambda: filler(b'{"a":1},', 16_000),
    "16 KB of English": lambda: text(words(16_000)),
    "16 KB of Chinese": lambda: text(cjk(5_300)),
    "16 KB of one letter": lambda: text("a" * 16_000),
    "16 KB of spaces": lambda: text(" " * 16_000),
    "1,000 prompts of 13 characters": lambda: text([words(13)] * 1000),
    "8,000 ids, echoed with 20 log-probabilities, streamed": lambda: text(
        [28] * 8000, echo=True, logprobs=20, stream=True
    ),
    "100 tokens with 20 log-probabilities, n=64": lambda: text("a", n=64, logprobs=20, max_tokens=100),
    "5,000 ids, echoed": lambda: text([[28] * 5000], echo=True),
    "4,096 characters of stop strings": lambda: text("the", stop=stops(4096), max_tokens=200, ignore_eos=True),
}


# --- the server -------------------------------------------------------------------------------------------------------


async def tick(figures: mmap.mmap) -> None:
    """Measure for ever."""
    woke, used = time.monotonic(), time.thread_time()
    while True:
        await asyncio.sleep(TICK_S)
        now, used_now = time.monotonic(), time.thread_time()
        late, busy = max(0.0, now - woke - TICK_S), used_now - used
        worst_late, worst_busy, num_late, num = FIGURES.unpack(figures[: FIGURES.size])
        figures[: FIGURES.size] = FIGURES.pack(
            max(late, worst_late), max(busy, worst_busy), num_late + (late > LATE_S), num + 1
        )
        woke, used = now, used_now


def serve(path: str, arguments: list[str]) -> int:
    """`pagemill serve` with a timer on its event loop that writes into a file."""
    from pagemill.cli.main import main
    from pagemill.serve.http.server import HttpServer

    with Path(path).open("r+b") as file:
        figures = mmap.mmap(file.fileno(), 0)
    startup = HttpServer.startup

    async def start(server: HttpServer, sockets: list[socket.socket] | None = None) -> None:
        server.timer = asyncio.create_task(tick(figures))  # type: ignore[attr-defined]
        await startup(server, sockets)

    HttpServer.startup = start  # type: ignore[method-assign]
    return main(["serve", *arguments])


# --- the clients ------------------------------------------------------------------------------------------------------


class Health(threading.Thread):
    """Asks /health again and again."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.worst_s = 0.0
        self._port = port
        self._on = True

    def run(self) -> None:
        while self._on:
            begin = time.monotonic()
            with contextlib.suppress(OSError):
                exchange(self._port, b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            self.worst_s = max(self.worst_s, time.monotonic() - begin)
            time.sleep(0.02)

    def stop(self) -> float:
        """The longest time that an answer took."""
        self._on = False
        self.join()
        return self.worst_s


class Streams:
    """Clients that read token after token, and note when each came."""

    def __init__(self, port: int, count: int) -> None:
        self._port = port
        self.gaps_s: list[float] = []
        for number in range(count):
            threading.Thread(target=self._read, args=[number], daemon=True).start()

    def _read(self, number: int) -> None:
        _, body = text(f"stream {number}", max_tokens=4000, ignore_eos=True, stream=True, seed=number)
        head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port)) as connection:
                connection.sendall(head.encode() + body)
                connection.recv(1 << 16)
                last = time.monotonic()
                while connection.recv(1 << 16):
                    now = time.monotonic()
                    self.gaps_s.append(now - last)
                    last = now


class Memory(threading.Thread):
    """Looks at the processes of a server again and again."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._process = psutil.Process(pid)
        self._on = True
        self.most_bytes = 0

    def run(self) -> None:
        while self._on:
            for process in [self._process, *self._process.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.most_bytes = max(self.most_bytes, process.memory_info().rss)
            time.sleep(0.1)

    def stop(self) -> int:
        """The most that any of them held."""
        self._on = False
        self.join()
        return self.most_bytes


def exchange(port: int, request: bytes, timeout_s: float = 60) -> bytes:
    """Send; the answer up to the end of the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
        return answer


def post(port: int, path: str, body: bytes, timeout_s: float) -> str:
    """The status, or that none came in time; the client leaves then."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    try:
        return re.findall(rb"HTTP/1\.1 (\d+)", exchange(port, head.encode() + body, timeout_s))[-1].decode()
    except (OSError, IndexError) as error:
        return type(error).__name__


def measure(
    port: int, pid: int, figures: mmap.mmap, streams: Streams, case: str, body: Body | None, timeout_s: float
) -> dict[str, Any]:
    """One line of the table."""
    figures[: FIGURES.size] = bytes(FIGURES.size)
    streams.gaps_s = []
    memory = Memory(pid)
    memory.start()
    health = Health(port)
    health.start()
    begin = time.monotonic()
    if body is None:
        time.sleep(5)
        status = ""
    else:
        status = post(port, *body, timeout_s)
    seconds = time.monotonic() - begin
    time.sleep(0.5)
    gaps = streams.gaps_s or [0.0]
    late, busy, num_late, _ = FIGURES.unpack(figures[: FIGURES.size])
    return {
        "case": case,
        "bytes": 0 if body is None else len(body[1]),
        "status": status,
        "seconds": round(seconds, 2),
        "late_ms": round(1000 * late, 1),
        "busy_ms": round(1000 * busy, 1),
        "num_late": int(num_late),
        "health_ms": round(1000 * health.stop(), 1),
        "median_gap_ms": round(1000 * statistics.median(gaps), 1),
        "longest_gap_ms": round(1000 * max(gaps), 1),
        "most_mib": memory.stop() >> 20,
    }


def run(cases: list[str], arguments: list[str], timeout_s: float, num_streams: int) -> list[dict[str, Any]]:
    """Start a server, measure, end it."""
    with tempfile.NamedTemporaryFile() as file, tempfile.TemporaryFile() as log:
        file.write(bytes(mmap.PAGESIZE))
        file.flush()
        figures = mmap.mmap(file.fileno(), 0)
        command = [sys.executable, __file__, "--serve", file.name, "--", *arguments]
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            port = wait_ready(process, log)
            post(port, *text("warm up"), timeout_s)
            post(port, *text(words(40_000)), timeout_s)  # starts a helper
            streams = Streams(port, num_streams)
            time.sleep(1)
            rows = []
            for case in ["(no body)", *cases]:
                body = CASES.get(case)
                if case in FORMS:
                    made: Body | None = TEXT, FORMS[case]()
                else:
                    made = None if body is None else body()
                rows.append(measure(port, process.pid, figures, streams, case, made, timeout_s))
                print(format_row(rows[-1]), flush=True)
            return rows
        finally:
            process.terminate()
            process.wait()


def format_row(row: dict[str, Any]) -> str:
    """A line of a table in Markdown."""
    return (
        f"| {row['case']} | {row['status']} | {row['seconds']} | {row['late_ms']} | {row['busy_ms']} "
        f"| {row['num_late']} | {row['health_ms']} | {row['median_gap_ms']} | {row['longest_gap_ms']} "
        f"| {row['most_mib']} |"
    )


def main() -> int:
    """Print the table, and write it as JSON where --out says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), metavar="NAME", help="all of CASES by default")
    parser.add_argument("--streams", type=int, default=0, help="streams that run beside")
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds after which a client leaves")
    parser.add_argument("--serve", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help="of pagemill serve")
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve, args.arguments)
    model = ["smollm2", "--load-format", "dummy", "--hf-overrides", json.dumps(TINY)]
    arguments = [*model, "--cpu-threads", "1", "--port", "0", *args.arguments]
    columns = (
        "| body | status | s | late (ms) | busy (ms) | late ticks | /health (ms) | gap (ms) | longest (ms) | MiB |"
    )
    print(columns + "\n" + "| --- " * 10 + "|")
    cases = list(FORMS) if args.cases == ["forms"] else args.cases
    rows = run(cases, arguments, args.timeout, args.streams)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""A load of streamed completions over HTTP, and when their pieces arrived. Knows no engine.

Costs the server's machine as little as it can: what arrives is only noted, and read when all is over.
"""

import asyncio
import json
import statistics
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens on this machine, and what it calls its model."""

    port: int
    model: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion. Times are seconds of one clock."""

    start_s: float
    piece_times_s: list[float]
    """When each event with text arrived."""
    num_tokens: int


class _Exchange(asyncio.Protocol):
    """Sends a request and keeps what comes back, until the end of the answer."""

    def __init__(self, request: bytes, done: "asyncio.Future[None]") -> None:
        self._request = request
        self._done = done
        self.times_s: list[float] = []
        self.pieces: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.times_s.append(time.perf_counter())
        self.pieces.append(data)
        if data.endswith(b"0\r\n\r\n") and data[-7:-5] in (b"\r\n", b""):
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)


async def _complete(address: Address, prompt: list[int] | str, num_tokens: int) -> tuple[float, _Exchange]:
    body = json.dumps(
        {
            "model": address.model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{address.port}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    start_s = time.perf_counter()
    _, exchange = await loop.create_connection(lambda: _Exchange(head.encode() + body, done), "127.0.0.1", address.port)
    await done
    return start_s, exchange


async def _run(address: Address, prompts: Sequence[list[int] | str], num_tokens: int, concurrency: int) -> list[tuple]:
    places = asyncio.Semaphore(concurrency)

    async def one(prompt: list[int] | str) -> tuple[float, _Exchange]:
        async with places:
            return await _complete(address, prompt, num_tokens)

    return await asyncio.gather(*map(one, prompts))


def complete(address: Address, prompts: Sequence[list[int] | str], num_tokens: int, concurrency: int) -> list[Answer]:
    """Greedy completions of exactly `num_tokens`. Raises RuntimeError for anything else that comes back."""
    answers = [_read(*pair) for pair in asyncio.run(_run(address, prompts, num_tokens, concurrency))]
    wrong = [answer.num_tokens for answer in answers if answer.num_tokens != num_tokens]
    if wrong:
        raise RuntimeError(f"{len(wrong)} completions have {wrong[0]} tokens instead of {num_tokens}")
    return answers


def figures(answers: list[Answer]) -> dict[str, float]:
    """Output tokens per second, and the times that users feel."""
    end_s = max(answer.piece_times_s[-1] for answer in answers)
    start_s = min(answer.start_s for answer in answers)
    gaps = sorted(b - a for answer in answers for a, b in pairwise(answer.piece_times_s))
    return {
        "tokens_per_s": sum(answer.num_tokens for answer in answers) / (end_s - start_s),
        "ttft_p50_ms": statistics.median(answer.piece_times_s[0] - answer.start_s for answer in answers) * 1e3,
        "itl_p99_ms": gaps[min(len(gaps) - 1, int(len(gaps) * 0.99))] * 1e3,
    }


def _read(start_s: float, exchange: _Exchange) -> Answer:
    """What an exchange brought."""
    raw = b"".join(exchange.pieces)
    ends = list(accumulate(map(len, exchange.pieces)))
    head, _, rest = raw.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0] + b" ":
        raise RuntimeError(f"the server answered {raw[:500]!r}")
    begin = len(raw) - len(rest)
    chunked = b"transfer-encoding: chunked" in head.lower()
    times: list[float] = []
    num_tokens, text = None, b""
    for end, data in _chunks(raw, begin) if chunked else [(len(raw), rest)]:
        text += data
        *events, text = text.replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            if not event.startswith(b"data:") or event.endswith(b"[DONE]"):
                continue
            message = json.loads(event[5:])
            if "error" in message:
                raise RuntimeError(f"the server failed: {message['error']}")
            if message.get("choices"):
                times.append(exchange.times_s[bisect_left(ends, end)])
            if message.get("usage"):
                num_tokens = message["usage"]["completion_tokens"]
    if not times:
        raise RuntimeError(f"no text came: {raw[:500]!r}")
    return Answer(start_s, times, len(times) if num_tokens is None else num_tokens)


def _chunks(raw: bytes, begin: int) -> list[tuple[int, bytes]]:
    """(offset of the end, content) of each chunk of an HTTP body that starts at `begin`."""
    found = []
    while True:
        line_end = raw.find(b"\r\n", begin)
        size = int(raw[begin:line_end].split(b";")[0], 16) if line_end > begin else 0
        if not size:
            return found
        begin = line_end + 2
        found.append((begin + size, raw[begin : begin + size]))
        begin += size + 2

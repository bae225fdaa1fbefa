"""Sends a workload to a server and notes when every piece comes back. Draws no conclusions: see serving_report."""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

import httpx

from pagemill.bench.workload import WorkItem
from pagemill.utils.sse import SseParser


@dataclass(slots=True)
class Sent:
    """What became of one request. Times are seconds of one monotonic clock."""

    start_s: float
    """When it was sent; waiting for a place under the concurrency limit comes before."""
    piece_times_s: list[float] = field(default_factory=list)
    """When each piece of text arrived."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """The server under load."""

    url: str
    """Without /v1."""
    model: str | None = None
    api_key: str | None = None


async def run_load(
    target: Target,
    workload: Sequence[WorkItem],
    arrivals_s: Sequence[float],
    max_concurrency: int | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> list[Sent]:
    """Send request i `arrivals_s[i]` seconds after the start, at most `max_concurrency` at a time.

    One result per request, in order; a request that fails carries its error. `transport` replaces the network in tests.
    """
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        headers=headers, timeout=None, limits=unlimited, trust_env=False, transport=transport
    ) as client:
        start_s = time.perf_counter()
        return await asyncio.gather(
            *(
                _send_at(start_s + arrival_s, client, target, item, places)
                for item, arrival_s in zip(workload, arrivals_s, strict=True)
            )
        )


async def _send_at(
    when_s: float,
    client: httpx.AsyncClient,
    target: Target,
    item: WorkItem,
    places: AbstractAsyncContextManager[None],
) -> Sent:
    await asyncio.sleep(max(0.0, when_s - time.perf_counter()))
    async with places:
        sent = Sent(time.perf_counter())
        try:
            await _stream(client, target, item, sent)
        except (httpx.HTTPError, ValueError) as error:
            sent.error = f"{type(error).__name__}: {error}"
    return sent


async def _stream(client: httpx.AsyncClient, target: Target, item: WorkItem, sent: Sent) -> None:
    """One greedy completion past end-of-sequence. Raises ValueError for an error or a broken stream."""
    body = {
        "prompt": item.prompt_token_ids,
        "max_tokens": item.num_output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.model is not None:
        body["model"] = target.model
    parser = SseParser()
    async with client.stream("POST", f"{target.url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise ValueError(f"{response.status_code} {(await response.aread())[:300].decode(errors='replace')}")
        async for chunk in response.aiter_bytes():
            now_s = time.perf_counter()
            for data in parser.feed(chunk):
                if data == "[DONE]":
                    return
                _note(json.loads(data), now_s, sent)
    raise ValueError("the server broke off its answer")


def _note(chunk: dict[str, object], now_s: float, sent: Sent) -> None:
    if "error" in chunk:
        raise ValueError(f"the server failed: {chunk['error']}")
    if chunk.get("choices"):
        sent.piece_times_s.append(now_s)
    usage = chunk.get("usage")
    if isinstance(usage, dict):
        sent.num_prompt_tokens = usage["prompt_tokens"]
        sent.num_output_tokens = usage["completion_tokens"]

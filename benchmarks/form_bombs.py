"""What forms that are made to do harm cost others: `python benchmarks/form_bombs.py`. For a quiet machine.

A server of the default model with 16 free streams: the time between two tokens of a stream, calm and while clients send
bombs one after the other, by turns; how each bomb is answered, how long that takes, and how long an honest grammar that
nobody has seen takes meanwhile. Then as many different schemas, one after the other: what the processes hold.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.integration.server_process import ServerProcess, running_server

NUM_STREAMS = 16
PATH = "/v1/completions"
Form = dict[str, Any]


def nested(keyword: str, depth: int) -> Any:
    """Branches within branches, two at each level."""
    schema: Any = {"type": "string"}
    for level in range(depth):
        schema = {keyword: [schema, {"type": "object", "properties": {f"p{level}": schema}}]}
    return schema


def bombs(turn: int) -> dict[str, Form]:
    """What a client may send; no two turns have the same ones."""
    many = [{"type": "string", "pattern": f"a.{{0,100}}b{turn}{number}"} for number in range(50)]
    tree = {"anyOf": [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}}, {"const": turn}]}
    return {
        "(a{1,300}){300}": {"regex": f"{turn}(a{{1,300}}){{300}}"},
        "((a{1,300}){300}){300}": {"regex": f"{turn}((a{{1,300}}){{300}}){{300}}"},
        "50 patterns at once": {"json": {"allOf": many}},
        "anyOf nested 12 deep": {"json": {"title": str(turn), **nested("anyOf", 12)}},
        "oneOf nested 12 deep": {"json": {"title": str(turn), **nested("oneOf", 12)}},
        "allOf nested 12 deep": {"json": {"title": str(turn), **nested("allOf", 12)}},
        "$ref to itself": {"json": tree},
        "alternatives of any text": {"regex": "|".join(f"(.*{turn}{letter}.{{14}}{letter})" for letter in "abcdefgh")},
        "(x+x+)+y": {"regex": f"{turn}((x+x+)+){{20}}y"},
        "doubling rules": {
            "grammar": "\n".join(["start: a0", *(f"a{n}: a{n + 1} a{n + 1}" for n in range(40)), f'a40: "{turn}"'])
        },
        "enum of 20,000": {"json": {"enum": [f"value {turn} {number}" for number in range(20_000)]}},
        "1 MB": {"json": {"properties": {f"p{turn}_{n}": {"type": "string"} for n in range(40_000)}}},
        "states without end": {"regex": f"(.*a.{{12}}{turn}b)|(.*c.{{13}}d)"},
    }


class Streams:
    """Free streams that go on, and the gaps between their tokens."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.gaps_ms: list[float] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Streams":
        self._client = httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None))
        self._tasks = [asyncio.create_task(self._go_on(number)) for number in range(NUM_STREAMS)]
        while len(self.gaps_ms) < 10 * NUM_STREAMS:
            await asyncio.sleep(0.1)
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    async def _go_on(self, seed: int) -> None:
        while True:
            body = {"prompt": f"Story {seed}:", "max_tokens": 1000, "stream": True, "ignore_eos": True, "seed": seed}
            async with self._client.stream("POST", self._url + PATH, json=body) as answer:
                last = None
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        now = time.perf_counter()
                        if last is not None:
                            self.gaps_ms.append(1000 * (now - last))
                        last = now


async def answered(client: httpx.AsyncClient, url: str, form: Form) -> tuple[float, str]:
    """How long a form takes, and the answer."""
    began = time.perf_counter()
    body = {"prompt": "a", "max_tokens": 16, "structured_outputs": form}
    answer = await client.post(url + PATH, content=json.dumps(body))
    words = answer.json()
    said = words["error"]["message"] if "error" in words else words["choices"][0]["finish_reason"]
    return time.perf_counter() - began, f"{answer.status_code} {said[:70]}"


async def beside_streams(server: ServerProcess, turns: int) -> None:
    """Prints what bombs do to streams, and to an honest grammar."""
    url = server.url
    calm: list[float] = []
    shaken: list[float] = []
    took: dict[str, list[tuple[float, str]]] = {}
    honest: list[float] = []
    headers = {"content-type": "application/json"}
    async with Streams(url) as streams, httpx.AsyncClient(timeout=600, headers=headers) as client:
        await answered(client, url, {"choice": ["warm"]})
        for turn in range(turns):
            streams.gaps_ms.clear()
            await asyncio.sleep(10)
            calm += streams.gaps_ms
            streams.gaps_ms.clear()
            for name, form in bombs(turn).items():
                took.setdefault(name, []).append(await answered(client, url, form))
            shaken += streams.gaps_ms
            together = [asyncio.create_task(answered(client, url, form)) for form in bombs(turn + 1000).values()]
            for number in range(5):
                honest.append((await answered(client, url, {"regex": f"[a-z]{{3}}{turn}{number}"}))[0])
            await asyncio.gather(*together)
    for name, gaps in (("calm", calm), ("bombs one after the other", shaken)):
        cuts = statistics.quantiles(gaps, n=100)
        print(f"| {name} | {len(gaps)} | {cuts[49]:.1f} | {cuts[94]:.1f} | {cuts[98]:.1f} | {max(gaps):.0f} |")
    for name, found in took.items():
        print(f"| {name} | {max(seconds for seconds, _ in found):.2f} s | {found[0][1]} |")
    print(f"honest grammars beside all bombs at once: {statistics.median(honest):.2f} s, {max(honest):.2f} at most")


async def many_schemas(server: ServerProcess, count: int) -> None:
    """Prints what the processes hold while different schemas come."""
    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(timeout=600, headers=headers) as client:
        for number in range(count + 1):
            if number % max(1, count // 4) == 0:
                print(f"after {number} schemas:", held(server))
            fields = {f"field_{number}_{n}": {"type": "string", "pattern": "^[a-z]+[0-9]{2}$"} for n in range(8)}
            schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
            await answered(client, server.url, {"json": schema})


def held(server: ServerProcess) -> str:
    """Resident memory of each process, in MiB."""
    main = psutil.Process(server.process.pid)
    sizes: dict[str, int] = {}
    for process in [main, *main.children(recursive=True)]:
        title = " ".join(process.cmdline()).strip() or "gone"
        sizes[title] = sizes.get(title, 0) + (process.memory_info().rss >> 20)
    return ", ".join(f"{title.removeprefix('pagemill: ')[:20]} {size}" for title, size in sizes.items())


def main() -> None:
    """Prints tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--schemas", type=int, default=2000)
    arguments = parser.parse_args()
    with running_server(arguments.model, "--max-model-len", "2048", "--max-num-seqs", "32") as server:
        print("before:", held(server))
        asyncio.run(beside_streams(server, arguments.turns))
        print("after the bombs:", held(server))
        asyncio.run(many_schemas(server, arguments.schemas))


if __name__ == "__main__":
    main()

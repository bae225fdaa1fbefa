"""What forms that are made to do harm cost others: `python benchmarks/form_bombs.py`. For a quiet machine.

A server of the default model with some free streams. For each bomb by itself: a calm while, then the bomb; how long its
answer takes, what the processes hold after it, and the time between two tokens of a stream in both. Then all bombs at
once, and honest grammars that nobody has seen among them. Then as many different schemas, one after the other: what the
processes hold, and what a schema takes. Every row is printed when it is known; `--only` runs some of the bombs.
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

PATH = "/v1/completions"
HEADERS = {"content-type": "application/json"}
WINDOW_S = 2.0
"""Of calm before a bomb, and the least that is looked at behind it."""
NUM_BLOCKS = 640
"""Of the KV cache, all of which are used before anything is measured, so that they do not count as growth."""
NUM_SIZES = 4
"""How often memory is read while schemas come."""
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
        "100 KB for one letter": {"regex": "a" * 100_000},
        "(a{1,300}){300}": {"regex": f"{turn}(a{{1,300}}){{300}}"},
        "((a{1,300}){300}){300}": {"regex": f"{turn}((a{{1,300}}){{300}}){{300}}"},
        "50 patterns at once": {"json": {"allOf": many}},
        "anyOf nested 12 deep": {"json": {"title": str(turn), **nested("anyOf", 12)}},
        "oneOf nested 12 deep": {"json": {"title": str(turn), **nested("oneOf", 12)}},
        "allOf nested 12 deep": {"json": {"title": str(turn), **nested("allOf", 12)}},
        "anyOf nested 9 deep": {"json": {"title": str(turn), **nested("anyOf", 9)}},
        "oneOf nested 9 deep": {"json": {"title": str(turn), **nested("oneOf", 9)}},
        "allOf nested 9 deep": {"json": {"title": str(turn), **nested("allOf", 9)}},
        "$ref to itself": {"json": tree},
        "alternatives of any text": {"regex": "|".join(f"(.*{turn}{letter}.{{14}}{letter})" for letter in "abcdefgh")},
        "(x+x+)+y": {"regex": f"{turn}((x+x+)+){{20}}y"},
        "doubling rules": {
            "grammar": "\n".join(["start: a0", *(f"a{n}: a{n + 1} a{n + 1}" for n in range(40)), f'a40: "{turn}"'])
        },
        "enum of 20,000": {"json": {"enum": [f"value {turn} {number}" for number in range(20_000)]}},
        "enum of 4,000": {"json": {"enum": [f"value {turn} {number}" for number in range(4_000)]}},
        "1 MB": {"json": {"properties": {f"p{turn}_{n}": {"type": "string"} for n in range(40_000)}}},
        "250 KB": {"json": {"properties": {f"p{turn}_{n}": {"type": "string"} for n in range(7_500)}}},
        "states without end": {"regex": f"(.*a.{{12}}{turn}b)|(.*c.{{13}}d)"},
    }


class Streams:
    """Free streams that go on, and the gaps between their tokens."""

    def __init__(self, url: str, count: int) -> None:
        self._url = url
        self._count = count
        self.gaps_ms: list[float] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Streams":
        self._client = httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None))
        self._tasks = [asyncio.create_task(self._go_on(number)) for number in range(self._count)]
        while len(self.gaps_ms) < 10 * self._count:
            await asyncio.sleep(0.1)
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    async def _go_on(self, seed: int) -> None:
        while True:
            body = {"prompt": f"Story {seed}:", "max_tokens": 500, "stream": True, "ignore_eos": True, "seed": seed}
            async with self._client.stream("POST", self._url + PATH, json=body) as answer:
                last = None
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        now = time.perf_counter()
                        if last is not None:
                            self.gaps_ms.append(1000 * (now - last))
                        last = now


def body_of(form: Form) -> bytes:
    """A request for a few tokens of this form."""
    return json.dumps({"prompt": "a", "max_tokens": 16, "stream": True, "structured_outputs": form}).encode()


async def answered(client: httpx.AsyncClient, url: str, body: bytes) -> tuple[float, str]:
    """Seconds until the first token or the refusal, and the answer."""
    began = time.perf_counter()
    verdict_s = 0.0
    said = ""
    async with client.stream("POST", url + PATH, content=body) as answer:
        if answer.status_code != 200:
            said = json.loads(await answer.aread())["error"]["message"]
            return time.perf_counter() - began, f"{answer.status_code} {said[:90]}"
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                verdict_s = verdict_s or time.perf_counter() - began
                event = json.loads(line.removeprefix("data: "))
                said = event["error"]["message"] if "error" in event else event["choices"][0]["finish_reason"] or said
    return verdict_s, f"200 {said[:90]}"


async def one_by_one(server: ServerProcess, arguments: argparse.Namespace) -> None:
    """Prints a row for each bomb, and what all did to the streams together."""
    calm: list[float] = []
    shaken: list[float] = []
    async with (
        Streams(server.url, arguments.streams) as streams,
        httpx.AsyncClient(timeout=600, headers=HEADERS) as client,
    ):
        await answered(client, server.url, body_of({"choice": ["first"]}))
        print("| bomb | answer | s | MiB more | calm, ms: p50 | p99 | with it: p50 | p99 | most |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        for turn in range(arguments.turns):
            for name, form in bombs(turn).items():
                if arguments.only and arguments.only not in name:
                    continue
                body = body_of(form)
                before = sum(held(server).values())
                streams.gaps_ms.clear()
                await asyncio.sleep(WINDOW_S)
                calm_here = streams.gaps_ms.copy()
                streams.gaps_ms.clear()
                began = time.perf_counter()
                verdict_s, said = await answered(client, server.url, body)
                await asyncio.sleep(began + WINDOW_S - time.perf_counter())
                here = streams.gaps_ms.copy()
                grown = sum(held(server).values()) - before
                row = [name, said, f"{verdict_s:.2f}", f"{grown:.1f}", quantiles(calm_here), quantiles(here)]
                print("| " + " | ".join(row), f"| {max(here):.0f} |", flush=True)
                calm += calm_here
                shaken += here
    print(f"| all | | | | {quantiles(calm)} | {quantiles(shaken)} | {max(shaken):.0f} |")
    print(f"the most while calm: {max(calm):.0f} ms")


async def together(server: ServerProcess, arguments: argparse.Namespace) -> None:
    """Prints what all bombs at once do to streams, and to honest grammars."""
    bodies = [body_of(form) for form in bombs(1000).values()]
    honest: list[float] = []
    async with (
        Streams(server.url, arguments.streams) as streams,
        httpx.AsyncClient(timeout=600, headers=HEADERS) as client,
    ):
        streams.gaps_ms.clear()
        await asyncio.sleep(2 * WINDOW_S)
        calm = streams.gaps_ms.copy()
        streams.gaps_ms.clear()
        began = time.perf_counter()
        tasks = [asyncio.create_task(answered(client, server.url, body)) for body in bodies]
        for number in range(5):
            honest.append((await answered(client, server.url, body_of({"regex": f"[a-z]{{3}}{number}"})))[0])
        answers = await asyncio.gather(*tasks)
        seconds = time.perf_counter() - began
        shaken = streams.gaps_ms.copy()
    print(
        f"{len(bodies)} bombs at once: {seconds:.1f} s; tokens' gaps {quantiles(calm)} calm, {quantiles(shaken)} then"
    )
    print("answers:", ", ".join(f"{took:.1f} s {said[:3]}" for took, said in answers))
    print(f"honest grammars among them: {statistics.median(honest):.2f} s, {max(honest):.2f} at most")


def quantiles(gaps_ms: list[float]) -> str:
    """Median and 99th percentile."""
    cuts = statistics.quantiles(gaps_ms, n=100)
    return f"{cuts[49]:.1f} | {cuts[98]:.1f}"


async def many_schemas(server: ServerProcess, count: int) -> None:
    """Prints what the processes hold while different schemas come, and what a schema takes."""
    took: list[float] = []
    every = max(1, count // NUM_SIZES)
    async with httpx.AsyncClient(timeout=600, headers=HEADERS) as client:
        for number in range(count + 1):
            if number % every == 0:
                sizes = ", ".join(f"{title} {mib:.0f}" for title, mib in held(server).items())
                lately = took[-100:]
                times = f"the last 100 took {1000 * statistics.median(lately):.1f} ms each" if lately else ""
                print(f"after {number} schemas: {sizes}; {times}", flush=True)
            fields = {f"field_{number}_{n}": {"type": "string", "pattern": "^[a-z]+[0-9]{2}$"} for n in range(8)}
            schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
            took.append((await answered(client, server.url, body_of({"json": schema})))[0])


def held(server: ServerProcess) -> dict[str, float]:
    """Memory by process in MiB; what several share counts in parts."""
    main = psutil.Process(server.process.pid)
    sizes: dict[str, float] = {}
    for process in [main, *main.children(recursive=True)]:
        title = (" ".join(process.cmdline()).strip() or "gone").removeprefix("pagemill: ")[:20]
        sizes[title] = sizes.get(title, 0) + process.memory_full_info().pss / 2**20
    return sizes


def main() -> None:
    """Prints tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--only", default="", help="part of a bomb's name")
    parser.add_argument("--schemas", type=int, default=0)
    arguments = parser.parse_args()
    flags = ("--max-model-len", 2048, "--max-num-seqs", 32, "--block-size", 16, "--num-gpu-blocks-override", NUM_BLOCKS)
    with running_server(arguments.model, *map(str, flags)) as server:
        for number in range(16 * NUM_BLOCKS // 2000):
            body = {"prompt": [number + 5] * 2000, "max_tokens": 1}
            httpx.post(server.url + PATH, json=body, timeout=600).raise_for_status()
        if arguments.turns:
            asyncio.run(one_by_one(server, arguments))
        if not arguments.only and not arguments.schemas:
            asyncio.run(together(server, arguments))
        if arguments.schemas:
            asyncio.run(many_schemas(server, arguments.schemas))


if __name__ == "__main__":
    main()

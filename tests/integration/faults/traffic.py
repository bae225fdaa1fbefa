"""Clients of the lab's server: they ask, watch the tokens come, and compare."""

import asyncio
import json
from dataclasses import dataclass, field

import httpx

from tests.integration.faults.lab import PATIENCE_S


@dataclass
class Answer:
    """What a client got. A token is a word of the text."""

    status: int = 0
    texts: dict = field(default_factory=dict)
    finish: dict = field(default_factory=dict)
    usage: dict | None = None
    error: dict | None = None
    headers: dict = field(default_factory=dict, compare=False)

    @property
    def num_tokens(self):
        return sum(len(text.split()) for text in self.texts.values())

    def take(self, body):
        self.error = body.get("error")
        for choice in body.get("choices", ()):
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            self.finish[index] = choice["finish_reason"] or self.finish.get(index)
        self.usage = body.get("usage") or self.usage


def asks(count, *, max_tokens=80, stream=None, first=3, **fields):
    """Requests that differ in their prompts; every other one streams, unless `stream` says otherwise."""
    return [
        {
            "prompt": [3 + (first * 31 + number * 7 + index * index) % 200 for index in range(4 + number % 23)],
            "max_tokens": max_tokens,
            "temperature": 0,
            "seed": number,  # what a scripted worker samples depends on it, too
            "ignore_eos": True,
            "stream": number % 2 == 0 if stream is None else stream,
            **fields,
        }
        for number in range(count)
    ]


def same(answers, others):
    """Whether two rounds of answers are equal, but for what the caches found."""
    return [_essence(answer) for answer in answers] == [_essence(other) for other in others]


def _essence(answer):
    usage = answer.usage and {name: value for name, value in answer.usage.items() if name.endswith("_tokens")}
    return answer.status, answer.texts, answer.finish, usage, answer.error


class Traffic:
    """Clients at work: `async with Traffic(server, asks(32)) as traffic`, then `until`, then `answers`. They come all
    at once, or one after the other every `gap_s` seconds. Nobody waits longer than `patience_s` for anything."""

    def __init__(self, server, requests, gap_s=0.0, patience_s=PATIENCE_S):
        self._gap_s = gap_s
        self._patience_s = patience_s
        self.url = server if isinstance(server, str) else server.url
        self.answers_so_far = [Answer() for _ in requests]
        self._requests = requests
        self._client = httpx.AsyncClient(
            timeout=patience_s, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
        )
        self.tasks = []

    async def __aenter__(self):
        self.tasks = [
            asyncio.create_task(self._ask(request, answer, number * self._gap_s))
            for number, (request, answer) in enumerate(zip(self._requests, self.answers_so_far, strict=True))
        ]
        return self

    async def __aexit__(self, *error):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self._client.aclose()

    async def until(self, num_tokens):
        """Until every stream has so many tokens, or is finished."""
        async with asyncio.timeout(self._patience_s):
            while any(
                request["stream"] and answer.num_tokens < num_tokens and not task.done()
                for request, answer, task in zip(self._requests, self.answers_so_far, self.tasks, strict=True)
            ):
                await asyncio.sleep(0.005)

    def states(self):
        """What became of each so far: for reports of failures."""
        errors = [task.done() and not task.cancelled() and task.exception() for task in self.tasks]
        return [
            (answer.status, answer.num_tokens, error) for answer, error in zip(self.answers_so_far, errors, strict=True)
        ]

    def is_running(self):
        return any(not task.done() for task in self.tasks)

    async def outcomes(self):
        """Answers, or what went wrong with the connection instead."""
        async with asyncio.timeout(self._patience_s):
            outcomes = await asyncio.gather(*self.tasks, return_exceptions=True)
        pairs = zip(outcomes, self.answers_so_far, strict=True)
        return [answer if outcome is None else outcome for outcome, answer in pairs]

    async def answers(self):
        """All of them, complete."""
        async with asyncio.timeout(self._patience_s):
            await asyncio.gather(*self.tasks)
        return self.answers_so_far

    async def _ask(self, request, answer, wait_s):
        await asyncio.sleep(wait_s)
        body = request | ({"stream_options": {"include_usage": True}} if request["stream"] else {})
        async with self._client.stream("POST", self.url + "/v1/completions", json=body) as response:
            answer.status, answer.headers = response.status_code, dict(response.headers)
            if not request["stream"] or response.status_code != 200:
                answer.take(json.loads(await response.aread()))
                return
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    answer.take(json.loads(line[6:]))
            assert line == "data: [DONE]" or not line, "a stream broke off"


async def ask_all(server, requests):
    """The answers of an undisturbed run."""
    async with Traffic(server, requests) as traffic:
        return await traffic.answers()

"""Engines behind a `FleetClient`, without processes or sockets."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from pagemill.errors import EngineDeadError
from pagemill.messages.engine_io import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    Finish,
    FinishReason,
)
from pagemill.messages.fleet import EngineDown, EngineUp, FleetEvent
from pagemill.messages.stats import SchedulerStats
from pagemill.serve.client.balancer import Balancer
from pagemill.serve.client.fleet import FleetClient
from tests.fakes.engine_setup import core_request
from tests.fakes.narrow import max_tokens_of

READY = EngineReady(max_model_len=64, vocab_size=100, num_blocks=10, block_size=4)


def next_token(request: EngineCoreRequest, index: int) -> int:
    """What a request's token `index` is, whoever computes it."""
    return (sum(request.prompt_token_ids) + 7 * index) % 97


class FakeEngine:
    """One connection to an engine: a token for every request and `outputs`, until it breaks."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.ready = READY
        self.num_engines = 1
        self.seen: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.running: dict[str, tuple[EngineCoreRequest, int]] = {}
        self.work = asyncio.Event()
        self.error: EngineDeadError | None = None
        self.closed = False
        self.paused = False

    async def add(self, request: EngineCoreRequest) -> None:
        if self.error:
            raise self.error
        self.seen.append(request)
        self.running[request.request_id] = (request, len(request.emitted_token_ids))
        self.work.set()

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def stats(self) -> dict[int, SchedulerStats]:
        return {self.index: SchedulerStats(num_running=len(self.running))}

    def problem(self) -> str | None:
        return str(self.error) if self.error else None

    def accepts(self) -> bool:
        return self.error is None

    def lose(self) -> None:
        self.error = EngineDeadError("boom")
        self.work.set()

    async def connected(self) -> None:
        if self.error:
            raise self.error

    async def outputs(self) -> list[EngineCoreOutputs]:
        while not self.running or self.paused:
            if self.error:
                raise self.error
            self.work.clear()
            await self.work.wait()
        if self.error:
            raise self.error
        await asyncio.sleep(0.002)
        if self.error:
            raise self.error
        rows, ended = EngineCoreOutputs(engine_index=self.index), []
        for request_id, (request, index) in list(self.running.items()):
            self.running[request_id] = (request, index + 1)
            token = next_token(request, index)
            if index + 1 == max_tokens_of(request):
                finish = Finish(FinishReason.LENGTH)
                ended.append(EngineCoreOutput(request_id=request_id, new_token_ids=[token], finish=finish))
                del self.running[request_id]
            else:
                rows.request_ids.append(request_id)
                rows.token_ids.append(token)
        stats = SchedulerStats(num_running=len(self.running))
        outputs = EngineCoreOutputs(
            engine_index=self.index, request_ids=rows.request_ids, token_ids=rows.token_ids, outputs=ended, stats=stats
        )
        return [outputs]

    async def call(self, name: str, *args: Any) -> bool:
        self.calls.append((name, args))
        return name != "refuse" or self.index != 1

    async def close(self) -> None:
        self.closed = True
        if not self.error:
            self.lose()


class Fleet:
    """A client, the latest connections to its engines by (index, incarnation), and what came out of it."""

    def __init__(self, num_engines: int = 1, balancer: Balancer | None = None) -> None:
        self.engines: dict[tuple[int, int], FakeEngine] = {}
        ups = [self.up(index) for index in range(num_engines)]
        self.client = FleetClient(self.connect, ups, balancer)
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, Finish] = {}

    @staticmethod
    def up(index: int, incarnation: int = 0) -> EngineUp:
        return EngineUp(index, incarnation, f"address-{index}-{incarnation}", READY)

    def tell(self, event: FleetEvent) -> None:
        """An event, applied at once."""
        self.client.notify(event)
        self.client.problem()

    def kill(self, index: int, incarnation: int = 0, reason: str = "boom") -> None:
        self.tell(EngineDown(index, incarnation, reason))

    def connect(self, event: EngineUp) -> FakeEngine:
        engine = self.engines[event.index, event.incarnation] = FakeEngine(event.index)
        return engine

    def __getitem__(self, key: tuple[int, int]) -> FakeEngine:
        return self.engines[key]

    async def read(self, steps: int | None = None) -> None:
        """Take outputs: so many, or until all that was asked for is finished."""
        while steps is None or steps:
            if steps is None and len(self.finish) == len(self.tokens):
                return
            batches = await asyncio.wait_for(self.client.outputs(), 60)
            for outputs in batches:
                for name, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
                    self.tokens[name].append(token)
                for output in outputs.outputs:
                    self.tokens[output.request_id] += output.new_token_ids
                    if output.finish is not None:
                        assert output.request_id not in self.finish
                        self.finish[output.request_id] = output.finish
            if steps is not None:
                steps = max(steps - len(batches), 0)

    async def add(self, *requests: EngineCoreRequest) -> None:
        for request in requests:
            self.tokens[request.request_id] = []
            await self.client.add(request)

    def check(self, *requests: EngineCoreRequest) -> None:
        for request in requests:
            expected = [next_token(request, index) for index in range(max_tokens_of(request))]
            assert self.tokens[request.request_id] == expected


def requests(count: int, max_tokens: int = 12) -> list[EngineCoreRequest]:
    return [core_request(f"r{index}", range(index, index + 5), max_tokens=max_tokens) for index in range(count)]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)

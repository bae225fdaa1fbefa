"""Scripted engines in processes of their own, several that look like one, and a front end for them without HTTP."""

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from pagemill.config.engine_config import EngineConfig
from pagemill.fleet.engines import EngineFleet
from pagemill.messages.engine_io import EngineCoreRequest, Finish
from pagemill.messages.step import SchedulerOutput
from pagemill.serve.client.balancer import Balancer, EngineLoad
from pagemill.serve.client.fleet import FleetClient
from pagemill.serve.client.zmq import ZmqClient
from pagemill.transport.handshake import Hello, Role
from tests.fakes.configs import model_config
from tests.fakes.engine_setup import core_request, engine_config, full
from tests.fakes.scripted_worker import ScriptedWorker, alone

WORKER = "tests.fakes.scripted_fleet:NotedWorker"
MAX_LEN = 1024
STEP_S = 0.002
PATIENCE_S = 120


def fleet_config(folder: Path, **settings: Any) -> EngineConfig:
    """A configuration whose workers leave notes in a folder."""
    config = engine_config(max_model_len=MAX_LEN, num_blocks=1024, **settings)
    return dataclasses.replace(config, model=model_config(max_model_len=MAX_LEN, download_dir=str(folder)))


class NotedWorker(ScriptedWorker):
    """Takes a moment for each step, and notes it in a file named after the process: r for requests, d for none."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self.notes = Path(str(config.model.download_dir)) / str(os.getpid())
        self.notes.touch()

    def execute_model(self, step: SchedulerOutput) -> None:
        self._note("r")
        super().execute_model(step)

    def execute_dummy_step(self) -> None:
        self._note("d")
        super().execute_dummy_step()

    def _note(self, kind: str) -> None:
        time.sleep(STEP_S)
        with self.notes.open("a") as file:
            file.write(kind)


class ByName(Balancer):
    """A balancer that sends the request "1-x" to engine 1, if that is there."""

    def choose(self, request: EngineCoreRequest, loads: Mapping[int, EngineLoad]) -> int:
        wanted = int(request.request_id.partition("-")[0])
        return wanted if wanted in loads else min(loads)


class FrontEnd:
    """Asks the engines of a deployment, and knows what they must answer."""

    def __init__(self, deployment: EngineFleet) -> None:
        self.deployment = deployment
        hello = Hello(secret=deployment.secret, role=Role.API_SERVER, index=0)
        self.client = FleetClient(lambda up: ZmqClient(up, hello), deployment.wait_ready(), ByName())
        self.requests: dict[str, EngineCoreRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, Finish] = {}

    async def __aenter__(self) -> Self:
        self.deployment.subscribe(self.client.notify)
        self.reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *error: object) -> None:
        self.deployment.unsubscribe(self.client.notify)
        self.reader.cancel()
        await asyncio.gather(self.reader, return_exceptions=True)
        await self.client.close()

    async def ask(self, name: str, prompt: int | Iterable[int] = 5, **params: Any) -> None:
        request = self.requests[name] = core_request(name, prompt, **params)
        self.tokens[name] = []
        await self.client.add(request)

    async def answered(self, *names: str) -> None:
        """Until these are finished, with the tokens of an engine that has nothing else to do."""
        await self.until(lambda: all(name in self.finish for name in names), names)
        for name in names:
            assert self.tokens[name] == alone(self.requests[name], [full()], 13, MAX_LEN)

    async def until(self, condition: Callable[[], object], what: object = "it") -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert not self.reader.done(), self.reader.exception()
            assert time.monotonic() < deadline, f"{what} did not happen within {PATIENCE_S} s"
            await asyncio.sleep(0.005)

    async def _read(self) -> None:
        while True:
            for outputs in await self.client.outputs():
                for name, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
                    self.tokens[name].append(token)
                for output in outputs.outputs:
                    self.tokens[output.request_id] += output.new_token_ids
                    if output.finish is not None:
                        self.finish[output.request_id] = output.finish

"""`LLMEngine`: requests that are added one by one, and steps that are asked for: for scripts with a loop of their own.
A synchronous face of `AsyncLLM`, as `LLM` is; it adds steps."""

import asyncio
import contextlib
import itertools
import weakref
from collections.abc import AsyncGenerator, Iterable
from operator import itemgetter
from typing import Any, Self

from pagemill.config.arguments import EngineArgs
from pagemill.errors import RequestError
from pagemill.launch import build_inproc
from pagemill.messages.core_api import CoreApi
from pagemill.messages.outputs import PoolingRequestOutput, RequestOutput
from pagemill.messages.pooling_params import PoolingParams
from pagemill.messages.prompts import Prompt
from pagemill.messages.sampling_params import SamplingParams
from pagemill.offline import OfflineControl, PrivateLoop
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.client.stepped import SteppedClient
from pagemill.serve.other_arguments import refuse_others
from pagemill.serve.processing.input_processor import RequestOptions
from pagemill.tokenizers.interface import Tokenizer

Output = RequestOutput | PoolingRequestOutput


class LLMEngine(OfflineControl):
    """A model that generates as long as `step` is called.

    Settings are those of `LLM`. Raises ConfigError or ModelError when the model cannot be loaded.
    """

    def __init__(self, engine_args: EngineArgs) -> None:
        clients: list[SteppedClient] = []

        def stepped(core: CoreApi) -> SteppedClient:
            clients.append(SteppedClient(core))
            return clients[-1]

        launched = build_inproc(engine_args, stepped)
        self.config = launched.config
        self._engine = launched.llm
        self._client = clients[0]
        self._loop = PrivateLoop()
        self._consumers: dict[str, asyncio.Task[None]] = {}
        """Id of an unfinished request -> what takes its outputs."""
        self._outputs: list[tuple[int, Output]] = []
        """Those that no step has returned, with the numbers of their requests."""
        self._count = itertools.count()
        self._errors: list[Exception] = []
        self._close = weakref.finalize(self, _shut_down, self._loop, self._engine, self._consumers)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: Any = None,
        stat_loggers: Any = None,
        enable_multiprocessing: bool = False,
    ) -> Self:
        """The same. The engine always runs in this process, whatever `enable_multiprocessing` says; nothing is
        reported, whatever the `usage_context`. Raises RequestError for `stat_loggers`, which plug-ins add."""
        if stat_loggers:
            raise RequestError("stat_loggers is not supported: plug-ins add them (docs/plug-ins.md)", "stat_loggers")
        return cls(engine_args)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the engine's model."""
        return self._engine.tokenizer

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Any = None,
        trace_headers: Any = None,
        priority: int = 0,
        **others: Any,
    ) -> str:
        """Check a request and queue it; its id, which outputs carry. `arrival_time` has no effect: requests of one
        priority run in the order in which they are added. Other arguments of vLLM have no counterpart; values that ask
        for nothing are accepted. Raises RequestError (a ValueError), also for an id that an unfinished request has."""
        given = {
            "lora_request": lora_request, "tokenization_kwargs": tokenization_kwargs, "trace_headers": trace_headers
        }  # fmt: skip
        refuse_others("LLMEngine.add_request", given | others)
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request_id={request_id!r} is not allowed: a text that is not empty", "request_id")
        if request_id in self._consumers:
            raise RequestError(f"request_id={request_id!r} is that of a request that is not finished", "request_id")
        self._loop.run(self._add(request_id, prompt, params, RequestOptions(priority=priority)))
        return request_id

    def abort_request(self, request_ids: str | Iterable[str], internal: bool = False) -> None:
        """End requests; no step returns anything more of them. Ids of others are passed over."""
        names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self._loop.run(self._abort([name for name in names if name in self._consumers]))

    def step(self) -> list[Output]:
        """Compute one step of the requests that are there, and return what is new of each in the order in which they
        were added: one output at most, which `SamplingParams.output_kind` shapes. Nothing where there is nothing to do.
        Raises EngineDeadError when the engine is gone, PagemillError for a request that it cannot complete."""
        if self._consumers and not self._outputs and not self._errors:
            self._loop.run(self._step())
        if self._errors:
            raise self._errors.pop(0)
        found = sorted(self._outputs, key=itemgetter(0))
        self._outputs = []
        return [output for _, output in found]

    def has_unfinished_requests(self) -> bool:
        """Whether a step has something to do or to tell."""
        return bool(self._consumers or self._outputs or self._errors)

    def get_num_unfinished_requests(self) -> int:
        """Requests that were added and have not finished."""
        return len(self._consumers)

    def shutdown(self) -> None:
        """Give the model's memory back. Called by itself at the end of the program."""
        self._close()

    async def _add(
        self, request_id: str, prompt: Prompt, params: SamplingParams | PoolingParams, options: RequestOptions
    ) -> None:
        """Until the core has the request, or it was refused."""
        prepared = await self._engine.prepare(prompt, params, options)
        pools = isinstance(params, PoolingParams)
        outputs: AsyncGenerator[Output, None]
        outputs = (
            self._engine.pool([prepared], [request_id]) if pools else self._engine.stream([prepared], [request_id])
        )
        before = self._client.num_added
        num_parts = params.n if isinstance(params, SamplingParams) else 1
        errors = len(self._errors)
        self._consumers[request_id] = asyncio.create_task(self._consume(request_id, outputs))
        await self._client.changes(
            lambda: self._client.num_added - before >= num_parts or request_id not in self._consumers
        )
        if len(self._errors) > errors:
            raise self._errors.pop()

    async def _consume(self, request_id: str, outputs: AsyncGenerator[Output, None]) -> None:
        number = next(self._count)
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    self._outputs.append((number, output))
                    if output.finished:
                        break
        except Exception as error:
            self._errors.append(error)
        finally:
            self._consumers.pop(request_id, None)
            await self._client.look()

    async def _step(self) -> None:
        """One step: until its outputs were given to those who take them, and those that finished are gone."""
        self._client.allow()
        await self._client.changes(lambda: self._client.is_idle or bool(self._errors) or not self._consumers)
        finished = {output.request_id for _, output in self._outputs if output.finished}
        await self._client.changes(lambda: finished.isdisjoint(self._consumers))

    async def _abort(self, request_ids: list[str]) -> None:
        tasks = [self._consumers[name] for name in request_ids]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._outputs = [(number, output) for number, output in self._outputs if output.request_id not in request_ids]


def _shut_down(loop: PrivateLoop, engine: AsyncLLM, consumers: dict[str, asyncio.Task[None]]) -> None:
    async def stop() -> None:
        tasks = list(consumers.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.shutdown()

    loop.close(stop())

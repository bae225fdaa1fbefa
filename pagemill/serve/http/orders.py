"""`Orders`: what an operator tells one API server, told to the others too. Does not know how it gets there."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from pagemill.errors import EngineDeadError
from pagemill.messages.fleet import AbortOrder, DrainOrder, FrontEndOrder
from pagemill.serve.async_llm import AsyncLLM
from pagemill.utils.tasks import TaskSet


class Orders:
    """Of one API server. Without others, nothing is told."""

    def __init__(self, engine: AsyncLLM, tell: Callable[[FrontEndOrder], None] = lambda order: None) -> None:
        """`tell` sends an order to all API servers, this one included, which has carried it out then: nothing comes of
        doing it again."""
        self.tell = tell
        self._engine = engine
        self._tasks = TaskSet()
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Carry out, in the body, what is told, on this event loop."""
        self._loop = asyncio.get_running_loop()
        try:
            yield
        finally:
            self._loop = None
            await self._tasks.cancel()

    def take(self, order: AbortOrder | DrainOrder) -> None:
        """An order that some API server was given. From any thread."""
        if isinstance(order, DrainOrder):
            self._engine.gate.holds_off = order.drains
            return
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: there is nothing left to be told
                loop.call_soon_threadsafe(lambda: self._tasks.spawn(self._abort(order)))

    async def _abort(self, order: AbortOrder) -> None:
        with contextlib.suppress(EngineDeadError):  # it has no requests any more
            await self._engine.abort(order.request_ids)

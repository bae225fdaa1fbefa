"""`InprocClient`: an engine core in this process, stepped on the event loop's thread or on a thread of its own.
Does not know what an engine core is made of."""

import asyncio
import gc
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from pagemill.errors import EngineDeadError
from pagemill.log import get_logger
from pagemill.messages.engine_io import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, Finish, FinishReason
from pagemill.messages.stats import SchedulerStats
from pagemill.serve.client.interface import CoreApi

logger = get_logger(__name__)


def add_or_report(core: CoreApi, request: EngineCoreRequest) -> list[EngineCoreOutputs]:
    """Add a request to a core. An exception there ends this request alone: it is the one output returned."""
    try:
        core.add(request)
    except Exception as error:
        logger.exception("the engine core refused request %s", request.request_id)
        core.abort([request.request_id])
        finish = Finish(FinishReason.ERROR, message=str(error))
        return [EngineCoreOutputs(outputs=[EngineCoreOutput(request_id=request.request_id, finish=finish)])]
    return []


class InlineRunner:
    """Steps the core when outputs are asked for, on the caller's thread. For offline batches: no thread, no queue."""

    def __init__(self, core: CoreApi) -> None:
        self._core = core
        self._ready: deque[EngineCoreOutputs] = deque()
        self._work = asyncio.Event()

    def add(self, request: EngineCoreRequest) -> None:
        """Add now."""
        self._ready.extend(add_or_report(self._core, request))
        self._work.set()

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort now."""
        self._core.abort(request_ids)

    def stats(self) -> SchedulerStats:
        """The core's, now."""
        return self._core.stats()

    async def outputs(self) -> EngineCoreOutputs:
        """Step until something comes out."""
        while not self._ready:
            if self._core.has_work():
                self._ready.extend(self._core.step())
                if not self._ready:
                    await asyncio.sleep(0)  # others have their turn; with outputs, they have it when these are read
            else:
                self._work.clear()
                await self._work.wait()
        return self._ready.popleft()

    async def call(self, name: str, *args: Any) -> Any:
        """Call now."""
        return self._core.call(name, *args)

    def stop(self) -> None:
        """Shut the core down."""
        self._core.shutdown()

    async def close(self) -> None:
        """Shut the core down."""
        self._core.shutdown()


def _nothing() -> None:
    """What most actions owe their caller when the core is dead."""


class _Action(NamedTuple):
    """Something for the core's thread to do."""

    run: Callable[[], None]
    refuse: Callable[[], None] = _nothing
    """Done instead, when the core is dead."""


class ThreadRunner:
    """Steps the core on a thread of its own. Everything for the core is queued and applied between steps, in order;
    the thread sleeps in the queue while the core has nothing to do."""

    def __init__(self, core: CoreApi) -> None:
        self._core = core
        self._inbox: SimpleQueue[_Action] = SimpleQueue()
        self._ready: deque[EngineCoreOutputs] = deque()
        self._news = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False
        self._error: EngineDeadError | None = None
        self._stats = SchedulerStats()
        self._thread = threading.Thread(target=self._run, name="pagemill-core", daemon=True)
        self._thread.start()

    def add(self, request: EngineCoreRequest) -> None:
        """Queue a request. Raises EngineDeadError."""
        self._check_alive()
        self._inbox.put(_Action(lambda: self._deliver(add_or_report(self._core, request))))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Queue an abort."""
        ids = list(request_ids)
        self._inbox.put(_Action(lambda: self._abort(ids)))

    def stats(self) -> SchedulerStats:
        """As of the last step or abort."""
        return self._stats

    async def outputs(self) -> EngineCoreOutputs:
        """Wait for the thread. Raises EngineDeadError once everything produced before the death was returned."""
        self._loop = asyncio.get_running_loop()
        while not self._ready:
            self._check_alive()
            self._news.clear()
            if not self._ready and self._error is None:  # the thread may have been faster than the line above
                await self._news.wait()
        return self._ready.popleft()

    async def call(self, name: str, *args: Any) -> Any:
        """Queue a call and wait for its result. Raises EngineDeadError, or what the call raised."""
        self._check_alive()
        loop = self._loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()

        def settle(value: Any, error: Exception | None) -> None:
            if result.done():
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(value)

        def run() -> None:
            try:
                value = self._core.call(name, *args)
            except Exception as raised:
                error = raised  # the name of an except clause is gone when the lambda runs
                self._on_loop(lambda: settle(None, error))
            else:
                self._on_loop(lambda: settle(value, None))

        self._inbox.put(_Action(run, refuse=lambda: self._on_loop(lambda: settle(None, self._error))))
        return await result

    def stop(self) -> None:
        """`close`, without an event loop: waits for the thread here."""
        self._closing = True
        self._inbox.put(_Action(_nothing))
        self._thread.join()
        self._core.shutdown()

    async def close(self) -> None:
        """Stop the thread after its current step, then shut the core down."""
        self._closing = True
        self._inbox.put(_Action(_nothing))
        await asyncio.to_thread(self._thread.join)
        self._core.shutdown()

    def _run(self) -> None:
        """The thread."""
        core = self._core
        try:
            while not self._closing:
                self._apply_inbox(wait=not core.has_work())
                if core.has_work() and not self._closing:
                    self._deliver(core.step())
        except Exception as error:
            logger.exception("the engine core died")
            self._error = EngineDeadError(f"the engine core died: {type(error).__name__}")
            self._on_loop(self._news.set)
            while not self._closing:  # callers already in the queue must hear of it
                self._inbox.get().refuse()

    def _apply_inbox(self, wait: bool) -> None:
        if wait:
            self._inbox.get().run()
        while True:
            try:
                action = self._inbox.get_nowait()
            except Empty:
                return
            action.run()

    def _abort(self, request_ids: Sequence[str]) -> None:
        self._core.abort(request_ids)
        self._stats = self._core.stats()

    def _deliver(self, outputs: Sequence[EngineCoreOutputs]) -> None:
        if outputs:
            self._stats = outputs[-1].stats or self._stats
            self._ready.extend(outputs)
            self._on_loop(self._news.set)

    def _on_loop(self, action: Callable[[], None]) -> None:
        loop = self._loop
        if loop is None:
            return  # nobody has waited yet; `outputs` looks before it waits
        try:
            loop.call_soon_threadsafe(action)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            logger.debug("outputs arrived after the event loop was closed")

    def _check_alive(self) -> None:
        if self._error is not None:
            raise self._error


class InprocClient:
    """`EngineClient` for a core in this process.

    inline=True: the core is stepped on the event loop's thread while somebody waits for outputs (offline batches).
    inline=False: the core has a thread of its own, so the event loop stays free for clients (the server).
    """

    num_engines = 1

    def __init__(self, core: CoreApi, inline: bool) -> None:
        self.ready = core.ready
        self._runner: InlineRunner | ThreadRunner = InlineRunner(core) if inline else ThreadRunner(core)
        self._closed = False
        self._error: EngineDeadError | None = None

    async def add(self, request: EngineCoreRequest) -> None:
        """Hand a request to the core. Raises EngineDeadError."""
        self._check_alive()
        self._runner.add(request)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests; a dead core has none."""
        if self._error is None and not self._closed:
            self._runner.abort(request_ids)

    async def outputs(self) -> EngineCoreOutputs:
        """The next batch of outputs. Raises EngineDeadError when a step failed."""
        self._check_alive()
        try:
            return await self._runner.outputs()
        except EngineDeadError as error:
            self._error = error
            raise
        except Exception as error:
            logger.exception("the engine core died")
            self._error = EngineDeadError(f"the engine core died: {type(error).__name__}")
            raise self._error from error

    async def call(self, name: str, *args: Any) -> Any:
        """A rare call by name."""
        self._check_alive()
        return await self._runner.call(name, *args)

    def stats(self) -> Mapping[int, SchedulerStats]:
        """Of the one engine, number 0."""
        return {0: self._runner.stats()}

    def problem(self) -> str | None:
        """Why the core cannot work, once it cannot."""
        if self._closed:
            return "the engine was shut down"
        return None if self._error is None else str(self._error)

    def accepts(self) -> bool:
        """Whether the core lives."""
        return self.problem() is None

    async def close(self) -> None:
        """Shut the core down; a second call does nothing."""
        if not self._closed:
            self._closed = True
            await self._runner.close()
            gc.unfreeze()  # what was frozen at its start (utils/collector.py) may be garbage now

    def stop(self) -> None:
        """`close`, where there is no event loop to wait on."""
        if not self._closed:
            self._closed = True
            self._runner.stop()
            gc.unfreeze()

    def _check_alive(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise EngineDeadError("the engine was shut down")

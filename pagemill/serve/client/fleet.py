"""`FleetClient`: several engines that may die and come back, as one that does not.

Does not know how an engine is reached (it is given a function that connects) or who starts one (it is told events).
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from pagemill.errors import EngineDeadError
from pagemill.log import get_logger
from pagemill.messages.engine_io import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    Finish,
    FinishReason,
)
from pagemill.messages.fleet import EngineDown, EngineLoadReport, EngineStalled, EngineUp, FleetEvent
from pagemill.messages.stats import SchedulerStats
from pagemill.serve.client.balancer import Balancer, EngineLoad, PrefixAffinity
from pagemill.serve.client.in_flight import InFlight, Ledger
from pagemill.serve.client.interface import EngineClient

logger = get_logger(__name__)

RESTARTING = "it is being restarted"
Connect = Callable[[EngineUp], EngineClient]


class Link:
    """The connection to one incarnation of one engine."""

    def __init__(self, event: EngineUp, client: EngineClient) -> None:
        self.index = event.index
        self.incarnation = event.incarnation
        self.client = client
        self.stats = SchedulerStats()
        """As last reported."""
        self.num_sent = 0
        """Requests sent since that report."""
        self.stalled = False
        self.reader: asyncio.Task[None] | None = None

    def note(self, stats: SchedulerStats) -> None:
        """The engine has reported."""
        self.stats = stats
        self.num_sent = 0


class FleetClient:
    """Implements `EngineClient`. A request whose engine died is sent to another, or to the next incarnation, with
    the tokens that were emitted already; whoever reads the outputs sees no seam.

    Everything happens on one event loop; `on_event` is called there. Raises EngineDeadError from everything once
    the last engine is gone for good.
    """

    def __init__(
        self,
        connect: Connect,
        ups: Iterable[EngineUp],
        balancer: Balancer | None = None,
        *,
        num_engines: int | None = None,
    ) -> None:
        """`ups` are the engines that run at the start, one event for each index; `num_engines` counts those that do
        not, too (default: there are none)."""
        first = list(ups)
        if not first:
            raise ValueError("there is no engine to connect to")
        self.ready: EngineReady = first[0].ready
        self.num_engines = len(first) if num_engines is None else num_engines
        self._connect = connect
        self._balancer = balancer or PrefixAffinity()
        self._links: dict[int, Link] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._early: deque[FleetEvent] = deque(first)
        """Events of other threads, and of before the event loop ran."""
        self._gone: dict[int, str] = {}
        """Engines that will not come back, and why."""
        self._restarting: dict[int, str] = {}
        """What is known of engines that will come back."""
        self._ledger = Ledger()
        self._ready_outputs: deque[EngineCoreOutputs] = deque()
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def add(self, request: EngineCoreRequest) -> None:
        """Send a request to an engine, or keep it until one is there."""
        self._check_alive()
        self._start_early()
        await self._send(self._ledger.add(request))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests, wherever they are."""
        by_engine: dict[int, list[str]] = {}
        for entry in self._ledger.remove(request_ids):
            if entry.engine is not None:
                by_engine.setdefault(entry.engine, []).append(entry.request.request_id)
        for index, ids in by_engine.items():
            link = self._links.get(index)
            if link is not None:
                with contextlib.suppress(EngineDeadError):  # then it has none of them any more
                    await link.client.abort(ids)
        self._send_waiting_soon()

    async def outputs(self) -> EngineCoreOutputs:
        """The next batch of any engine."""
        self._start_early()
        while not self._ready_outputs:
            self._check_alive()
            self._news.clear()
            await self._news.wait()
        return self._ready_outputs.popleft()

    async def call(self, name: str, *args: Any) -> Any:
        """Call every engine that is up; the result of the first, or False when any says False."""
        self._check_alive()
        self._start_early()
        links = list(self._links.values())
        if not links:
            raise EngineDeadError("no engine is up at the moment")
        results = await asyncio.gather(*(link.client.call(name, *args) for link in links))
        return False if any(result is False for result in results) else results[0]

    async def close(self) -> None:
        """Give up all connections. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._news.set()
        for link in self._links.values():
            await self._hang_up(link)
        self._links.clear()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stats(self) -> Mapping[int, SchedulerStats]:
        """Of every engine, also of those that are down: they do nothing."""
        self._start_early()
        nothing = SchedulerStats()
        return {
            index: self._links[index].stats if index in self._links else nothing for index in range(self.num_engines)
        }

    def problem(self) -> str | None:
        """What is wrong with the engines now; None when all of them work. Never waits."""
        self._start_early()
        down = [index for index in range(self.num_engines) if index not in self._links]
        if down:
            causes = [self._gone.get(index, self._restarting.get(index, RESTARTING)) for index in down]
            return "; ".join(f"engine {index} is down: {cause}" for index, cause in zip(down, causes, strict=True))
        stalled = [link.index for link in self._links.values() if link.stalled]
        return f"engine {stalled[0]} has work and finishes no step" if stalled else None

    def accepts(self) -> bool:
        """Whether a request would be worked on now."""
        self._start_early()
        return any(not link.stalled for link in self._links.values())

    def notify(self, event: FleetEvent) -> None:
        """Like `on_event`, from any thread, also before the event loop runs."""
        if self._loop is None and isinstance(event, EngineLoadReport):
            return  # several a second, for as long as nobody asks anything: they would pile up
        self._early.append(event)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._start_early)

    def on_event(self, event: FleetEvent) -> None:
        """Something about the engines changed. Called on the event loop."""
        if self._closed:
            return
        self._start_early()
        self._apply(event)

    def _apply(self, event: FleetEvent) -> None:
        match event:
            case EngineUp():
                self._start(event)
            case EngineDown():
                failed = event.num_failed_starts
                self._restarting[event.index] = RESTARTING + (f", {failed} attempts in a row failed" if failed else "")
                if event.final:
                    self._gone[event.index] = event.reason
                    self._news.set()
                link = self._links.get(event.index)
                if link is not None and link.incarnation == event.incarnation:
                    self._bury(link, event.reason, event.follows)
            case EngineStalled():
                link = self._links.get(event.index)
                if link is not None and link.incarnation == event.incarnation:
                    link.stalled = event.stalled
            case EngineLoadReport():
                link = self._links.get(event.index)
                if link is not None:
                    link.note(event.stats)
                    self._send_waiting_soon()  # an engine that took nothing for a while may do so now

    # --- engines --------------------------------------------------------------------------------------------------

    def _start_early(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        while self._early and not self._closed:
            self._apply(self._early.popleft())

    def _start(self, event: EngineUp) -> None:
        old = self._links.get(event.index)
        if old is not None and old.incarnation >= event.incarnation:
            return
        link = Link(event, self._connect(event))
        if old is not None:  # the news of its death was overtaken
            self._bury(old, "it was replaced")
        self._links[event.index] = link
        link.reader = asyncio.get_running_loop().create_task(self._read(link), name=f"engine-{event.index}")
        self._send_waiting_soon()

    async def _read(self, link: Link) -> None:
        try:
            while True:
                outputs = await link.client.outputs()
                if outputs.stats is not None:
                    link.note(outputs.stats)
                self._ledger.note(outputs)
                self._publish(msgspec.structs.replace(outputs, engine_index=link.index) if link.index else outputs)
                if self._ledger.trial_is_over():
                    self._send_waiting_soon()
        except EngineDeadError as error:
            self._bury(link, str(error))
        except Exception as error:  # nobody awaits this task: without it the requests would wait forever
            logger.exception("the outputs of engine %d cannot be read any more", link.index)
            self._bury(link, f"its outputs cannot be read: {type(error).__name__}")

    def _bury(self, link: Link, reason: str, follows: bool = False) -> None:
        """Take from an engine what it had, and find others for it. `follows`: its end was another's doing."""
        if self._links.get(link.index) is not link or self._closed:
            return
        del self._links[link.index]
        self._balancer.forget(link.index)
        num_lost = self._ledger.num_on(link.index)
        logger.warning("engine %d is gone (%s); %d requests go on elsewhere", link.index, reason, num_lost)
        failed = self._ledger.bury(link.index, reason, follows)
        if failed:
            self._publish(EngineCoreOutputs(engine_index=link.index, outputs=failed))
        self._spawn(self._hang_up(link))
        self._send_waiting_soon()

    async def _hang_up(self, link: Link) -> None:
        if link.reader is not None:
            link.reader.cancel()
            await asyncio.gather(link.reader, return_exceptions=True)
        await link.client.close()

    # --- requests -------------------------------------------------------------------------------------------------

    def _send_waiting_soon(self) -> None:
        """Send what waits for an engine, in a task of its own: the present one may be cancelled on the way."""
        if self._links and self._ledger.num_waiting and not self._closed:
            self._spawn(self._send_waiting())

    async def _send_waiting(self) -> None:
        for entry in self._ledger.to_send():
            await self._send(entry)

    async def _send(self, entry: InFlight) -> None:
        """Send one request, if it may be sent and there is an engine; a death meanwhile is noticed by the reader. What
        goes wrong with this request ends it, and no other."""
        if entry.engine is not None or entry.request.request_id not in self._ledger or not self._links:
            return
        loads = {index: self._load_of(link) for index, link in self._links.items() if not link.stalled}
        if not loads:
            loads = {index: self._load_of(link) for index, link in self._links.items()}
        try:
            link = self._links[self._balancer.choose(entry.request, loads)]
            link.num_sent += 1
            await self._hand_over(entry, link)
        except Exception as error:
            logger.exception("request %s could not be sent", entry.request.request_id)
            self._ledger.remove([entry.request.request_id])
            finish = Finish(FinishReason.ERROR, message=f"it could not be sent: {type(error).__name__}")
            output = EngineCoreOutput(request_id=entry.request.request_id, finish=finish)
            self._publish(EngineCoreOutputs(outputs=[output]))

    async def _hand_over(self, entry: InFlight, link: Link) -> None:
        try:
            await link.client.add(self._ledger.place(entry, link.index))
        except EngineDeadError as error:
            # Its death is known already, or will be; or it lives and took nothing, and then nobody else says so.
            if self._links.get(link.index) is link and entry.request.request_id in self._ledger:
                logger.warning("engine %d did not take a request: %s", link.index, error)
                self._ledger.take_back(entry)

    def _load_of(self, link: Link) -> EngineLoad:
        """What is known of an engine; its own figures lag behind what was sent to it just now."""
        known = link.stats
        running = known.num_running + link.num_sent
        own = self._ledger.num_on(link.index) - known.num_waiting
        return EngineLoad(max(running, own), known.num_waiting)

    def _publish(self, outputs: EngineCoreOutputs) -> None:
        self._ready_outputs.append(outputs)
        self._news.set()

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _check_alive(self) -> None:
        if self._closed:
            raise EngineDeadError("the engine was shut down")
        if len(self._gone) == self.num_engines:
            raise EngineDeadError("; ".join(self._gone[index] for index in sorted(self._gone)))

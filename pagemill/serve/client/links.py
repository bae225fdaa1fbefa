"""`EngineLinks`: a front end's connections to its engines, which come and go, and are made anew when they are lost.

Does not know how an engine is reached (it is given a function that connects), who starts one (it is told events), nor
what requests are: it tells a listener what comes in, and which engines can be asked.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from pagemill.errors import EngineDeadError
from pagemill.log import get_logger
from pagemill.messages.engine_io import EngineCoreOutputs
from pagemill.messages.fleet import EngineDown, EngineLoadReport, EngineStalled, EngineUp, FleetEvent
from pagemill.messages.stats import SchedulerStats
from pagemill.serve.client.interface import EngineConnection
from pagemill.utils.backoff import Backoff
from pagemill.utils.pacer import Pacer
from pagemill.utils.tasks import TaskSet

logger = get_logger(__name__)

Connect = Callable[[EngineUp], EngineConnection]
RESTARTING = "it is being restarted"


class LinksListener(Protocol):
    """The owner of the links. Every method is called on the event loop, and must not wait."""

    def received(self, engine: int, outputs: EngineCoreOutputs) -> None:
        """An engine has sent outputs."""

    def reachable(self, engine: int) -> None:
        """An engine is connected, for the first time or again; it has none of its former requests."""

    def disconnected(self, engine: int, reason: str) -> None:
        """The connection to an engine is lost, which may be alive: its requests must be sent again."""

    def died(self, engine: int, reason: str, follows: bool) -> None:
        """An engine is gone, with its requests. `follows`: it had to end because another did."""

    def may_take_more(self) -> None:
        """An engine has reported; one that took nothing for a while may do so now."""

    def ended(self) -> None:
        """An engine is gone for good, or the links were closed."""


class Link:
    """One incarnation of an engine, and the present connection to it."""

    def __init__(self, up: EngineUp, client: EngineConnection) -> None:
        self.up = up
        self.client = client
        self.stats = SchedulerStats()
        """As last reported."""
        self.num_sent = 0
        """Requests sent since that report."""
        self.stalled = False
        self.lost = False
        """Whether the connection is lost, and not made again yet."""
        self.keeper: asyncio.Task[None] | None = None

    @property
    def index(self) -> int:
        """The number of the engine."""
        return self.up.index

    def note(self, stats: SchedulerStats) -> None:
        """The engine has reported."""
        self.stats = stats
        self.num_sent = 0


class EngineLinks:
    """The connections to all engines. Every method is for one event loop, except `notify`."""

    def __init__(self, connect: Connect, ups: Iterable[EngineUp], num_engines: int, listener: LinksListener) -> None:
        self.num_engines = num_engines
        self._connect = connect
        self._listener = listener
        self._links: dict[int, Link] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending: deque[FleetEvent] = deque(ups)
        """Events of other threads, and of before the event loop ran."""
        self._gone: dict[int, str] = {}
        """Engines that are gone for good, and why."""
        self._restarting: dict[int, str] = {}
        """Engines that are down for now, and what is known about their return."""
        self._tasks = TaskSet()
        self._closed = False

    def notify(self, event: FleetEvent) -> None:
        """Apply an event of the fleet, soon. From any thread, also before the event loop runs."""
        if self._loop is None and isinstance(event, EngineLoadReport):
            return  # several a second, for as long as nobody asks anything: they would pile up
        self._pending.append(event)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self.apply_pending)

    def apply_pending(self) -> None:
        """Apply the events of other threads."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        while self._pending and not self._closed:
            self._apply(self._pending.popleft())

    def open(self) -> list[Link]:
        """The links over which requests can be sent. One whose first connection is still being made is among them."""
        return [link for link in self._links.values() if not link.lost]

    def get(self, index: int) -> Link | None:
        """The link to an engine that can be asked."""
        link = self._links.get(index)
        return None if link is None or link.lost else link

    def stats(self) -> Mapping[int, SchedulerStats]:
        """The statistics of every engine; those of one that is down are zeros."""
        nothing = SchedulerStats()
        return {
            index: self._links[index].stats if index in self._links else nothing for index in range(self.num_engines)
        }

    def problem(self) -> str | None:
        """What is wrong with the engines now; None when all of them work."""
        found = [self._why_unreached(index) for index in range(self.num_engines) if self.get(index) is None]
        if found:
            return "; ".join(found)
        stalled = [link.index for link in self._links.values() if link.stalled]
        return f"engine {stalled[0]} has work and finishes no step" if stalled else None

    def check_alive(self) -> None:
        """Raise EngineDeadError when no engine will be there any more."""
        if self._closed:
            raise EngineDeadError("the engine was shut down")
        if len(self._gone) == self.num_engines:
            raise EngineDeadError("; ".join(self._gone[index] for index in sorted(self._gone)))

    def give_up(self, link: Link, reason: str) -> None:
        """Make a connection anew over which something could not be sent: the engine forgets all that it was asked
        over it, and the listener sends again what it needs."""
        if self._links.get(link.index) is link and not link.lost and not self._closed:
            self._lose(link, reason)
            self._tasks.spawn(link.client.close())

    async def close(self) -> None:
        """Close all connections. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._listener.ended()
        for link in self._links.values():
            await _close(link)
        self._links.clear()
        await self._tasks.cancel()

    def _why_unreached(self, index: int) -> str:
        if index in self._links:
            return f"engine {index} cannot be reached: the connection is being made again"
        return f"engine {index} is down: {self._gone.get(index, self._restarting.get(index, RESTARTING))}"

    def _apply(self, event: FleetEvent) -> None:
        link = self._links.get(event.index)
        match event:
            case EngineUp():
                self._start(event)
            case EngineDown():
                self._restarting[event.index] = _describe_outage(event)
                if event.final:
                    self._gone[event.index] = event.reason
                    self._listener.ended()
                if link is not None and link.up.incarnation == event.incarnation:
                    if event.awaits_node and not link.lost:  # no request did that
                        self._listener.disconnected(link.index, event.reason)
                    self._drop(link, event.reason, event.follows or event.awaits_node)
            case EngineStalled():
                if link is not None and link.up.incarnation == event.incarnation:
                    link.stalled = event.stalled
            case EngineLoadReport():
                if link is not None:
                    link.note(event.stats)
                    self._listener.may_take_more()

    def _start(self, up: EngineUp) -> None:
        old = self._links.get(up.index)
        if old is not None and old.up.incarnation >= up.incarnation:
            return
        link = Link(up, self._connect(up))
        if old is not None:  # the event of its end has not come yet
            self._drop(old, "it was replaced")
        self._links[up.index] = link
        link.keeper = asyncio.get_running_loop().create_task(self._keep(link), name=f"engine-{up.index}")
        self._listener.reachable(up.index)

    def _drop(self, link: Link, reason: str, follows: bool = False) -> None:
        del self._links[link.index]
        self._listener.died(link.index, reason, follows)
        self._tasks.spawn(_close(link))

    async def _keep(self, link: Link) -> None:
        """Read from an engine, and connect again whenever the connection is lost, until the task is cancelled."""
        backoff = Backoff()
        while True:
            try:
                await link.client.connected()
                if link.lost:
                    link.lost = False
                    logger.info("engine %d is connected again", link.index)
                    self._listener.reachable(link.index)
                await self._read(link, backoff)
            except EngineDeadError as error:
                self._lose(link, str(error))
            except Exception as error:  # nobody awaits this task: without it the requests would wait forever
                logger.exception("the outputs of engine %d cannot be used", link.index)
                self._lose(link, f"its outputs cannot be used: {type(error).__name__}")
            await link.client.close()
            await asyncio.sleep(backoff.next_s())
            link.client = self._connect(link.up)

    async def _read(self, link: Link, backoff: Backoff) -> None:
        """Pass on what an engine sends until the connection is lost. Others have their turn also while the engine is
        faster than its answers are read."""
        pacer = Pacer()
        while not link.lost:
            batches = await link.client.outputs()
            if link.lost or self._links.get(link.index) is not link:
                return  # it came too late: somebody else has the requests
            for outputs in batches:
                if outputs.stats is not None:
                    link.note(outputs.stats)
                self._listener.received(link.index, outputs)
            backoff.reset()
            await pacer.pause()

    def _lose(self, link: Link, reason: str) -> None:
        if link.lost or self._links.get(link.index) is not link or self._closed:
            logger.debug("engine %d: %s", link.index, reason)
            return
        link.lost = True
        logger.warning("engine %d cannot be reached (%s); connecting again", link.index, reason)
        self._listener.disconnected(link.index, reason)


async def _close(link: Link) -> None:
    if link.keeper is not None:
        link.keeper.cancel()
        await asyncio.gather(link.keeper, return_exceptions=True)
    await link.client.close()


def _describe_outage(event: EngineDown) -> str:
    """What is known about an engine that is down, for health checks."""
    if event.awaits_node:
        return "its node cannot be reached"
    failed = event.num_failed_starts
    return RESTARTING + (f", {failed} attempts in a row failed" if failed else "")

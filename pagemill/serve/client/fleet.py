"""`FleetClient`: several engines that may die and come back, as one that does not.

Keeps what every engine was asked, and has it sent again when the engine is gone, or the connection to it. How
connections are made and kept is known to links.py, who gets what to sending.py.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from pagemill.errors import EngineDeadError
from pagemill.log import get_logger
from pagemill.messages.engine_io import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, EngineReady
from pagemill.messages.fleet import EngineUp, FleetEvent, HaltOrder
from pagemill.messages.stats import SchedulerStats
from pagemill.serve.client.balancer import Balancer, PrefixAffinity
from pagemill.serve.client.in_flight import InFlightRequests
from pagemill.serve.client.links import Connect, EngineLinks, Link
from pagemill.serve.client.sending import RequestSender
from pagemill.utils.tasks import TaskSet

logger = get_logger(__name__)


RESUME = "resume"
HALTS = ("pause", "hold", RESUME)
"""Calls that change whether an engine works on requests."""


class FleetClient:
    """Implements `EngineClient`. A request whose engine died, or cannot be reached, is sent to another, or to the same
    one again, with the tokens that were emitted already; whoever reads the outputs sees no seam.

    Everything happens on one event loop, but for `notify`. Raises EngineDeadError from everything once the last engine
    is gone for good.
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
        self._balancer = balancer or PrefixAffinity()
        self._in_flight = InFlightRequests()
        self._links = EngineLinks(connect, first, self.num_engines, self)
        self._sender = RequestSender(self._links, self._in_flight, self._balancer, self._publish)
        self._ready_outputs: list[EngineCoreOutputs] = []
        self._wakeup = asyncio.Event()
        self._halt = RESUME
        """The last of HALTS that the engines were told."""
        self._tasks = TaskSet()

    async def add(self, request: EngineCoreRequest) -> None:
        """Send a request to an engine, or keep it until one is there."""
        self._links.check_alive()
        self._links.apply_pending()
        await self._sender.add(request)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests, wherever they are. Whoever is cancelled while he waits here has stopped them, too."""
        await self._sender.abort(request_ids)

    async def outputs(self) -> list[EngineCoreOutputs]:
        """The batches of all engines, in the order in which they came."""
        self._links.apply_pending()
        while not self._ready_outputs:
            self._links.check_alive()
            self._wakeup.clear()
            await self._wakeup.wait()
        outputs, self._ready_outputs = self._ready_outputs, []
        return outputs

    async def call(self, name: str, *args: Any) -> Any:
        """Call every engine that can be reached; the result of the first, or False when any says False. One that comes
        later is told to halt as the others were, before it gets a request."""
        self._links.check_alive()
        self._links.apply_pending()
        if name in HALTS:
            self._halt = name
        links = self._links.open()
        if not links:
            raise EngineDeadError("no engine can be reached at the moment")
        results = await asyncio.gather(*(link.client.call(name, *args) for link in links))
        return False if any(result is False for result in results) else results[0]

    async def close(self) -> None:
        """Give up all connections. A second call does nothing."""
        await self._links.close()
        await self._sender.close()
        await self._tasks.cancel()

    def stats(self) -> Mapping[int, SchedulerStats]:
        """Of every engine, also of those that are down: they do nothing."""
        self._links.apply_pending()
        return self._links.stats()

    def problem(self) -> str | None:
        """What is wrong with the engines now; None when all of them work. Never waits."""
        self._links.apply_pending()
        return self._links.problem()

    def accepts(self) -> bool:
        """Whether a request would be worked on now."""
        self._links.apply_pending()
        return any(not link.stalled for link in self._links.open())

    def notify(self, event: FleetEvent | HaltOrder) -> None:
        """Something about the engines changed, or another front end has told them to halt. From any thread, also before
        the event loop runs."""
        if isinstance(event, HaltOrder):
            self._halt = event.call
        else:
            self._links.notify(event)

    # --- called by the links --------------------------------------------------------------------------------------

    def received(self, engine: int, outputs: EngineCoreOutputs) -> None:
        """Remember what came, and pass it on."""
        self._in_flight.note(outputs)
        self._publish(msgspec.structs.replace(outputs, engine_index=engine) if engine else outputs)
        if self._in_flight.probation_is_over():
            self._sender.send_waiting_soon()

    def reachable(self, engine: int) -> None:
        """An engine can be asked: send it requests that wait for one."""
        self._in_flight.reconnect(engine)
        if self._halt != RESUME and (link := self._links.get(engine)) is not None:
            self._tasks.spawn(self._halt_too(link, self._halt))  # first: messages arrive as they are sent
        self._sender.send_waiting_soon()

    def disconnected(self, engine: int, reason: str) -> None:
        """Take from an engine what it had, and find others for it, or wait until it is connected again."""
        self._forget(engine, self._in_flight.disconnect(engine, reason))

    def died(self, engine: int, reason: str, follows: bool) -> None:
        """Take from an engine what it had, and find others for it."""
        num_lost = self._in_flight.num_on(engine)
        logger.warning("engine %d is gone (%s); %d requests go on elsewhere", engine, reason, num_lost)
        self._forget(engine, self._in_flight.engine_died(engine, reason, follows))

    def may_take_more(self) -> None:
        """An engine has reported its load: send requests that no engine took before."""
        self._sender.send_waiting_soon()

    def ended(self) -> None:
        """Let whoever waits for outputs look again."""
        self._wakeup.set()

    def _forget(self, engine: int, failed: list[EngineCoreOutput]) -> None:
        self._balancer.forget(engine)
        if failed:
            self._publish(EngineCoreOutputs(engine_index=engine, outputs=failed))
        self._sender.send_waiting_soon()

    async def _halt_too(self, link: Link, call: str) -> None:
        with contextlib.suppress(EngineDeadError):  # it is told again when it is back
            await link.client.call(call)

    def _publish(self, outputs: EngineCoreOutputs) -> None:
        self._ready_outputs.append(outputs)
        self._wakeup.set()

"""`RequestSender`: chooses an engine for each request, sends it there, and stops it there.

Does not know what becomes of the answers, nor how connections are made and kept.
"""

import asyncio
from collections.abc import Callable, Sequence

from pagemill.errors import EngineDeadError
from pagemill.log import get_logger
from pagemill.messages.engine_io import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from pagemill.serve.client.balancer import Balancer, EngineLoad
from pagemill.serve.client.in_flight import InFlight, InFlightRequests
from pagemill.serve.client.links import EngineLinks, Link
from pagemill.utils.tasks import TaskSet

logger = get_logger(__name__)


class RequestSender:
    """`publish` is given the end of a request that cannot be sent."""

    def __init__(
        self,
        links: EngineLinks,
        in_flight: InFlightRequests,
        balancer: Balancer,
        publish: Callable[[EngineCoreOutputs], None],
    ) -> None:
        self._links = links
        self._in_flight = in_flight
        self._balancer = balancer
        self._publish = publish
        self._tasks = TaskSet()

    async def add(self, request: EngineCoreRequest) -> None:
        """Send a request to an engine, or keep it until one is there."""
        await self._send(self._in_flight.add(request))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests, wherever they are. Whoever is cancelled while he waits here has stopped them, too."""
        by_engine: dict[int, list[str]] = {}
        for entry in self._in_flight.remove(request_ids):
            if entry.engine is not None:
                by_engine.setdefault(entry.engine, []).append(entry.request.request_id)
        telling = [self._tasks.spawn(self._tell_to_abort(index, ids)) for index, ids in by_engine.items()]
        self.send_waiting_soon()
        if telling:
            await asyncio.shield(asyncio.gather(*telling))

    async def close(self) -> None:
        """Cancel what is being sent; requests that are not with an engine yet stay where they are."""
        await self._tasks.cancel()

    def send_waiting_soon(self) -> None:
        """Send what waits for an engine, in a task of its own: the present one may be cancelled on the way."""
        if self._in_flight.num_waiting and self._links.open():
            self._tasks.spawn(self._send_waiting())

    async def _send_waiting(self) -> None:
        for entry in self._in_flight.to_send():
            await self._send(entry)

    async def _send(self, entry: InFlight) -> None:
        """Send one request, if it may be sent and there is an engine; a death meanwhile is noticed by the links. What
        goes wrong with this request ends it, and no other."""
        links = {link.index: link for link in self._links.open()}
        if entry.engine is not None or entry.request.request_id not in self._in_flight or not links:
            return
        loads = {index: self._load_of(link) for index, link in links.items() if not link.stalled}
        if not loads:
            loads = {index: self._load_of(link) for index, link in links.items()}
        try:
            link = links[self._balancer.choose(entry.request, loads)]
            link.num_sent += 1
            await self._hand_over(entry, link)
        except Exception as error:
            logger.exception("request %s could not be sent", entry.request.request_id)
            self._in_flight.remove([entry.request.request_id])
            message = f"it could not be sent: {type(error).__name__}"
            output = EngineCoreOutput.failed(entry.request.request_id, message)
            self._publish(EngineCoreOutputs(outputs=[output]))

    async def _hand_over(self, entry: InFlight, link: Link) -> None:
        request = self._in_flight.place(entry, link.index)
        placement = entry.num_placed
        try:
            await link.client.add(request)
        except EngineDeadError as error:
            # The links know of its death already, or will; or it lives and took nothing.
            if entry.num_placed == placement and entry.request.request_id in self._in_flight:
                logger.warning("engine %d did not take a request: %s", link.index, error)
                self._in_flight.unplace(entry)

    async def _tell_to_abort(self, index: int, request_ids: list[str]) -> None:
        """Tell an engine to abort requests. If it cannot be told, its connection is made again: it then aborts
        everything."""
        link = self._links.get(index)
        if link is None:  # then it has none of them any more
            return
        try:
            await link.client.abort(request_ids)
        except EngineDeadError as error:
            self._links.give_up(link, f"it could not be told of an abort: {error}")

    def _load_of(self, link: Link) -> EngineLoad:
        """What is known of an engine; its own figures lag behind what was sent to it just now."""
        known = link.stats
        running = known.num_running + link.num_sent
        own = self._in_flight.num_on(link.index) - known.num_waiting
        return EngineLoad(max(running, own), known.num_waiting)

"""`WaveCoordinator`: lets data-parallel engines whose expert layers exchange tokens step together, in waves.

Does not know what a step does, nor who starts the engines: events tell it which are up, and it connects to those.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable

from pagemill.errors import HandshakeError, PeerGoneError, TransportError
from pagemill.log import get_logger
from pagemill.messages.core_calls import EngineCall, EngineReport
from pagemill.messages.fleet import EngineDown, EngineUp, FleetEvent
from pagemill.messages.waves import JoinWaves, RoundDecision, RoundDone, StartWave, WaveOrder, WaveReport, WaveStarted
from pagemill.transport.async_client import AsyncClientSocket
from pagemill.transport.codec import Codec
from pagemill.transport.handshake import Hello, Role
from pagemill.transport.liveness import Introductions
from pagemill.utils.backoff import Backoff

logger = get_logger(__name__)

CONNECT_S = 10.0


class WaveState:
    """Which engines take part in the present wave, and what they have reported of its present round.

    An engine may go, and another may come, at any time: the decision on a round needs those that are there.
    """

    def __init__(self) -> None:
        self._members: set[int] = set()
        self._reports: dict[int, bool] = {}
        """Engine -> whether it had work at the end of the present round."""
        self._wave = 0
        self._round: int | None = None
        """The round whose reports come in; None: all engines pause, or will after the round that they are in."""

    def join(self, engine: int) -> JoinWaves:
        """An engine is up: add it, and return where it begins."""
        self._members.add(engine)
        self._reports.pop(engine, None)
        return JoinWaves(self._wave, self._round)

    def resume(self) -> JoinWaves:
        """Where an engine continues that has been a member all the time, over a connection that was made again."""
        return JoinWaves(self._wave, self._round, resumes=True)

    def leave(self, engine: int) -> WaveOrder | None:
        """An engine is gone: remove it, and return the order for the others that follows."""
        self._members.discard(engine)
        self._reports.pop(engine, None)
        if not self._members:
            self._round = None
        return self._decision()

    def on_report(self, engine: int, report: WaveReport) -> WaveOrder | None:
        """The order for all engines that follows from a report. One of a wave or round of the past changes nothing."""
        match report:
            case WaveStarted(wave) if wave == self._wave + 1:
                self._wave = wave
                self._round = 0
                self._reports.clear()
                return StartWave(wave)
            case RoundDone(wave, number, has_work) if (wave, number) == (self._wave, self._round):
                if engine in self._members:
                    self._reports[engine] = has_work
                    return self._decision()
        return None

    def _decision(self) -> RoundDecision | None:
        number = self._round
        if number is None or len(self._reports) < len(self._members):
            return None
        go_on = any(self._reports.values())
        self._reports.clear()
        self._round = number + 1 if go_on else None
        return RoundDecision(self._wave, number, go_on)


class WaveCoordinator:
    """Connects to every engine that is up, on a thread with an event loop of its own, until `close`."""

    def __init__(self, secret: str) -> None:
        self._hello = Hello(secret=secret, role=Role.COORDINATOR, index=0)
        self._state = WaveState()
        self._orders: Codec[EngineCall] = Codec(EngineCall)
        self._reports: Codec[EngineReport] = Codec(EngineReport)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._members: dict[int, AsyncClientSocket] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="pagemill-waves", daemon=True)
        self._thread.start()

    def notify(self, event: FleetEvent) -> None:
        """Follow the engine of an EngineUp, drop that of an EngineDown. From any thread, never blocks."""
        if isinstance(event, (EngineUp, EngineDown)):
            self._call(lambda: self._apply(event))

    def close(self) -> None:
        """Close all connections and end the thread. A second call does nothing."""
        self._call(self._loop.stop)
        self._thread.join()

    def _call(self, action: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(action)

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self._loop.close()

    def _apply(self, event: EngineUp | EngineDown) -> None:
        former = self._tasks.pop(event.index, None)
        if former is not None:
            former.cancel()
        if isinstance(event, EngineUp):
            self._tasks[event.index] = self._loop.create_task(self._follow(event, former))

    async def _follow(self, up: EngineUp, former: "asyncio.Task[None] | None") -> None:
        """Coordinate one incarnation of an engine until this task is cancelled. A lost connection is made anew; the
        others do without the engine only when it is gone."""
        if former is not None:
            await asyncio.gather(former, return_exceptions=True)
        introductions = Introductions(self._hello)
        backoff = Backoff()
        has_joined = False
        try:
            while True:
                try:
                    socket = await AsyncClientSocket.connect(up.address, introductions.next(), timeout_s=CONNECT_S)
                    backoff.reset()
                    greeting = self._state.resume() if has_joined else self._state.join(up.index)
                    has_joined = True
                    await self._coordinate(up.index, socket, greeting)
                except HandshakeError as error:
                    logger.warning("engine %d cannot be coordinated yet: %s", up.index, error)
                except Exception:  # nobody awaits this task, and without it the engine takes no step
                    logger.exception("engine %d could not be coordinated; trying again", up.index)
                await asyncio.sleep(backoff.next_s())
        finally:
            if has_joined:
                await self._broadcast(self._state.leave(up.index))

    async def _coordinate(self, engine: int, socket: AsyncClientSocket, greeting: JoinWaves) -> None:
        """Exchange reports and orders over one connection until it ends."""
        try:
            self._members[engine] = socket
            await self._send(socket, greeting)
            while True:
                await self._on_message(engine, await socket.receive())
        except PeerGoneError as error:
            logger.warning("the connection to engine %d is lost: %s; it is made again", engine, error)
        finally:
            del self._members[engine]
            socket.close()

    async def _on_message(self, engine: int, frames: "list[bytes | bytearray | memoryview]") -> None:
        try:
            report = self._reports.decode(frames)
        except TransportError as error:
            logger.warning("dropped a message of engine %d: %s", engine, error)
            return
        if isinstance(report, WaveReport):
            await self._broadcast(self._state.on_report(engine, report))

    async def _broadcast(self, order: WaveOrder | None) -> None:
        if order is None:
            return
        logger.debug("%s", order)
        for socket in list(self._members.values()):
            with contextlib.suppress(PeerGoneError):  # `_coordinate` of that engine sees it too
                await self._send(socket, order)

    async def _send(self, socket: AsyncClientSocket, order: WaveOrder) -> None:
        """Send one order. It is on its way when this returns, so that orders stay in order; they are few and small."""
        await socket.send(self._orders.encode(order))

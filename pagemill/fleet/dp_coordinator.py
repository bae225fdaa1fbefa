"""`WaveCoordinator`: lets data-parallel engines whose expert layers exchange tokens step together, in waves.

Does not know what a step does, nor who starts the engines: it is told of each that comes and goes, and connects to it.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable

from pagemill.errors import HandshakeError, PeerGoneError, TransportError
from pagemill.log import get_logger
from pagemill.messages.core_calls import EngineCall, EngineReport
from pagemill.messages.fleet import EngineDown, EngineUp, FleetEvent
from pagemill.messages.waves import JoinWaves, RoundDecision, RoundDone, StartWave, WaveNews, WaveOrder, WaveStarted
from pagemill.transport.codec import Codec
from pagemill.transport.handshake import Hello, Role
from pagemill.transport.liveness import Introductions, Pauses
from pagemill.transport.sockets import AsyncClientSocket

logger = get_logger(__name__)

CONNECT_S = 10.0


class WaveState:
    """What is known of the waves: which engines take part, and what they reported of the present round.

    An engine may go, and another may come, at any time: the verdict on a round needs those that are there.
    """

    def __init__(self) -> None:
        self._members: set[int] = set()
        self._reports: dict[int, bool] = {}
        """Engine -> whether it had work at the end of the present round."""
        self._wave = 0
        self._round: int | None = None
        """The round whose reports come in; None: all engines pause, or will after the round that they are in."""

    def join(self, engine: int) -> JoinWaves:
        """An engine comes; where it begins."""
        self._members.add(engine)
        self._reports.pop(engine, None)
        return JoinWaves(self._wave, self._round)

    def resume(self) -> JoinWaves:
        """An engine is connected again, and was a member all the time: nothing was decided without it."""
        return JoinWaves(self._wave, self._round, resumes=True)

    def leave(self, engine: int) -> WaveOrder | None:
        """An engine is gone; what to tell the others."""
        self._members.discard(engine)
        self._reports.pop(engine, None)
        if not self._members:
            self._round = None
        return self._verdict()

    def hear(self, engine: int, news: WaveNews) -> WaveOrder | None:
        """What to tell all engines because of some news. News of a wave or round of the past change nothing."""
        match news:
            case WaveStarted(wave) if wave == self._wave + 1:
                self._wave, self._round = wave, 0
                self._reports.clear()
                return StartWave(wave)
            case RoundDone(wave, number, has_work) if (wave, number) == (self._wave, self._round):
                if engine in self._members:
                    self._reports[engine] = has_work
                    return self._verdict()
        return None

    def _verdict(self) -> RoundDecision | None:
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
        self._book = WaveState()
        self._orders: Codec[EngineCall] = Codec(EngineCall)
        self._reports: Codec[EngineReport] = Codec(EngineReport)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._members: dict[int, AsyncClientSocket] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="pagemill-waves", daemon=True)
        self._thread.start()

    def notify(self, event: FleetEvent) -> None:
        """Something about the engines changed. From any thread, never blocks."""
        if isinstance(event, (EngineUp, EngineDown)):
            self._call(lambda: self._apply(event))

    def close(self) -> None:
        """Hang up. A second call does nothing."""
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
        introductions, pauses, has_joined = Introductions(self._hello), Pauses(), False
        try:
            while True:
                try:
                    socket = await AsyncClientSocket.connect(up.address, introductions.next(), timeout_s=CONNECT_S)
                    pauses.reset()
                    first_word = self._book.resume() if has_joined else self._book.join(up.index)
                    has_joined = True
                    await self._coordinate(up.index, socket, first_word)
                except HandshakeError as error:
                    logger.warning("engine %d cannot be coordinated yet: %s", up.index, error)
                except Exception:  # nobody awaits this task, and without it the engine takes no step
                    logger.exception("engine %d could not be coordinated; trying again", up.index)
                await asyncio.sleep(pauses.next())
        finally:
            if has_joined:
                await self._broadcast(self._book.leave(up.index))

    async def _coordinate(self, engine: int, socket: AsyncClientSocket, first_word: JoinWaves) -> None:
        """Until the connection ends."""
        try:
            self._members[engine] = socket
            await self._send(socket, first_word)
            while True:
                await self._hear(engine, await socket.receive())
        except PeerGoneError as error:
            logger.warning("the connection to engine %d is lost: %s; it is made again", engine, error)
        finally:
            del self._members[engine]
            socket.close()

    async def _hear(self, engine: int, frames: "list[bytes | bytearray | memoryview]") -> None:
        try:
            news = self._reports.decode(frames)
        except TransportError as error:
            logger.warning("dropped a message of engine %d: %s", engine, error)
            return
        if isinstance(news, WaveNews):
            await self._broadcast(self._book.hear(engine, news))

    async def _broadcast(self, order: WaveOrder | None) -> None:
        if order is None:
            return
        logger.debug("%s", order)
        for socket in list(self._members.values()):
            with contextlib.suppress(PeerGoneError):  # who is in charge of that engine hears of it too
                await self._send(socket, order)

    async def _send(self, socket: AsyncClientSocket, order: WaveOrder) -> None:
        """Orders are few and small: they are on their way when this returns, so that they stay in order."""
        await socket.send(self._orders.encode(order))

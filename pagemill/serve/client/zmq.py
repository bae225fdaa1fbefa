"""`ZmqClient`: one incarnation of one engine core, in another process.

Does not know what happens when that process dies: whoever made it is told by others, and closes it.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from pagemill.errors import EngineDeadError, HandshakeError, PeerGoneError, TransportError
from pagemill.log import get_logger
from pagemill.messages.core_calls import (
    AbortRequests,
    AddRequests,
    CallResult,
    CoreCall,
    EngineCall,
    EngineReport,
    StepOutputs,
)
from pagemill.messages.engine_io import EngineCoreOutputs, EngineCoreRequest
from pagemill.messages.fleet import EngineUp
from pagemill.messages.stats import SchedulerStats
from pagemill.transport.codec import Codec
from pagemill.transport.handshake import Hello
from pagemill.transport.sockets import AsyncClientSocket

logger = get_logger(__name__)

CONNECT_S = 10.0


class ZmqClient:
    """Implements `EngineClient`. Made on the event loop; the connection is there when the first call needs it."""

    num_engines = 1

    def __init__(self, up: EngineUp, hello: Hello) -> None:
        self.ready = up.ready
        self._index = up.index
        self._stats = SchedulerStats()
        self._address = up.address
        self._calls: Codec[EngineCall] = Codec(EngineCall)
        self._reports: Codec[EngineReport] = Codec(EngineReport)
        self._call_ids = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._connecting = asyncio.get_running_loop().create_task(
            AsyncClientSocket.connect(up.address, hello, timeout_s=CONNECT_S), name=f"connect-{up.index}"
        )
        self._closed = False

    async def add(self, request: EngineCoreRequest) -> None:
        """Send a request. Raises EngineDeadError."""
        await self._send(AddRequests([request]))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Send an abort. Raises EngineDeadError."""
        await self._send(AbortRequests(list(request_ids)))

    async def outputs(self) -> EngineCoreOutputs:
        """The next batch. Answers to calls arrive here too, so somebody must wait here for calls to end."""
        while True:
            socket = await self._socket()
            try:
                report = self._reports.decode(await socket.receive())
            except PeerGoneError as error:
                raise EngineDeadError(str(error)) from error
            except TransportError as error:
                logger.warning("dropped a message of %s: %s", self._address, error)
                continue
            match report:
                case StepOutputs(outputs):
                    self._stats = outputs.stats or self._stats
                    return outputs
                case CallResult():
                    self._answer(report)

    async def call(self, name: str, *args: Any) -> Any:
        """Call a method of the core. Raises ValueError with what it raised there, EngineDeadError when it is gone."""
        call_id = next(self._call_ids)
        answer = self._answers[call_id] = asyncio.get_running_loop().create_future()
        try:
            await self._send(CoreCall(call_id, name, list(args)))
            return await answer
        finally:
            del self._answers[call_id]

    def stats(self) -> Mapping[int, SchedulerStats]:
        """As of the last outputs that came here."""
        return {self._index: self._stats}

    def problem(self) -> str | None:
        """Only what this end knows."""
        return "the connection was closed" if self._closed else None

    def accepts(self) -> bool:
        """Whether the connection is open."""
        return not self._closed

    async def close(self) -> None:
        """Hang up; calls that wait end with EngineDeadError. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDeadError("the engine is gone"))
        self._connecting.cancel()
        (connected,) = await asyncio.gather(self._connecting, return_exceptions=True)
        if isinstance(connected, AsyncClientSocket):
            connected.close()

    def _answer(self, result: CallResult) -> None:
        answer = self._answers.get(result.call_id)
        if answer is None or answer.done():
            return
        if result.error is None:
            answer.set_result(result.value)
        else:
            answer.set_exception(ValueError(result.error))

    async def _send(self, call: EngineCall) -> None:
        try:
            socket = await self._socket()
            await socket.send(self._calls.encode(call))
        except PeerGoneError as error:
            raise EngineDeadError(str(error)) from error
        except asyncio.CancelledError:
            # `close` cancels what waits for the connection; the caller itself was not cancelled.
            task = asyncio.current_task()
            if not self._closed or task is None or task.cancelling():
                raise
            raise EngineDeadError("the connection was closed") from None

    async def _socket(self) -> AsyncClientSocket:
        if self._closed:
            raise EngineDeadError("the connection was closed")
        try:
            return await asyncio.shield(self._connecting)
        except HandshakeError as error:
            raise EngineDeadError(str(error)) from error

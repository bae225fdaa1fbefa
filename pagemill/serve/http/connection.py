"""What handlers need of the connection: the parsed body, whether the client is gone, and event streams.
Does not know what is sent."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagemill.serve.http.errors import BodyTooLargeError, request_error
from pagemill.serve.http.protocol import Wire, wire_of

Body = TypeVar("Body", bound=BaseModel)
T = TypeVar("T")
Output = TypeVar("Output")

_encode = msgspec.json.encode
CLIENT_CLOSED_REQUEST = 499
EVENT_STREAM = "text/event-stream"
SMALL_BODY_BYTES = 16 << 10
PART_BYTES = 256 << 10
"""Of a large body, sent at once."""
COMMENT = b": keep-alive\n\n"
"""A line of server-sent events that says nothing."""


async def read_body(request: Request) -> bytes:
    """The whole body. Unlike `request.body()`, the request does not keep it for as long as it is answered."""
    return b"".join([part async for part in request.stream()])


async def read_small(request: Request, kind: type[Body], most_bytes: int = SMALL_BODY_BYTES) -> Body:
    """The body of a request that says little: parsed here, because it takes no time. Raises RequestError, and
    BodyTooLargeError for one of more than `most_bytes`."""
    raw = await read_body(request)
    if len(raw) > most_bytes:
        raise BodyTooLargeError(f"the body of this route is too large: at most {most_bytes} bytes are read")
    return parse_body(raw, kind)


def parse_body(raw: bytes, kind: type[Body]) -> Body:
    """A JSON body, parsed and validated in one pass. Raises RequestError, which holds nothing of the body."""
    return _validated(lambda: kind.model_validate_json(raw))


def checked(kind: type[Body], fields: Mapping[str, Any]) -> Body:
    """The same for fields that are parsed already: those of another body, which stand for one of this kind."""
    return _validated(lambda: kind.model_validate(fields))


def _validated(make: Callable[[], T]) -> T:
    try:
        return make()
    except ValidationError as error:
        problem = request_error(error)
    # Raised here, where no ValidationError is being handled: that would become its context, and may hold it in turn.
    # The collector does not look into a ValidationError, so such a cycle would keep the body and all that was parsed of
    # it for good. Nor may this frame refer to what refers to it.
    try:
        raise problem
    finally:
        del problem


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None when the client went away first. `work` is then cancelled and its clean-up awaited,
    whatever comes of that.

    The body must have been read: what `receive` returns next is the disconnect.
    """
    task = cast("asyncio.Task[Any]", asyncio.current_task())
    num_cancels = task.cancelling()
    is_gone = False

    def cancel_work(watcher: "asyncio.Task[None]") -> None:
        nonlocal is_gone
        is_gone = True
        watcher.exception()  # who cannot tell any more whether the client is there is not waited for
        task.cancel()

    watcher = asyncio.create_task(_disconnected(receive))
    watcher.add_done_callback(cancel_work)
    try:
        return await work
    except (Exception, asyncio.CancelledError):
        # Cancelled by others too: that is theirs to hear of, as with asyncio.timeout().
        if not is_gone or task.cancelling() > num_cancels + 1:
            raise
        return None
    finally:
        watcher.remove_done_callback(cancel_work)
        watcher.cancel()
        if is_gone:
            task.uncancel()


async def respond_unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The response that `work` makes, or an empty one that nobody reads."""
    return await until_disconnect(request.receive, work) or Response(status_code=CLIENT_CLOSED_REQUEST)


class KeepAlive(NamedTuple):
    """What is sent to a client whose stream is silent, so that nobody between takes the connection for dead."""

    interval_s: float = 0.0
    """After a whole interval without an event; 0: never."""
    event: bytes = COMMENT
    """Once the stream has begun. Before, it is a comment, which begins the response."""


NO_KEEP_ALIVE = KeepAlive()


class EventSink(Generic[Output]):
    """A short way for the events of a response that has begun: one write, no `send` through the whole application.
    Implements `Sink`."""

    def __init__(self, wire: Wire | None) -> None:
        """`wire`: the connection under the response; None: the server has none to offer, and everything is sent."""
        self.begun = False
        """Whether the response has."""
        self.num_pushed = 0
        self.events_of: Callable[[Output], bytes] = _no_events
        """Set by who makes the events: those of an output; b"" when it has none."""
        self._has_room: Callable[[], bool] = _is_closed if wire is None else wire.has_room
        self._write: Callable[[bytes], None] = _write_nowhere if wire is None else wire.write_chunk

    def is_open(self) -> bool:
        """Whether an output may be pushed now; otherwise events are yielded to the stream, which waits for the
        client."""
        return self.begun and self._has_room()

    def push(self, output: Output) -> None:
        """Write the events of an output, if it has any."""
        events = self.events_of(output)
        if events:
            self.num_pushed += 1
            self._write(events)


def _no_events(output: object) -> bytes:
    """Nobody makes events yet."""
    return b""


def _is_closed() -> bool:
    """There is no connection."""
    return False


def _write_nowhere(body: bytes) -> None:
    raise RuntimeError("there is no connection to write to")


class LargeBody(Response):
    """A body of JSON that may be large. It is sent part by part, others having their turn in between."""

    def __init__(self, pieces: Sequence[bytes], headers: Mapping[str, str] | None = None) -> None:
        """`pieces`: what the body is when they stand one behind the other."""
        self._pieces = pieces
        super().__init__(headers=dict(headers or {}), media_type="application/json")
        self.headers["content-length"] = str(sum(map(len, pieces)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all parts."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in self._parts():
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _parts(self) -> Iterator[bytes]:
        part: list[bytes] = []
        size = 0
        for piece in self._pieces:
            part.append(piece)
            size += len(piece)
            if size >= PART_BYTES:
                yield b"".join(part)
                part, size = [], 0
        if part:
            yield b"".join(part)


class LargeJson(LargeBody):
    """An object with a list that may be large."""

    def __init__(
        self,
        head: Mapping[str, Any],
        name: str,
        rows: Sequence[bytes],
        tail: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """The members of `head`, one or more; a list of `rows`, each JSON, under a name; those of `tail`."""
        pieces = [_encode(head)[:-1], b",", _encode(name), b":", *list_of(rows)]
        pieces.append(b"," + _encode(tail)[1:] if tail else b"}")
        super().__init__(pieces, headers)


def list_of(rows: Sequence[bytes]) -> list[bytes]:
    """The pieces of a list of `rows`, each JSON."""
    pieces = [b"["]
    for number, row in enumerate(rows):
        pieces += [b",", row] if number else [row]
    pieces.append(b"]")
    return pieces


class EventStream(Response):
    """Events, server-sent or of another type: those that `events` yields, and those of outputs that are pushed to the
    sink meanwhile. The response starts with the first event yielded: what goes wrong before becomes an ordinary error
    response. When the client goes away, the generator is closed."""

    def __init__(
        self,
        events: Callable[[EventSink[Any]], AsyncGenerator[bytes, None]],
        headers: Mapping[str, str] | None = None,
        media_type: str = EVENT_STREAM,
        keep_alive: KeepAlive = NO_KEEP_ALIVE,
    ) -> None:
        self.media_type = media_type
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"} | dict(headers or {}))
        self._events = events
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the generator ends or the client is gone."""
        await until_disconnect(receive, self._send_all(send, EventSink(wire_of(scope))))

    def init_headers(self, headers: Any = None) -> None:
        """No content length: the end of the stream is the end of the body."""
        super().init_headers(headers)
        self.raw_headers = [item for item in self.raw_headers if item[0] != b"content-length"]

    async def _send_all(self, send: Send, sink: EventSink[Any]) -> None:
        turn = asyncio.Lock()
        num_sent = 0

        async def send_part(part: bytes) -> None:
            async with turn:
                if not sink.begun:
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": part, "more_body": True})
                sink.begun = True

        async def break_silence() -> None:
            interval_s, event = self._keep_alive
            while True:
                before = num_sent + sink.num_pushed
                await asyncio.sleep(interval_s)
                if num_sent + sink.num_pushed == before and not turn.locked():
                    await send_part(event if before else COMMENT)

        async with contextlib.aclosing(self._events(sink)) as events, _beside(break_silence, self._keep_alive):
            async for event in events:
                num_sent += 1
                await send_part(event)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextlib.asynccontextmanager
async def _beside(work: Callable[[], Coroutine[Any, Any, None]], keep_alive: KeepAlive) -> AsyncGenerator[None, None]:
    """Do `work` until the body ends, where there is an interval."""
    if not keep_alive.interval_s:
        yield
        return
    worker = asyncio.create_task(work())
    try:
        yield
    finally:
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

"""`Peers`: requests that reached one API server, and are about what another one has stored. Each has a socket in the
private folder of the server, on which the others pass such a request on as it came, and get the answer as it is made.

What is stored is owned by the server whose number follows from its id, so nobody has to look for it. Does not know what
is stored: a route says that it is about such a thing (`StoredRoute`).
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Final

import msgspec
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagemill.errors import TransportError, UnavailableError
from pagemill.log import get_logger
from pagemill.serve.http.connection import read_body, respond_unless_gone, until_disconnect
from pagemill.serve.http.middleware import REQUEST_ID_HEADER
from pagemill.transport.stream_frames import read_frame, write_frame

logger = get_logger(__name__)

PASSED_ON: Final = "pagemill.passed_on"
"""Among the extensions of the scope of a request that another API server has passed on."""
PART_BYTES = 1 << 20
_ID_BYTES = 24
_OWNER_DIGITS = 8
_OF_THE_CONNECTION = frozenset((b"connection", b"expect", b"keep-alive", b"transfer-encoding", b"upgrade"))
"""Headers that say nothing of the request."""
_NOT_THERE = "the API server that has stored this is being started again; try again later"


class PassedOn(msgspec.Struct, frozen=True):
    """A request, whose body is the next frame."""

    method: str
    path: str
    raw_path: bytes
    query: bytes
    headers: list[tuple[bytes, bytes]]


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """Status and headers of the answer to a request that was passed on; its body follows, as `Part`s."""

    status: int
    headers: list[tuple[bytes, bytes]]


class Part(msgspec.Struct, frozen=True, tag="part"):
    """A part of the body of an answer to a request that was passed on."""

    body: bytes


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The answer to a request that was passed on is complete."""


_REQUESTS = msgspec.msgpack.Decoder(PassedOn)
_ANSWERS: msgspec.msgpack.Decoder[Begun | Part | Ended] = msgspec.msgpack.Decoder(Begun | Part | Ended)
_encode = msgspec.msgpack.encode
_Link = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Peers:
    """Of one API server."""

    def __init__(self, paths: Sequence[str] = (), index: int = 0) -> None:
        """`paths`: of the sockets of all of them, of which this one has the place `index`; none: it is the only one."""
        self._paths = paths
        self._index = index
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def count(self) -> int:
        """How many there are, this one included."""
        return max(1, len(self._paths))

    def new_id(self, prefix: str) -> str:
        """An id that nobody can guess, of something that is stored here."""
        token = secrets.token_hex(_ID_BYTES)
        number = int(token[-_OWNER_DIGITS:], 16) % (16**_OWNER_DIGITS // self.count) * self.count + self._index
        return f"{prefix}_{token[:-_OWNER_DIGITS]}{number:0{_OWNER_DIGITS}x}"

    def are_asked(self, scope: Scope, name: str | None) -> bool:
        """Whether a request is for another API server, because what has this id is there. What has no id of ours is
        nowhere, which every server can say."""
        return not is_passed_on(scope) and self._owner(name) != self._index

    async def ask(self, request: Request, name: str | None, body: bytes) -> Response:
        """The answer of the API server that has stored what the request names. Raises UnavailableError."""
        return await respond_unless_gone(request, self._ask(request, self._paths[self._owner(name)], body))

    @contextlib.asynccontextmanager
    async def running(self, app: ASGIApp) -> AsyncIterator[None]:
        """Answer, in the body, what the others ask."""
        if self.count == 1:
            yield
            return

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            if task is not None:
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await _take(app, reader, writer)

        server = await asyncio.start_unix_server(take, self._paths[self._index])
        try:
            yield
        finally:
            server.close()
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _owner(self, name: str | None) -> int:
        digits = (name or "")[-_OWNER_DIGITS:]
        try:
            return int(digits, 16) % self.count
        except ValueError:
            return self._index

    async def _ask(self, request: Request, path: str, body: bytes) -> Response:
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        except OSError:
            raise UnavailableError(_NOT_THERE) from None
        try:
            await write_frame(writer, _encode(_passed_on(request)))
            await write_frame(writer, body)
            begun = _ANSWERS.decode(await read_frame(reader))
            if isinstance(begun, Begun):
                return Relayed(begun, (reader, writer))
        except (EOFError, OSError):
            logger.warning("another API server went away while it was asked")
        except BaseException:
            writer.close()
            raise
        writer.close()
        raise UnavailableError(_NOT_THERE)


class StoredRoute(APIRoute):
    """A route whose path has the id of something that is stored, as `name`, on whichever API server."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The route's own, or that of the server that has it."""
        handle = super().get_route_handler()

        async def handle_or_ask(request: Request) -> Response:
            name = request.path_params.get("name")
            peers: Peers = request.app.state.services.peers
            if name is None or not peers.are_asked(request.scope, name):
                return await handle(request)
            return await peers.ask(request, name, await read_body(request))

        return handle_or_ask


class Relayed(Response):
    """An answer that another API server makes."""

    def __init__(self, begun: Begun, link: _Link) -> None:
        self.status_code = begun.status
        self.background = None
        self.body = b""
        self.raw_headers = begun.headers
        self._link = link

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on, part by part. Raises ConnectionError when it breaks off."""
        try:
            await until_disconnect(receive, self._relay(send))
        finally:
            self._link[1].close()

    async def _relay(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while True:
            try:
                part = _ANSWERS.decode(await read_frame(self._link[0]))
            except EOFError:
                raise ConnectionResetError("the API server that made this answer is gone") from None
            more = isinstance(part, Part)
            await send({"type": "http.response.body", "body": getattr(part, "body", b""), "more_body": more})
            if not more:
                return


def is_passed_on(scope: Scope) -> bool:
    """Whether another API server has passed a request on."""
    return PASSED_ON in scope.get("extensions", {})


def _passed_on(request: Request) -> PassedOn:
    """With its key, which is checked again, and under the same id."""
    scope = request.scope
    headers = [item for item in scope["headers"] if item[0] not in _OF_THE_CONNECTION and item[0] != REQUEST_ID_HEADER]
    headers.append((REQUEST_ID_HEADER, scope["request_id"].encode()))
    raw_path = scope.get("raw_path") or scope["path"].encode()
    return PassedOn(scope["method"], scope["path"], raw_path, scope["query_string"], headers)


async def _take(app: ASGIApp, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request. What the application raises it has answered and logged."""
    try:
        request = _REQUESTS.decode(await read_frame(reader))
        body = await read_frame(reader)
        await app(_scope_of(request), _receiver(reader, body), _sender(writer))
    except (EOFError, OSError):
        logger.debug("an API server went away that had passed on a request")
    except (TransportError, msgspec.MsgspecError) as error:
        logger.warning("dropped what another API server has sent: %s", error)
    except Exception as error:
        logger.error("an answer for another API server broke off: %s", type(error).__name__)
    finally:
        writer.close()


def _scope_of(request: PassedOn) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.raw_path,
        "query_string": request.query,
        "root_path": "",
        "headers": request.headers,
        "client": None,
        "server": None,
        "extensions": {PASSED_ON: {}},
    }


def _receiver(reader: asyncio.StreamReader, body: bytes) -> Receive:
    """The body, and then the end: nothing else comes over the connection."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if waiting:
            return waiting.pop()
        with contextlib.suppress(OSError):
            await reader.read()
        return {"type": "http.disconnect"}

    return receive


def _sender(writer: asyncio.StreamWriter) -> Send:
    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [(bytes(name), bytes(value)) for name, value in message.get("headers", ())]
            await write_frame(writer, _encode(Begun(message["status"], headers)))
            return
        body = message.get("body", b"")
        for start in range(0, len(body), PART_BYTES):
            await write_frame(writer, _encode(Part(body[start : start + PART_BYTES])))
        if not message.get("more_body", False):
            await write_frame(writer, _encode(Ended()))

    return send

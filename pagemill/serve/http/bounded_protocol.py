"""`BoundedProtocol`: uvicorn's HTTP connection, with bounds on what a client may send and on the time it takes, and an
eye on whether the client is still there. All of it is before the application, and so before authentication.

What a client sends is given to the parser in small parts, and no further part while a complete request waits behind the
one at work. What is not parsed yet is at most what one read from the socket brought; reading then pauses.
"""

import enum
import math
import select
from collections.abc import Iterable
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from pagemill.serve.http.connections import Connections
from pagemill.serve.http.errors import ApiError, form_of_errors

PART_BYTES = 4096
"""What the parser is given at once: the shortest request has 18 bytes."""
READ_BYTES = 32 << 10
"""What is read from the socket at once. asyncio makes room for 256 KiB, which takes longer than to parse a request."""
LINGER_S = 2.0
LINGER_BYTES = 4 * 2**20
"""How long, and how far, a connection that was refused is read from, so that its client gets to read why."""
PROBE_S = 0.1
"""After the client's end of sending until a probe, which most answers make needless; and from there until a client that
left has answered it, on most networks. Later answers are found within a second."""
FRAMING = (b"content-length", b"transfer-encoding")
"""Headers of requests that have a body."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_HUNG_UP = select.POLLERR | select.POLLHUP
_SENDS_NO_MORE = getattr(select, "POLLRDHUP", 0)

BAD_REQUEST = ApiError(400, "this is not an HTTP request", "invalid_request_error", None, "malformed_request")
ONE_HOST = ApiError(
    400, "an HTTP/1.1 request has exactly one Host header", "invalid_request_error", None, "malformed_request"
)
TOO_SLOW = ApiError(408, "the request did not arrive in time", "invalid_request_error", None, "request_timeout")
URL_TOO_LONG = ApiError(414, "the URL of the request is too long", "invalid_request_error", None, "url_too_long")
HEAD_TOO_LARGE = ApiError(431, "the headers are too large or too many", "invalid_request_error", None, "head_too_large")
TOO_MANY_CONNECTIONS = ApiError(
    503, "the server has as many connections as it can", "server_error", None, "too_many_connections",
    {"Retry-After": "1"},
)  # fmt: skip


class Phase(enum.Enum):
    """What the client is sending."""

    BETWEEN = enum.auto()
    """Nothing, or blank lines before a request."""
    HEAD = enum.auto()
    BODY = enum.auto()
    """With the trailers behind it."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Implements `Connection`."""

    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._all = connections
        self._limits = connections.limits
        self.url = b""
        self._phase = Phase.BETWEEN
        self._rest = memoryview(b"")
        """What was read and waits to be parsed."""
        self._num_headers = 0
        self._num_dry = 0
        """Bytes parsed of a head or of trailers; of a body, those since it last grew."""
        self._read_until = math.inf
        """When what the client is sending must be complete."""
        self._write_until = math.inf
        """When the client must have read some of what waits for it."""
        self._running: RequestResponseCycle | None = None
        """The request whose answer is sent next or now."""
        self._refusal: ApiError | None = None
        """Why a callback of the parser raised."""
        self._is_deaf = False
        """Whether what comes is dropped."""
        self._num_dropped = 0
        self._client_is_done = False
        """Whether the client sends no more: it left, or it closed its sending half and waits."""

    # What asyncio calls

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.max_size = READ_BYTES
        self._read_until = self.loop.time() + self._limits.head_s
        self._all.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """All requests of the connection hear of it, not only the newest."""
        self._all.remove(self)
        self._rest = memoryview(b"")
        self.pipeline.clear()
        _disconnect(self._running)
        self._running = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            self._num_dropped += len(data)
            if self._num_dropped > LINGER_BYTES:
                self.transport.abort()
            return
        self._parse(memoryview(bytes(self._rest) + data) if self._rest else memoryview(data))

    def eof_received(self) -> bool:  # type: ignore[override]
        """True: the connection stays open, for answers to complete requests. With TLS it cannot: its end is that of
        both directions."""
        if self.transport.get_extra_info("ssl_object") is not None:
            return False
        running = self._running
        if self._is_deaf or running is None or running.more_body:
            return False
        self._find_out_whether_client_left(running)
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_until = self.loop.time() + self._limits.slow_reader_s

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_until = math.inf

    # What the parser calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._phase = Phase.HEAD
        self._num_headers = 0
        if self._read_until == math.inf:
            self._read_until = self.loop.time() + self._limits.head_s

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers are counted and dropped: by then, the application has the headers."""
        self._num_headers += 1
        if self._num_headers > self._limits.max_headers:
            self._refusal = HEAD_TOO_LARGE
            raise ValueError
        if self._phase is Phase.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A request with two hosts is refused, and one of HTTP/1.1 without one (RFC 9112, 3.2): what stands between
        client and server may take the other one."""
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() == "1.1"):
            self._refusal = ONE_HOST
            raise ValueError
        self._phase = Phase.BODY
        self._num_dry = 0
        self._read_until = self.loop.time() + self._limits.body_s
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_dry = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and any(name in FRAMING for name, _ in self.headers):
            return  # the parser skips a body that is there: see `_parse_part`
        self._phase = Phase.BETWEEN
        self._num_dry = 0
        self._read_until = math.inf
        if not self.cycle.response_complete:
            self._all.busy(self)
        super().on_message_complete()
        if not self.pipeline:  # nothing more of this request can come, but the end of the connection
            self.flow.resume_reading()

    # What requests call

    def on_response_complete(self) -> None:
        """The next request of the connection has its turn."""
        self._running = None
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._running is None and not self._rest:
            if self._is_deaf or self._client_is_done:
                self.transport.close()
            else:
                self._all.idle(self)
        if self._rest:
            self.flow.pause_reading()
            self.loop.call_soon(self._parse_rest)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.more_body and (self._is_deaf or self._client_is_done):  # the rest of it will never come
            self.transport.close()
            return
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":
            app = _Unchunked(app, cycle)
        super()._start_asgi_task(cycle, app)

    # Connection

    def give_way(self) -> None:
        self.transport.abort()

    def refuse_for_load(self) -> None:
        self._refuse(TOO_MANY_CONNECTIONS)

    def check(self, now: float) -> None:
        if now >= self._write_until:
            self._all.log.note("a client did not read its answer for %g s", self._limits.slow_reader_s)
            self.transport.abort()
        elif self.transport.is_closing():  # and something is not sent yet
            self._write_until = min(self._write_until, now + self._limits.slow_reader_s)
        elif self._running is not None and (self.flow.read_paused or self._client_is_done):
            self._read_until = max(self._read_until, now + self._limits.head_s)
            self._look_for_hang_up()
            if self._rest or self.pipeline:  # where much is unread, the end of the connection waits behind it
                self._probe(self._running)
        elif now >= self._read_until:
            self._end_waiting()

    # What is parsed, and when

    def _parse_rest(self) -> None:
        if self.parser is not None and not self._is_deaf:
            self.flow.resume_reading()
            self._parse(self._rest)

    def _parse(self, data: memoryview) -> None:
        self._unset_keepalive_if_required()
        if self._read_until == math.inf and self._running is None:  # blank lines behind a request are no head
            self._read_until = self.loop.time() + self._limits.head_s
        while data and not self.pipeline and not self._is_deaf:
            data = data[self._parse_part(data[:PART_BYTES]) :]
        self._rest = memoryview(b"") if self._is_deaf else data
        if self._rest:
            self.flow.pause_reading()

    def _parse_part(self, part: memoryview) -> int:
        """The number of bytes parsed."""
        num_bytes = len(part)
        self._num_dry += num_bytes
        try:
            self.parser.feed_data(part)
        except httptools.HttpParserUpgrade as upgrade:  # to a protocol that is not spoken here: HTTP goes on
            num_bytes = max(1, int(upgrade.args[0]))
            if self._phase is Phase.BODY:
                self.parser = httptools.HttpRequestParser(_KnownHead(self))
                self.parser.feed_data(_head_of_body(self.headers))
        except httptools.HttpParserError:
            self._refuse(self._refusal or BAD_REQUEST)
        else:
            if self._num_dry > self._limits.max_head_bytes:
                in_url = self._phase is Phase.HEAD and 2 * len(self.url) > self._num_dry
                self._refuse(URL_TOO_LONG if in_url else HEAD_TOO_LARGE)
        return num_bytes

    # How a connection ends

    def _end_waiting(self) -> None:
        """The client did not send in time what it has begun."""
        if self._is_deaf:
            self.transport.abort()
        elif self._phase is Phase.BETWEEN:
            self.transport.close()
        else:
            self._refuse(TOO_SLOW)

    def _refuse(self, error: ApiError) -> None:
        """Read no more. The client is told why, unless answers to requests before come first: then the connection is
        closed behind them."""
        self._is_deaf = True
        if error is not TOO_MANY_CONNECTIONS:
            self._all.log.note("refused a request: %d, %s", error.status, error.message)
        running = self._running
        if running is not None and not running.more_body:
            running.keep_alive = running.keep_alive and bool(self.pipeline)
            self._read_until = math.inf
            self.flow.pause_reading()
            return
        begun = self._phase is Phase.BODY and self.cycle is not None and self.cycle.response_started
        _disconnect(running)
        if begun or not self._all.linger(self):
            self.transport.close()
            return
        self.transport.write(_closing_answer(error, form_of_errors(self.url.decode("latin-1"))))
        self.transport.write_eof()
        self._read_until = self.loop.time() + LINGER_S
        self.flow.resume_reading()

    # Whether the client is there

    def _find_out_whether_client_left(self, running: RequestResponseCycle) -> None:
        """The client sends no more. It may have left, or wait for its answer: what it does with what it gets will tell,
        since the machine of a client that left answers with a reset. Where the answer has not begun, HTTP/1.1 allows
        to send an interim response at any time; to older clients nothing can be sent, and they count as gone."""
        if self._client_is_done:
            return
        self._client_is_done = True
        if running.response_started:
            return
        if running.scope["http_version"] == "1.0":
            self.transport.abort()
            return
        self.loop.call_later(PROBE_S, self._probe, running)
        self.loop.call_later(2 * PROBE_S, self._look_for_hang_up)

    def _probe(self, running: RequestResponseCycle | None) -> None:
        """Send something that the machine of a client that left answers with a reset."""
        if running is None or running is not self._running or running.response_started or self.transport.is_closing():
            return
        if running.scope["http_version"] != "1.0":
            self.transport.write(_CONTINUE)

    def _look_for_hang_up(self) -> None:
        """For connections that are not read from, and so do not say."""
        if self.transport.is_closing() or self._running is None:
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), _SENDS_NO_MORE)
        events = next((events for _, events in poll.poll(0)), 0)
        if events & _HUNG_UP:
            self.transport.abort()
        elif events & _SENDS_NO_MORE:
            self._find_out_whether_client_left(self._running)


class _KnownHead:
    """What a parser calls that is told the head of a request once more, to go on with its body: a connection, which
    does not hear of that head again."""

    def __init__(self, connection: BoundedProtocol) -> None:
        self._connection = connection
        self._is_past = False
        self.on_body = connection.on_body
        self.on_message_complete = connection.on_message_complete

    def on_message_begin(self) -> None:
        if self._is_past:
            self._connection.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._is_past:
            self._connection.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_past:
            self._connection.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_past:
            self._connection.on_headers_complete()
        self._is_past = True


def _head_of_body(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The head of a request with the same body, and nothing else."""
    framing = [name + b": " + value + b"\r\n" for name, value in headers if name in FRAMING]
    return b"".join([b"POST / HTTP/1.1\r\n", *framing, b"\r\n"])


class _Unchunked:
    """An application whose answer to HTTP/1.0 ends with the connection, where it does not say how long it is."""

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application with a `send` that turns the chunked coding off before the answer begins."""
        cycle = self._cycle
        has_length = False

        async def send_plainly(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_plainly)


def _disconnect(cycle: RequestResponseCycle | None) -> None:
    """The application hears that the client is gone, and nothing that it sends goes out."""
    if cycle is not None and not cycle.response_complete:
        cycle.disconnected = True
        cycle.message_event.set()


def _closing_answer(error: ApiError, form: str) -> bytes:
    """As it goes over the wire."""
    body = error.body(form)
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    lines = [f"{name}: {value}\r\n".encode() for name, value in (headers | error.headers).items()]
    return b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body])

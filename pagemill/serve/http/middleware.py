"""Request ids and the limit on bodies, as plain ASGI: nothing between a stream and its socket but a function call.
Does not know what the routes do."""

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagemill.serve.http.errors import BodyTooLargeError

MAX_BODY_BYTES = 16 * 2**20
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class RequestIdMiddleware:
    """Gives every request an id - the client's X-Request-Id when it is well-formed - and returns it as a header.

    Handlers find it as scope["request_id"].
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Name the request, then pass it on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = scope["request_id"] = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self.app(scope, receive, send_named)


class BodyLimitMiddleware:
    """Refuses bodies above a size: by their Content-Length before reading, and while they come in."""

    def __init__(self, app: ASGIApp, max_bytes: int = MAX_BODY_BYTES) -> None:
        self.app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises BodyTooLargeError, from here or from `receive` inside the route."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > self._max_bytes:
            raise self._too_large()
        num_bytes = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._too_large()
            return message

        await self.app(scope, receive_limited, send)

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"the body of the request is too large: at most {self._max_bytes} bytes are read")

"""`AccessLogMiddleware`: a line for each request that was answered. What malformed requests get is logged elsewhere
(connections.py): they never come here."""

import time
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagemill.log import get_logger
from pagemill.serve.http.peers import is_passed_on
from pagemill.utils.log_text import one_line

logger = get_logger(__name__)

MAX_PATH_CHARS = 256
MAX_CLIENT_CHARS = 64
NO_STATUS = "-"
"""Of a request whose client went away before its answer began."""


class AccessLogMiddleware:
    """The client, the method and path, the status, the time until the end of the answer, and the request's id. Neither
    the query nor any header is shown: they may hold what is secret."""

    def __init__(self, app: ASGIApp, silent_paths: Iterable[str] = ()) -> None:
        """`silent_paths`: those that have no line."""
        self.app = app
        self._silent_paths = frozenset(silent_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and log when the answer has ended, however that was. What another API server has passed on is logged
        there."""
        if scope["type"] != "http" or scope["path"] in self._silent_paths or is_passed_on(scope):
            await self.app(scope, receive, send)
            return
        status: int | str = NO_STATUS
        begun = time.perf_counter()

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            logger.info(
                '%s "%s %s HTTP/%s" %s %.1f ms %s',
                _client(scope),
                one_line(scope["method"], MAX_CLIENT_CHARS),
                _path(scope),
                scope["http_version"],
                status,
                (time.perf_counter() - begun) * 1e3,
                scope.get("request_id", NO_STATUS),
            )


def _client(scope: Scope) -> str:
    """A proxy may have said who it is."""
    client = scope.get("client")
    return NO_STATUS if client is None else one_line(f"{client[0]}:{client[1]}", MAX_CLIENT_CHARS)


def _path(scope: Scope) -> str:
    """As it was sent, without what would end the part of the line that it is in."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return one_line(raw[: MAX_PATH_CHARS + 1].decode("latin-1"), MAX_PATH_CHARS).replace('"', "%22")

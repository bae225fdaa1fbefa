"""`RootPathMiddleware`: a server whose paths begin with a prefix, for proxies that leave it in the path. Does not know
what the routes do."""

import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote

from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from pagemill.errors import ConfigError

_PREFIX: Final = re.compile(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")


def root_path_of(given: str | None) -> str:
    """The prefix without a slash at its end; empty: there is none. Raises ConfigError for what is no path."""
    prefix = (given or "").rstrip("/")
    if prefix and not _PREFIX.fullmatch(prefix):
        raise ConfigError(
            f"root_path={given!r} is not allowed: a path such as /llm, of letters, digits, '.', '_', '~' and '-'"
        )
    return prefix


def check_root_path(prefix: str, routes: Iterable[BaseRoute]) -> None:
    """Raises ConfigError for a prefix with which routes of the server begin: such a path would have two meanings."""
    hidden = [path for path in (getattr(route, "path", "") for route in routes) if f"{path}/".startswith(f"{prefix}/")]
    if prefix and hidden:
        raise ConfigError(f"root_path={prefix!r} is not allowed: {hidden[0]} is a path of the server itself")


class RootPathMiddleware:
    """Takes the prefix off the path of a request. It is the outermost: whatever asks which route a request reaches
    sees one path, with the prefix or without. Paths without it are served too, for proxies that take it off."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self.app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Leads from the prefix alone to the page, whose links need the slash."""
        path = scope.get("path", "")
        if path == self._prefix and scope["type"] == "http":
            await Response(status_code=307, headers={"location": f"{self._prefix}/"})(scope, receive, send)
            return
        if path.startswith(f"{self._prefix}/"):
            scope["path"] = path.removeprefix(self._prefix)
            raw = scope.get("raw_path") or b""
            prefix = self._prefix.encode()
            # A client may spell the prefix with escapes; the path was taken apart from them already.
            scope["raw_path"] = (
                raw.removeprefix(prefix) if raw.startswith(prefix + b"/") else quote(scope["path"]).encode()
            )
        await self.app(scope, receive, send)

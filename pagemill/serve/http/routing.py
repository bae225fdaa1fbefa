"""What routes have in common: HEAD wherever there is GET, a redirect from a path with a slash too many, what they say
of themselves to the middleware, and what requests say in a header."""

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send


def with_head(routes: Sequence[BaseRoute]) -> Sequence[BaseRoute]:
    """The routes, those for GET also for HEAD; the server leaves the body out."""
    for route in routes:
        methods: set[str] = getattr(route, "methods", None) or set()
        if "GET" in methods:
            methods.add("HEAD")
    return routes


def route_of(scope: Scope) -> BaseRoute | None:
    """The route that the router will choose; None: there is none that takes this method of this path."""
    return next((route for route in scope["app"].router.routes if route.matches(scope)[0] is Match.FULL), None)


def header_of(scope: Scope, name: bytes) -> str:
    """The first header of this name, which is in lower case; empty: there is none."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return ""


def says(route: BaseRoute | None, name: str) -> Any:
    """What a route says of itself under a name of its `openapi_extra`; None: nothing."""
    extra: dict[str, Any] = getattr(route, "openapi_extra", None) or {}
    return extra.get(name)


class SlashRedirect:
    """Where no route matches: leads to the route without the slash at the end, by a path alone, which is on this server
    whatever the client calls it."""

    def __init__(self, routes: Sequence[BaseRoute], root_path: str = "") -> None:
        self._routes = routes
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises HTTPException where there is none either."""
        path = scope["path"].rstrip("/")
        other = {**scope, "path": path}
        if not scope["path"].endswith("/") or not any(r.matches(other)[0] is Match.FULL for r in self._routes):
            raise HTTPException(404)
        query = scope["query_string"].decode("latin-1")
        location = self._root_path + quote(path) + (f"?{query}" if query else "")
        await Response(status_code=307, headers={"location": location})(scope, receive, send)

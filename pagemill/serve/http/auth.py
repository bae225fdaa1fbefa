"""API keys. Every route needs one, except those listed here; which route a request reaches is asked of the router
itself, so that no spelling of a path means one thing to the check and another to the router."""

import hmac

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from pagemill.serve.http.errors import UnauthorizedError

PUBLIC_PATHS = frozenset({"/", "/static/{name}", "/health", "/health/live", "/health/ready", "/ping", "/metrics"})
"""Route paths (not URLs) that need no key, for GET and HEAD: probes, metrics and the playground's page."""
_POLICY_VIOLATION = 1008


class AuthMiddleware:
    """Lets a request through when it carries the key or reaches a public route."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises UnauthorizedError, which the error middleware around this one answers."""
        if scope["type"] == "lifespan" or self._has_key(scope) or _is_public(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            raise UnauthorizedError("the API key is missing or wrong; send it as 'Authorization: Bearer KEY'")

    def _has_key(self, scope: Scope) -> bool:
        values = Headers(scope=scope).getlist("authorization")
        scheme, _, given = (values[0] if len(values) == 1 else "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._key)


def _is_public(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
        return False
    route = _route_of(scope)
    return route is not None and getattr(route, "path", None) in PUBLIC_PATHS


def _route_of(scope: Scope) -> BaseRoute | None:
    """The route that the router will choose."""
    for route in scope["app"].router.routes:
        if route.matches(scope)[0] is Match.FULL:
            return route  # type: ignore[no-any-return]
    return None

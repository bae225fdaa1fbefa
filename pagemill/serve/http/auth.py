"""API keys. Every route needs one, except those that say `openapi_extra=PUBLIC`; which route a request reaches is asked
of the router itself, so that no spelling of a path means one thing to the check and another to the router."""

import contextlib
import hashlib
import hmac
from collections.abc import Iterable
from typing import Any, Final

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from pagemill.serve.http.errors import UnauthorizedError

PUBLIC: Final[dict[str, Any]] = {"security": []}
"""`openapi_extra` of a route that needs no key for GET and HEAD: probes, metrics and the playground's page. It is how
OpenAPI says that an operation has no security requirement."""
_POLICY_VIOLATION = 1008


class AuthMiddleware:
    """Lets a request through when it carries a key or reaches a public route. scope["api_key"] says which key it was,
    as the key's hash."""

    def __init__(self, app: ASGIApp, api_keys: Iterable[str]) -> None:
        self.app = app
        keys = (api_keys,) if isinstance(api_keys, str) else api_keys  # a text is not many keys of one character
        self._digests = [digest for key in keys for digest in _digests(key)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises UnauthorizedError, which the error middleware around this one answers."""
        if scope["type"] == "lifespan" or self._has_key(scope) or _is_public(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            raise UnauthorizedError("the API key is missing or wrong; send it as 'Authorization: Bearer KEY'")

    def _has_key(self, scope: Scope) -> bool:
        values = [value for name, value in scope.get("headers", ()) if name == b"authorization"]
        scheme, _, given = (values[0] if len(values) == 1 else b"").partition(b" ")
        digest, found = _digest(given.strip()), b""
        for known in self._digests:  # all of them: how long it takes must not say which
            found = known if hmac.compare_digest(digest, known) else found
        if scheme.lower() == b"bearer" and found:
            scope["api_key"] = found
            return True
        return False


def _digest(key: bytes) -> bytes:
    """Of one length, whatever the key is."""
    return hashlib.sha256(key).digest()


def _digests(key: str) -> list[bytes]:
    """Headers have no encoding: clients send what is not ASCII in either of two."""
    encoded = [key.encode()]
    with contextlib.suppress(UnicodeEncodeError):
        encoded.append(key.encode("latin-1"))
    return [_digest(form) for form in dict.fromkeys(encoded)]


def is_public(route: BaseRoute | None) -> bool:
    """Whether a route says that it needs no key."""
    extra: dict[str, Any] = getattr(route, "openapi_extra", None) or {}
    return bool(extra.get("security") == PUBLIC["security"])


def _is_public(scope: Scope) -> bool:
    return scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and is_public(_route_of(scope))


def _route_of(scope: Scope) -> BaseRoute | None:
    """The route that the router will choose."""
    for route in scope["app"].router.routes:
        if route.matches(scope)[0] is Match.FULL:
            return route  # type: ignore[no-any-return]
    return None

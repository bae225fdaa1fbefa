"""API keys. Every route needs one, except those that say `openapi_extra=PUBLIC`; which route a request reaches is asked
of the router itself, so that no spelling of a path means one thing to the check and another to the router."""

import contextlib
import hashlib
import hmac
from collections.abc import Iterable
from typing import Any, Final

from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from pagemill.serve.http.errors import UnauthorizedError
from pagemill.serve.http.routing import route_of, says

PUBLIC: Final[dict[str, Any]] = {"security": []}
"""`openapi_extra` of a route that needs no key for GET and HEAD: probes, metrics and the playground's page. It is how
OpenAPI says that an operation has no security requirement."""
_METRICS = "x-metrics"
METRICS: Final[dict[str, Any]] = {_METRICS: True}
"""`openapi_extra` of a route that needs a key where metrics do."""
_POLICY_VIOLATION = 1008


class AuthMiddleware:
    """Lets a request through when it carries a key or reaches a public route. scope["api_key"] says which key it was,
    as the key's hash."""

    def __init__(self, app: ASGIApp, api_keys: Iterable[str], protect_metrics: bool = False) -> None:
        self.app = app
        self._protect_metrics = protect_metrics
        keys = (api_keys,) if isinstance(api_keys, str) else api_keys  # a text is not many keys of one character
        self._digests = [(digest, name_of_key(key)) for key in keys for digest in _digests(key)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises UnauthorizedError, which the error middleware around this one answers."""
        if scope["type"] == "lifespan" or self._has_key(scope) or self._is_public(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            raise UnauthorizedError("the API key is missing or wrong; send it as 'Authorization: Bearer KEY'")

    def _is_public(self, scope: Scope) -> bool:
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            return False
        route = route_of(scope)
        return is_public(route) and not (self._protect_metrics and says(route, _METRICS))

    def _has_key(self, scope: Scope) -> bool:
        found = b""
        for given in _given_keys(scope):
            digest = _digest(given)
            for known, name in self._digests:  # all of them: how long it takes must not say which
                found = name if hmac.compare_digest(digest, known) else found
        if found:
            scope["api_key"] = found
            return True
        return False


def _given_keys(scope: Scope) -> list[bytes]:
    """What a request sends as keys: as `Authorization: Bearer KEY`, as `x-api-key: KEY`, or both. A header that comes
    twice counts for nothing."""
    headers = scope.get("headers", ())
    bearers = [value for name, value in headers if name == b"authorization"]
    keys = [value for name, value in headers if name == b"x-api-key"]
    given = []
    if len(bearers) == 1:
        scheme, _, key = bearers[0].partition(b" ")
        given += [key.strip()] if scheme.lower() == b"bearer" else []
    return given + ([keys[0].strip()] if len(keys) == 1 else [])


def name_of_key(key: str) -> bytes:
    """What scope["api_key"] is for requests with this key, however they encode it."""
    return _digest(key.encode())


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
    return bool(says(route, "security") == PUBLIC["security"])

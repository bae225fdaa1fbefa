"""`KeySalts`: clients with different API keys share no cached prefixes, so that none can ask what another has sent.
Does not know how keys are checked."""

import hashlib
import secrets

import msgspec
from starlette.types import Scope

from pagemill.messages.engine_io import EngineCoreRequest

SALT_BYTES = 16


class KeySalts:
    """A salt for each key, that nobody outside can work out, before the one that a request brings."""

    def __init__(self, secret: str = "") -> None:
        """`secret`: the same in all API servers of a deployment; empty: this is the only one."""
        self._secret = hashlib.sha256(secret.encode()).digest() if secret else secrets.token_bytes(32)

    def salted(self, request: EngineCoreRequest, scope: Scope) -> EngineCoreRequest:
        """The request, salted by the key that let it in (scope["api_key"], see auth.py)."""
        key: bytes | None = scope.get("api_key")
        if key is None:
            return request
        salt = hashlib.blake2b(key, key=self._secret, digest_size=SALT_BYTES).hexdigest()
        # Requests bring no "/" of their own: what two keys make of two salts is never the same.
        return msgspec.structs.replace(request, cache_salt=f"{salt}/{request.cache_salt or ''}")

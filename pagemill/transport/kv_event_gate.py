"""Who may subscribe to KV cache events: anybody who can connect, or those whose keys are in a file (CURVE, by ZAP).

Knows nothing about events. Subscribers are no processes of ours: they have keys of their own, made by
`zmq.curve_keypair()`, and need the public key of the server.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from pagemill.config.kv_events_config import KVEventsConfig
from pagemill.errors import ConfigError
from pagemill.log import get_logger

logger = get_logger(__name__)

DOMAIN = b"pagemill-kv-events"
KEY_CHARS = 40


class Gate:
    """Stands before the sockets of a context. This one lets everybody in."""

    closed_to_others = False
    """Whether subscribers need a key."""

    def guard(self, socket: "zmq.Socket[bytes]") -> None:
        """Called before a socket binds or connects."""

    def close(self) -> None:
        """Called before the context ends."""


class KeyGate(Gate):
    """Those may come in who have one of the keys."""

    closed_to_others = True

    def __init__(self, context: "zmq.Context[Any]", private: bytes, allowed: frozenset[bytes]) -> None:
        self._private = private
        self._allowed = allowed
        self._num_refused = 0
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(DOMAIN.decode(), credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the owner of this public key may come in; called by the library."""
        if bytes(key) in self._allowed:
            return True
        self._num_refused += 1
        if self._num_refused & (self._num_refused - 1) == 0:  # the 1st, 2nd, 4th, ...: nobody may fill the log
            logger.warning("refused a subscriber to KV cache events: unknown key (%d so far)", self._num_refused)
        return False

    def guard(self, socket: "zmq.Socket[bytes]") -> None:
        """Let it ask for keys."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self._private)
        socket.set(zmq.ZAP_DOMAIN, DOMAIN)

    def close(self) -> None:
        """Nobody comes in any more."""
        self._authenticator.stop()


def gate_maker(config: KVEventsConfig) -> "Callable[[zmq.Context[Any]], Gate]":
    """Makes the gate that the settings want, of a context. Raises ConfigError for files that cannot be read or hold no
    keys."""
    secret = config.curve_secret_key_file
    clients = config.curve_client_keys_file
    if secret is None and clients is None:
        return lambda context: Gate()
    if secret is None or clients is None:
        raise ConfigError(
            "kv_events_config: curve_secret_key_file and curve_client_keys_file belong together: "
            f"{'the former' if secret is None else 'the latter'} is missing"
        )
    if not zmq.has("curve"):
        raise ConfigError("kv_events_config: this libzmq was built without CURVE (libsodium)")
    private = _keys_in("curve_secret_key_file", secret)
    if len(private) != 1:
        raise ConfigError(f"kv_events_config: curve_secret_key_file={secret!r} holds {len(private)} keys; 1 is needed")
    allowed = frozenset(_keys_in("curve_client_keys_file", clients))
    return lambda context: KeyGate(context, private[0], allowed)


def _keys_in(name: str, path: str) -> list[bytes]:
    """The keys in a file, one a line; empty lines do not count."""
    try:
        lines = [line.strip() for line in Path(path).read_bytes().splitlines()]
    except OSError as error:
        raise ConfigError(f"kv_events_config: {name}={path!r} cannot be read: {error.strerror}") from error
    keys = [line for line in lines if line]
    for number, key in enumerate(keys, 1):
        try:
            zmq.curve_public(key)  # whatever 40 characters of Z85 are, they have a public key
        except (zmq.ZMQError, ValueError):
            problem = f"key {number} of {name}={path!r} is not {KEY_CHARS} characters of Z85"
            raise ConfigError(f"kv_events_config: {problem}") from None
    return keys

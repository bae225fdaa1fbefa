"""CURVE: tcp connections between the processes of a deployment are encrypted, and nobody else's get anywhere.

Knows nothing about what is sent. The keys of a server follow from the deployment's secret: who does not know it can
make no connection that the server's library would take a message from, however long it talks. ipc sockets need none of
it: they are files in a folder that others cannot enter.
"""

import functools
import hashlib
import socket as sockets
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

from pagemill.errors import ConfigError

HANDSHAKE_MS = 5_000
"""What a connection gets to prove that it belongs here."""
GREETING = b"\xff" + bytes(8) + b"\x7f\x03"
"""How a client of ZMTP 3 begins; the server then sends its whole greeting."""
GREETING_BYTES = 64
MECHANISM = slice(12, 32)
"""Where a greeting of ZMTP names how connections are protected."""
PROBE_S = 1.0


def protect(socket: "zmq.Socket[Any]", address: str, secret: str, *, serves: bool) -> None:
    """Before a tcp socket binds (`serves`) or connects: protect its connections. Others stay as they are. Raises
    ConfigError when the library cannot."""
    if not address.startswith("tcp://"):
        return
    if not zmq.has("curve"):
        raise ConfigError("this libzmq was built without CURVE (libsodium), which sockets between machines need")
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    public, private = keys_of(secret)
    if serves:
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, private)
        return
    own_public, own_private = zmq.curve_keypair()
    socket.set(zmq.CURVE_SERVERKEY, public)
    socket.set(zmq.CURVE_PUBLICKEY, own_public)
    socket.set(zmq.CURVE_SECRETKEY, own_private)


@functools.lru_cache(maxsize=8)
def keys_of(secret: str) -> tuple[bytes, bytes]:
    """The public and the private key of the servers of a deployment, 40 characters each. The public one is as secret as
    the secret: knowing it is what lets a client in. Slow on purpose, for secrets that people think of."""
    private = z85.encode(hashlib.scrypt(secret.encode(), salt=b"pagemill curve server", n=1 << 14, r=8, p=1, dklen=32))
    return zmq.curve_public(private), private


def is_guarded(address: str) -> bool:
    """Whether somebody listens at a tcp address who protects connections as this deployment does. One that does not
    answer then has another secret, or does not get to its work."""
    if not address.startswith("tcp://"):
        return False
    where = urlsplit(address)
    try:
        with sockets.create_connection((where.hostname or "", where.port or 0), timeout=PROBE_S) as probe:
            probe.sendall(GREETING)
            greeting = b""
            while len(greeting) < GREETING_BYTES and (part := probe.recv(GREETING_BYTES - len(greeting))):
                greeting += part
    except OSError:
        return False
    return greeting[MECHANISM].rstrip(b"\0") == b"CURVE"

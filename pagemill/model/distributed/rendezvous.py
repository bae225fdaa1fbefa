"""`meet`: the ranks of an engine find each other, or say who is missing.

Knows nothing about groups. Every socket listens on the address of the rendezvous only, loopback on one host:
torch's own defaults listen on all interfaces, and nothing in these protocols asks who is calling.
"""

import socket
import time
from datetime import timedelta
from urllib.parse import urlsplit

from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from pagemill.errors import ConfigError, DistributedError

LOOPBACK = "127.0.0.1"
_POLL_S = 0.01
_MAX_POLL_S = 0.2


def meet(rank: int, world_size: int, address: str, timeout_s: float) -> tuple[Store, str]:
    """The store that all ranks share, and this host's address as the others see it.

    `address` is tcp://HOST:PORT, where rank 0 listens, or file://PATH on one host. Raises ConfigError for another
    form, DistributedError when not all ranks have come after `timeout_s` seconds.
    """
    parts = urlsplit(address)
    deadline = time.monotonic() + timeout_s
    if parts.scheme == "file" and parts.path:
        store: Store = FileStore(parts.path, world_size)
        host = LOOPBACK
    elif parts.scheme == "tcp" and parts.hostname and parts.port:
        store, host = _tcp_store(rank, world_size, parts.hostname, parts.port, timeout_s)
    else:
        raise ConfigError(f"init_address={address!r} is neither tcp://HOST:PORT nor file://PATH")
    store.set_timeout(timedelta(seconds=timeout_s))
    store.set(f"here/{rank}", "1")
    _wait_for_all(store, rank, world_size, address, deadline)
    return store, host


def _wait_for_all(store: Store, rank: int, world_size: int, address: str, deadline: float) -> None:
    """Polls, for a store's own wait does not say who is missing."""
    missing = [other for other in range(world_size) if other != rank]
    started = time.monotonic()
    pause = _POLL_S
    while missing := [other for other in missing if not store.check([f"here/{other}"])]:
        if time.monotonic() > deadline:
            raise DistributedError(
                f"rank {rank} of {world_size} waited {time.monotonic() - started:.0f} s at {address}; "
                f"missing: {', '.join(f'rank {other}' for other in missing)}"
            )
        time.sleep(pause)
        pause = min(pause * 1.5, _MAX_POLL_S)


def _tcp_store(rank: int, world_size: int, host: str, port: int, timeout_s: float) -> tuple[Store, str]:
    timeout = timedelta(seconds=timeout_s)
    try:
        if rank:
            store = TCPStore(host, port, world_size, False, timeout, wait_for_workers=False)
            return store, _own_address(host, port)
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen()
        listener.setblocking(False)
        # The store owns the descriptor from here on.
        descriptor = listener.detach()
        return TCPStore(
            host, port, world_size, True, timeout, wait_for_workers=False, master_listen_fd=descriptor
        ), str(target[0])
    except (OSError, RuntimeError) as error:
        what = "cannot listen" if rank == 0 else "cannot reach rank 0"
        raise DistributedError(f"rank {rank} of {world_size} {what} at tcp://{host}:{port}: {error}") from error


def _own_address(host: str, port: int) -> str:
    """The address of the interface that leads to a host. Nothing is sent."""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])

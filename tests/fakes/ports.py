"""Ports for tests that must know one before anybody listens on it."""

import itertools
import os
import random
import socket

RANGE = range(12_000, 32_000)
"""Below those that the kernel gives to whoever does not ask for one (net.ipv4.ip_local_port_range): nobody gets one of
these by chance between the choice and its use."""
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4
_SHARE = RANGE[_WORKER * len(RANGE) // 4 : (_WORKER + 1) * len(RANGE) // 4]
_PORTS = itertools.cycle(random.Random(os.getpid()).sample(_SHARE, len(_SHARE)))


def free_port(host: str = "127.0.0.1") -> int:
    """One that is free, that this process was not given lately, and that no other process of this test run is given."""
    for port in itertools.islice(_PORTS, len(_SHARE)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no port of {RANGE} is free")

"""Endpoints of the KV event publisher: which are allowed, what they become per rank, and which end binds.

Knows nothing about sockets.
"""

import ipaddress
import re
from dataclasses import dataclass

from pagemill.config.kv_events_config import KVEventsConfig
from pagemill.errors import ConfigError

TCP = re.compile(r"tcp://(?P<host>\*|\[[0-9A-Fa-f:.%\w]+\]|[\w.-]+):(?P<port>\d{1,5})", re.ASCII)
IPC = re.compile(r"ipc://[^\s*]+")
ALLOWED = "tcp://ADDRESS:PORT, tcp://*:PORT or ipc://PATH is allowed"


@dataclass(frozen=True)
class Endpoint:
    """One end of a ZMQ connection."""

    address: str
    binds: bool
    """False for a host name: the other side is somewhere else, and binds."""
    every_network: bool
    """Whether it listens on every interface of the machine."""


def publish_endpoint(config: KVEventsConfig, *, data_parallel_rank: int) -> Endpoint:
    """Where this rank publishes. Raises ConfigError for an endpoint that cannot be one."""
    return _parse("endpoint", config.endpoint, data_parallel_rank)


def replay_endpoint(config: KVEventsConfig, *, data_parallel_rank: int) -> Endpoint | None:
    """Where this rank answers requests for replay; None for nowhere. Raises ConfigError."""
    given = config.replay_endpoint
    if given is None:
        return None
    endpoint = _parse("replay_endpoint", given, data_parallel_rank)
    if not endpoint.binds:
        raise ConfigError(
            f"kv_events_config: replay_endpoint={given!r} names another host; subscribers connect to it, so * or an "
            "address of this machine is needed"
        )
    return endpoint


def check_endpoints(config: KVEventsConfig, data_parallel_size: int) -> None:
    """Raise ConfigError unless every rank can have endpoints of its own, or needs none."""
    if not config.active:
        return
    taken: dict[str, str] = {}
    for rank in range(data_parallel_size):
        for name, endpoint in (
            ("endpoint", publish_endpoint(config, data_parallel_rank=rank)),
            ("replay_endpoint", replay_endpoint(config, data_parallel_rank=rank)),
        ):
            if endpoint is None:
                continue
            other = taken.setdefault(endpoint.address, f"{name} of rank {rank}")
            if other != f"{name} of rank {rank}":
                raise ConfigError(
                    f"kv_events_config: {endpoint.address} would be the {other} and the {name} of rank {rank}; ports "
                    f"of endpoint and replay_endpoint must be {data_parallel_size} apart, one per rank"
                )


def _parse(name: str, given: str, rank: int) -> Endpoint:
    if IPC.fullmatch(given):
        return Endpoint(f"{given}_dp{rank}" if rank else given, binds=True, every_network=False)
    match = TCP.fullmatch(given)
    if match is None:
        raise ConfigError(f"kv_events_config: {name}={given!r} is not an endpoint; {ALLOWED}")
    host = match["host"]
    port = int(match["port"]) + rank
    if not (int(match["port"]) and port <= 65535):
        extra = f" plus data-parallel rank {rank}" if rank else ""
        raise ConfigError(f"kv_events_config: the port of {name}={given!r}{extra} is not one of 1 to 65535")
    try:
        every_network = host == "*" or ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return Endpoint(f"tcp://{host}:{port}", binds=False, every_network=False)
    return Endpoint(f"tcp://{host}:{port}", binds=True, every_network=every_network)

"""`HttpLimits`: what one connection may cost, and how many there may be. Does not know how they are kept to."""

import contextlib
import resource
from dataclasses import dataclass, field
from pathlib import Path

from pagemill.config.server_config import ServerConfig

MAX_CONNECTIONS = 16_384
ACCEPTED_AT_ONCE = 32
"""Connections that are accepted before any of them is looked at."""
SPARE_DESCRIPTORS = 64 + ACCEPTED_AT_ONCE
"""Left for files, for engines that are started again, and for connections that are about to be refused."""
MIN_CONNECTIONS = 8
_OPEN_FILES = Path("/proc/self/fd")


@dataclass(frozen=True)
class HttpLimits:
    """Sizes in bytes, times in seconds."""

    max_head_bytes: int = 65_536
    max_headers: int = 256
    keep_alive_s: float = 5.0
    head_s: float = 20.0
    body_s: float = 120.0
    slow_reader_s: float = 60.0
    max_connections: int = field(default_factory=lambda: affordable_connections())


def limits_of(config: ServerConfig) -> HttpLimits:
    """Those of the configuration, completed from the limit of open files of this process."""
    return HttpLimits(
        max_head_bytes=config.h11_max_incomplete_event_size,
        max_headers=config.h11_max_header_count,
        keep_alive_s=config.timeout_keep_alive,
        head_s=config.timeout_request_head,
        body_s=config.timeout_request_body,
        slow_reader_s=config.timeout_slow_reader,
        max_connections=min(config.limit_concurrency or MAX_CONNECTIONS, affordable_connections()),
    )


def affordable_connections() -> int:
    """Connections for which there are descriptors, after those open now and some to spare."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    num_open = SPARE_DESCRIPTORS
    with contextlib.suppress(OSError):  # there is no such folder outside Linux
        num_open = sum(1 for _ in _OPEN_FILES.iterdir())
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, limit - num_open - SPARE_DESCRIPTORS))

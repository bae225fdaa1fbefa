"""Open files: how many a process may have. Knows nothing about what they are for."""

import contextlib
import resource

MOST = 2**20
"""Some machines allow a billion, for which some programs make room."""


def raise_limit() -> int:
    """Let this process, and those that it starts, have as many open files as it is allowed to; the number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # the kernel's own limit may be lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

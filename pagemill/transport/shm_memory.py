"""Memory without a name, for processes that inherit its descriptor. Knows nothing about what is kept in it.

It is gone when the last process that maps it is, however that one dies: nothing is left in /dev/shm, ever.
"""

import os
import tempfile

from pagemill.errors import ConfigError


def create_unnamed(name: str, num_bytes: int) -> int:
    """File descriptor of new memory, all zero, every byte of it reserved: a first touch of memory that is only
    promised would end the process with SIGBUS where there is none left. The caller closes it.

    Raises ConfigError when there is not so much.
    """
    fd = -1
    try:
        fd = _open(name)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, num_bytes)
        else:
            os.ftruncate(fd, num_bytes)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise ConfigError(
            f"{num_bytes} bytes of memory cannot be shared between processes: {error.strerror or error}; free some, "
            "or give the container more"
        ) from error
    return fd


def _open(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())

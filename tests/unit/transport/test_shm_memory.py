"""Memory between processes is reserved when it is made, or refused."""

import errno
import os

import psutil
import pytest

from pagemill.errors import ConfigError
from pagemill.transport import shm_load, shm_queue
from pagemill.transport.shm_memory import create_unnamed


def test_every_byte_is_reserved():
    fd = create_unnamed("test", 1 << 20)
    try:
        facts = os.fstat(fd)
        assert facts.st_size == 1 << 20
        assert facts.st_blocks * 512 >= 1 << 20
        assert os.pread(fd, 1 << 20, 0) == bytes(1 << 20)
    finally:
        os.close(fd)


@pytest.mark.parametrize("create", [lambda: shm_load.create_load(2), lambda: shm_queue.create_queue(2)])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM])
def test_memory_that_is_not_there(monkeypatch, create, number):
    def full(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = psutil.Process().num_fds()
    with pytest.raises(ConfigError, match=f"cannot be shared between processes: {os.strerror(number)}"):
        create()
    assert psutil.Process().num_fds() == before

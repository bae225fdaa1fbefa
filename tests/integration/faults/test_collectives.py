"""The connections between the workers of an engine are cut: the workers start again, and the requests go on."""

import ctypes
import os
import platform
import socket

import psutil
import pytest

from tests.integration.faults.lab import Server, wait_for
from tests.integration.faults.traffic import Traffic, ask_all, asks, same

PIDFD_GETFD = 438
"""The system call, which os does not have: takes a descriptor of a process that one may trace, as those below one."""

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"), reason="a system call of Linux"
)


def cut_tcp(pid):
    """Shut down all tcp connections of a process from outside; how many there were."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(pid)
    try:
        ends = [end for end in psutil.Process(pid).net_connections("tcp") if end.status == psutil.CONN_ESTABLISHED]
        for end in ends:
            taken = libc.syscall(PIDFD_GETFD, pidfd, end.fd, 0)
            if taken < 0:
                pytest.skip(f"descriptors of others cannot be taken here: {os.strerror(ctypes.get_errno())}")
            with socket.socket(fileno=taken) as connection:
                connection.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(pidfd)
    return len(ends)


async def test_a_lost_collective_starts_the_workers_again_and_loses_no_request(checkpoint):
    with Server(checkpoint, "-tp", 2) as server:
        requests = asks(32, max_tokens=400)
        calm = await ask_all(server, requests)
        workers = {server.pid("worker 0"), server.pid("worker 1")}
        async with Traffic(server, requests) as traffic:
            await traffic.until(5)
            assert cut_tcp(server.pid("worker 1")), "they are connected"
            assert same(await traffic.answers(), calm)
        wait_for(lambda: server.status() == 200, "health")
        assert not workers & {server.pid("worker 0"), server.pid("worker 1")}
        assert "is gone: " in server.log and "starting it again" in server.log
        server.wait_empty()

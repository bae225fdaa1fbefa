"""The load of API servers in shared memory: rows, totals, and a lock that outlives nobody."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from pagemill.errors import TransportError
from pagemill.transport.shm_load import LOCK_S, Load, Remainder, SharedLoad, create_load

HOLD = """
import sys
import time
from pagemill.transport.shm_load import LOCK_S, SharedLoad
shared = SharedLoad(int(sys.argv[1]))
with shared.lock() as locked:
    print(locked, flush=True)
    sys.stdin.readline()
"""
ADD = """
import sys
import time
from pagemill.transport.shm_load import LOCK_S, Load, SharedLoad
shared, row = SharedLoad(int(sys.argv[1])), int(sys.argv[2])
mine = 0
for _ in range(3000):
    with shared.lock() as locked:
        if locked and shared.total().num_requests < 1000:
            mine += 1
            shared.set(row, Load(mine, 2 * mine))
"""


@pytest.fixture
def shared() -> Iterator[SharedLoad]:
    shared = SharedLoad(create_load(3))
    yield shared
    shared.close()


def test_the_total_is_the_sum_of_the_rows(shared: SharedLoad) -> None:
    assert shared.total() == (0, 0)
    shared.set(0, Load(2, 30))
    shared.set(2, Load(5, 700))
    assert shared.total() == (7, 730)
    shared.set(0, Load(0, 0))
    assert shared.total() == (5, 700)
    shared.close()
    shared.close()


def test_other_memory_is_refused() -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, 4096)
    with pytest.raises(TransportError):
        SharedLoad(fd)
    os.close(fd)


def test_each_client_has_its_load_and_allowances() -> None:
    shared = SharedLoad(create_load(2, num_clients=5))
    for row in range(2):
        shared.set(row, Load(9, 9))
        for client in range(5):
            shared.set_client(row, client, Load(client, 10 * client))
            shared.set_remainder(client, 3, Remainder(-1.5 * client, 7.0))
    assert shared.total() == (18, 18)
    assert [shared.client(client) for client in range(5)] == [(2 * n, 20 * n) for n in range(5)]
    shared.clear(0)
    assert shared.total() == (9, 9)
    assert [shared.client(client) for client in range(5)] == [(n, 10 * n) for n in range(5)]
    assert [shared.remainder(client, 3) for client in range(5)] == [(-1.5 * n, 7.0) for n in range(5)]
    assert shared.remainder(4, 0) == (0.0, 0.0)
    shared.close()


def child(shared: SharedLoad, code: str, *args: int) -> subprocess.Popen[str]:
    fd = shared._fd
    return subprocess.Popen(
        [sys.executable, "-c", code, str(fd), *map(str, args)],
        pass_fds=[fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_who_holds_the_lock_keeps_others_out_until_it_dies(shared: SharedLoad) -> None:
    holder = child(shared, HOLD)
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == "True\n"
        begun = time.monotonic()
        with shared.lock() as locked:
            assert not locked
        assert time.monotonic() - begun >= LOCK_S, "it may wait for a processor"
        assert shared._is_stuck, "so the next one does not wait for it again"
        with shared.lock() as locked:
            assert not locked
        holder.kill()
        holder.wait()
    with shared.lock() as locked:
        assert locked
    assert not shared._is_stuck


@pytest.mark.slow
def test_processes_that_race_never_pass_a_limit(shared: SharedLoad) -> None:
    racers = [child(shared, ADD, row) for row in range(3)]
    for racer in racers:
        with racer:
            assert racer.wait(60) == 0
    assert shared.total() == (1000, 2000)

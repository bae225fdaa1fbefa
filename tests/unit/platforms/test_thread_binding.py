"""Binding on this machine, in a process of its own: what is bound stays so in threads that outlive the test."""

import json
import os
import subprocess
import sys

import pytest

from pagemill.errors import ConfigError
from pagemill.platforms.thread_binding import ThreadBinding

SCRIPT = """
import json, os, sys, threading
from pagemill.platforms.thread_binding import ThreadBinding

def look(seen, go=None):
    if go is not None:
        go.wait()
    seen.append(sorted(os.sched_getaffinity(0)))

def in_thread():
    seen = []
    thread = threading.Thread(target=look, args=(seen,))
    thread.start()
    thread.join()
    return seen[0]

go, earlier, later = threading.Event(), [], []
first = threading.Thread(target=look, args=(earlier, go))
first.start()
binding = ThreadBinding([int(sys.argv[1])], json.loads(sys.argv[2]))
here, started = sorted(os.sched_getaffinity(0)), in_thread()
pool = threading.Thread(target=look, args=(later, go))
pool.start()
binding.release()
go.set()
first.join()
pool.join()
print(json.dumps([here, started, earlier[0], later[0], sorted(os.sched_getaffinity(0)), in_thread()]))
"""


@pytest.mark.parametrize("nodes", ["[0]", "[0, 1]"])
def test_threads_started_later_are_bound_and_all_are_released(nodes):
    cpus = sorted(os.sched_getaffinity(0))
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(cpus[-1]), nodes], capture_output=True, text=True, check=True, timeout=300
    )
    here, started, earlier, later, after, new = json.loads(result.stdout)
    assert here == started == [cpus[-1]]
    assert earlier == later == after == new == cpus


def test_cpus_that_are_not_there():
    before = os.sched_getaffinity(0)
    with pytest.raises(ConfigError, match=r"cpu_threads_bind: threads cannot be bound to CPUs \[60000\]"):
        ThreadBinding([60_000], [0])
    assert os.sched_getaffinity(0) == before

"""The process of an engine core whose workers have processes of their own: up together, gone together."""

import dataclasses
import os
import signal
import time

import msgspec
import psutil
import pytest

from pagemill.catalog.executors import MP
from pagemill.engine.process import CoreSpec
from pagemill.messages.process_reports import ProcessReport, Started
from pagemill.transport.addresses import PrivateDirectory
from pagemill.transport.handshake import new_secret
from pagemill.utils.processes import Child
from tests.fakes.configs import parallel_config
from tests.fakes.engine_setup import engine_config
from tests.fakes.worker_processes import HERE


def wait_for(child, kind, timeout_s=60):
    """The next report of a kind."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        content = child.report(1)
        report = content and msgspec.msgpack.decode(content, type=ProcessReport)
        if isinstance(report, kind):
            return report
    raise AssertionError(f"no {kind.__name__} in {timeout_s} s")


@pytest.fixture
def core(tmp_path_factory, monkeypatch):
    """A core's process and its workers', by title."""
    children = set(psutil.Process().children(recursive=True))  # as the fork server that other tests left
    # One that is killed cannot remove its private folder; the next deployment would.
    monkeypatch.setenv("PAGEMILL_RPC_BASE_PATH", str(tmp_path_factory.mktemp("c")))
    parallel = parallel_config(tensor_parallel_size=2, distributed_executor_backend=MP)
    config = dataclasses.replace(engine_config(), parallel=parallel)
    with PrivateDirectory() as folder:
        spec = CoreSpec(config, 3, f"{HERE}:ProcessWorker", folder.ipc("core"), new_secret())
        with Child("pagemill.engine.process:run", "pagemill: engine core 3", msgspec.msgpack.encode(spec)) as child:
            wait_for(child, Started)
            yield child, {" ".join(p.cmdline()).strip(): p for p in psutil.Process(child.pid).children()}
            child.signal(signal.SIGTERM)
    assert set(psutil.Process().children(recursive=True)) <= children


@pytest.mark.slow
def test_every_worker_has_a_process_and_all_end_together(core):
    child, workers = core
    assert sorted(workers) == ["pagemill: worker 6", "pagemill: worker 7"]
    started = time.monotonic()
    child.signal(signal.SIGTERM)
    assert child.wait(60) == 0
    assert time.monotonic() - started < 60
    assert not any(worker.is_running() for worker in workers.values())


@pytest.mark.slow
def test_an_idle_core_whose_worker_is_killed_ends(core):
    child, workers = core
    os.kill(workers["pagemill: worker 7"].pid, signal.SIGKILL)
    started = time.monotonic()
    assert child.wait(60) == 1
    assert time.monotonic() - started < 60
    assert not any(worker.is_running() for worker in workers.values())


@pytest.mark.slow
def test_workers_die_with_a_core_that_is_killed(core):
    child, workers = core
    child.signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(workers.values(), timeout=60)
    assert alive == []

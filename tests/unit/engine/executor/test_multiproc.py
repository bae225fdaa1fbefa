"""An executor of several worker processes: the same tokens, every way to die, and nothing left behind."""

import contextlib
import dataclasses
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from pagemill.catalog.executors import EXECUTORS
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.multiproc import MultiprocExecutor
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.errors import ConfigError, EngineDeadError, ModelError
from pagemill.messages.kv_spec import FullAttentionSpec
from pagemill.messages.step import NewRequest, SchedulerOutput
from pagemill.transport.worker_protocol import SampleTokens
from tests.fakes.engine_setup import Client, core_request, engine_config, make_core
from tests.fakes.scripted_worker import alone
from tests.fakes.worker_processes import CRASH_PROMPT, HANG_PROMPT, HERE, KILL_PROMPT
from tests.marks import slow

SPEC = FullAttentionSpec(4, 1, 1, "float32")


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path_factory, monkeypatch):
    children = set(psutil.Process().children(recursive=True))  # as the fork server that other tests left
    folder = tmp_path_factory.mktemp("p")
    monkeypatch.setenv("PAGEMILL_RPC_BASE_PATH", str(folder))
    before = open_descriptors()
    yield
    assert set(psutil.Process().children(recursive=True)) <= children
    assert list(folder.iterdir()) == []
    assert list(Path("/dev/shm").glob("*pagemill*")) == []
    assert open_descriptors() <= before  # fewer, when ZMQ has just closed what other tests left to it
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pagemill-watch")]


@contextlib.contextmanager
def executor(name="ProcessWorker", config=None, **options):
    with contextlib.closing(_Closing(MultiprocExecutor(f"{HERE}:{name}", config or engine_config(), **options))) as it:
        yield it.executor


class _Closing:
    def __init__(self, executor):
        self.executor = executor
        self.close = executor.shutdown


def serve(executor, *requests, **settings):
    """A core on the executor after these requests."""
    client = Client(EngineCore(engine_config(**settings), executor))
    client.add(*requests)
    client.run()
    return client


def requests(count=6):
    return [core_request(str(n), 3 + 5 * n, max_tokens=4 + n, seed=n) for n in range(count)]


def test_the_catalogue_knows_it():
    assert EXECUTORS.resolve("mp") is MultiprocExecutor


@pytest.mark.parametrize(("sizes", "steps"), [((1, 1), 1), slow((2, 1), 1), slow((1, 2), 2)])
def test_the_same_tokens_as_in_one_process(sizes, steps):
    options = {"tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1]}
    core, _ = make_core(budget=16)
    expected = Client(core)
    expected.add(*requests())
    expected.run()
    with executor(**options) as multiproc:
        assert multiproc.max_concurrent_steps == steps
        client = serve(multiproc, *requests(), budget=16)
    assert client.tokens == expected.tokens
    assert client.tokens["3"] == alone(requests()[3], [SPEC], 13, 64)


@pytest.mark.slow
def test_steps_overlap():
    with executor(overlap=True, tensor_parallel_size=2) as multiproc:
        assert multiproc.max_concurrent_steps == 2
        client = serve(multiproc, *requests())
    for request in requests():
        assert client.tokens[request.request_id] == alone(request, [SPEC], 13, 64)


@pytest.mark.slow
def test_workers_that_run_ahead_are_given_the_next_step_meanwhile():
    with executor("Ahead", overlap=True, tensor_parallel_size=2) as multiproc:
        client = serve(multiproc, *requests())
        multiproc.call_all("warm_up")
    for request in requests():
        assert client.tokens[request.request_id] == alone(request, [SPEC], 13, 64)


@pytest.mark.slow
def test_steps_larger_than_a_slot_of_the_queue():
    params = core_request("a", 1).params
    with executor("Counting", tensor_parallel_size=2) as multiproc:
        for step_id, num_tokens in enumerate((10, 500_000, 20, 2_000_000)):
            new = NewRequest("a", 0, np.full(num_tokens, 70_000, np.int32), num_tokens, 0, ([1],), params)
            array = np.arange(num_tokens, dtype=np.int32)
            multiproc.execute_model(SchedulerOutput(step_id, array, array, new=[new]))
            assert multiproc.sample_tokens().result().token_ids.tolist() == [num_tokens, num_tokens]


@pytest.mark.slow
def test_results_of_calls_come_by_rank():
    with executor(tensor_parallel_size=2) as multiproc:
        assert multiproc.available_kv_bytes() == [1 << 30, (1 << 30) + 1]
        assert multiproc.kv_cache_specs() == [{"layer": SPEC}] * 2
        assert multiproc.call_all("warm_up") == [None, None]
        multiproc.check_health()


@pytest.mark.slow
def test_what_workers_print_says_who_did(capfd):
    with executor(tensor_parallel_size=2) as multiproc:
        multiproc.call_all("warm_up")
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [f"[worker {n}] {text}" for n in (0, 1) for text in ("warm", f"worker {n}")]
    assert sorted(err.splitlines()) == ["[worker 0] to stderr", "[worker 1] to stderr"]


@pytest.mark.slow
def test_processes_are_called_what_they_are():
    with executor(tensor_parallel_size=2, first_index=4) as multiproc:
        titles = [" ".join(psutil.Process(pid).cmdline()).strip() for pid in multiproc.pids]
        assert titles == ["pagemill: worker 4", "pagemill: worker 5"]


@pytest.mark.slow
@pytest.mark.parametrize("method", [*map(slow, ["execute_model", "shutdown", "__init__", "_write"]), "no_such"])
def test_only_methods_of_a_worker_can_be_called(method):
    with executor() as multiproc:
        with pytest.raises(ValueError, match="unknown method"):
            multiproc.call_all(method)
        with pytest.raises(ValueError, match="takes 0 arguments"):
            multiproc.call_all("warm_up", 1)
        multiproc.check_health()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        slow("BrokenModel", ModelError, "weights are damaged"),
        slow("BrokenSettings", ConfigError, "settings cannot work"),
        ("DiesLoading", EngineDeadError, "worker .* is gone: exit status 3"),
        ("NoSuchWorker", ConfigError, "'module:callable' is expected"),
    ],
)
@pytest.mark.parametrize("size", [slow(1), 2])
def test_what_keeps_a_worker_from_starting_is_told(name, error, says, size):
    with pytest.raises(error, match=says):
        MultiprocExecutor(f"{HERE}:{name}", engine_config(), tensor_parallel_size=size)


def test_sizes_that_cannot_be():
    with pytest.raises(ConfigError, match="at least 1 each"):
        MultiprocExecutor(f"{HERE}:ProcessWorker", engine_config(), tensor_parallel_size=0)


@pytest.mark.slow
def test_an_error_of_the_callers_to_mend_ends_nothing():
    with executor("BrokenWarmUp", tensor_parallel_size=2) as multiproc:
        for _ in range(2):
            with pytest.raises(ConfigError, match="too much to warm up"):
                multiproc.call_all("warm_up")
        assert len(multiproc.available_kv_bytes()) == 2


@pytest.mark.slow
def test_an_error_in_a_step_is_told_with_its_traceback():
    deaths = []
    with executor(tensor_parallel_size=2, on_death=deaths.append) as multiproc:
        core = EngineCore(engine_config(), multiproc)
        core.add(core_request("a", [CRASH_PROMPT], max_tokens=16))
        with pytest.raises(
            EngineDeadError, match=r"pagemill: worker 1 failed:\nTraceback[^§]*execute_model[^§]*caught fire"
        ):
            for _ in range(16):  # the rank that returns the tokens is not the one that fails
                core.step()
                time.sleep(0.05)
        for call in (multiproc.check_health, multiproc.available_kv_bytes, multiproc.sample_tokens):
            with pytest.raises(EngineDeadError, match="caught fire"):
                call()
    assert len(deaths) == 1


@pytest.mark.slow
def test_a_worker_killed_in_a_step():
    with executor(tensor_parallel_size=2) as multiproc:
        core = EngineCore(engine_config(), multiproc)
        core.add(core_request("a", [KILL_PROMPT]))
        started = time.monotonic()
        with pytest.raises(EngineDeadError, match=r"worker . \(pid \d+\) is gone: killed by SIGKILL"):
            core.step()
        assert time.monotonic() - started < 60


@pytest.mark.slow
def test_a_worker_killed_while_idle_is_noticed_at_once():
    died = threading.Event()
    with executor(tensor_parallel_size=2, on_death=lambda error: died.set()) as multiproc:
        os.kill(multiproc.pids[1], signal.SIGKILL)
        assert died.wait(60)
        with pytest.raises(EngineDeadError, match=r"worker 1 .* killed by SIGKILL"):
            multiproc.check_health()


@pytest.mark.slow
def test_every_pending_step_of_a_dead_executor_says_so():
    with executor(overlap=True) as multiproc:
        core = EngineCore(engine_config(), multiproc)
        core.add(core_request("a", [HANG_PROMPT], max_tokens=4))
        multiproc.execute_model(core._scheduler.schedule())
        steps = [multiproc.sample_tokens() for _ in range(2)]
        assert not steps[0].ready()
        os.kill(multiproc.pids[0], signal.SIGKILL)
        for step in reversed(steps):
            with pytest.raises(EngineDeadError):
                step.result()
            assert step.ready()


@pytest.mark.slow
def test_a_step_has_a_deadline():
    with executor(step_timeout_s=0.2) as multiproc:
        core = EngineCore(engine_config(), multiproc)
        core.add(core_request("a", [HANG_PROMPT]))
        with pytest.raises(EngineDeadError, match=r"no step finished within 0\.2 s"):
            core.step()


@pytest.mark.slow
def test_a_stopped_worker_shows_no_sign_of_life():
    with executor(tensor_parallel_size=2) as multiproc:
        health = multiproc._workers._health
        health._silent_s = 60.0
        multiproc.check_health()
        os.kill(multiproc.pids[1], signal.SIGSTOP)
        time.sleep(5.5)
        health._silent_s = 5.0  # pulses come every second
        with pytest.raises(EngineDeadError, match="worker 1 has given no sign of life for"):
            multiproc.check_health()


@pytest.mark.slow
def test_garbage_in_the_queues_is_dropped(caplog):
    with executor() as multiproc:
        for noise in ([b"\xc1"], [b""], [os.urandom(50)] * 3, [b"\x91\xa4none"], [bytes(500_000)]):
            multiproc._workers.commands.put(noise, 1)
        client = serve(multiproc, core_request("a", 5))
        assert client.tokens["a"] == alone(core_request("a", 5), [SPEC], 13, 64)


@pytest.mark.slow
def test_a_step_that_was_lost_is_not_answered_with_another():
    with executor() as multiproc:
        multiproc._send(SampleTokens(), 1)
        with pytest.raises(EngineDeadError, match="worker 0 failed"):
            multiproc.sample_tokens().result()


@pytest.mark.slow
def test_workers_are_asked_to_stop(tmp_path):
    config = engine_config()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, download_dir=str(tmp_path)))
    with executor("Tidy", config, tensor_parallel_size=2) as multiproc:
        multiproc.shutdown()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
        for call in (multiproc.check_health, multiproc.available_kv_bytes):
            with pytest.raises(EngineDeadError, match="were stopped"):
                call()


@pytest.mark.slow
def test_workers_that_will_not_stop_are_killed_in_time():
    with executor("Stubborn", tensor_parallel_size=3) as multiproc:
        os.kill(multiproc.pids[2], signal.SIGSTOP)
        started = time.monotonic()
        multiproc.shutdown()
        assert time.monotonic() - started < 60


@pytest.mark.slow
def test_workers_die_with_their_parent(tmp_path):
    """Even with one that is killed, and with one of them stopped."""
    code = f"""
from pagemill.engine.executor.multiproc import MultiprocExecutor
from tests.fakes.worker_processes import config
import time
executor = MultiprocExecutor("{HERE}:Stubborn", config(), tensor_parallel_size=2)
print(*executor.pids, flush=True)
time.sleep(60)
"""
    # Killed, it cannot remove its private folder; the next deployment does.
    environment = os.environ | {"PAGEMILL_RPC_BASE_PATH": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        parent.kill()
        _, alive = psutil.wait_procs(workers, timeout=60)
        assert alive == []


def test_the_configuration_survives_the_journey():
    from pagemill.config.engine_config import EngineConfig

    config = engine_config()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config


def test_one_process_has_nothing_to_watch():
    single = UniprocExecutor(f"{HERE}:solo")
    single.check_health()
    single.shutdown()
    with pytest.raises(EngineDeadError, match="was stopped"):
        single.check_health()


@pytest.mark.slow
def test_idle_workers_cost_no_processor_time():
    with executor(tensor_parallel_size=2) as multiproc:
        multiproc.check_health()

        def seconds():
            here = resource.getrusage(resource.RUSAGE_SELF)
            ran = [int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in multiproc.pids]
            return here.ru_utime + here.ru_stime + sum(ran) / 1e9

        time.sleep(0.5)
        before = seconds()
        time.sleep(5)
        used = seconds() - before
        assert used < 0.5, f"{used} s of processor time in 5 s without work"

"""An executor of Ray actors, on a Ray of threads: the same tokens, every way to die, and nothing but bytes."""

import contextlib
import dataclasses
import os
import threading
import time

import numpy as np
import pytest

from pagemill.catalog.executors import EXECUTORS
from pagemill.engine.core import EngineCore
from pagemill.engine.executor import ray_workers
from pagemill.engine.executor.factory import make_executor
from pagemill.engine.executor.ray import RayExecutor
from pagemill.errors import ConfigError, DistributedError, EngineDeadError, ModelError
from pagemill.messages.kv_spec import FullAttentionSpec
from pagemill.messages.step import NewRequest, SchedulerOutput
from pagemill.transport.worker_protocol import SampleTokens
from pagemill.worker import ray_actor
from tests.fakes.configs import parallel_config
from tests.fakes.engine_setup import Client, core_request, engine_config, make_core
from tests.fakes.ray_module import FakeRay
from tests.fakes.scripted_worker import alone
from tests.fakes.worker_processes import CRASH_PROMPT, HANG_PROMPT, HERE, ProcessWorker

SPEC = FullAttentionSpec(4, 1, 1, "float32")
NODES = {"10.0.0.1": {"CPU": 2.0, "GPU": 4.0}, "10.0.0.2": {"CPU": 2.0, "GPU": 4.0}}
released = threading.Event()


class Unhurried(ProcessWorker):
    """Hangs where others do, until it is released; so does its warm-up on rank 1, and fails on rank 0."""

    def execute_model(self, step):
        if HANG_PROMPT in {token for new in step.new for token in new.token_ids}:
            released.wait(10)  # and not for a minute, as others do: this thread holds up the end of the test run
        else:
            super().execute_model(step)

    def warm_up(self):
        if self.rank.rank:
            released.wait(10)
        else:
            raise ConfigError("too much to warm up")


class Bereft(ProcessWorker):
    """Rank 0 loses the other ranks, or so it says."""

    def execute_model(self, step):
        if self.rank.rank == 0:
            raise DistributedError("another rank is gone")
        released.wait(10)


class Telling(ProcessWorker):
    """Says who it is."""

    ranks: list = []  # noqa: RUF012  (threads of one process share it)

    def load_model(self):
        self.ranks.append((self.rank, os.environ.get("CUDA_VISIBLE_DEVICES")))


@pytest.fixture(autouse=True)
def ray(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_actor, "PULSE_S", 0.05)
    monkeypatch.setattr(ray_workers, "DEATH_REPORT_GRACE_S", 0.5)
    create = ray_actor.socket.create_server  # every node is here
    monkeypatch.setattr(ray_actor.socket, "create_server", lambda address: create(("127.0.0.1", address[1])))
    released.clear()
    yield (fake := FakeRay(NODES).install(monkeypatch))
    assert not fake.connected
    assert all(actor.is_dead for actor in fake.actors)
    assert fake.removed == fake.groups
    for thread in threading.enumerate():  # one that was not waited for ends with its actors, if a little later
        if thread.name.startswith("pagemill-watch"):
            thread.join(60)
            assert not thread.is_alive()


@contextlib.contextmanager
def executor(name="ProcessWorker", where=HERE, config=None, **options):
    executor = RayExecutor(f"{where}:{name}", config or engine_config(), **options)
    try:
        yield executor
    finally:
        released.set()
        executor.shutdown()


def requests(count=6):
    return [core_request(str(n), 3 + 5 * n, max_tokens=4 + n, seed=n) for n in range(count)]


def test_the_catalogue_knows_it():
    assert EXECUTORS.resolve("ray") is RayExecutor


@pytest.mark.parametrize(("sizes", "steps"), [((1, 1), 1), ((2, 1), 1), ((1, 2), 2), ((2, 2), 2)])
def test_the_same_tokens_as_in_one_process(sizes, steps):
    core, _ = make_core(budget=16)
    expected = Client(core)
    expected.add(*requests())
    expected.run()
    with executor(tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1]) as on_ray:
        assert on_ray.max_concurrent_steps == steps
        client = Client(EngineCore(engine_config(budget=16), on_ray))
        client.add(*requests())
        client.run()
    assert client.tokens == expected.tokens


def test_the_factory_makes_one(ray):
    parallel = parallel_config(tensor_parallel_size=2, distributed_executor_backend="ray")
    config = dataclasses.replace(engine_config(async_scheduling=True), parallel=parallel)
    config = dataclasses.replace(config, cpu=dataclasses.replace(config.cpu, cpu_threads=2))
    made = make_executor(config, f"{HERE}:ProcessWorker", replica=3)
    assert isinstance(made, RayExecutor)
    assert made.max_concurrent_steps == 2
    made.shutdown()
    assert [actor.options["name"] for actor in ray.actors] == ["pagemill: worker 6", "pagemill: worker 7"]
    assert [repr(actor.object) for actor in ray.actors] == ["pagemill: worker 6", "pagemill: worker 7"]
    assert [actor.options["num_cpus"] for actor in ray.actors] == [2, 2]
    assert ray.actors[0].options["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "2"


def test_steps_overlap():
    with executor(overlap=True) as on_ray:
        client = Client(EngineCore(engine_config(), on_ray))
        client.add(*requests())
        client.run()
    for request in requests():
        assert client.tokens[request.request_id] == alone(request, [SPEC], 13, 64)


def test_several_steps_in_flight_are_answered_in_order(ray):
    params = core_request("a", 1).params
    with executor("Counting", tensor_parallel_size=2, overlap=True) as on_ray:
        steps = []
        for step_id, num_tokens in enumerate((10, 300_000, 20, 500_000)):
            new = NewRequest("a", 0, np.full(num_tokens, 70_000, np.int32), num_tokens, 0, ([1],), params)
            array = np.arange(num_tokens, dtype=np.int32)
            on_ray.execute_model(SchedulerOutput(step_id, array, array, new=[new]))
            steps.append(on_ray.sample_tokens())
        assert [step.result().token_ids.tolist() for step in reversed(steps)] == [
            [n, n] for n in (500_000, 20, 300_000, 10)
        ]
    assert len(ray.puts) == 2  # once for all workers


def test_results_of_calls_come_by_rank():
    with executor(tensor_parallel_size=2) as on_ray:
        assert on_ray.available_kv_bytes() == [1 << 30, (1 << 30) + 1]
        assert on_ray.kv_cache_specs() == [{"layer": SPEC}] * 2
        assert on_ray.call_all("warm_up") == [None, None]
        on_ray.check_health()
        assert on_ray.pids == [os.getpid()] * 2


@pytest.mark.parametrize("method", ["execute_model", "shutdown", "__init__", "_write", "no_such"])
def test_only_methods_of_a_worker_can_be_called(method):
    with executor() as on_ray:
        with pytest.raises(ValueError, match="unknown method"):
            on_ray.call_all(method)
        on_ray.check_health()


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("BrokenModel", ModelError, "weights are damaged"),
        ("BrokenSettings", ConfigError, "settings cannot work"),
        ("NoSuchWorker", ConfigError, "'module:callable' is expected"),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_what_keeps_a_worker_from_starting_is_told(name, error, says, size):
    with pytest.raises(error, match=says):
        RayExecutor(f"{HERE}:{name}", engine_config(), tensor_parallel_size=size)


def test_sizes_that_cannot_be():
    with pytest.raises(ConfigError, match="at least 1 each"):
        RayExecutor(f"{HERE}:ProcessWorker", engine_config(), tensor_parallel_size=0)


def test_no_room():
    with pytest.raises(ConfigError, match=r"no room for 6 workers of 1 CPU each within 0\.5 s; its 2 nodes"):
        RayExecutor(f"{HERE}:ProcessWorker", engine_config(), tensor_parallel_size=6, room_timeout_s=0.5)


def test_a_node_with_another_version(monkeypatch):
    monkeypatch.setattr(ray_actor, "__version__", "0.0.7")
    with pytest.raises(ConfigError, match=r"10\.0\.0\.2 has pagemill 0\.0\.7; .* is needed"):
        RayExecutor(f"{HERE}:ProcessWorker", engine_config())


def test_ranks_and_devices(monkeypatch):
    """Two nodes with two workers each: ranks of a stage on one node, which see the devices of both."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Telling.ranks.clear()
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    with executor("Telling", __name__, per_worker={"CPU": 1, "GPU": 1}, **sizes):
        pass
    told = sorted(Telling.ranks, key=lambda pair: pair[0].rank)
    assert [rank.local_rank for rank, _ in told] == [0, 1, 0, 1]
    assert {rank.world_size for rank, _ in told} == {4}
    assert {devices for _, devices in told} == {"3,2"}
    (address,) = {rank.init_address for rank, _ in told}
    assert address.startswith("tcp://10.0.0.1:")


def test_an_error_of_the_callers_to_mend_ends_nothing():
    with executor("BrokenWarmUp", tensor_parallel_size=2) as on_ray:
        for _ in range(2):
            with pytest.raises(ConfigError, match="too much to warm up"):
                on_ray.call_all("warm_up")
        assert len(on_ray.available_kv_bytes()) == 2


@pytest.mark.slow
def test_a_call_that_fails_on_one_and_hangs_on_another(monkeypatch):
    monkeypatch.setattr("pagemill.engine.executor.ray.FAILED_CALL_S", 0.3)
    with executor("Unhurried", __name__, tensor_parallel_size=2) as on_ray:
        with pytest.raises(ConfigError, match="too much to warm up"):
            on_ray.call_all("warm_up")
        with pytest.raises(EngineDeadError, match="warm_up failed on one worker and did not finish on another"):
            on_ray.check_health()


def test_an_error_in_a_step_is_told_with_its_traceback():
    deaths = []
    with executor(tensor_parallel_size=2, on_death=deaths.append) as on_ray:
        core = EngineCore(engine_config(), on_ray)
        core.add(core_request("a", [CRASH_PROMPT], max_tokens=16))
        with pytest.raises(
            EngineDeadError, match=r"pagemill: worker 1 .*failed:\nTraceback[^§]*execute_model[^§]*caught fire"
        ):
            for _ in range(16):  # the rank that returns the tokens is not the one that fails
                core.step()
                time.sleep(0.05)
        for call in (on_ray.check_health, on_ray.available_kv_bytes, on_ray.sample_tokens):
            with pytest.raises(EngineDeadError, match="caught fire"):
                call()
    assert len(deaths) == 1


@pytest.mark.slow
def test_an_actor_that_dies_in_a_step(ray):
    with executor("Unhurried", __name__, tensor_parallel_size=2) as on_ray:
        core = EngineCore(engine_config(), on_ray_without_warm_up(on_ray))
        core.add(core_request("a", [HANG_PROMPT]))
        threading.Timer(0.2, ray.actors[1].die).start()
        with pytest.raises(EngineDeadError, match=r"worker 1 \(pid \d+ on 10\..*\) is gone: somebody killed it\.$"):
            core.step()


@pytest.mark.slow
@pytest.mark.parametrize(("dies", "reason"), [(True, "worker 1 .* is gone"), (False, "worker 0 [^§]*another rank is")])
def test_the_first_to_suffer_is_not_the_reason(ray, dies, reason):
    with executor("Bereft", __name__, pipeline_parallel_size=2) as on_ray:
        core = EngineCore(engine_config(), on_ray_without_warm_up(on_ray))
        core.add(core_request("a", 3))
        if dies:
            threading.Timer(0.15, ray.actors[1].die).start()
        with pytest.raises(EngineDeadError, match=reason):
            for _ in range(3):  # two are in flight at once
                core.step()


def on_ray_without_warm_up(on_ray):
    on_ray.call_all = lambda method, call=on_ray.call_all: None if method == "warm_up" else call(method)
    on_ray.initialize_kv_cache = lambda plan: None
    return on_ray


def test_an_actor_that_dies_while_idle_is_noticed_at_once(ray):
    died = threading.Event()
    with executor(tensor_parallel_size=2, on_death=lambda error: died.set()) as on_ray:
        ray.actors[1].die()
        assert died.wait(60)
        with pytest.raises(EngineDeadError, match=r"worker 1 .* is gone"):
            on_ray.check_health()


def test_every_pending_step_of_a_dead_executor_says_so(ray):
    with executor("Unhurried", __name__, overlap=True) as on_ray:
        core = EngineCore(engine_config(), on_ray_without_warm_up(on_ray))
        core.add(core_request("a", [HANG_PROMPT], max_tokens=4))
        on_ray.execute_model(core._scheduler.schedule())
        steps = [on_ray.sample_tokens() for _ in range(2)]
        assert not steps[0].ready()
        ray.actors[0].die()
        for step in reversed(steps):
            with pytest.raises(EngineDeadError):
                step.result()
            assert step.ready()


@pytest.mark.slow
def test_a_step_has_a_deadline():
    with executor("Unhurried", __name__, step_timeout_s=0.2) as on_ray:
        core = EngineCore(engine_config(), on_ray_without_warm_up(on_ray))
        core.add(core_request("a", [HANG_PROMPT]))
        with pytest.raises(EngineDeadError, match=r"no step finished within 0\.2 s"):
            core.step()


@pytest.mark.slow
def test_an_actor_without_a_pulse_shows_no_sign_of_life(ray):
    with executor(tensor_parallel_size=2) as on_ray:
        on_ray._workers._health._silent_s = 3.0
        time.sleep(3.5)
        on_ray.check_health()
        ray.actors[1].object.pulse = lambda: released.wait(120) or b""
        with pytest.raises(EngineDeadError, match=r"worker 1 .* has given no sign of life for"):
            for _ in range(1200):
                on_ray.check_health()
                time.sleep(0.05)


def test_a_step_that_was_lost_is_not_answered_with_another():
    with executor() as on_ray:
        on_ray._workers.tell(0, on_ray._parcel(SampleTokens()))
        with pytest.raises(EngineDeadError, match=r"worker 0 .*failed"):
            on_ray.sample_tokens().result()


def test_workers_are_asked_to_stop(tmp_path):
    config = engine_config()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, download_dir=str(tmp_path)))
    with executor("Tidy", config=config, tensor_parallel_size=2) as on_ray:
        on_ray.shutdown()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
        for call in (on_ray.check_health, on_ray.available_kv_bytes):
            with pytest.raises(EngineDeadError, match="were stopped"):
                call()


def test_a_connection_that_somebody_else_has_closed(ray):
    with executor() as on_ray:
        ray.shutdown()
        on_ray.shutdown()
        for actor in ray.actors:
            actor.die()
        ray.removed.extend(ray.groups)

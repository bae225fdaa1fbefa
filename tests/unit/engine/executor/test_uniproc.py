"""An executor of one worker in this process."""

import threading

import pytest

from pagemill.catalog.executors import EXECUTORS
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.errors import ConfigError, EngineDeadError
from pagemill.messages.extensions import SamplingPayloads
from tests.fakes.engine_setup import Client, core_request, make_core
from tests.fakes.scripted_worker import ScriptedWorker, alone


def test_the_catalogue_knows_it():
    assert EXECUTORS.resolve("uni") is UniprocExecutor


def test_a_worker_is_built_by_name_with_its_arguments_and_loaded():
    executor = UniprocExecutor("tests.fakes.scripted_worker:ScriptedWorker", {"only": "spec"})
    assert executor.kv_cache_specs() == [{"only": "spec"}]


def test_calls_reach_the_worker_and_shutdown_does_once():
    worker = ScriptedWorker(kv_bytes=123)
    executor = UniprocExecutor(worker)
    assert executor.available_kv_bytes() == [123]
    assert executor.call_all("warm_up") == [None]
    executor.shutdown()
    executor.shutdown()
    assert worker.calls == ["load_model", "available_kv_bytes", "warm_up", "shutdown"]


@pytest.mark.parametrize("path", ["no.such.module:Worker", "tests.fakes.scripted_worker:Missing", "tests", ""])
def test_a_name_that_leads_nowhere_is_refused(path):
    with pytest.raises(ConfigError, match="'module:callable' is expected"):
        UniprocExecutor(path)


class SlowWorker(ScriptedWorker):
    """Its forward pass waits until it may go on."""

    def __init__(self):
        super().__init__()
        self.started, self.may_go_on = threading.Event(), threading.Event()

    def execute_model(self, step):
        self.started.set()
        if not self.may_go_on.wait(60):
            raise TimeoutError("nobody let the step go on")
        super().execute_model(step)


def test_with_overlap_the_next_step_is_scheduled_while_one_runs():
    worker = SlowWorker()
    core, _ = make_core(overlap=True, worker=worker)
    core.add(core_request("a", 5))
    assert core.step() == []
    assert worker.started.wait(60)
    assert core.has_work()
    worker.may_go_on.set()
    client = Client(core)
    client.run()
    assert client.tokens["a"] == alone(core_request("a", 5), worker.group_specs, worker.vocab_size, 64)
    core.shutdown()


@pytest.mark.parametrize("method", ["execute_model", "sample_tokens"])
def test_what_a_worker_raises_on_its_thread_arrives(monkeypatch, method):
    core, worker = make_core(overlap=True)
    core.add(core_request("a", 5))

    def fail(*args):
        raise MemoryError("no memory left")

    monkeypatch.setattr(worker, method, fail)
    with pytest.raises(EngineDeadError, match="MemoryError: no memory left"):
        for _ in range(3):
            core.step()
    core.shutdown()


def test_a_call_waits_for_the_steps_before_it():
    worker = SlowWorker()
    core, _ = make_core(overlap=True, worker=worker)
    core.add(core_request("a", 5))
    core.step()
    threading.Timer(0.05, worker.may_go_on.set).start()
    core._executor.call_all("warm_up")
    assert len(worker.steps) == 1
    core.shutdown()


class AheadWorker(ScriptedWorker):
    """Its tokens are there when they are asked for, and not before."""

    runs_ahead = True

    def __init__(self, *args):
        super().__init__(*args)
        self.asked = []

    def sample_tokens(self, payloads=None):
        output = super().sample_tokens(payloads).result()
        worker = self

        class Soon:
            def ready(self):
                return False

            def result(self):
                worker.asked.append(output.step_id)
                return output

        return Soon()


def test_a_worker_that_runs_ahead_needs_no_thread():
    worker = AheadWorker()
    core, _ = make_core(overlap=True, worker=worker)
    client = Client(core)
    client.add(core_request("a", 3, max_tokens=5))
    client.step()
    client.step()
    assert len(worker.steps) - len(worker.asked) >= 1
    client.run()
    assert client.tokens["a"] == alone(core_request("a", 3, max_tokens=5), worker.group_specs, worker.vocab_size, 64)
    assert worker.asked == sorted(worker.asked)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_goes_with_the_call_that_samples_arrives_there(overlap):
    told = []

    class Listening(ScriptedWorker):
        def sample_tokens(self, payloads=None):
            told.append(payloads)
            return super().sample_tokens()

    core, _ = make_core(overlap=overlap, worker=Listening())
    executor = core._executor
    core.add(core_request("a", 5))
    step = core._scheduler.schedule()
    executor.execute_model(step)
    payloads = SamplingPayloads(toy=3)
    assert executor.sample_tokens(payloads).result().step_id == step.step_id
    assert told == [payloads]
    core.shutdown()

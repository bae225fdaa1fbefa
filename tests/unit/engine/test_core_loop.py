"""The loop around a core: messages in, reports out, each to whom it belongs."""

import threading
import time

import pytest

from pagemill.engine.core_loop import CoreLoop
from pagemill.errors import EngineDeadError
from pagemill.messages.core_calls import (
    AbortRequests,
    AddRequests,
    CallResult,
    CoreCall,
    FrontEndGone,
    StepOutputs,
)
from pagemill.messages.engine_io import EngineCoreOutputs, FinishReason
from pagemill.messages.stats import ResidencySamples, SchedulerStats
from tests.fakes.engine_setup import core_request, make_core
from tests.fakes.scripted_worker import alone


class Sent:
    """What was posted, per front end, with tokens put together."""

    def __init__(self):
        self.tokens, self.finish, self.results, self.owners = {}, {}, [], {}
        self.num_messages = 0
        self.all_finished = threading.Event()
        self.expected = None

    def __call__(self, front_end, report):
        self.num_messages += 1
        if isinstance(report, CallResult):
            self.results.append((front_end, report))
            return
        outputs = report.outputs
        for name, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
            self.tokens.setdefault(name, []).append(token)
            self.owners.setdefault(name, set()).add(front_end)
        for output in outputs.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            self.owners.setdefault(output.request_id, set()).add(front_end)
            if output.finish is not None:
                self.finish.setdefault(output.request_id, output.finish)
        if len(self.finish) == self.expected:
            self.all_finished.set()


@pytest.fixture
def running():
    """A loop on a thread, its core, its worker and what it sent."""
    core, worker = make_core()
    sent = Sent()
    loop = CoreLoop(core, sent)
    thread = threading.Thread(target=loop.run)
    thread.start()
    yield loop, core, worker, sent
    loop.stop()
    thread.join(60)
    assert not thread.is_alive()


def wait_until(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_each_front_end_gets_its_own_requests_outputs(running):
    loop, _, worker, sent = running
    requests = [core_request(f"r{index}", 4 + index, max_tokens=9, seed=index) for index in range(6)]
    sent.expected = len(requests)
    for index, request in enumerate(requests):
        loop.inbox.put((index % 3, AddRequests([request])))
    assert sent.all_finished.wait(60)
    assert sent.owners == {request.request_id: {index % 3} for index, request in enumerate(requests)}
    for request in requests:
        assert sent.tokens[request.request_id] == alone(request, worker.group_specs, worker.vocab_size, 64)
    wait_until(lambda: loop.idle)
    assert loop.num_steps > 0
    assert (loop.stats.num_running, loop.stats.num_waiting) == (0, 0)
    assert not loop._owners
    assert not loop._num_owned


def test_an_abort_and_a_dead_front_end_free_everything(running):
    loop, core, _, sent = running
    loop.inbox.put((0, AddRequests([core_request("a", 4, max_tokens=50)])))
    loop.inbox.put((1, AddRequests([core_request("b", 4, max_tokens=50), core_request("c", 5, max_tokens=50)])))
    loop.inbox.put((0, AbortRequests(["a", "unknown"])))
    loop.inbox.put((2, FrontEndGone(1)))
    wait_until(lambda: loop.idle and not core.has_work())
    assert core._kv.pool.num_used == 0
    assert not loop._owners
    assert not loop._num_owned
    assert not sent.finish
    assert (loop.stats.num_running, loop.stats.num_waiting, loop.stats.kv_cache_usage) == (0, 0, 0)


def test_what_is_said_of_a_step_as_a_whole_goes_to_one_front_end():
    core, _ = make_core()
    posted = []
    loop = CoreLoop(core, lambda front_end, report: posted.append((front_end, report.outputs)))
    for index in range(2):
        loop._apply((index, AddRequests([core_request(f"r{index}", 4)])))
    stats = SchedulerStats(num_running=2, residency=ResidencySamples([1.0]))
    rows = EngineCoreOutputs(request_ids=["r0", "r1"], token_ids=[5, 6], stats=stats, step_at=3.0, num_step_tokens=2)
    loop._deliver(rows)
    (_, first), (_, second) = posted
    assert (first.num_step_tokens, second.num_step_tokens) == (2, 0)
    assert (first.stats, second.stats) == (stats, SchedulerStats(num_running=2))
    assert first.step_at == second.step_at == 3.0
    assert loop.stats == SchedulerStats(num_running=2), "pulses must not repeat samples"


def test_calls_are_answered_and_their_errors_too(running):
    loop, _, _, sent = running
    loop.inbox.put((3, CoreCall(7, "reset_prefix_cache")))
    loop.inbox.put((3, CoreCall(8, "explode", [1])))
    wait_until(lambda: len(sent.results) == 2)
    assert sent.results[0] == (3, CallResult(7, True))
    assert "unknown call 'explode'" in sent.results[1][1].error


def test_a_worker_that_dies_while_nothing_is_to_do_ends_the_loop():
    core, _ = make_core()
    loop = CoreLoop(core, Sent())
    timer = threading.Timer(0.05, loop.fail, [EngineDeadError("worker 1 is gone")])
    timer.start()
    with pytest.raises(EngineDeadError, match="worker 1 is gone"):
        loop.run()
    timer.join()


def test_a_refused_request_ends_alone(running):
    loop, _, _, sent = running
    sent.expected = 2
    request = core_request("a", 4, max_tokens=30)
    loop.inbox.put((0, AddRequests([request, request, core_request("b", 4)])))
    assert sent.all_finished.wait(60)
    assert sent.finish["b"].reason is FinishReason.LENGTH
    assert sent.finish["a"].reason is FinishReason.ERROR
    assert "in use" in sent.finish["a"].message


def test_an_idle_loop_sleeps(running):
    loop, *_ = running
    wait_until(lambda: loop.idle)
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.05


def test_a_failing_step_ends_the_loop(monkeypatch):
    core, worker = make_core()
    loop = CoreLoop(core, lambda *_: None)

    def fail(*args):
        raise MemoryError("no memory left")

    monkeypatch.setattr(worker, "execute_model", fail)
    loop.inbox.put((0, AddRequests([core_request("a", 4)])))
    with pytest.raises(EngineDeadError, match="no memory left"):
        loop.run()


def test_one_front_end_gets_the_outputs_as_they_are():
    core, _ = make_core()
    posted = []
    loop = CoreLoop(core, lambda owner, report: posted.append((owner, report)))
    loop._add(0, core_request("a", 4))
    (outputs,) = core.step()
    loop._deliver(outputs)
    assert posted == [(0, StepOutputs(outputs))]
    assert posted[0][1].outputs is outputs


@pytest.mark.slow
def test_idle_time_is_for_what_can_be_prepared():
    core, _ = make_core()
    left, prepared = 3, []

    def prepare():
        prepared.append(threading.current_thread().name)
        return len(prepared) < left

    loop = CoreLoop(core, Sent(), prepare=prepare)
    thread = threading.Thread(target=loop.run, name="loop")
    thread.start()
    wait_until(lambda: len(prepared) == left)
    time.sleep(0.15)
    loop.stop()
    thread.join(60)
    assert prepared == ["loop"] * left


@pytest.mark.slow
def test_nothing_is_prepared_while_there_is_something_to_do():
    core, _ = make_core()
    seen = []
    sent = Sent()
    loop = CoreLoop(core, sent, prepare=lambda: seen.append(core.has_work()) or True)
    thread = threading.Thread(target=loop.run)
    thread.start()
    for index in range(3):
        loop.inbox.put((0, AddRequests([core_request(f"r{index}", [1, 2, 3], max_tokens=20)])))
        time.sleep(0.1)
    wait_until(lambda: len(sent.finish) == 3)
    loop.stop()
    thread.join(60)
    assert seen and not any(seen)


def test_a_core_that_cannot_prepare_is_dead():
    core, worker = make_core()

    def broken():
        raise RuntimeError("no such graph")

    worker.prepare_more = broken
    loop = CoreLoop(core, Sent(), prepare=core.prepare_more)
    with pytest.raises(EngineDeadError):
        loop.run()

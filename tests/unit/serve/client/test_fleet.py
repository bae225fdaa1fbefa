"""Engines die and come back, and connections are lost; whoever reads the outputs sees no seam."""

import asyncio

import pytest

from pagemill.errors import EngineDeadError
from pagemill.messages.engine_io import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineReady,
    Finish,
    FinishReason,
)
from pagemill.messages.fleet import EngineDown, EngineLoadReport, EngineStalled, EngineUp
from pagemill.messages.stats import SchedulerStats
from pagemill.serve.client.balancer import LeastLoaded, RoundRobin
from pagemill.serve.client.fleet import FleetClient
from pagemill.serve.client.in_flight import MAX_CRASHES
from tests.fakes.engine_setup import core_request

READY = EngineReady(max_model_len=64, vocab_size=100, num_blocks=10, block_size=4)


def next_token(request, index):
    """What a request's token `index` is, whoever computes it."""
    return (sum(request.prompt_token_ids) + 7 * index) % 97


class FakeEngine:
    """One connection to an engine: a token for every request and `outputs`, until it breaks."""

    def __init__(self, index):
        self.index = index
        self.ready = READY
        self.seen, self.aborted, self.calls = [], [], []
        self.running = {}
        self.work = asyncio.Event()
        self.error = None
        self.closed = False
        self.paused = False

    async def add(self, request):
        if self.error:
            raise self.error
        self.seen.append(request)
        self.running[request.request_id] = [request, len(request.emitted_token_ids)]
        self.work.set()

    async def abort(self, request_ids):
        self.aborted += request_ids
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def lose(self):
        self.error = EngineDeadError("boom")
        self.work.set()

    async def connected(self):
        if self.error:
            raise self.error

    async def outputs(self):
        while not self.running or self.paused:
            if self.error:
                raise self.error
            self.work.clear()
            await self.work.wait()
        if self.error:
            raise self.error
        await asyncio.sleep(0.002)
        if self.error:
            raise self.error
        rows, ended = EngineCoreOutputs(engine_index=self.index), []
        for request_id, entry in list(self.running.items()):
            request, index = entry
            entry[1] += 1
            token = next_token(request, index)
            if entry[1] == request.params.max_tokens:
                finish = Finish(FinishReason.LENGTH)
                ended.append(EngineCoreOutput(request_id=request_id, new_token_ids=[token], finish=finish))
                del self.running[request_id]
            else:
                rows.request_ids.append(request_id)
                rows.token_ids.append(token)
        stats = SchedulerStats(num_running=len(self.running))
        return EngineCoreOutputs(
            engine_index=self.index, request_ids=rows.request_ids, token_ids=rows.token_ids, outputs=ended, stats=stats
        )

    async def call(self, name, *args):
        self.calls.append((name, args))
        return name != "refuse" or self.index != 1

    async def close(self):
        self.closed = True
        if not self.error:
            self.lose()


class Fleet:
    """A client, the latest connections to its engines by (index, incarnation), and what came out of it."""

    def __init__(self, num_engines=1, balancer=None):
        self.engines = {}
        ups = [self.up(index) for index in range(num_engines)]
        self.client = FleetClient(self.connect, ups, balancer)
        self.tokens, self.finish = {}, {}

    @staticmethod
    def up(index, incarnation=0):
        return EngineUp(index, incarnation, f"address-{index}-{incarnation}", READY)

    def tell(self, event):
        """An event, applied at once."""
        self.client.notify(event)
        self.client.problem()

    def kill(self, index, incarnation=0, reason="boom"):
        self.tell(EngineDown(index, incarnation, reason))

    def connect(self, event):
        engine = self.engines[event.index, event.incarnation] = FakeEngine(event.index)
        return engine

    def __getitem__(self, key):
        return self.engines[key]

    async def read(self, steps=None):
        """Take outputs: so many, or until all that was asked for is finished."""
        while steps is None or steps:
            if steps is None and len(self.finish) == len(self.tokens):
                return
            outputs = await asyncio.wait_for(self.client.outputs(), 5)
            for name, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
                self.tokens[name].append(token)
            for output in outputs.outputs:
                self.tokens[output.request_id] += output.new_token_ids
                if output.finish is not None:
                    assert output.request_id not in self.finish
                    self.finish[output.request_id] = output.finish
            if steps is not None:
                steps -= 1

    async def add(self, *requests):
        for request in requests:
            self.tokens[request.request_id] = []
            await self.client.add(request)

    def check(self, *requests):
        for request in requests:
            expected = [next_token(request, index) for index in range(request.params.max_tokens)]
            assert self.tokens[request.request_id] == expected


def requests(count, max_tokens=12):
    return [core_request(f"r{index}", range(index, index + 5), max_tokens=max_tokens) for index in range(count)]


async def test_streams_go_on_on_the_next_incarnation_with_the_same_tokens():
    fleet, batch = Fleet(), requests(5)
    await fleet.add(*batch)
    await fleet.read(steps=4)
    fleet.kill(0, 0)
    await asyncio.sleep(0.01)
    assert fleet[0, 0].closed
    assert fleet.client.problem() == "engine 0 is down: it is being restarted"
    assert not fleet.client.accepts()
    late = core_request("late", 9, max_tokens=3)
    await fleet.add(late)
    fleet.tell(fleet.up(0, 1))
    assert fleet.client.problem() is None
    await fleet.read()
    fleet.check(*batch, late)
    assert all(len(request.emitted_token_ids) >= 4 for request in fleet[0, 1].seen if request.request_id != "late")
    await fleet.client.close()
    assert fleet[0, 1].closed


async def test_another_engine_takes_over_at_once():
    fleet, batch = Fleet(2, RoundRobin()), requests(6)
    await fleet.add(*batch)
    await fleet.read(steps=6)
    fleet.kill(1, 0)
    await fleet.read()
    fleet.check(*batch)
    assert {request.request_id for request in fleet[0, 0].seen} == {request.request_id for request in batch}
    assert fleet.client.problem() == "engine 1 is down: it is being restarted"
    assert fleet.client.accepts()
    await fleet.client.close()


async def test_news_of_a_death_before_the_connection_breaks_and_of_an_older_incarnation():
    fleet, batch = Fleet(), requests(3)
    await fleet.add(*batch)
    await fleet.read(steps=2)
    fleet[0, 0].paused = True
    fleet.tell(EngineDown(0, 0, "killed by SIGKILL"))
    fleet.tell(fleet.up(0, 1))
    fleet.tell(EngineDown(0, 0, "killed by SIGKILL"))
    fleet.tell(fleet.up(0, 0))
    assert fleet.client.problem() is None
    await fleet.read()
    fleet.check(*batch)
    await fleet.client.close()


async def test_a_restart_that_overtakes_the_news_of_the_death():
    fleet, batch = Fleet(), requests(3)
    await fleet.add(*batch)
    await fleet.read(steps=2)
    fleet[0, 0].paused = True
    fleet.tell(fleet.up(0, 1))
    await fleet.add(*(more := [core_request("more", 4, max_tokens=5)]))
    await fleet.read()
    fleet.check(*batch, *more)
    assert len(fleet[0, 1].seen) == 4
    await fleet.client.close()


async def test_a_poison_request_ends_alone():
    fleet, batch = Fleet(), requests(3, max_tokens=30)
    poison = core_request("poison", 6, max_tokens=30)
    await fleet.add(*batch, poison)
    for incarnation in range(4):
        engine = fleet[0, incarnation] if (0, incarnation) in fleet.engines else None
        if engine is None:
            fleet.tell(fleet.up(0, incarnation))
            engine = fleet[0, incarnation]
        while "poison" not in engine.running and "poison" not in fleet.finish:
            await fleet.read(steps=1)
        if "poison" in fleet.finish:
            break
        fleet.kill(0, incarnation)
        await asyncio.sleep(0.01)
        while fleet.client._ready_outputs:
            await fleet.read(steps=1)
        if "poison" in fleet.finish:
            fleet.tell(fleet.up(0, incarnation + 1))
            break
    await fleet.read()
    assert fleet.finish["poison"].reason is FinishReason.ERROR
    assert "boom" in fleet.finish["poison"].message
    fleet.check(*batch)
    await fleet.client.close()


async def test_an_abort_reaches_the_engine_that_has_the_request_and_survives_a_restart():
    fleet, batch = Fleet(2, RoundRobin()), requests(4, max_tokens=1000)
    await fleet.add(*batch)
    await fleet.read(steps=2)
    await fleet.client.abort(["r1", "unknown"])
    assert (fleet[0, 0].aborted, fleet[1, 0].aborted) == ([], ["r1"])
    fleet.kill(0, 0)
    fleet.kill(1, 0)
    await asyncio.sleep(0.01)
    await fleet.client.abort(["r0"])
    fleet.tell(fleet.up(1, 1))
    await asyncio.sleep(0.01)
    assert [request.request_id for request in fleet[1, 1].seen] == ["r2", "r3"]
    await fleet.client.close()


async def test_when_no_engine_will_come_back_everything_raises():
    fleet = Fleet()
    await fleet.add(core_request("a", 3, max_tokens=1000))
    fleet.tell(EngineDown(0, 0, "it failed to start 3 times", final=True))
    with pytest.raises(EngineDeadError, match="failed to start 3 times"):
        for _ in range(100):
            await asyncio.wait_for(fleet.client.outputs(), 5)
    with pytest.raises(EngineDeadError, match="failed to start 3 times"):
        await fleet.client.add(core_request("b", 3))
    assert "failed to start" in fleet.client.problem()
    await fleet.client.close()
    with pytest.raises(EngineDeadError, match="shut down"):
        await fleet.client.outputs()


async def test_a_stalled_engine_gets_no_new_requests_while_another_can_take_them():
    fleet = Fleet(2, LeastLoaded())
    fleet.tell(EngineStalled(0, 0, stalled=True))
    assert fleet.client.problem() == "engine 0 has work and finishes no step"
    assert fleet.client.accepts()
    await fleet.add(*requests(3, max_tokens=1))
    assert len(fleet[1, 0].seen) == 3
    fleet.tell(EngineStalled(1, 0, stalled=True))
    assert not fleet.client.accepts()
    await fleet.add(core_request("anyway", 3, max_tokens=1))
    fleet.tell(EngineStalled(0, 0, stalled=False))
    assert fleet.client.accepts()
    await fleet.client.close()


async def test_load_is_what_was_reported_and_what_was_sent_since():
    fleet = Fleet(2, LeastLoaded())
    for engine in (0, 1):
        fleet.tell(EngineLoadReport(engine, SchedulerStats(num_running=4 * engine)))
        if (engine, 0) in fleet.engines:
            fleet[engine, 0].paused = True
    await fleet.add(*requests(7, max_tokens=1000))
    assert [len(fleet[engine, 0].seen) for engine in (0, 1)] == [4 + 2, 1]  # equal loads at 4: the first; then in turns
    await fleet.client.close()


async def test_figures_of_every_engine_also_of_those_that_are_down():
    fleet = Fleet(2, LeastLoaded())
    busy = SchedulerStats(num_running=7, kv_cache_usage=0.5)
    assert fleet.client.stats() == {0: SchedulerStats(), 1: SchedulerStats()}
    fleet.tell(EngineLoadReport(1, busy))
    assert fleet.client.stats() == {0: SchedulerStats(), 1: busy}
    fleet.tell(EngineDown(1, 0, "it fell over"))
    assert fleet.client.stats() == {0: SchedulerStats(), 1: SchedulerStats()}
    await fleet.client.close()


async def test_calls_go_to_all_engines():
    fleet = Fleet(2)
    assert await fleet.client.call("reset_prefix_cache", 1) is True
    assert await fleet.client.call("refuse") is False
    assert fleet[0, 0].calls == fleet[1, 0].calls == [("reset_prefix_cache", (1,)), ("refuse", ())]
    await fleet.client.close()


async def test_an_engine_that_lives_and_takes_nothing_gets_the_request_later():
    fleet, (request,) = Fleet(), requests(1)
    fleet.tell(EngineLoadReport(0, SchedulerStats()))
    fleet[0, 0].error = EngineDeadError("takes nothing any more")
    fleet[0, 0].work.set = lambda: None  # its reader notices nothing
    await fleet.add(request)
    assert fleet[0, 0].seen == []
    fleet[0, 0].error = None
    del fleet[0, 0].work.set
    fleet.tell(EngineLoadReport(0, SchedulerStats()))
    await fleet.read()
    fleet.check(request)
    await fleet.client.close()


async def test_a_request_that_cannot_be_sent_ends_alone():
    fleet, batch = Fleet(), requests(3)
    fleet.tell(EngineLoadReport(0, SchedulerStats()))
    add = fleet[0, 0].add

    async def refuse(request):
        if request.request_id == "r1":
            raise TypeError("a message holds a value that cannot travel")
        await add(request)

    fleet[0, 0].add = refuse
    await fleet.add(*batch)
    await fleet.read()
    assert fleet.finish["r1"].reason is FinishReason.ERROR
    fleet.check(batch[0], batch[2])
    await fleet.client.close()


async def test_outputs_that_cannot_be_used_cost_the_connection():
    fleet, batch = Fleet(2, RoundRobin()), requests(4)
    await fleet.add(*batch)
    first = fleet[1, 0]
    first.error = ZeroDivisionError("a defect of ours")
    await fleet.read()
    fleet.check(*batch)
    assert first.closed
    await fleet.client.close()


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


async def test_a_lost_connection_is_made_again_and_streams_go_on():
    fleet, batch = Fleet(), requests(5, max_tokens=40)
    await fleet.add(*batch)
    for _ in range(MAX_CRASHES + 1):  # nobody becomes a suspect by that
        await fleet.read(steps=3)
        lost = fleet[0, 0]
        lost.lose()
        await until(lambda: fleet.client.problem() is not None)
        assert fleet.client.problem() == "engine 0 cannot be reached: the connection is being made again"
        assert not fleet.client.accepts()
        await until(lambda: fleet[0, 0] is not lost and fleet.client.accepts())  # noqa: B023
        assert lost.closed
        assert fleet.client.problem() is None
    await fleet.read()
    fleet.check(*batch)
    await fleet.client.close()
    assert fleet[0, 0].closed


async def test_another_engine_takes_over_from_one_that_cannot_be_reached():
    fleet, batch = Fleet(2, RoundRobin()), requests(6)
    await fleet.add(*batch)
    await fleet.read(steps=6)
    fleet[1, 0].lose()
    await fleet.read()
    fleet.check(*batch)
    await fleet.client.close()


async def test_attempts_go_on_for_as_long_as_nobody_says_that_the_engine_is_gone():
    fleet, (request,) = Fleet(), requests(1)
    attempts = []

    def connect(event):
        engine = fleet.connect(event)
        attempts.append(engine)
        if len(attempts) < 4:
            engine.error = EngineDeadError("no answer")
        return engine

    fleet.client._links._connect = connect
    await fleet.add(request)
    await fleet.read()
    fleet.check(request)
    assert len(attempts) == 4
    assert all(engine.closed for engine in attempts[:3])
    attempts[3].lose()
    await until(lambda: fleet.client.problem() is not None)
    fleet.kill(0)
    await asyncio.sleep(0.3)
    assert len(attempts) == 4, "it is gone: nobody asks for it any more"
    assert fleet.client.problem() == "engine 0 is down: it is being restarted"
    await fleet.client.close()


async def test_an_abort_that_cannot_be_sent_costs_the_connection():
    """So that the engine learns of it: it forgets what it was asked over a connection that is lost."""
    fleet, batch = Fleet(), requests(3, max_tokens=30)
    await fleet.add(*batch)
    await fleet.read(steps=2)
    first = fleet[0, 0]

    async def refuse(request_ids):
        raise EngineDeadError("takes nothing any more")

    first.abort = refuse
    await fleet.client.abort(["r1"])
    del fleet.tokens["r1"]
    assert first.closed
    await fleet.read()
    fleet.check(batch[0], batch[2])
    assert [request.request_id for request in fleet[0, 0].seen] == ["r0", "r2"]
    await fleet.client.close()


async def test_an_abort_of_a_caller_that_is_cancelled_is_sent_all_the_same():
    fleet, batch = Fleet(), requests(2, max_tokens=1000)
    await fleet.add(*batch)
    engine, slow = fleet[0, 0], asyncio.Event()
    abort = engine.abort

    async def abort_slowly(request_ids):
        await slow.wait()
        await abort(request_ids)

    engine.abort = abort_slowly
    aborting = asyncio.create_task(fleet.client.abort(["r0"]))
    await asyncio.sleep(0.01)
    aborting.cancel()
    await asyncio.gather(aborting, return_exceptions=True)
    slow.set()
    await until(lambda: engine.aborted == ["r0"])
    await fleet.client.close()


async def test_a_request_that_waits_to_be_sent_over_a_connection_that_is_lost_meanwhile_is_sent_once():
    fleet, (request,) = Fleet(), requests(1)
    fleet.client.accepts()
    first, slow = fleet[0, 0], asyncio.Event()

    async def fail_late(request):
        await slow.wait()
        raise EngineDeadError("takes nothing any more")

    first.add = fail_late
    adding = asyncio.create_task(fleet.add(request))
    await asyncio.sleep(0.01)
    first.lose()
    await until(lambda: fleet[0, 0] is not first and fleet[0, 0].seen)
    slow.set()
    await adding
    await fleet.read()
    fleet.check(request)
    assert len(fleet[0, 0].seen) == 1
    await fleet.client.close()


async def test_a_consumer_that_is_cancelled_does_not_hold_up_the_requests_of_others():
    """What waits for an engine is sent by nobody's task in particular."""
    fleet, batch = Fleet(), requests(2)
    await fleet.add(*batch)
    fleet.kill(0, 0)
    await asyncio.sleep(0.01)
    slow = asyncio.Event()

    class SlowEngine(FakeEngine):
        async def add(self, request):
            await slow.wait()
            await super().add(request)

    fleet.connect = None
    engine = fleet.engines[0, 1] = SlowEngine(0)
    fleet.client._links._connect = lambda event: engine
    fleet.tell(fleet.up(0, 1))
    aborting = asyncio.create_task(fleet.client.abort(["nobody"]))
    await asyncio.sleep(0.01)
    aborting.cancel()
    await asyncio.gather(aborting, return_exceptions=True)
    slow.set()
    await fleet.read()
    fleet.check(*batch)
    await fleet.client.close()


def test_figures_do_not_pile_up_before_anybody_asks():
    fleet = Fleet()
    for _ in range(1000):
        fleet.client.notify(EngineLoadReport(0, SchedulerStats()))
    fleet.client.notify(EngineDown(0, 0, "it fell over"))
    assert len(fleet.client._links._pending) == 2


async def test_an_engine_that_is_down_at_the_start_is_counted():
    engine = FakeEngine(0)
    client = FleetClient(lambda event: engine, [Fleet.up(0)], num_engines=2)
    assert client.problem() == "engine 1 is down: it is being restarted"
    assert client.accepts()
    await client.close()

"""Engines die and come back; whoever reads the outputs sees no seam."""

import asyncio
import time

import pytest

from pagemill.errors import EngineDeadError
from pagemill.messages.engine_io import (
    EngineCoreOutputs,
    FinishReason,
)
from pagemill.messages.fleet import EngineDown, EngineLoadReport, EngineStalled, HaltOrder
from pagemill.messages.stats import SchedulerStats
from pagemill.serve.client.balancer import LeastLoaded, RoundRobin
from pagemill.serve.client.fleet import FleetClient
from tests.fakes.engine_setup import core_request
from tests.fakes.fleet import FakeEngine, Fleet, requests, until


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
            await asyncio.wait_for(fleet.client.outputs(), 60)
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


@pytest.mark.parametrize("told_by_another", [False, True])
async def test_an_engine_that_comes_later_halts_as_the_others_did(told_by_another):
    fleet = Fleet(2)
    await fleet.client.call("hold")
    if told_by_another:
        fleet.client.notify(HaltOrder("pause"))
    else:
        await fleet.client.call("pause")
    fleet.kill(1, 0)
    fleet.tell(fleet.up(1, 1))
    await until(lambda: fleet[1, 1].calls)
    assert fleet[1, 1].calls == [("pause", ())]
    await fleet.client.call("resume")
    fleet.kill(1, 1)
    fleet.tell(fleet.up(1, 2))
    await fleet.add(*requests(4))
    await fleet.read()
    assert fleet[1, 2].calls == []
    await fleet.client.close()


async def test_an_engine_that_is_faster_than_its_outputs_are_read_leaves_others_their_turns(monkeypatch):
    """Nothing is waited for where there is always another batch: the event loop would do nothing else."""
    batches = []
    deadline = time.monotonic() + 120

    async def more(_):
        if time.monotonic() > deadline:
            raise EngineDeadError("nobody else had a turn")
        batches.append(None)
        return [EngineCoreOutputs(request_ids=["a"], token_ids=[1])]

    monkeypatch.setattr(FakeEngine, "outputs", more)
    fleet = Fleet(1)
    async with asyncio.timeout(240):
        taken = await fleet.client.outputs()
        while len(taken) < 100:
            taken += await fleet.client.outputs()
    assert fleet.client.problem() is None and len(batches) >= len(taken)
    await fleet.client.close()

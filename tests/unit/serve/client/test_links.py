"""Connections are lost, and made again while nobody says that the engine is gone; streams show no seam."""

import asyncio

import pytest

from pagemill.errors import EngineDeadError
from pagemill.messages.fleet import EngineDown
from pagemill.serve.client.balancer import RoundRobin
from pagemill.serve.client.in_flight import MAX_CRASHES
from tests.fakes.fleet import Fleet, requests, until


async def test_outputs_that_cannot_be_used_cost_the_connection():
    fleet, batch = Fleet(2, RoundRobin()), requests(4)
    await fleet.add(*batch)
    first = fleet[1, 0]
    first.error = ZeroDivisionError("a defect of ours")
    await fleet.read()
    fleet.check(*batch)
    assert first.closed
    await fleet.client.close()


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


async def test_a_node_that_is_out_of_reach_makes_nobody_a_suspect():
    fleet, (request,) = Fleet(), requests(1, max_tokens=60)
    await fleet.add(request)
    for incarnation in range(MAX_CRASHES + 1):
        await fleet.read(steps=2)
        fleet.tell(EngineDown(0, incarnation, "its node is silent", awaits_node=True))
        assert fleet.client.problem() == "engine 0 is down: its node cannot be reached"
        fleet.tell(fleet.up(0, incarnation + 1))
    await fleet.read()
    fleet.check(request)
    await fleet.client.close()


async def test_another_engine_takes_over_from_one_that_cannot_be_reached():
    fleet, batch = Fleet(2, RoundRobin()), requests(6)
    await fleet.add(*batch)
    await fleet.read(steps=6)
    fleet[1, 0].lose()
    await fleet.read()
    fleet.check(*batch)
    await fleet.client.close()


@pytest.mark.slow
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

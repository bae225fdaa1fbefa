"""A request that kills the worker is given up after its second crash; the others do not notice."""

import pytest

from tests.integration.faults.lab import Server, long_only
from tests.integration.faults.traffic import Traffic, ask_all, asks, same
from tests.integration.faults.worker import POISON

POISONED = {"prompt": [5, POISON, 7], "max_tokens": 4}


@pytest.fixture(scope="module")
def server(checkpoint):
    with Server(checkpoint, scripted=True, LAB_STEP_S=0.005) as server:
        yield server


def num_crashes(server):
    return server.log.count("engine core 0 is gone: killed by SIGKILL")


@pytest.mark.parametrize("stream", [False, *long_only(True)])
async def test_alone_it_is_given_up_after_two_crashes(server, stream):
    before = num_crashes(server)
    (answer,) = await ask_all(server, [POISONED | {"stream": stream}])
    assert (answer.status, answer.error["code"]) == (500, "generation_failed")
    assert num_crashes(server) - before == 2


async def test_the_others_complete(server):
    requests = asks(10)
    calm = await ask_all(server, requests)
    before = num_crashes(server)
    async with Traffic(server, requests) as traffic:
        await traffic.until(3)
        (poisoned,) = await ask_all(server, [POISONED | {"stream": False}])
        assert (poisoned.status, poisoned.error["code"]) == (500, "generation_failed")
        assert same(await traffic.answers(), calm)
    # Two that put all that were there into quarantine; one more after which it is rejected.
    assert num_crashes(server) - before <= 3
    server.wait_healthy()
    server.wait_empty()
    assert same(await ask_all(server, requests), calm)


async def test_several_at_once_fail_nobody_else(server):
    """Independent ones, one of them with several completions, and requests that come while they are found out."""
    requests = asks(12, first=5)
    calm = await ask_all(server, requests)
    poisons = [POISONED | {"stream": False, "prompt": [number, POISON, 7], "n": 1 + number % 2} for number in (4, 5)]
    before = num_crashes(server)
    async with Traffic(server, requests, gap_s=0.2) as traffic, Traffic(server, poisons) as poisoned:
        for answer in await poisoned.answers():
            assert (answer.status, answer.error["code"]) == (500, "generation_failed")
        assert same(await traffic.answers(), calm)
    # Three completions, none of which is computed more than three times, whenever they come.
    assert num_crashes(server) - before <= 9
    server.wait_healthy()
    server.wait_empty()

"""Engine cores and workers are killed under load: every request completes, with the tokens of an undisturbed run."""

import pytest

from tests.integration.faults.lab import Server
from tests.integration.faults.traffic import Traffic, ask_all, asks, same

SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 1234}


@pytest.fixture(scope="module")
def server(checkpoint):
    with Server(checkpoint) as server:
        yield server


async def disturbed(server, requests, *kills):
    """The answers, while each of `kills` happens in the middle of things."""
    async with Traffic(server, requests) as traffic:
        for number, kill in enumerate(kills):
            await traffic.until(5 + 15 * number)
            assert traffic.is_running()
            kill()
        return await traffic.answers()


@pytest.mark.parametrize("fields", [{}, SAMPLED], ids=["greedy", "seeded"])
async def test_a_killed_core_loses_no_request(server, fields):
    requests = asks(32, **fields)
    calm = await ask_all(server, requests)
    assert all(answer.finish == {0: "length"} and answer.num_tokens == 80 for answer in calm)
    pid = server.pid("engine core 0")
    answers = await disturbed(server, requests, lambda: server.kill("engine core 0"))
    assert same(answers, calm)
    assert server.pid("engine core 0") != pid
    assert all(answer.usage["completion_tokens"] == 80 for answer in answers)


async def test_a_core_killed_twice_loses_no_request(server):
    requests = asks(32, first=4)
    calm = await ask_all(server, requests)
    kill = lambda: server.kill("engine core 0")  # noqa: E731
    assert same(await disturbed(server, requests, kill, kill), calm)
    server.wait_empty()

"""/props and /slots."""

import asyncio

import pytest

from tests.fakes.fake_core import FakeCore
from tests.unit.serve.http.conftest import Connect


async def test_props(connect: Connect) -> None:
    client = await connect(scheduler={"max_num_seqs": 3})
    props = (await client.get("/props")).json()
    settings = props["default_generation_settings"]
    assert (settings["n_ctx"], settings["params"]["temperature"]) == (256, 1.0)
    assert (props["total_slots"], props["chat_template"], props["model_alias"]) == (3, "fake", "fake")
    assert (props["bos_token"], props["eos_token"]) == ("<s>", "</s>")
    assert "/nowhere" not in str(props), "where the files are is told to nobody"


@pytest.mark.slow
async def test_as_many_slots_work_as_requests_run(connect: Connect) -> None:
    core = FakeCore(step_s=0.01)
    client = await connect(core, scheduler={"max_num_seqs": 3})
    assert [slot["is_processing"] for slot in (await client.get("/slots")).json()] == [False] * 3
    running = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "max_tokens": 50}))
    while not any(slot["is_processing"] for slot in (await client.get("/slots")).json()):
        await asyncio.sleep(0.001)
    assert [slot["id"] for slot in (await client.get("/slots")).json()] == [0, 1, 2]
    assert (await client.get("/load")).json() == {"server_load": 1}
    await running
    assert (await client.get("/load")).json() == {"server_load": 0}

"""The in-process client: order, sleep, death, shutdown."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pagemill.errors import EngineDeadError
from pagemill.messages.engine_io import EngineCoreRequest, FinishReason
from pagemill.messages.sampling_params import SamplingParams
from pagemill.serve.client.inproc import InprocClient
from tests.fakes.fake_core import FakeCore, say


def request(request_id: str = "a", max_tokens: int = 3) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=1)
    return EngineCoreRequest(request_id=request_id, prompt_token_ids=[1, 2, 3], params=params, arrival_time=0.0)


async def collect(client: InprocClient, request_id: str) -> tuple[list[int], Any]:
    """All tokens of a request and how it ended."""
    tokens: list[int] = []
    while True:
        for outputs in await asyncio.wait_for(client.outputs(), 60):
            pairs = zip(outputs.request_ids, outputs.token_ids, strict=True)
            tokens += [token for name, token in pairs if name == request_id]
            for output in outputs.outputs:
                if output.request_id == request_id:
                    tokens += output.new_token_ids
                    if output.finish is not None:
                        return tokens, output.finish


@pytest.fixture
async def closing() -> AsyncIterator[list[InprocClient]]:
    clients: list[InprocClient] = []
    yield clients
    for client in clients:
        await client.close()


async def test_requests_run_to_their_end(closing: list[InprocClient]) -> None:
    core = FakeCore(say("hello"))
    client = InprocClient(core)
    closing.append(client)
    for name in ("a", "b"):
        await client.add(request(name))
    assert (await collect(client, "a"))[0] == list(b"hel")
    await client.add(request("c"))
    tokens, finish = await collect(client, "c")
    assert (tokens, finish.reason) == (list(b"hel"), FinishReason.LENGTH)
    assert client.ready is core.ready


async def test_the_thread_of_the_event_loop_calls_the_core(closing: list[InprocClient]) -> None:
    core = FakeCore()
    client = InprocClient(core)
    closing.append(client)
    await client.add(request())
    await collect(client, "a")
    assert await client.call("reset_prefix_cache") is True
    await client.abort(["x"])
    await client.call("reset_prefix_cache")
    assert core.threads == {threading.get_ident()}


async def test_abort_reaches_the_core(closing: list[InprocClient]) -> None:
    core = FakeCore(step_s=0.002)
    client = InprocClient(core)
    closing.append(client)
    await client.add(request("a", 200))
    await client.outputs()
    await client.abort(["a", "unknown"])
    assert core.aborted == ["a"]
    assert core.num_running == 0


async def test_outputs_waits_until_something_is_added(closing: list[InprocClient]) -> None:
    core = FakeCore()
    client = InprocClient(core)
    closing.append(client)
    waiting = asyncio.create_task(client.outputs())
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await client.add(request())
    assert (await asyncio.wait_for(waiting, 60))[0].outputs[0].request_id == "a"


async def test_a_dead_core_raises_for_everybody(closing: list[InprocClient]) -> None:
    client = InprocClient(FakeCore(fail_after=1))
    closing.append(client)
    await client.add(request())
    with pytest.raises(EngineDeadError) as raised:
        await collect(client, "a")
    assert "0x" not in str(raised.value)
    for again in (client.outputs(), client.add(request()), client.call("reset_prefix_cache")):
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(again, 60)
    await client.abort(["a"])


async def test_a_refused_request_fails_alone(closing: list[InprocClient]) -> None:
    core = FakeCore()
    client = InprocClient(core)
    closing.append(client)
    core.refuse = True
    await client.add(request("bad"))
    assert (await collect(client, "bad"))[1].reason is FinishReason.ERROR
    core.refuse = False
    await client.add(request("good"))
    assert (await collect(client, "good"))[1].reason is FinishReason.LENGTH


async def test_errors_of_a_call_belong_to_its_caller(closing: list[InprocClient]) -> None:
    client = InprocClient(FakeCore())
    closing.append(client)
    with pytest.raises(ValueError, match="unknown call"):
        await client.call("nonsense")
    assert await client.call("reset_prefix_cache") is True


async def test_close() -> None:
    core = FakeCore()
    client = InprocClient(core)
    await client.close()
    await client.close()
    assert core.is_shut_down
    with pytest.raises(EngineDeadError, match="shut down"):
        await client.add(request())
    await client.abort(["a"])

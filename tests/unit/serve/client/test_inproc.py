"""The in-process client, inline and on a thread: order, sleep, death, shutdown."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pagemill.errors import EngineDeadError
from pagemill.messages.engine_io import EngineCoreRequest, FinishReason
from pagemill.messages.sampling_params import SamplingParams
from pagemill.serve.client.inproc import InprocClient
from tests.fakes.engine import wait_until
from tests.fakes.fake_core import FakeCore, say

MODES = pytest.mark.parametrize("inline", [True, False], ids=["inline", "thread"])


def request(request_id: str = "a", max_tokens: int = 3) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=1)
    return EngineCoreRequest(request_id=request_id, prompt_token_ids=[1, 2, 3], params=params, arrival_time=0.0)


async def collect(client: InprocClient, request_id: str) -> tuple[list[int], Any]:
    """All tokens of a request and how it ended."""
    tokens: list[int] = []
    while True:
        outputs = await asyncio.wait_for(client.outputs(), 5)
        tokens += [tok for rid, tok in zip(outputs.request_ids, outputs.token_ids, strict=True) if rid == request_id]
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


@MODES
async def test_requests_run_to_their_end(inline: bool, closing: list[InprocClient]) -> None:
    core = FakeCore(say("hello"))
    client = InprocClient(core, inline)
    closing.append(client)
    for name in ("a", "b"):
        await client.add(request(name))
    assert (await collect(client, "a"))[0] == list(b"hel")
    await client.add(request("c"))
    tokens, finish = await collect(client, "c")
    assert (tokens, finish.reason) == (list(b"hel"), FinishReason.LENGTH)
    assert client.ready is core.ready


@MODES
async def test_one_thread_calls_the_core(inline: bool, closing: list[InprocClient]) -> None:
    core = FakeCore()
    client = InprocClient(core, inline)
    closing.append(client)
    await client.add(request())
    await collect(client, "a")
    assert await client.call("reset_prefix_cache") is True
    await client.abort(["x"])
    await client.call("reset_prefix_cache")
    assert len(core.threads) == 1
    assert (threading.get_ident() in core.threads) is inline


@MODES
async def test_abort_reaches_the_core(inline: bool, closing: list[InprocClient]) -> None:
    core = FakeCore(step_s=0.002)
    client = InprocClient(core, inline)
    closing.append(client)
    await client.add(request("a", 200))
    await client.outputs()
    await client.abort(["a", "unknown"])
    await asyncio.to_thread(wait_until, lambda: core.aborted == ["a"])
    assert core.num_running == 0


@MODES
async def test_outputs_waits_until_something_is_added(inline: bool, closing: list[InprocClient]) -> None:
    core = FakeCore()
    client = InprocClient(core, inline)
    closing.append(client)
    waiting = asyncio.create_task(client.outputs())
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await client.add(request())
    assert (await asyncio.wait_for(waiting, 5)).outputs[0].request_id == "a"


@MODES
async def test_a_dead_core_raises_for_everybody(inline: bool, closing: list[InprocClient]) -> None:
    client = InprocClient(FakeCore(fail_after=1), inline)
    closing.append(client)
    await client.add(request())
    with pytest.raises(EngineDeadError) as raised:
        await collect(client, "a")
    assert "0x" not in str(raised.value)
    for again in (client.outputs(), client.add(request()), client.call("reset_prefix_cache")):
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(again, 5)
    await client.abort(["a"])


async def test_calls_in_the_queue_hear_of_the_death(closing: list[InprocClient]) -> None:
    client = InprocClient(FakeCore(fail_after=0, step_s=0.05), inline=False)
    closing.append(client)
    await client.add(request())
    await asyncio.sleep(0.01)  # the step that fails is under way
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(client.call("reset_prefix_cache"), 5)


@MODES
async def test_a_refused_request_fails_alone(inline: bool, closing: list[InprocClient]) -> None:
    core = FakeCore()
    client = InprocClient(core, inline)
    closing.append(client)
    core.refuse = True
    await client.add(request("bad"))
    assert (await collect(client, "bad"))[1].reason is FinishReason.ERROR
    core.refuse = False
    await client.add(request("good"))
    assert (await collect(client, "good"))[1].reason is FinishReason.LENGTH


@MODES
async def test_errors_of_a_call_belong_to_its_caller(inline: bool, closing: list[InprocClient]) -> None:
    client = InprocClient(FakeCore(), inline)
    closing.append(client)
    with pytest.raises(ValueError, match="unknown call"):
        await client.call("nonsense")
    assert await client.call("reset_prefix_cache") is True


@MODES
async def test_close(inline: bool) -> None:
    core = FakeCore()
    client = InprocClient(core, inline)
    await client.close()
    await client.close()
    assert core.is_shut_down
    with pytest.raises(EngineDeadError, match="shut down"):
        await client.add(request())
    await client.abort(["a"])


@pytest.mark.slow
async def test_an_idle_thread_does_not_burn_time(closing: list[InprocClient]) -> None:
    core = FakeCore()
    client = InprocClient(core, inline=False)
    closing.append(client)
    await client.add(request())
    await collect(client, "a")
    steps, before = core.num_steps, time.process_time()
    await asyncio.sleep(0.2)
    assert core.num_steps == steps
    assert time.process_time() - before < 0.1

import asyncio
import json

import httpx
import pytest

from pagemill.bench.load import Target, run_load
from pagemill.bench.workload import WorkItem

WORK = [WorkItem([number, 2, 3], 2) for number in range(6)]
TARGET = Target("http://test.invalid", model="m", api_key="k")


def event(data: object) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


class Answer(httpx.AsyncByteStream):
    """Two pieces, `delay_s` apart."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s

    async def __aiter__(self):
        yield event({"choices": [{"text": "a"}]})
        await asyncio.sleep(self.delay_s)
        yield event({"choices": [{"text": "b"}]})
        yield event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
        yield b"data: [DONE]\n\n"


async def test_every_request_is_sent_and_timed():
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        assert request.headers["authorization"] == "Bearer k"
        return httpx.Response(200, stream=Answer(0.02))

    results = await run_load(TARGET, WORK, [0.0] * 6, transport=httpx.MockTransport(answer))
    assert sorted(body["prompt"][0] for body in bodies) == [0, 1, 2, 3, 4, 5]
    assert bodies[0] == {
        "prompt": [0, 2, 3],
        "max_tokens": 2,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "model": "m",
    }
    for sent in results:
        assert sent.error is None
        assert (sent.num_prompt_tokens, sent.num_output_tokens) == (3, 2)
        first, second = sent.piece_times_s
        assert sent.start_s <= first and second - first >= 0.015


async def test_no_more_than_max_concurrency_at_a_time():
    running, most = 0, 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return httpx.Response(200, stream=Answer())

    await run_load(TARGET, WORK, [0.0] * 6, max_concurrency=2, transport=httpx.MockTransport(answer))
    assert most == 2
    await run_load(TARGET, WORK, [0.0] * 6, transport=httpx.MockTransport(answer))
    assert most == 6


async def test_requests_wait_for_their_arrival():
    transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=Answer()))
    results = await run_load(TARGET, WORK[:2], [0.0, 0.08], transport=transport)
    assert results[1].start_s - results[0].start_s >= 0.07


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(503, text="busy"), "ValueError: 503 busy"),
        (httpx.Response(200, content=event({"error": {"message": "died"}})), "the server failed: {'message': 'died'}"),
        (httpx.Response(200, content=event({"choices": []})), "the server broke off its answer"),
        (httpx.Response(200, content=b"data: {oops\n\n"), "JSONDecodeError"),
        (httpx.ConnectError("refused"), "ConnectError: refused"),
    ],
)
async def test_a_failed_request_carries_its_error(response: httpx.Response | Exception, message: str):
    def answer(request: httpx.Request) -> httpx.Response:
        if isinstance(response, Exception):
            raise response
        return response

    [sent] = await run_load(TARGET, WORK[:1], [0.0], transport=httpx.MockTransport(answer))
    assert sent.error is not None and message in sent.error

"""Streams whose every event has the token counts so far."""

import json
from typing import Any

import httpx
import pytest

from tests.fakes.engine import make_app, make_engine
from tests.fakes.fake_core import FakeCore, say

SAID = 'a "],"usage":null}\n\n b'
"""A text that looks like the end of an event."""
COUNTS = {"include_usage": True, "continuous_usage_stats": True}


async def streamed(path: str, **body: Any) -> list[dict[str, Any]]:
    engine = make_engine(FakeCore(say(SAID)))
    transport = httpx.ASGITransport(make_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post(path, json=body | {"max_tokens": 100, "stream": True, "stream_options": COUNTS})
    await engine.shutdown()
    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/v1/completions", {"prompt": "hi"}, lambda choice: choice["text"]),
        ("/v1/completions", {"prompt": "hi", "logprobs": 1}, lambda choice: choice["text"]),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}]},
            lambda choice: choice["delta"].get("content", ""),
        ),
    ],
)
async def test_counts_grow_with_the_text(path: str, body: dict[str, Any], text: Any) -> None:
    *events, last = await streamed(path, **body)
    assert "".join(text(choice) for event in events for choice in event["choices"]) == SAID
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[0] < counts[-1] == len(SAID)
    assert last["choices"] == [] and last["usage"] == events[-1]["usage"]

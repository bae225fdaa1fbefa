"""Lines of a batch file, answered by the application around a fake engine."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from pagemill.cli.batch_lines import BadLine, answer_lines, read_line
from tests.fakes.engine import make_app, make_engine
from tests.fakes.fake_core import FakeCore

MESSAGES = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


def line(custom_id: Any, url: Any = "/v1/chat/completions", body: Any = MESSAGES, **others: Any) -> bytes:
    entry = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return json.dumps(entry | others).encode() + b"\n"


async def answers(lines: list[bytes], window: int = 4) -> list[dict[str, Any]]:
    engine = make_engine(FakeCore())
    transport = httpx.ASGITransport(make_app(engine), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        found = [answer async for answer in answer_lines(client, lines, window)]
    await engine.shutdown()
    entries = [json.loads(answer.line) for answer in found]
    for answer, entry in zip(found, entries, strict=True):
        assert answer.ok is (entry["error"] is None and entry["response"]["status_code"] == 200)
        assert entry.keys() == {"id", "custom_id", "response", "error"}
        assert entry["id"].startswith("batch_req_") and "\n" not in answer.line
    return entries


async def test_each_line_gets_an_answer_in_its_order() -> None:
    texts = [line(f"t{place}", "/v1/completions", {"prompt": "ab", "max_tokens": place}) for place in range(1, 10)]
    found = await answers([line("chat"), b"\n", b"  \n", *texts], window=3)
    assert [entry["custom_id"] for entry in found] == ["chat", *(f"t{place}" for place in range(1, 10))]
    assert {entry["response"]["status_code"] for entry in found} == {200}
    assert found[0]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    usage = [entry["response"]["body"]["usage"]["completion_tokens"] for entry in found[1:]]
    assert usage == list(range(1, 10))
    assert all(entry["response"]["request_id"] for entry in found)


async def test_a_wrong_line_spoils_no_other() -> None:
    lines = [
        b"not json\n", b"[1]\n", line("", body={}), line("a", url="/metrics"), line("b", url="//v1/x"),
        line("c", method="GET"), line("d", body="text"), line("e", body={"stream": True}), line("good"), line("good"),
        b'{"custom_id": "f\xff"}\n', b"[" * 100_000,
    ]  # fmt: skip
    found = await answers(lines)
    assert [entry["custom_id"] for entry in found] == [
        None, None, "", "a", "b", "c", "d", "e", "good", "good", None, None
    ]  # fmt: skip
    assert [entry["error"] is None for entry in found] == [place == 8 for place in range(12)]
    assert {entry["error"]["code"] for entry in found if entry["error"]} == {"invalid_line"}
    assert found[9]["error"]["message"] == "custom_id 'good' is that of an earlier line"


async def test_what_the_application_refuses_is_its_answer() -> None:
    bad = line("bad", body={**MESSAGES, "temperature": -1})
    missing = line("missing", url="/v1/no-such")
    found = await answers([bad, missing, line("model", body={**MESSAGES, "model": "other"})])
    assert [entry["response"]["status_code"] for entry in found] == [400, 404, 404]
    assert "temperature" in found[0]["response"]["body"]["error"]["message"]
    assert [entry["error"] for entry in found] == [None] * 3


async def test_leaving_ends_what_is_under_way() -> None:
    core = FakeCore(step_s=0.001)
    engine = make_engine(core)
    transport = httpx.ASGITransport(make_app(engine), raise_app_exceptions=False)
    long = {"prompt": "ab", "max_tokens": 200}
    lines = [line("short", "/v1/completions", {"prompt": "ab", "max_tokens": 1})]
    lines += [line(f"{place}", "/v1/completions", long) for place in range(3)]
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        found = answer_lines(client, lines, 4)
        assert (await anext(found)).ok
        await found.aclose()
        await asyncio.sleep(0.05)
        assert core.num_running == 0
    await engine.shutdown()


@pytest.mark.parametrize(("given", "message"), [
    (None, "the line is not a JSON object"),
    ({"custom_id": 3}, "custom_id=3 is not allowed: a text that names the line"),
    ({"custom_id": "a", "method": "PUT"}, "method='PUT' is not allowed: POST"),
    ({"custom_id": "a", "url": "https://x/v1/chat/completions"}, "url='https://x/v1/chat/completions' is not allowed"),
    ({"custom_id": "a", "url": "/v1/../metrics"}, "is not allowed: the path of an endpoint"),
    ({"custom_id": "a", "url": "/v1/completions"}, "body is not a JSON object"),
])  # fmt: skip
def test_what_is_wrong_is_named(given: Any, message: str) -> None:
    with pytest.raises(BadLine) as caught:
        read_line(given)
    assert message in str(caught.value)

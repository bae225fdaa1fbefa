"""Responses that are stored: found again, followed, continued, cancelled; in the background and not."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.fakes.fake_core import FakeCore, say
from tests.fakes.fake_tokenizer import EOS
from tests.unit.serve.http.conftest import Connect
from tests.unit.serve.http.routes.test_responses import BODY, PARSERS, PATH, TOOLS, events, output_of, said

STORE: dict[str, Any] = {"response_store_bytes": 1 << 20}
SLOW = 0.002


async def ended(client: httpx.AsyncClient, name: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    """A response, when it has ended."""
    async with asyncio.timeout(120):
        while True:
            answer = (await client.get(f"{PATH}/{name}", headers=headers)).json()
            if answer["status"] not in ("queued", "in_progress"):
                return answer  # type: ignore[no-any-return]
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_found_again(connect: Connect, stream: bool) -> None:
    client = await connect(FakeCore(say("hello", EOS)), **STORE)
    answer = await client.post(PATH, json=BODY | {"stream": stream})
    whole = events(answer)[-1]["response"] if stream else answer.json()
    assert whole["store"] is True
    name = whole["id"]
    assert (await client.get(f"{PATH}/{name}")).json() == whole
    listed = (await client.get(f"{PATH}/{name}/input_items")).json()
    assert (listed["object"], listed["has_more"]) == ("list", False)
    assert [item["content"] for item in listed["data"]] == [[{"type": "input_text", "text": "hi"}]]
    assert listed["first_id"] == listed["last_id"] == listed["data"][0]["id"]
    gone = await client.delete(f"{PATH}/{name}")
    assert gone.json() == {"id": name, "object": "response", "deleted": True}
    for missing in (await client.get(f"{PATH}/{name}"), await client.delete(f"{PATH}/{name}")):
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")


async def test_store_false_stores_nothing(connect: Connect) -> None:
    client = await connect(FakeCore(say("hello", EOS)), **STORE)
    whole = (await client.post(PATH, json=BODY | {"store": False})).json()
    assert whole["store"] is False
    assert (await client.get(f"{PATH}/{whole['id']}")).status_code == 404


async def test_what_came_before_is_part_of_the_prompt(connect: Connect) -> None:
    said = '<think>hmm</think>so <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    core = FakeCore(say(said, EOS), max_model_len=1024)
    client = await connect(core, **STORE, **PARSERS)
    first = (await client.post(PATH, json=BODY | {"tools": TOOLS, "instructions": "be kind"})).json()
    result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "done"}
    follow = BODY | {"tools": TOOLS, "previous_response_id": first["id"], "input": [result]}
    second = (await client.post(PATH, json=follow)).json()
    assert second["previous_response_id"] == first["id"]
    assert second["instructions"] is None
    whole = [{"role": "user", "content": "hi"}, *first["output"], result]
    assert (await client.post(PATH, json=BODY | {"tools": TOOLS, "input": whole})).status_code == 200
    assert core.seen[1].prompt_token_ids == core.seen[2].prompt_token_ids
    # A third turn has both before it, also when the first is gone.
    await client.delete(f"{PATH}/{first['id']}")
    third = (await client.post(PATH, json=BODY | {"previous_response_id": second["id"], "input": "and?"})).json()
    listed = (await client.get(f"{PATH}/{third['id']}/input_items", params={"order": "asc"})).json()["data"]
    assert [item["type"] for item in listed] == [
        "message", "reasoning", "message", "function_call", "function_call_output", "reasoning", "message",
        "function_call", "message",
    ]  # fmt: skip
    assert listed[-1]["content"][0]["text"] == "and?"


async def test_pages_of_items(connect: Connect) -> None:
    client = await connect(FakeCore(say("ok", EOS)), **STORE)
    body = BODY | {"input": [{"role": "user", "content": text} for text in "abcde"]}
    path = f"{PATH}/{(await client.post(PATH, json=body)).json()['id']}/input_items"

    async def page(**query: Any) -> tuple[str, bool, str]:
        found = (await client.get(path, params=query)).json()
        text = "".join(item["content"][0]["text"] for item in found["data"])
        return text, found["has_more"], found["last_id"]

    text, more, last = await page(limit=2)
    assert (text, more) == ("ed", True)
    text, more, last = await page(limit=2, after=last)
    assert (text, more) == ("cb", True)
    assert (await page(after=last))[:2] == ("a", False)
    assert (await page(order="asc", limit=100))[:2] == ("abcde", False)
    for query in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"after": "x"}):
        answer = await client.get(path, params=query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(query)))


async def test_in_the_background(connect: Connect) -> None:
    core = FakeCore(say("hello", EOS), step_s=SLOW)
    client = await connect(core, **STORE)
    started = (await client.post(PATH, json=BODY | {"background": True})).json()
    assert (started["status"], started["background"], started["output"]) == ("queued", True, [])
    whole = await ended(client, started["id"])
    assert (whole["status"], whole["output"][0]["content"][0]["text"]) == ("completed", "hello")
    follow = await client.get(f"{PATH}/{started['id']}", params={"stream": "true"})
    assert (follow.status_code, follow.json()["error"]["param"]) == (400, "stream")
    assert (await client.post(f"{PATH}/{started['id']}/cancel")).json() == whole


async def test_a_stream_in_the_background_is_followed_from_any_event(connect: Connect) -> None:
    client = await connect(FakeCore(say("hello", EOS), step_s=SLOW), **STORE)
    answer = await client.post(PATH, json=BODY | {"background": True, "stream": True})
    found = events(answer)
    whole = found[-1]["response"]
    assert output_of(found) == whole["output"]
    path = f"{PATH}/{whole['id']}"
    assert (await client.get(path)).json() == whole
    assert events(await client.get(path, params={"stream": "true"})) == found
    later = await client.get(path, params={"stream": "true", "starting_after": 4})
    numbers = [json.loads(line.removeprefix("data: "))["sequence_number"] for line in said(later).splitlines()[1::3]]
    assert numbers == list(range(5, len(found)))
    none = await client.get(path, params={"stream": "true", "starting_after": len(found) - 1})
    assert (none.status_code, said(none)) == (200, "")
    wrong = await client.get(path, params={"stream": "true", "starting_after": "-1"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "starting_after")


async def test_cancelling_ends_the_work(connect: Connect) -> None:
    core = FakeCore(say("a" * 10_000), max_model_len=16_000, step_s=SLOW)
    client = await connect(core, **STORE)
    started = (await client.post(PATH, json=BODY | {"background": True, "max_output_tokens": 10_000})).json()
    follow = await client.post(PATH, json=BODY | {"previous_response_id": started["id"]})
    assert (follow.status_code, follow.json()["error"]["param"]) == (400, "previous_response_id")
    cancelled = (await client.post(f"{PATH}/{started['id']}/cancel")).json()
    assert (cancelled["status"], cancelled["id"]) == ("cancelled", started["id"])
    assert (await client.get(f"{PATH}/{started['id']}")).json() == cancelled
    assert len(core.aborted) == len(core.seen)


async def test_deleting_ends_the_work(connect: Connect) -> None:
    core = FakeCore(say("a" * 10_000), max_model_len=16_000, step_s=SLOW)
    client = await connect(core, **STORE)
    started = (await client.post(PATH, json=BODY | {"background": True, "max_output_tokens": 10_000})).json()
    assert (await client.delete(f"{PATH}/{started['id']}")).status_code == 200
    assert (await client.get(f"{PATH}/{started['id']}")).status_code == 404
    assert len(core.aborted) == len(core.seen)


async def test_an_engine_that_dies_fails_the_answer(connect: Connect) -> None:
    client = await connect(FakeCore(say("hello", EOS), fail_after=3), **STORE)
    started = (await client.post(PATH, json=BODY | {"background": True})).json()
    whole = await ended(client, started["id"])
    assert (whole["status"], whole["error"]["code"]) == ("failed", "server_error")


async def test_an_answer_that_is_too_large_to_be_stored(connect: Connect) -> None:
    client = await connect(FakeCore(say("a" * 200, EOS)), response_store_bytes=1500)
    whole = (await client.post(PATH, json=BODY)).json()
    assert (whole["status"], whole["store"]) == ("completed", True)
    large = BODY | {"metadata": {"a": "b" * 500, "c": "d" * 500}}
    assert (await client.post(PATH, json=large)).json()["store"] is False
    refused = await client.post(PATH, json=large | {"background": True})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_overloaded")
    for stream in (False, True):
        client = await connect(FakeCore(say("a" * 200, EOS)), response_store_bytes=2500 if stream else 1300)
        started = await client.post(PATH, json=BODY | {"background": True, "stream": stream})
        name = events(started)[0]["response"]["id"] if stream else started.json()["id"]
        failed = await ended(client, name)
        assert (failed["status"], failed["output"]) == ("failed", [])
        assert "no room" in failed["error"]["message"]


async def test_a_key_sees_only_its_own(connect: Connect) -> None:
    client = await connect(FakeCore(say("hello", EOS)), **STORE, api_key=("ann", "bob"))
    ann, bob = ({"authorization": f"Bearer {key}"} for key in ("ann", "bob"))
    name = (await client.post(PATH, json=BODY, headers=ann)).json()["id"]
    assert (await client.get(f"{PATH}/{name}", headers=ann)).status_code == 200
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        assert (await client.request(method, f"{PATH}/{name}{path}", headers=bob)).status_code == 404
    follow = await client.post(PATH, json=BODY | {"previous_response_id": name}, headers=bob)
    assert (follow.status_code, follow.json()["error"]["param"]) == (400, "previous_response_id")


async def test_without_a_store_there_is_nothing_to_be_found(connect: Connect) -> None:
    client = await connect(FakeCore(say("hello", EOS)))
    name = (await client.post(PATH, json=BODY)).json()["id"]
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        answer = await client.request(method, f"{PATH}/{name}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_supported")
        assert "--response-store-bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("fields", "named"), [
    ({"background": True, "store": False}, "background"), ({"previous_response_id": "resp_x"}, "previous_response_id"),
    ({"previous_response_id": 5}, "previous_response_id"),
])  # fmt: skip
async def test_what_is_wrong_is_named(connect: Connect, fields: dict[str, Any], named: str) -> None:
    client = await connect(**STORE)
    answer = await client.post(PATH, json=BODY | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, named), answer.text


async def test_only_background_responses_are_cancelled(connect: Connect) -> None:
    client = await connect(FakeCore(say("hello", EOS)), **STORE)
    name = (await client.post(PATH, json=BODY)).json()["id"]
    answer = await client.post(f"{PATH}/{name}/cancel")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_id")


async def test_a_body_that_is_no_json_is_refused_as_ever(connect: Connect) -> None:
    client = await connect(**STORE)
    for raw in (b"{", b'{"previous_response_id":"x",', b"[" * 5000, b"\xff"):
        answer = await client.post(PATH, content=raw, headers={"content-type": "application/json"})
        assert answer.status_code == 400


async def test_answers_expire(connect: Connect) -> None:
    client = await connect(FakeCore(say("hello", EOS)), **STORE, response_store_ttl=0.05)
    name = (await client.post(PATH, json=BODY)).json()["id"]
    async with asyncio.timeout(120):
        while (await client.get(f"{PATH}/{name}")).status_code != 404:
            await asyncio.sleep(0.01)

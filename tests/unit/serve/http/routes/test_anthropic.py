"""POST /v1/messages and /v1/messages/count_tokens: blocks, events, errors."""

import json
from typing import Any

import httpx
import pytest

from pagemill.messages.sampling_params import SamplingParams
from tests.fakes.fake_core import FakeCore, say
from tests.fakes.fake_tokenizer import EOS
from tests.unit.serve.http.conftest import Connect

PATH = "/v1/messages"
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {"model": "fake", "max_tokens": 200, "messages": HI}
PARSERS: dict[str, Any] = {
    "reasoning_parser": "qwen3", "enable_auto_tool_choice": True, "tool_call_parser": "hermes",
}  # fmt: skip
TOOLS = [{"name": "f", "description": "does it", "input_schema": {"type": "object"}}]
CALL = '<tool_call>{"name": "f", "arguments": {"a": [1, "é</b>"]}}</tool_call>'


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream; each is named as its type."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, last = answer.text.split("\n\n")
    assert last == ""
    found = []
    for line in lines:
        name, data = line.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def message_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of events, in which every block is opened and closed in its turn."""
    message: dict[str, Any] = found[0]["message"]
    assert [event["type"] for event in found[:2]] == ["message_start", "ping"]
    assert (found[0]["type"], message["content"], message["stop_reason"]) == ("message_start", [], None)
    parts: list[str] = []
    is_open = False
    for event in found[2:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(parts)
                is_open = True
                message["content"].append(event["content_block"])
                parts.append("")
            case "content_block_delta":
                assert is_open and event["index"] == len(parts) - 1
                delta = event["delta"]
                parts[-1] += next(value for name, value in delta.items() if name != "type")
                kinds = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "tool_use"}
                assert kinds[delta["type"]] == message["content"][-1]["type"]
            case "content_block_stop":
                assert is_open and event["index"] == len(parts) - 1
                is_open = False
            case other:
                raise AssertionError(other)
    assert not is_open
    assert [event["type"] for event in found[-2:]] == ["message_delta", "message_stop"]
    for block, part in zip(message["content"], parts, strict=True):
        if block["type"] == "tool_use":
            assert block["input"] == {}
            block["input"] = json.loads(part)
        else:
            block[block["type"]] = part
    return message | found[-2]["delta"] | {"usage": found[-2]["usage"]}


def same(message: dict[str, Any]) -> dict[str, Any]:
    """Without ids, which differ."""
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return message | {"id": "", "content": content}


async def test_a_message(connect: Connect) -> None:
    core = FakeCore(say("hello é😀", EOS))
    client = await connect(core)
    body = BODY | {"system": "be kind", "temperature": 0.5, "top_k": 3, "top_p": 0.9}
    answer = await client.post(PATH, json=body, headers={"x-request-id": "r1"})
    assert answer.json() == {
        "id": "msg_r1", "type": "message", "role": "assistant", "model": "fake",
        "content": [{"type": "text", "text": "hello é😀"}], "stop_reason": "end_turn", "stop_sequence": None,
        "usage": {
            "input_tokens": len("[system]be kind[user]hi[assistant]"), "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0, "output_tokens": 13,
        },
    }  # fmt: skip
    assert answer.headers["request-id"] == "r1"
    params = core.seen[0].params
    assert isinstance(params, SamplingParams)
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.5, 3, 0.9, 200)
    assert bytes(core.seen[0].prompt_token_ids) == b"[system]be kind[user]hi[assistant]"


@pytest.mark.parametrize("said", [
    "plain", "<think>hmm é</think>answer", f"<think>hmm</think>so {CALL}", f"{CALL}{CALL}", "", "<think>cut",
    f"text {CALL} more",
])  # fmt: skip
async def test_a_stream_is_the_message(connect: Connect, said: str) -> None:
    client = await connect(FakeCore(say(said, EOS), max_model_len=1024), **PARSERS)
    body = BODY | {"tools": TOOLS}
    whole = (await client.post(PATH, json=body)).json()
    streamed = await client.post(PATH, json=body | {"stream": True})
    assert same(message_of(events(streamed))) == same(whole)


async def test_blocks_of_thinking_text_and_calls(connect: Connect) -> None:
    client = await connect(FakeCore(say(f"<think>hmm</think>so {CALL}", EOS)), **PARSERS)
    whole = (await client.post(PATH, json=BODY | {"tools": TOOLS})).json()
    thinking, text, call = whole["content"]
    assert thinking == {"type": "thinking", "thinking": "hmm", "signature": ""}
    assert text["text"].strip() == "so"
    assert call["id"].startswith("toolu_")
    assert (call["name"], call["input"]) == ("f", {"a": [1, "é</b>"]})
    assert whole["stop_reason"] == "tool_use"
    hidden = BODY | {"thinking": {"type": "adaptive", "display": "omitted"}}
    assert [block["type"] for block in (await client.post(PATH, json=hidden)).json()["content"]] == ["text"]


async def test_a_call_that_is_cut_short_is_none_to_be_made(connect: Connect) -> None:
    said = '<tool_call>{"name": "f", "arguments": {"a": 1, "b": "xy'
    client = await connect(FakeCore(say(said + "z" * 200)), **PARSERS)
    body = BODY | {"tools": TOOLS, "max_tokens": len(said)}
    whole = (await client.post(PATH, json=body)).json()
    assert whole["stop_reason"] == "max_tokens"
    assert whole["content"][0]["input"] == {"a": 1}
    found = events(await client.post(PATH, json=body | {"stream": True}))
    assert found[-2]["delta"]["stop_reason"] == "max_tokens"


async def test_why_it_ended(connect: Connect) -> None:
    client = await connect(FakeCore(say("hello", EOS)))
    stopped = (await client.post(PATH, json=BODY | {"stop_sequences": ["x", "lo"]})).json()
    assert (stopped["content"][0]["text"], stopped["stop_reason"]) == ("hel", "stop_sequence")
    assert stopped["stop_sequence"] == "lo"
    assert (await client.post(PATH, json=BODY | {"max_tokens": 2})).json()["stop_reason"] == "max_tokens"


async def test_more_than_the_context_means_the_context(connect: Connect) -> None:
    client = await connect(FakeCore(say("a" * 300)))
    answer = (await client.post(PATH, json=BODY | {"max_tokens": 32_000})).json()
    assert answer["stop_reason"] == "max_tokens"
    assert answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"] == 256


async def test_a_conversation_with_tools_is_the_chat_that_it_stands_for(connect: Connect) -> None:
    core = FakeCore(say("ok", EOS))
    client = await connect(core, **PARSERS)
    messages = [
        *HI,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hmm", "signature": "x"}, {"type": "redacted_thinking", "data": "y"},
                {"type": "text", "text": "so"}, {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "done"}]},
                {"type": "text", "text": "go on"},
            ],
        },
    ]  # fmt: skip
    system = [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "two"}]
    body = BODY | {"messages": messages, "system": system, "tools": TOOLS, "tool_choice": {"type": "auto"}}
    assert (await client.post(PATH, json=body)).status_code == 200
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    chat = {
        "messages": [
            {"role": "system", "content": "one\ntwo"}, *HI,
            {"role": "assistant", "content": "so", "reasoning": "hmm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "t1", "content": "done"}, {"role": "user", "content": "go on"},
        ],
        "tools": [
            {"type": "function", "function": {
                "name": "f", "description": "does it", "parameters": {"type": "object"},
            }}
        ],
    }  # fmt: skip
    assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
    assert core.seen[0].prompt_token_ids == core.seen[1].prompt_token_ids


async def test_a_last_message_of_the_assistant_is_continued(connect: Connect) -> None:
    core = FakeCore(say("ok", EOS))
    client = await connect(core)
    messages = [*HI, {"role": "assistant", "content": "The answer is"}]
    await client.post(PATH, json=BODY | {"messages": messages})
    assert bytes(core.seen[0].prompt_token_ids) == b"[user]hi[assistant]The answer is"


@pytest.mark.parametrize(("fields", "shown"), [
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, b"(enable_thinking=True)"),
    ({"thinking": {"type": "disabled"}}, b"(enable_thinking=False)"), ({"thinking": {"type": "adaptive"}}, b""),
    ({"output_config": {"effort": "max"}}, b"(reasoning_effort=high)"),
])  # fmt: skip
async def test_how_much_it_thinks(connect: Connect, fields: dict[str, Any], shown: bytes) -> None:
    core = FakeCore(say("ok", EOS))
    client = await connect(core)
    answer = await client.post(PATH, json=BODY | fields)
    assert bytes(core.seen[0].prompt_token_ids) == b"[user]hi" + shown + b"[assistant]"
    named = answer.headers.get("x-pagemill-ignored-fields")
    assert named == ("thinking.budget_tokens" if "budget_tokens" in str(fields) else None)


@pytest.mark.parametrize(("reasoning", "named"), [("qwen3", None), (None, "thinking.display")])
async def test_thinking_that_is_to_be_left_out(connect: Connect, reasoning: str | None, named: str | None) -> None:
    client = await connect(FakeCore(say("ok", EOS)), reasoning_parser=reasoning)
    answer = await client.post(PATH, json=BODY | {"thinking": {"type": "adaptive", "display": "omitted"}})
    assert answer.headers.get("x-pagemill-ignored-fields") == named


async def test_members_without_effect_are_named(connect: Connect) -> None:
    client = await connect(FakeCore(say("ok", EOS)), enable_auto_tool_choice=True, tool_call_parser="hermes")
    tool = {"name": "f", "input_schema": {"type": "object"}, "input_examples": [{}]}
    used = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "no", "is_error": True}
    messages = [*HI, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
    answer = await client.post(
        PATH, json=BODY | {"messages": messages, "tools": [tool], "thinking": {"type": "adaptive", "x": 1}}
    )
    assert answer.status_code == 200
    names = "messages.2.content.0.is_error, tools.0.input_examples, thinking.x"
    assert answer.headers["x-pagemill-ignored-fields"] == names


async def test_how_much_is_thought_is_limited(connect: Connect) -> None:
    core = FakeCore(say("ok", EOS))
    client = await connect(core, reasoning_parser="qwen3")
    answer = await client.post(PATH, json=BODY | {"thinking": {"type": "enabled", "budget_tokens": 7}})
    assert "x-pagemill-ignored-fields" not in answer.headers
    grammar = core.seen[0].grammar
    assert grammar is not None
    assert grammar.thinking is not None
    assert (grammar.source, grammar.thinking.budget) == ("", 7)
    wrong = await client.post(PATH, json=BODY | {"thinking": {"type": "enabled", "budget_tokens": -1}})
    assert "thinking.budget_tokens=-1" in wrong.text


async def test_the_form_of_the_answer(connect: Connect) -> None:
    core = FakeCore(say("1", EOS))
    client = await connect(core)
    schema = {"type": "integer"}
    await client.post(PATH, json=BODY | {"output_config": {"format": {"type": "json_schema", "schema": schema}}})
    assert core.seen[0].grammar is not None


async def test_tokens_are_counted_as_they_are_run(connect: Connect) -> None:
    core = FakeCore(say("ok", EOS))
    client = await connect(core, **PARSERS)
    body = {"model": "fake", "messages": HI, "system": "x", "tools": TOOLS}
    counted = await client.post(f"{PATH}/count_tokens", json=body)
    await client.post(PATH, json=body | {"max_tokens": 1})
    assert counted.json() == {"input_tokens": len(core.seen[0].prompt_token_ids)}
    long = [{"role": "user", "content": "a" * 1000}]
    assert (await client.post(f"{PATH}/count_tokens", json={"messages": long})).json()["input_tokens"] > 1000


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(("fields", "named"), [
    ({"max_tokens": None}, "max_tokens"), ({"max_tokens": "9"}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"),
    ({"messages": None}, "messages"), ({"messages": []}, "messages"), ({"messages": [5]}, "messages.0.role"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool_use_id"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": "x"}]}]},
     "messages.0.content.0.input"),
    ({"system": 5}, "system"), ({"system": [IMAGE]}, "system.0"), ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 100}, "stop_sequences"), ({"temperature": -1}, "temperature"),
    ({"temperature": 3}, "temperature"), ({"top_p": 0}, "top_p"), ({"tools": {}}, "tools"), ({"tools": [5]}, "tools.0"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema"), ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice"), ({"thinking": {"type": "x"}}, "thinking"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config"), ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"tools": TOOLS}, "tools"), ({"model": "other"}, "other"),
])  # fmt: skip
async def test_what_is_wrong_is_named(connect: Connect, fields: dict[str, Any], named: str) -> None:
    client = await connect()
    answer = await client.post(PATH, json=BODY | fields, headers={"x-request-id": "r1"})
    error = answer.json()["error"]
    kind = "not_found_error" if "model" in fields else "invalid_request_error"
    assert (answer.status_code, error["type"]) == (404 if "model" in fields else 400, kind), answer.text
    assert named in error["message"]
    assert (answer.json()["type"], answer.json()["request_id"]) == ("error", "r1")


async def test_errors_of_the_middleware_have_the_form_too(connect: Connect) -> None:
    client = await connect(api_key=("k",))
    missing = await client.post(PATH, json=BODY)
    assert (missing.status_code, missing.json()["error"]["type"]) == (401, "authentication_error")
    key = {"x-api-key": "k"}
    wrong = await client.post(PATH, content="a", headers=key | {"content-type": "text/plain"})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (415, "invalid_request_error")
    other = await client.put(PATH, headers=key)
    assert (other.status_code, other.json()["type"]) == (405, "error")
    assert "type" not in (await client.get("/v1/nothing", headers=key)).json()


async def test_an_engine_that_dies_ends_the_stream_with_an_error(connect: Connect) -> None:
    client = await connect(FakeCore(say("hello", EOS), fail_after=3))
    streamed = await client.post(PATH, json=BODY | {"stream": True})
    *_, last = streamed.text.strip().split("\n\n")
    assert last.startswith("event: error\n")
    assert json.loads(last.partition("data: ")[2])["error"]["type"] == "overloaded_error"
    whole = await client.post(PATH, json=BODY)
    assert (whole.status_code, whole.json()["error"]["type"]) == (503, "overloaded_error")

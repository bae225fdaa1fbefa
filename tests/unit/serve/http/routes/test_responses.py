"""POST /v1/responses: items, events, tools, errors."""

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import httpx
import pytest

from pagemill.catalog.parsers import REASONING_PARSERS
from pagemill.messages.sampling_params import SamplingParams
from pagemill.serve.parsers.interface import Delta, MessageForm
from tests.fakes.fake_core import FakeCore, say
from tests.fakes.fake_tokenizer import EOS
from tests.unit.serve.http.conftest import Connect

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "fake", "input": "hi"}
PARSERS: dict[str, Any] = {
    "reasoning_parser": "qwen3", "enable_auto_tool_choice": True, "tool_call_parser": "hermes",
}  # fmt: skip
TOOLS = [{"type": "function", "name": "f", "description": "does it", "parameters": {"type": "object"}}]
CALL = '<tool_call>{"name": "f", "arguments": {"a": [1, "é</b>"]}}</tool_call>'


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream; each is named as its type, and they are numbered."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, last = said(answer).split("\n\n")
    assert last == ""
    found = []
    for number, line in enumerate(lines):
        name, data = line.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", number)
        found.append(event)
    return found


def said(answer: httpx.Response) -> str:
    """The text of a stream, without comments."""
    return re.sub(r"^:.*\n\n", "", answer.text, flags=re.MULTILINE)


def output_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a client makes of events, each of which is opened, written and closed in its turn."""
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    assert (found[0]["response"]["status"], found[0]["response"]["output"]) == ("in_progress", [])
    output: list[dict[str, Any]] = []
    text, scores, is_open = "", [], False
    for event in found[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert not is_open and event["output_index"] == len(output)
            assert event["item"]["status"] == "in_progress"
            is_open, text, scores = True, "", []
            output.append(event["item"])
            continue
        assert is_open and event["output_index"] == len(output) - 1
        if kind == "output_item.done":
            assert event["item"]["id"] == output[-1]["id"]
            output[-1], is_open = event["item"], False
            assert text == text_of(output[-1])
            continue
        assert event["item_id"] == output[-1]["id"]
        if kind.endswith(".delta"):
            text += event["delta"]
            scores += event.get("logprobs", [])
        elif kind == "content_part.done":
            assert event["part"]["text"] == text
            assert event["part"].get("logprobs", []) == scores
        elif kind.endswith(("_text.done", "arguments.done")):
            assert event["text" if "text" in event else "arguments"] == text
    assert not is_open
    return output


def text_of(item: dict[str, Any]) -> str:
    return item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]


def same(answer: dict[str, Any]) -> dict[str, Any]:
    """Without ids and times, which differ."""
    output = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")} for item in answer["output"]
    ]
    return {
        name: value for name, value in answer.items() if name not in ("id", "created_at", "completed_at")
    } | {"output": output}  # fmt: skip


async def test_an_answer(connect: Connect) -> None:
    core = FakeCore(say("hello é😀", EOS))
    client = await connect(core)
    body = BODY | {"instructions": "be kind", "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 99, "user": "u"}
    answer = (await client.post(PATH, json=body | {"metadata": {"a": "b"}})).json()
    message = answer["output"][0]
    assert answer["id"].startswith("resp_") and message["id"].startswith("msg_")
    assert answer["completed_at"] >= answer["created_at"] > 0
    assert same(answer) == {
        "object": "response", "status": "completed", "error": None, "incomplete_details": None, "model": "fake",
        "output": [{
            "type": "message", "status": "completed", "role": "assistant",
            "content": [{"type": "output_text", "text": "hello é😀", "annotations": [], "logprobs": []}],
        }],
        "usage": {
            "input_tokens": len("[system]be kind[user]hi[assistant]"), "output_tokens": 13,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 47,
        },
        "conversation": None, "instructions": "be kind", "max_output_tokens": 99, "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "previous_response_id": None, "reasoning": {"effort": None, "summary": None},
        "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_logprobs": 0,
        "truncation": "disabled", "user": "u", "temperature": 0.5, "top_p": 0.9, "store": False, "background": False,
        "service_tier": "default",
    }  # fmt: skip
    params = core.seen[0].params
    assert isinstance(params, SamplingParams)
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.9, 99)
    assert bytes(core.seen[0].prompt_token_ids) == b"[system]be kind[user]hi[assistant]"


@pytest.mark.parametrize("said", [
    "plain", "<think>hmm é</think>answer", f"<think>hmm</think>so {CALL}", f"{CALL}{CALL}", "", "<think>cut",
    f"text {CALL} more",
])  # fmt: skip
async def test_a_stream_is_the_answer(connect: Connect, said: str) -> None:
    client = await connect(FakeCore(say(said, EOS), max_model_len=1024), **PARSERS)
    body = BODY | {"tools": TOOLS}
    whole = (await client.post(PATH, json=body)).json()
    found = events(await client.post(PATH, json=body | {"stream": True}))
    last = found[-1]["response"]
    assert found[-1]["type"] == "response.completed"
    assert output_of(found) == last["output"]
    assert same(last) == same(whole)


async def test_reasoning_text_and_calls(connect: Connect) -> None:
    client = await connect(FakeCore(say(f"<think>hmm</think>so {CALL}", EOS), max_model_len=1024), **PARSERS)
    whole = (await client.post(PATH, json=BODY | {"tools": TOOLS})).json()
    thought, text, call = whole["output"]
    assert (thought["type"], thought["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "hmm"}])
    assert text["content"][0]["text"].strip() == "so"
    assert call["id"].startswith("fc_") and call["call_id"].startswith("call_")
    assert (call["name"], json.loads(call["arguments"])) == ("f", {"a": [1, "é</b>"]})
    assert call["status"] == "completed"
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == len("hmm")
    assert whole["tools"] == [TOOLS[0] | {"strict": False}]


async def test_an_answer_that_is_cut_short(connect: Connect) -> None:
    said = 'so <tool_call>{"name": "f", "arguments": {"a": 1, "b": "xy'
    client = await connect(FakeCore(say(said + "z" * 200)), **PARSERS)
    body = BODY | {"tools": TOOLS, "max_output_tokens": len(said)}
    whole = (await client.post(PATH, json=body)).json()
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    call = whole["output"][-1]
    assert (call["status"], call["arguments"]) == ("incomplete", '{"a": 1, "b": "xy')
    found = events(await client.post(PATH, json=body | {"stream": True}))
    assert found[-1]["type"] == "response.incomplete"
    assert same(found[-1]["response"]) == same(whole)
    plain = (await client.post(PATH, json=BODY | {"max_output_tokens": 3})).json()["output"][0]
    assert (plain["status"], plain["content"][0]["text"]) == ("incomplete", "so ")
    # What was cut short comes back as it was.
    again = await client.post(PATH, json=BODY | {"tools": TOOLS, "input": [*whole["output"], BODY_MESSAGE]})
    assert again.status_code == 200, again.text


BODY_MESSAGE = {"role": "user", "content": "hi"}


async def test_more_than_the_context_means_the_context(connect: Connect) -> None:
    client = await connect(FakeCore(say("a" * 300)))
    answer = (await client.post(PATH, json=BODY | {"max_output_tokens": 32_000})).json()
    assert answer["status"] == "incomplete"
    assert answer["usage"]["total_tokens"] == 256


async def test_log_probabilities(connect: Connect) -> None:
    client = await connect(FakeCore(say("é!", EOS)))
    body = BODY | {"top_logprobs": 2}
    whole = (await client.post(PATH, json=body)).json()
    scores = whole["output"][0]["content"][0]["logprobs"]
    assert [bytes(token["bytes"]) for token in scores[:3]] == [b"\xc3", b"\xa9", b"!"]
    assert all(len(token["top_logprobs"]) == 2 for token in scores)
    found = events(await client.post(PATH, json=body | {"stream": True}))
    assert output_of(found) == found[-1]["response"]["output"]
    assert same(found[-1]["response"]) == same(whole)
    included = await client.post(PATH, json=BODY | {"include": ["message.output_text.logprobs"]})
    assert len(included.json()["output"][0]["content"][0]["logprobs"]) == len(scores)


async def test_items_are_the_chat_that_they_stand_for(connect: Connect) -> None:
    core = FakeCore(say("ok", EOS))
    client = await connect(core, **PARSERS)
    items = [
        {"role": "developer", "content": "one"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hmm"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "so", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "t1", "name": "f", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": "t1", "output": "done"},
        {"role": "user", "content": "go on"},
    ]  # fmt: skip
    answer = await client.post(PATH, json=BODY | {"input": items, "tools": TOOLS, "instructions": "zero"})
    assert answer.status_code == 200, answer.text
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    function = {name: value for name, value in TOOLS[0].items() if name != "type"}
    chat = {
        "messages": [
            {"role": "system", "content": "zero"}, {"role": "system", "content": "one"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "so", "reasoning": "hmm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "t1", "content": "done"}, {"role": "user", "content": "go on"},
        ],
        "tools": [{"type": "function", "function": function}],
    }  # fmt: skip
    assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
    assert core.seen[0].prompt_token_ids == core.seen[1].prompt_token_ids


@pytest.mark.parametrize(("effort", "shown"), [
    ("high", b"(reasoning_effort=high)"), ("none", b"(enable_thinking=False)"), (None, b""),
])  # fmt: skip
async def test_how_much_it_thinks(connect: Connect, effort: str | None, shown: bytes) -> None:
    core = FakeCore(say("ok", EOS))
    client = await connect(core)
    answer = await client.post(PATH, json=BODY | {"reasoning": {"effort": effort, "summary": "auto"}})
    assert bytes(core.seen[0].prompt_token_ids) == b"[user]hi" + shown + b"[assistant]"
    assert answer.headers["x-pagemill-ignored-fields"] == "reasoning.summary"
    assert answer.json()["reasoning"] == {"effort": effort, "summary": None}


@pytest.mark.parametrize(("form", "has_form"), [
    ({"type": "json_schema", "name": "n", "schema": {"type": "integer"}, "strict": True}, True),
    ({"type": "json_object"}, True), ({"type": "text"}, False),
])  # fmt: skip
async def test_the_form_of_the_answer(connect: Connect, form: dict[str, Any], has_form: bool) -> None:
    core = FakeCore(say("1", EOS))
    client = await connect(core)
    answer = await client.post(PATH, json=BODY | {"text": {"format": form}})
    assert (core.seen[0].grammar is not None) == has_form
    assert answer.json()["text"] == {"format": form}


IMAGE = {"type": "input_image", "image_url": "data:"}


@pytest.mark.parametrize(("fields", "named"), [
    ({"input": None}, "input"), ({"input": []}, "input"), ({"input": 5}, "input"),
    ({"input": [5]}, "input.0"), ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input.0.role"), ({"input": [{"role": "user"}]}, "input.0.content"),
    ({"input": [{"role": "user", "content": [IMAGE]}]}, "input.0.content.0"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]}, "input.0.arguments"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "5"}]}, "input.0.arguments"),
    ({"input": [{"type": "function_call_output", "output": "a"}]}, "input.0.call_id"),
    ({"input": [{"type": "reasoning", "content": "a"}]}, "input.0.content"),
    ({"instructions": 5}, "instructions"), ({"max_output_tokens": -1}, "max_output_tokens"),
    ({"max_output_tokens": "9"}, "max_output_tokens"), ({"temperature": 3}, "temperature"), ({"top_p": 0}, "top_p"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format"), ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format"),
    ({"reasoning": {"effort": "x"}}, "reasoning"), ({"tools": {}}, "tools"), ({"tools": [5]}, "tools.0"),
    ({"tools": [{"type": "web_search"}]}, "tools.0"), ({"tools": [{"type": "function"}]}, "tools.0.name"),
    ({"tools": TOOLS}, "tools"), ({"tool_choice": "required"}, "tool_choice"), ({"include": ["x"]}, "include"),
    ({"include": "x"}, "include"), ({"top_logprobs": 99}, "top_logprobs"), ({"metadata": {"a": 5}}, "metadata"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata"), ({"metadata": {"a": "b" * 513}}, "metadata"),
    ({"truncation": "auto"}, "truncation"), ({"prompt": {"id": "x"}}, "prompt"), ({"n": 2}, "n"),
    ({"store": True}, "store"), ({"background": True}, "background"),
    ({"previous_response_id": "resp_x"}, "previous_response_id"), ({"conversation": "conv_x"}, "conversation"),
    ({"stop": 5}, "stop"), ({"stream": "yes"}, "stream"),
])  # fmt: skip
async def test_what_is_wrong_is_named(connect: Connect, fields: dict[str, Any], named: str) -> None:
    client = await connect()
    answer = await client.post(PATH, json=BODY | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", named), answer.text
    assert named.rpartition(".")[2] in error["message"]


@pytest.mark.parametrize(("said", "texts"), [
    ("<think>hm</think>\n\nso é ", ["so é"]),
    (f"<think>hm</think>a {CALL}", ["a"]),
    (f"<think>hm</think>a {CALL} b {CALL} c", ["a", "b", "c"]),
    (f"<think>hm</think>{CALL}", []),
    ("<think>hm", []),
    ("plain <", ["plain <"]),
])  # fmt: skip
async def test_log_probabilities_of_a_message_are_those_of_its_tokens(
    connect: Connect, said: str, texts: list[str]
) -> None:
    client = await connect(FakeCore(say(said, EOS), max_model_len=1024), **PARSERS)
    body = BODY | {"top_logprobs": 1, "tools": TOOLS}
    whole = (await client.post(PATH, json=body)).json()
    found = events(await client.post(PATH, json=body | {"stream": True}))
    assert output_of(found) == found[-1]["response"]["output"]
    assert same(found[-1]["response"]) == same(whole)
    messages = [item["content"][0] for item in whole["output"] if item["type"] == "message"]
    scored = [b"".join(bytes(token["bytes"]) for token in part["logprobs"]).decode() for part in messages]
    assert [part["text"].strip() for part in messages] == texts
    first = scored[:1]
    last = scored[-1:]
    assert all(text in scores for text, scores in zip(texts[:1] + texts[-1:], first + last, strict=True))
    assert not any("hm" in text or "think" in text or "tool_call" in text for text in first)


async def test_log_probabilities_of_what_a_class_takes_apart_are_refused(connect: Connect) -> None:
    REASONING_PARSERS.add("whole", f"{__name__}:WholeParser")
    try:
        client = await connect(reasoning_parser="whole")
        answer = await client.post(PATH, json=BODY | {"top_logprobs": 1})
    finally:
        REASONING_PARSERS.remove("whole")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_logprobs")


class WholeParser:
    """Takes all for content. Implements `MessageParser`."""

    markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, form: MessageForm) -> None:
        pass

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        return [Delta(text)] if text else []

    def finish(self) -> list[Delta]:
        return []


async def test_another_model_is_not_found(connect: Connect) -> None:
    client = await connect()
    assert (await client.post(PATH, json=BODY | {"model": "other"})).status_code == 404


async def test_an_engine_that_dies_ends_the_stream_with_the_answer_so_far(connect: Connect) -> None:
    client = await connect(FakeCore(say("hello", EOS), fail_after=3))
    found = events(await client.post(PATH, json=BODY | {"stream": True}))
    last = found[-1]["response"]
    assert (found[-1]["type"], last["status"], last["error"]["code"]) == ("response.failed", "failed", "server_error")
    assert [item["status"] for item in last["output"]] == ["incomplete"]
    whole = await client.post(PATH, json=BODY)
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "engine_dead")


async def test_tokens_count_for_the_limit_of_the_client(connect: Connect) -> None:
    client = await connect(FakeCore(say("hello", EOS)), rate_limit_tokens=5, response_store_bytes=1 << 20)
    assert (await client.post(PATH, json=BODY | {"background": True})).status_code == 200
    assert (await client.post(PATH, json=BODY)).status_code == 429

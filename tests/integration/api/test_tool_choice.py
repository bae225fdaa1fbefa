"""Calls that a request insists on, on random weights: they are always calls that can be made. Over HTTP, whole and
streamed, where the marks are control tokens and where they are text."""

import json

import anthropic
import httpx
import jsonschema
import pytest
from tokenizers import Tokenizer

from tests.fakes.tiny_checkpoint import byte_tokenizer, make_checkpoint
from tests.integration.server_process import running_server

MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
THINK, END, CALL = "259", "260", "261"
H = str(byte_tokenizer().token_to_id("h"))
NO_THOUGHT = {"logit_bias": {THINK: -100, H: -100}}
"""As text, the mark of reasoning differs from that of a call in this letter first."""
WEATHER = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 0, "maximum": 9}, "unit": {"enum": ["c", "f"]}},
    "required": ["days", "unit"],
    "additionalProperties": False,
}
NOW = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"weather": WEATHER, "now": NOW}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
STRICT = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in TOOLS]
NAMED = {"type": "function", "function": {"name": "weather"}}
BODY = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, "max_tokens": 400, "temperature": 1, "seed": 3}
ONE = {"parallel_tool_calls": False}


ONLY_MARKS_OF_ONE_TOKEN = pytest.mark.parametrize("server", ["control"], indirect=True)
"""A mark of several tokens cannot be made likely."""


@pytest.fixture(scope="module", params=["control", "text"])
def server(request, tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("calls"), "LlamaForCausalLM")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if request.param == "control":
        assert tokenizer.add_special_tokens(MARKS) == len(MARKS)
    tokenizer.save(str(folder / "tokenizer.json"))
    flags = ("--dtype", "float32", "--cpu-threads", "1", "--reasoning-parser", "qwen3")
    # Else random weights may write white space until the tokens are spent.
    flags += ("--structured-outputs-config", '{"disable_any_whitespace": true}')
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with running_server(str(folder), *flags, *tools) as process:
        yield process


def post(server, **more):
    return httpx.post(f"{server.url}/v1/chat/completions", json=BODY | more, timeout=120)


def ask(server, **more):
    """The calls of the answer and why it ended; streamed it is the same."""
    answer = post(server, **more)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
    content = choice["message"]["content"] or ""
    assert streamed(server, **more) == (calls, content, choice["finish_reason"])
    assert content == "" or choice["finish_reason"] != "tool_calls"
    return calls, choice["finish_reason"]


def streamed(server, **more):
    calls, content, reason = [], "", None
    body = BODY | more | {"stream": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line[6:])["choices"]
            content += choice["delta"].get("content", "")
            reason = choice["finish_reason"]
            for call in choice["delta"].get("tool_calls", ()):
                if "id" in call:
                    calls.append({"name": call["function"]["name"], "arguments": ""})
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
    return calls, content, reason


def check(calls, reason, names=("weather", "now")):
    assert reason == "tool_calls"
    assert calls
    for call in calls:
        assert call["name"] in names
        jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])


@pytest.mark.parametrize(("more", "names"), [
    ({"tool_choice": "required"}, ("weather", "now")),
    ({"tool_choice": NAMED}, ("weather",)),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}}, ("weather",)),
])  # fmt: skip
def test_calls_that_are_insisted_on_are_made(server, more, names):
    calls, reason = ask(server, **more, **ONE, **NO_THOUGHT)
    assert len(calls) == 1
    check(calls, reason, names)


def test_what_is_cut_off_is_no_call_that_can_be_made(server):
    assert ask(server, tool_choice=NAMED, max_tokens=12)[1] == "length"


@ONLY_MARKS_OF_ONE_TOKEN
def test_a_call_that_the_model_begins_is_held_to_its_schema(server):
    """It writes the mark first, whatever it would write after it."""
    calls, reason = ask(server, tools=STRICT, logit_bias={CALL: 100}, **ONE)
    assert len(calls) == 1
    check(calls, reason)


@ONLY_MARKS_OF_ONE_TOKEN
def test_reasoning_ends_where_its_budget_is_spent(server):
    more = {"tools": [], "thinking_token_budget": 7, "logit_bias": {THINK: 100, "261": -100}, "max_tokens": 12}
    answer = post(server, **more, return_token_ids=True).json()["choices"][0]
    thought = answer["token_ids"]
    assert thought[:9] == [int(THINK)] * 8 + [int(END)]
    assert "reasoning" in answer["message"]


def test_anthropics_client(server):
    tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    model = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"][0]["id"]
    with anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0) as client:
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}):
            message = client.messages.create(
                model=model, max_tokens=400, messages=BODY["messages"], tools=tools, tool_choice=choice
            )
            (used,) = message.content
            assert (used.type, message.stop_reason) == ("tool_use", "tool_use")
            jsonschema.validate(used.input, SCHEMAS[used.name])


@pytest.mark.parametrize("more", [{"tool_choice": NAMED}, {"tools": STRICT}])
def test_a_schema_that_cannot_be_held_is_named(server, more):
    tools = [json.loads(json.dumps(tool)) for tool in more.get("tools", TOOLS)]
    tools[0]["function"]["parameters"]["properties"]["days"] = {"type": "string", "pattern": "(?<=x)y"}
    answer = post(server, **(more | {"tools": tools}))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools.0.function.parameters"

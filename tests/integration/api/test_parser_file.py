"""A file that adds a format of tool calls and one of reasoning, on two API servers and their helper processes."""

import json

import httpx

from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.integration.server_process import running_server

FILE = """
from pagemill.serve.parsers.format import Calls, JsonCall, Reasoning, Written

CALLS = Calls(
    form=(JsonCall(),), begin=("[call]",), end=("[/call]",), written=(Written("[call]", None, "[/call]"),), many=False
)
THOUGHT = Reasoning("[t]", "[/t]")


def register(catalogue):
    catalogue.tool_parsers.add("mine", f"{__name__}:CALLS")
    catalogue.reasoning_parsers.add("mine", f"{__name__}:THOUGHT")
"""
TOOL = {"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False,
}}}  # fmt: skip
BODY = {"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL], "temperature": 0, "max_tokens": 100}
LONG = "word " * 10_000
"""Bodies with it are prepared by a helper process."""


def test_it_works_in_every_process(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    checkpoint = make_checkpoint(tmp_path / "tiny", "LlamaForCausalLM")
    flags = ("--dtype", "float32", "--cpu-threads", "1", "--api-server-count", "2", "--enable-auto-tool-choice")
    flags += ("--structured-outputs-config", '{"disable_any_whitespace": true}')
    mine = (
        "--tool-parser-plugin", str(tmp_path / "mine.py"), "--tool-call-parser", "mine",
        "--reasoning-parser-plugin", str(tmp_path / "mine.py"), "--reasoning-parser", "mine",
    )  # fmt: skip
    named = {"type": "function", "function": {"name": "f"}}
    with running_server(str(checkpoint), *flags, *mine) as server:
        for number in range(8):  # the system chooses one of the two for each connection
            body = BODY | {"tool_choice": named, "thinking_token_budget": 0}
            body |= {"padding": LONG} if number % 4 == 3 else {}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300)
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            (call,) = choice["message"]["tool_calls"]
            assert call["function"]["name"] == "f"
            assert json.loads(call["function"]["arguments"]) in ({"n": 1}, {"n": 2})
        assert "".join(server.lines).count("mine.py loaded") >= 3  # the supervisor, two API servers

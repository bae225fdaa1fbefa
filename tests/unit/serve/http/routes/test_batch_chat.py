"""POST /v1/chat/completions/batch: a choice for each conversation."""

from typing import Any

import pytest

from tests.fakes.fake_core import FakeCore, say
from tests.fakes.fake_tokenizer import EOS
from tests.unit.serve.http.conftest import Connect

PATH = "/v1/chat/completions/batch"
HI, HO = ([{"role": "user", "content": text}] for text in ("hi", "ho"))
PARSERS: dict[str, Any] = {
    "reasoning_parser": "qwen3", "enable_auto_tool_choice": True, "tool_call_parser": "hermes",
}  # fmt: skip


def same(choice: dict[str, Any]) -> dict[str, Any]:
    """Without the ids of calls, which differ."""
    calls = [call | {"id": ""} for call in choice["message"].get("tool_calls", [])]
    return choice | {"message": choice["message"] | {"tool_calls": calls}}


async def test_each_conversation_gets_the_choice_of_a_chat(connect: Connect) -> None:
    said = {b"hi": '<think>hmm</think><tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', b"ho": "well"}
    core = FakeCore(lambda request: [*said[bytes(request.prompt_token_ids)[6:8]].encode(), EOS], max_model_len=1024)
    client = await connect(core, **PARSERS)
    fields = {"tools": [{"type": "function", "function": {"name": "f"}}], "temperature": 0.5, "logprobs": True}
    answer = await client.post(PATH, json=fields | {"messages": [HI, HO]}, headers={"x-request-id": "r1"})
    batch = answer.json()
    assert (answer.status_code, batch["object"], batch["id"]) == (200, "chat.completion", "chatcmpl-r1")
    assert [choice["index"] for choice in batch["choices"]] == [0, 1]
    alone = [(await client.post("/v1/chat/completions", json=fields | {"messages": item})).json() for item in (HI, HO)]
    for number, (choice, chat) in enumerate(zip(batch["choices"], alone, strict=True)):
        assert same(choice) == same(chat["choices"][0] | {"index": number})
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert batch["usage"][name] == sum(chat["usage"][name] for chat in alone)


async def test_what_is_said_of_prompts_is_in_the_choices(connect: Connect) -> None:
    client = await connect(FakeCore(say("ok", EOS)))
    body = {"messages": [HI, HO], "return_token_ids": True, "prompt_logprobs": 0}
    choices = (await client.post(PATH, json=body)).json()["choices"]
    assert [bytes(choice["prompt_token_ids"]) for choice in choices] == [b"[user]hi[assistant]", b"[user]ho[assistant]"]
    assert all(len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"]) for choice in choices)


@pytest.mark.parametrize(("fields", "named"), [
    ({"messages": None}, "messages"), ({"messages": []}, "messages"), ({"messages": HI}, "messages"),
    ({"messages": [HI] * 1025}, "messages"), ({"messages": [HI, []]}, "messages.1"),
    ({"messages": [HI, [{"role": "x", "content": ""}]]}, "messages.1.0.role"),
    ({"n": 2}, "n"), ({"stream": True}, "stream"), ({"use_beam_search": True}, "use_beam_search"),
    ({"temperature": 3}, "temperature"), ({"max_tokens": 9999}, "max_tokens"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
])  # fmt: skip
async def test_what_is_wrong_is_named(connect: Connect, fields: dict[str, Any], named: str) -> None:
    core = FakeCore(say("ok", EOS))
    client = await connect(core)
    answer = await client.post(PATH, json={"messages": [HI, HO]} | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, named), answer.text
    assert core.seen == []


async def test_one_that_does_not_fit_refuses_all(connect: Connect) -> None:
    core = FakeCore(say("ok", EOS))
    client = await connect(core)
    answer = await client.post(PATH, json={"messages": [HI, [{"role": "user", "content": "a" * 300}]]})
    assert answer.status_code == 400
    assert core.seen == []

"""Every bad input: the right status, an error object that names the field, and a server that lives on."""

import json
import re
from typing import Any

import pytest

from pagemill.messages.engine_io import Finish, FinishReason
from tests.fakes.fake_core import FakeCore
from tests.unit.serve.http.conftest import Connect

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]

BOTH: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "0.5"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": float("nan")}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": 10**300}, "n"),
    ({"n": "2"}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"max_tokens": 10**4000}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "10"}, "max_tokens"),
    ({"min_tokens": 30, "max_tokens": 20}, "min_tokens"),
    ({"min_tokens": 10**9}, "min_tokens"),
    ({"seed": 2**70}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"stop": "x" * 2000}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [300]}, "stop_token_ids"),
    ({"stop_token_ids": ["1"]}, "stop_token_ids"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"other": True}}, "stream_options"),
    ({"stream": True, "stream_options": 1}, "stream_options"),
    ({"cache_salt": "a/b"}, "cache_salt"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"priority": 1}, "priority"),
    ({"priority": "high"}, "priority"),
    ({"model": 5}, "model"),
    ({"user": 5}, "user"),
    ({"logprobs": -2}, "logprobs"),
    ({"logprobs": 1.5}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logit_bias": {"5": 100.5}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"logit_bias": {"-5": 1}}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"300": 1}}, "logit_bias"),
    ({"logit_bias": {str(10**9): 1}}, "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(20_000)}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"presence_penalty": "1"}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"repetition_penalty": 1e30}, "repetition_penalty"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [300]}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"allowed_token_ids": ["5"]}, "allowed_token_ids"),
    ({"allowed_token_ids": [1] * 20_000}, "allowed_token_ids"),
    ({"bad_words": "no"}, "bad_words"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": [5]}, "bad_words"),
    ({"bad_words": ["x" * 257]}, "bad_words"),
    ({"bad_words": ["x" * 200]}, "bad_words"),
    ({"bad_words": ["x"] * 257}, "bad_words"),
    ({"repetition_detection": {"max_pattern_size": 5}}, "repetition_detection"),
    ({"repetition_detection": {"pattern": 5}}, "repetition_detection"),
    ({"repetition_detection": True}, "repetition_detection"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tools": {}}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["a"]}, "ignore_eos": True}, "ignore_eos"),
    ({"structured_outputs": {"choice": ["yes"]}, "bad_words": ["yes"]}, "bad_words"),
    ({"structured_outputs": {"regex": "[ab]c"}, "bad_words": ["a", "b"]}, "bad_words"),
    ({"guided_json": {"type": "string"}, "response_format": {"type": "json_object"}}, "guided_json"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"use_beam_search": 1}, "use_beam_search"),
    ({"use_beam_search": True, "stream": True}, "stream"),
    ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
    ({"use_beam_search": True, "top_p": 0.5}, "top_p"),
    ({"use_beam_search": True, "prompt_logprobs": 0}, "prompt_logprobs"),
    ({"use_beam_search": True, "return_token_ids": True}, "return_token_ids"),
    ({"use_beam_search": True, "stop": "x"}, "stop"),
    ({"use_beam_search": True, "max_tokens": 0}, "max_tokens"),
    ({"use_beam_search": True, "n": 65}, "n"),
    ({"use_beam_search": True, "n": 60}, "n"),
    ({"use_beam_search": True, "length_penalty": 1e9}, "length_penalty"),
    ({"length_penalty": 2}, "length_penalty"),
]

CHAT_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "alien", "content": "hi"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 300_000}]}, "messages"),
    ({"max_completion_tokens": -1}, "max_tokens"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"documents": "text"}, "documents"),
    ({"documents": [{"text": "x"}] * 1025}, "documents"),
    ({"documents": [{"text": "x"}, "text"]}, "documents.1"),
    ({"documents": [{}]}, "documents.0"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"add_generation_prompt": 1}, "add_generation_prompt"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "web_search"}]}, "tools.0"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools.0.function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]}, "tools.0.function.description"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools.0.function.strict"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 1025}, "tools"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, "tool_choice"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ({"thinking_token_budget": -1}, "thinking_token_budget"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"include_reasoning": False}, "include_reasoning"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages.0.tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages.0.tool_calls.0"),
    *(
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]},
            "messages.0.tool_calls.0.function.arguments",
        )
        for arguments in ("{", "[]", "7", "NaN", 7, '{"a":' * 100_000)
    ),
]

TEXT_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": [1, -1]}, "prompt"),
    ({"prompt": [1, 300]}, "prompt"),
    ({"prompt": [1, 10**400]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [[1, "a"]]}, "prompt"),
    ({"prompt": "x" * 300}, "prompt"),
    ({"prompt": [1] * 256}, "prompt"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": ["a"] * 1000, "n": 5}, "n"),
    ({"echo": "yes"}, "echo"),
]

CASES = [(CHAT, case) for case in BOTH + CHAT_ONLY] + [(TEXT, case) for case in BOTH + TEXT_ONLY]


def check_error(content: bytes) -> dict[str, Any]:
    """An OpenAI error object without internals."""
    error = json.loads(content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) <= 1000
    assert not re.search(r"0x[0-9a-f]{4}|\.py|/nowhere|Traceback|\n", error["message"])
    return error


async def check_alive(client: Any) -> None:
    answer = await client.post(TEXT, json={"prompt": "abc", "max_tokens": 3})
    assert answer.json()["choices"][0]["text"] == "abc"


async def test_every_bad_field_is_named_and_the_server_lives_on(connect: Connect) -> None:
    core = FakeCore()
    client = await connect(core)
    for path, (fields, param) in CASES:
        body = {"messages": HI} if path == CHAT else {"prompt": "hi"}
        answer = await client.post(path, content=json.dumps(body | fields))
        assert answer.status_code == 400, (path, fields, answer.text)
        assert check_error(answer.content)["param"] == param, (path, fields, answer.text)
        assert check_error(answer.content)["type"] == "invalid_request_error"
    assert core.seen == []
    await check_alive(client)


@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b"5", b"null", b'"hi"', b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}',
    b'{"prompt": "\xed\xa0\x80"}', b"[" * 100_000, b'{"prompt": ' + b"9" * 10_000 + b"}", b'{"messages": {}}',
])  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_bodies_that_are_not_json_objects(connect: Connect, path: str, content: bytes) -> None:
    client = await connect()
    answer = await client.post(path, content=content)
    assert answer.status_code == 400
    check_error(answer.content)
    await check_alive(client)


@pytest.mark.parametrize("fields", [
    {"logprobs": None, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "best_of": 1},
    {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "user": "me"},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
    {"temperature": None, "n": None, "stop": None, "seed": None, "stream": None, "stream_options": None},
    {"something_new": {"a": [1]}, "metadata": {}, "store": False},
    {"temperature": 1, "top_k": -1, "stop": [], "stop_token_ids": [], "seed": -5, "skip_special_tokens": True},
])  # fmt: skip
async def test_neutral_and_unknown_fields_are_accepted(connect: Connect, fields: dict[str, Any]) -> None:
    client = await connect()
    assert (await client.post(TEXT, json={"prompt": "abc"} | fields)).status_code == 200
    assert (await client.post(CHAT, json={"messages": HI, "max_tokens": 3} | fields)).status_code == 200


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_unknown_model(connect: Connect, path: str) -> None:
    client = await connect()
    answer = await client.post(path, json={"model": "gpt-9", "messages": HI, "prompt": "hi"})
    assert answer.status_code == 404
    error = check_error(answer.content)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'gpt-9'" in error["message"]
    assert "'fake'" in error["message"]
    await check_alive(client)


async def test_unknown_route_and_wrong_method(connect: Connect) -> None:
    client = await connect()
    for path in ("/v1/nothing", "//v1/completions", "/v1/completions/../x"):
        answer = await client.post(path, json={})
        assert answer.status_code == 404
        check_error(answer.content)
    wrong = await client.get(TEXT)
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    check_error(wrong.content)


async def test_body_too_large(connect: Connect) -> None:
    client = await connect()
    announced = await client.post(TEXT, content=b"x" * (16 * 2**20 + 1))
    assert announced.status_code == 413
    check_error(announced.content)

    num_sent = 0

    async def endless() -> Any:
        nonlocal num_sent
        for _ in range(100):
            num_sent += 1
            yield b" " * 2**20

    streamed = await client.post(TEXT, content=endless())
    assert streamed.status_code == 413
    assert num_sent < 20
    await check_alive(client)


async def test_messages_of_templates_show_no_internals(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.fakes.fake_tokenizer import ByteTokenizer

    original = ByteTokenizer.render_chat
    monkeypatch.setattr(ByteTokenizer, "render_chat", lambda self, messages, **_: original(
        self, messages, chat_template="broken"))  # fmt: skip
    client = await connect()
    answer = await client.post(CHAT, json={"messages": HI})
    assert answer.status_code == 400
    assert check_error(answer.content)["message"] == "the template failed at <path>, <object at <address>>"


async def test_unexpected_exceptions_show_nothing(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.fakes.fake_tokenizer import ByteTokenizer

    def broken(*_: Any, **__: Any) -> list[int]:
        raise KeyError("secret at 0x7f00deadbeef in /nowhere/file.py")

    client = await connect()
    with monkeypatch.context() as patch:
        patch.setattr(ByteTokenizer, "encode", broken)
        answer = await client.post(TEXT, json={"prompt": "hi"})
    assert answer.status_code == 500
    assert "secret" not in check_error(answer.content)["message"]
    await check_alive(client)


async def test_dead_engine(connect: Connect) -> None:
    client = await connect(FakeCore(fail_after=2))
    assert (await client.get("/health")).status_code == 200
    for stream in (False, True, False):
        answer = await client.post(TEXT, json={"prompt": "hi", "stream": stream, "max_tokens": 9, "stop": "zz"})
        assert answer.status_code == 503
        assert check_error(answer.content)["code"] == "engine_dead"
    dead = await client.get("/health")
    assert dead.status_code == 503
    assert check_error(dead.content)["code"] == "unavailable"


@pytest.mark.slow
async def test_overloaded(connect: Connect) -> None:
    import asyncio

    client = await connect(FakeCore(step_s=0.002), {"max_num_seqs": 1, "max_num_queued_reqs": 1})
    body = {"prompt": "hi", "max_tokens": 100}
    busy = [asyncio.create_task(client.post(TEXT, json=body)) for _ in range(2)]
    await asyncio.sleep(0.05)
    for stream in (False, True):
        answer = await client.post(TEXT, json=body | {"stream": stream})
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        check_error(answer.content)
    assert [task.status_code for task in await asyncio.gather(*busy)] == [200, 200]
    await check_alive(client)


async def test_a_request_that_the_engine_fails(connect: Connect) -> None:
    core = FakeCore()
    client = await connect(core)
    core.refuse = True
    for stream in (False, True):
        answer = await client.post(TEXT, json={"prompt": "hi", "stream": stream})
        assert answer.status_code == 500
        assert check_error(answer.content)["code"] == "generation_failed"
    core.refuse = False
    await check_alive(client)


async def test_the_reason_of_a_failure_is_told_without_internals(connect: Connect) -> None:
    core = FakeCore()
    client = await connect(core)
    reason = "the model returned NaN (layer at 0x7f00deadbeef, /secret/model/file)"
    failed = Finish(FinishReason.ERROR, message=reason)
    core._finish = lambda request, answer, position: failed if position == 2 else None
    for stream in (False, True):
        answer = await client.post(TEXT, json={"prompt": "hi", "max_tokens": 9, "stream": stream})
        assert answer.status_code == (200 if stream else 500)
        body = answer.content.split(b"data: ")[-2] if stream else answer.content
        error = check_error(body)
        assert error["code"] == "generation_failed"
        assert "the model returned NaN" in error["message"]
        assert "secret" not in error["message"]

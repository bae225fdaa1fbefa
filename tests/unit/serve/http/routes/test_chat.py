"""POST /v1/chat/completions: bodies, events, usage."""

import json
from typing import Any

import httpx

from tests.fakes.fake_core import FakeCore, say
from tests.fakes.fake_tokenizer import EOS
from tests.unit.serve.http.conftest import Connect

PATH = "/v1/chat/completions"
FLAGS: dict[str, Any] = {"reasoning_parser": "qwen3", "enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a stream, which must end with [DONE]."""
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def test_body(connect: Connect) -> None:
    client = await connect(FakeCore(say("hello é😀", EOS)))
    body = BODY | {"cache_salt": "mine"}
    answer = (await client.post(PATH, json=body, headers={"x-request-id": "my-1"})).json()
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello é😀"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": len("[user]hi[assistant]"),
        "completion_tokens": 13,
        "total_tokens": 32,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert (answer["id"], answer["object"], answer["model"]) == ("chatcmpl-my-1", "chat.completion", "fake")


async def test_events(connect: Connect) -> None:
    client = await connect(FakeCore(say('say "é😀"\n', EOS)))
    found = events(await client.post(PATH, json=BODY | {"stream": True}))
    deltas = [event["choices"][0]["delta"] for event in found]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas[1:-1]) == 'say "é😀"\n'
    assert all(delta["content"] for delta in deltas[1:-1])
    assert deltas[-1] == {}
    assert [event["choices"][0]["finish_reason"] for event in found] == [None] * (len(found) - 1) + ["stop"]
    assert {event["object"] for event in found} == {"chat.completion.chunk"}
    assert len({(event["id"], event["created"], event["model"]) for event in found}) == 1
    assert not any("usage" in event for event in found)


async def test_usage_of_a_stream(connect: Connect) -> None:
    client = await connect(FakeCore(say("hey", EOS)))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *others, last = events(await client.post(PATH, json=BODY | options))
    assert all(event["usage"] is None for event in others)
    assert last["choices"] == []
    assert last["usage"] == (await client.post(PATH, json=BODY)).json()["usage"]


async def test_several_choices(connect: Connect) -> None:
    client = await connect(FakeCore(say("abc", EOS)))
    found = events(await client.post(PATH, json=BODY | {"n": 3, "stream": True}))
    for index in range(3):
        mine = [event["choices"][0] for event in found if event["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "abc"
        assert mine[-1]["finish_reason"] == "stop"
    whole = (await client.post(PATH, json=BODY | {"n": 3})).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 12


async def test_stop_strings_never_leak(connect: Connect) -> None:
    client = await connect(FakeCore(say("one END two")))
    fields = {"stop": ["END", "nope"], "stream": True}
    found = events(await client.post(PATH, json=BODY | fields))
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in found) == "one "
    assert found[-1]["choices"][0]["stop_reason"] == "END"
    assert "usage" in (await client.post(PATH, json=BODY | {"stop": "END"})).json()


async def test_max_tokens_default_is_the_room(connect: Connect) -> None:
    client = await connect()
    answer = (await client.post(PATH, json=BODY)).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 256
    limited = (await client.post(PATH, json=BODY | {"max_tokens": 9, "max_completion_tokens": 5})).json()
    assert limited["usage"]["completion_tokens"] == 5


async def test_template_options_reach_the_template(connect: Connect) -> None:
    core = FakeCore()
    client = await connect(core)
    await client.post(PATH, json=BODY | {"max_tokens": 1, "chat_template_kwargs": {"enable_thinking": False}})
    await client.post(PATH, json=BODY | {"max_tokens": 1, "continue_final_message": True})
    await client.post(PATH, json=BODY | {"max_tokens": 1, "documents": [{"title": "t"}]})
    prompts = [bytes(request.prompt_token_ids).decode() for request in core.seen]
    assert prompts == [
        "[user]hi(enable_thinking=False)[assistant]",
        "[user]hi",
        "[user]hi(documents=[{'title': 't'}])[assistant]",
    ]


async def test_sampling_fields_reach_the_engine(connect: Connect) -> None:
    core = FakeCore()
    client = await connect(core, {"scheduling_policy": "priority"})
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "stop_token_ids": [9], "min_tokens": 2,
        "max_tokens": 4, "ignore_eos": True, "cache_salt": "s", "priority": -2,
    }  # fmt: skip
    assert (await client.post(PATH, json=BODY | fields)).status_code == 200
    request = core.seen[0]
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 0.9, 5, 0.1, 3)
    assert (params.stop_token_ids, params.min_tokens, params.max_tokens) == ((9,), 2, 4)
    assert (request.cache_salt, request.priority) == ("s", -2)


async def test_an_error_within_a_stream_is_an_event(connect: Connect) -> None:
    client = await connect(FakeCore(fail_after=3))
    found = events(await client.post(PATH, json=BODY | {"stream": True}))
    assert found[-1]["error"]["code"] == "engine_dead"
    assert found[0]["choices"][0]["delta"]["role"] == "assistant"


async def test_more_tokens_than_a_full_queue_are_refused(connect: Connect) -> None:
    client = await connect(FakeCore(num_blocks=4), {"max_num_seqs": 4, "max_num_queued_reqs": 1})
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 4, "temperature": 1, "max_completion_tokens": 21}
    refused = await client.post(PATH, json=body)
    assert refused.status_code == 400
    assert "1 prompts x n=4 x max_tokens=21 are 84 tokens" in refused.json()["error"]["message"]
    assert (await client.post(PATH, json=body | {"max_completion_tokens": 20})).status_code == 200


async def test_an_answer_without_text_has_the_ids_of_its_tokens(connect: Connect) -> None:
    client = await connect(FakeCore(say("hello", EOS)), **FLAGS)
    body = BODY | {"detokenize": False}
    (choice,) = (await client.post(PATH, json=body)).json()["choices"]
    assert (choice["message"]["content"], choice["token_ids"]) == ("", [*b"hello", EOS])
    found = events(await client.post(PATH, json=body | {"stream": True}))
    choices = [event["choices"][0] for event in found]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == choice["token_ids"]
    assert not any(choice["delta"].get("content") for choice in choices)
    for fields in (
        {"stop": "x"},
        {"use_beam_search": True},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ):
        answer = await client.post(PATH, json=body | fields)
        assert answer.status_code == 400
        assert "detokenize" in answer.json()["error"]["message"]

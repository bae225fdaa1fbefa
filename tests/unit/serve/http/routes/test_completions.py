"""POST /v1/completions: bodies, events, echo, several prompts."""

from typing import Any

import pytest

from tests.fakes.fake_core import FakeCore, say
from tests.fakes.fake_tokenizer import EOS
from tests.unit.serve.http.conftest import Connect
from tests.unit.serve.http.routes.test_chat import events

PATH = "/v1/completions"


@pytest.mark.parametrize(("prompt", "texts"), [
    ("abcd", ["abc"]),
    (["abcd", "efgh"], ["abc", "efg"]),
    ([*b"abcd"], ["abc"]),
    ([[*b"abcd"], [*b"efgh"]], ["abc", "efg"]),
])  # fmt: skip
@pytest.mark.parametrize("echo", [False, True])
async def test_forms_of_a_prompt(connect: Connect, prompt: Any, texts: list[str], echo: bool) -> None:
    client = await connect()
    body = {"prompt": prompt, "max_tokens": 3, "echo": echo}
    expected = [("abcd", "efgh")[index] * echo + text for index, text in enumerate(texts)]
    whole = (await client.post(PATH, json=body)).json()
    assert [choice["text"] for choice in whole["choices"]] == expected
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(texts)))
    assert whole["object"] == "text_completion"
    streamed = [""] * len(texts)
    for event in events(await client.post(PATH, json=body | {"stream": True})):
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == expected


async def test_choices_are_numbered_prompt_by_prompt(connect: Connect) -> None:
    client = await connect()
    body = {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 2, "cache_salt": "mine"}
    whole = (await client.post(PATH, json=body)).json()
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == [
        (0, "ab"), (1, "ab"), (2, "cd"), (3, "cd"),
    ]  # fmt: skip
    assert whole["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 8,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_a_repetition_ends_with_a_reason_of_its_own(connect: Connect, stream: bool) -> None:
    core = FakeCore(say("so: " + "on and " * 20))
    client = await connect(core)
    body = {"prompt": "a", "max_tokens": 100, "repetition_detection": {"max_pattern_size": 10, "min_count": 3}}
    answer = await client.post(PATH, json=body | {"stream": stream})
    choices = [event["choices"][0] for event in events(answer)] if stream else answer.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "so: on and on and on and"
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("repetition", "repetition_detected")
    assert len(core.aborted) == 1
    del body["repetition_detection"]
    assert (await client.post(PATH, json=body)).json()["choices"][0]["finish_reason"] == "length"


async def test_events_and_usage(connect: Connect) -> None:
    client = await connect(FakeCore(say("hey", EOS)))
    body = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}
    *choices, usage = events(await client.post(PATH, json=body))
    assert "".join(event["choices"][0]["text"] for event in choices) == "hey"
    assert choices[-1]["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4


async def test_default_max_tokens(connect: Connect) -> None:
    client = await connect()
    assert (await client.post(PATH, json={"prompt": "a"})).json()["usage"]["completion_tokens"] == 16
    long = {"prompt": [97] * 250}
    assert (await client.post(PATH, json=long)).json()["usage"]["completion_tokens"] == 6
    assert (await client.post(PATH, json=long | {"max_tokens": 16})).status_code == 400


async def test_a_bad_prompt_in_a_list_starts_nothing(connect: Connect) -> None:
    core = FakeCore()
    client = await connect(core)
    assert (await client.post(PATH, json={"prompt": ["good", "x" * 300]})).status_code == 400
    assert core.seen == []


async def test_stop_strings_and_include(connect: Connect) -> None:
    client = await connect(FakeCore(say("one, two, three")))
    body = {"prompt": "a", "stop": [", "]}
    choice = (await client.post(PATH, json=body)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one", "stop", ", ")
    included = (await client.post(PATH, json=body | {"include_stop_str_in_output": True})).json()["choices"][0]
    assert included["text"] == "one, "


async def test_many_prompts(connect: Connect) -> None:
    client = await connect(FakeCore(num_blocks=1024))
    whole = (
        await client.post(PATH, json={"prompt": [f"{index:04d}" for index in range(1024)], "max_tokens": 4})
    ).json()
    assert [choice["text"] for choice in whole["choices"]] == [f"{index:04d}" for index in range(1024)]


async def test_more_tokens_than_a_full_queue_are_refused_when_they_were_asked_for(connect: Connect) -> None:
    # 4 blocks of 16 tokens, shared by 16 completions that run; 4 wait.
    client = await connect(FakeCore(num_blocks=4), {"max_num_seqs": 16, "max_num_queued_reqs": 4})
    body = {"prompt": ["a", "b"], "n": 4, "max_tokens": 10, "temperature": 1}
    assert (await client.post(PATH, json=body)).status_code == 200
    refused = await client.post(PATH, json=body | {"max_tokens": 11})
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "max_tokens"
    assert "2 prompts x n=4 x max_tokens=11 are 88 tokens" in error["message"] and "at most 80" in error["message"]
    assert (await client.post(PATH, json={"prompt": "a", "max_tokens": 100})).status_code == 200
    assert (await client.post(PATH, json={"prompt": ["a"] * 5, "temperature": 1})).status_code == 200


@pytest.mark.slow
async def test_a_long_list_of_prompts_may_ask_for_more_tokens_than_the_cache_holds_at_once(connect: Connect) -> None:
    client = await connect(FakeCore(num_blocks=4096))  # 65,536 tokens, as by default
    body = {"prompt": [f"{index:04d}" for index in range(1024)], "max_tokens": 100}
    whole = (await client.post(PATH, json=body)).json()
    assert len(whole["choices"]) == 1024
    refused = await client.post(PATH, json=body | {"max_tokens": 5065})
    assert refused.status_code == 400 and "at most 5185536" in refused.json()["error"]["message"]

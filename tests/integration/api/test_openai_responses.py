"""The `openai` package against /v1/responses: whole, streamed, tools, reasoning, structured answers, errors."""

import json
import time
from collections.abc import Iterator

import openai
import pytest
from pydantic import BaseModel

from tests.fakes.engine import running_server
from tests.fakes.fake_core import FakeCore, say
from tests.fakes.fake_tokenizer import EOS

KEY = "correct-horse"
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
SAID = '<think>hmm</think>so <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
ASK = {"model": "fake", "input": "hi", "tools": [TOOL]}
SERVER = {
    "api_key": (KEY,), "reasoning_parser": "qwen3", "enable_auto_tool_choice": True, "tool_call_parser": "hermes",
}  # fmt: skip


class Place(BaseModel):
    """What is to be found."""

    name: str


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_server(FakeCore(say(SAID, EOS), max_model_len=4096), response_store_bytes=1 << 22, **SERVER) as url:
        yield f"{url}/v1"


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


def items(response):
    """What is said, without ids."""
    return [
        (item.type, item.status, item.arguments if item.type == "function_call" else item.content[0].text)
        for item in response.output
    ]


def test_an_answer(client):
    response = client.responses.create(**ASK, instructions="be kind")
    thought, text, call = response.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hmm")
    assert (text.type, response.output_text.strip()) == ("message", "so")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "f", {"a": 1})
    assert (response.status, response.model, response.instructions) == ("completed", "fake", "be kind")
    assert response.usage.output_tokens == len(SAID) + 1
    assert response.tools[0].name == "f"


def test_a_stream_is_the_answer(client):
    whole = client.responses.create(**ASK)
    text = arguments = ""
    with client.responses.stream(**ASK) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                text += event.delta
            elif event.type == "response.function_call_arguments.delta":
                arguments += event.delta
        streamed = stream.get_final_response()
    assert text == whole.output_text
    assert json.loads(arguments) == {"a": 1}
    assert items(streamed) == items(whole)
    assert streamed.usage == whole.usage


def test_raw_events(client):
    found = list(client.responses.create(**ASK, stream=True))
    assert [event.sequence_number for event in found] == list(range(len(found)))
    kinds = [event.type for event in found]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3


async def test_the_async_client(url):
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        whole = await client.responses.create(**ASK)
        async with client.responses.stream(**ASK) as stream:
            assert items(await stream.get_final_response()) == items(whole)


def test_a_conversation_goes_on_with_what_came_back(client):
    first = client.responses.create(**ASK)
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "done"}
    again = client.responses.create(**ASK | {"input": [{"role": "user", "content": "hi"}, *first.output, result]})
    assert again.output_text


def test_stored_answers(client):
    first = client.responses.create(**ASK)
    assert client.responses.retrieve(first.id) == first
    items = client.responses.input_items.list(first.id, limit=1)
    assert [item.content[0].text for item in items] == ["hi"]
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "done"}
    second = client.responses.create(**ASK | {"input": [result]}, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert len(list(client.responses.input_items.list(second.id, limit=2))) == 5
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_an_answer_in_the_background(client):
    started = client.responses.create(**ASK, background=True)
    deadline = time.monotonic() + 120
    while (answer := client.responses.retrieve(started.id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (answer.status, answer.output_text.strip()) == ("completed", "so")
    assert client.responses.cancel(started.id) == answer


def test_a_stream_in_the_background_is_followed(client):
    found = list(client.responses.create(**ASK, background=True, stream=True))
    name = found[0].response.id
    again = list(client.responses.retrieve(name, stream=True, starting_after=3))
    assert [event.sequence_number for event in again] == [event.sequence_number for event in found[4:]]
    with client.responses.stream(response_id=name, starting_after=3) as stream:
        assert stream.get_final_response().output_text == found[-1].response.output_text


def test_a_client_that_leaves_ends_no_work_in_the_background(client):
    with client.responses.create(**ASK, background=True, stream=True) as stream:
        name = next(iter(stream)).response.id
    deadline = time.monotonic() + 120
    while client.responses.retrieve(name).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert client.responses.retrieve(name).status == "completed"


def test_conversations(client):
    made = client.conversations.create(items=[{"role": "user", "content": "hi"}], metadata={"a": "b"})
    assert client.conversations.retrieve(made.id) == made
    assert client.conversations.update(made.id, metadata={"c": "d"}).metadata == {"c": "d"}
    response = client.responses.create(**ASK | {"input": "and?"}, conversation=made.id)
    assert response.conversation.id == made.id
    kept = list(client.conversations.items.list(made.id, order="asc", limit=2))
    assert [item.type for item in kept] == ["message", "message", "reasoning", "message", "function_call"]
    assert client.conversations.items.retrieve(kept[1].id, conversation_id=made.id) == kept[1]
    assert client.conversations.items.delete(kept[1].id, conversation_id=made.id).id == made.id
    added = client.conversations.items.create(made.id, items=[{"role": "user", "content": "ho"}])
    assert added.data[0].content[0].text == "ho"
    assert client.conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(made.id)


def test_a_structured_answer():
    with (
        running_server(FakeCore(say('{"name": "Rome"}', EOS), max_model_len=4096), api_key=(KEY,)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        parsed = client.responses.parse(model="fake", input="where?", text_format=Place)
        assert parsed.output_parsed == Place(name="Rome")
        with client.responses.stream(model="fake", input="where?", text_format=Place) as stream:
            assert stream.get_final_response().output_parsed == Place(name="Rome")


def test_errors_are_of_the_classes_that_the_client_knows(url, client):
    with pytest.raises(openai.BadRequestError, match="web_search"):
        client.responses.create(model="fake", input="hi", tools=[{"type": "web_search"}])
    with pytest.raises(openai.NotFoundError, match="gpt"):
        client.responses.create(model="gpt", input="hi")
    stranger = openai.OpenAI(base_url=url, api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.responses.create(**ASK)

"""The `anthropic` package against /v1/messages: whole, streamed, tools, thinking, errors."""

from collections.abc import Iterator

import anthropic
import pytest

from tests.fakes.engine import running_server
from tests.fakes.fake_core import FakeCore, say
from tests.fakes.fake_tokenizer import EOS

KEY = "correct-horse"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
SAID = '<think>hmm</think>so <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
ASK = {"model": "claude-any-9", "max_tokens": 100, "messages": HI, "tools": [TOOL]}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = {
        "api_key": (KEY,), "model_alias": ("claude-*=default",), "reasoning_parser": "qwen3",
        "enable_auto_tool_choice": True, "tool_call_parser": "hermes",
    }  # fmt: skip
    with running_server(FakeCore(say(SAID, EOS)), **server) as url:
        yield url


@pytest.fixture
def client(url):
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


def blocks(message):
    return [block.model_dump(exclude={"id"}) for block in message.content]


def test_a_message(client):
    message = client.messages.create(**ASK)
    thinking, text, call = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "hmm")
    assert text.text.strip() == "so"
    assert (call.type, call.name, call.input) == ("tool_use", "f", {"a": 1})
    assert (message.stop_reason, message.role, message.model) == ("tool_use", "assistant", "fake")
    assert message.usage.output_tokens == len(SAID) + 1
    assert message._request_id in message.id


def test_a_stream_is_the_message(client):
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text.strip() == "so"
    assert blocks(streamed) == blocks(whole)
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)
    assert streamed.usage.input_tokens == whole.usage.input_tokens


def test_raw_events(client):
    kinds = [event.type for event in client.messages.create(**ASK, stream=True)]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3


async def test_the_async_client(url):
    async with anthropic.AsyncAnthropic(base_url=url, auth_token=KEY, max_retries=0) as client:
        message = await client.messages.create(**ASK)
        async with client.messages.stream(**ASK) as stream:
            assert blocks(await stream.get_final_message()) == blocks(message)


def test_tokens_are_counted(client):
    counted = client.messages.count_tokens(model="claude-any-9", messages=HI, tools=[TOOL])
    assert counted.input_tokens == client.messages.create(**ASK).usage.input_tokens


def test_a_conversation_goes_on_with_what_came_back(client):
    first = client.messages.create(**ASK)
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "done"}
    messages = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**ASK | {"messages": messages}).content


def test_errors_are_of_the_classes_that_the_client_knows(url, client):
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
        client.messages.create(**ASK, stop_sequences=["x"] * 100)
    with pytest.raises(anthropic.NotFoundError, match="gpt"):
        client.messages.create(**ASK | {"model": "gpt"})
    stranger = anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(**ASK)

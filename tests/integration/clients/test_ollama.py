"""The `ollama` package against /api."""

from collections.abc import Iterator

import ollama
import pytest

from tests.fakes.engine import running_server
from tests.fakes.fake_core import FakeCore, say
from tests.fakes.fake_tokenizer import EOS

SAID = '<think>hmm</think>so <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
HI = [{"role": "user", "content": "hi"}]


def f(a: int) -> int:
    """A tool.

    Args:
        a: a number
    """
    return a


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = {"reasoning_parser": "qwen3", "enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with running_server(FakeCore(say(SAID, EOS), max_model_len=2048), **server) as url:
        yield url


@pytest.fixture
def client(url):
    with ollama.Client(host=url) as client:
        yield client


def test_a_chat_with_a_function_as_a_tool(client):
    answer = client.chat("fake", messages=HI, tools=[f], think=True)
    assert (answer.message.thinking, answer.message.content.strip()) == ("hmm", "so")
    call = answer.message.tool_calls[0].function
    assert (call.name, call.arguments) == ("f", {"a": 1})
    assert (answer.done, answer.done_reason, answer.eval_count) == (True, "stop", len(SAID) + 1)


def test_a_stream_is_the_answer(client):
    whole = client.chat("fake", messages=HI, tools=[f])
    parts = list(client.chat("fake", messages=HI, tools=[f], stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert "".join(part.message.thinking or "" for part in parts) == whole.message.thinking
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert calls == whole.message.tool_calls
    assert parts[-1].eval_count == whole.eval_count


def test_a_conversation_goes_on_with_what_came_back(client):
    first = client.chat("fake", messages=HI, tools=[f])
    messages = [*HI, first.message, {"role": "tool", "content": "1", "tool_name": "f"}]
    assert client.chat("fake", messages=messages, tools=[f]).message.content


def test_a_prompt(client):
    assert client.generate("fake", "hi", options={"num_predict": 3}).done_reason == "length"
    assert client.generate("fake", "hi", raw=True).response == SAID
    assert client.generate("fake").done_reason == "load"


async def test_the_async_client(url):
    async with ollama.AsyncClient(host=url) as client:
        parts = [part async for part in await client.chat("fake", messages=HI, stream=True)]
    assert parts[-1].done


def test_what_there_is(client):
    assert [model.model for model in client.list().models] == ["fake"]
    assert client.ps().models[0].context_length == 2048
    assert "tools" in client.show("fake").capabilities


def test_errors(client):
    with pytest.raises(ollama.ResponseError, match="gpt") as caught:
        client.chat("gpt", messages=HI)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"options\.temperature"):
        client.chat("fake", messages=HI, options={"temperature": -1})

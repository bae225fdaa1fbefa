"""The `openai` package, sync and async, against a server on a scripted engine: chats, completions, tools, reasoning,
structured output, errors. tests/integration/test_serve.py has it on a real one."""

from collections.abc import Iterator

import openai
import pydantic
import pytest

from tests.fakes.engine import running_server
from tests.fakes.fake_core import FakeCore, say
from tests.fakes.fake_tokenizer import EOS

KEY = "correct-horse"
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
SAID = '<think>hmm</think>so <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
ASK = {"model": "gpt-any", "max_tokens": 100, "messages": HI, "tools": [TOOL]}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = {
        "api_key": (KEY,), "model_alias": ("gpt-*=default",), "reasoning_parser": "qwen3",
        "enable_auto_tool_choice": True, "tool_call_parser": "hermes",
    }  # fmt: skip
    with running_server(FakeCore(say(SAID, EOS), max_model_len=2048), **server) as url:
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def plain_url() -> Iterator[str]:
    """A server whose model says an object, and nothing takes it apart."""
    with running_server(FakeCore(say('{"a": 7}', EOS))) as url:
        yield f"{url}/v1"


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


def parts_of(message):
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return message.reasoning, (message.content or "").strip(), calls


EXPECTED = ("hmm", "so", [("f", '{"a": 1}')])


def test_a_chat(client):
    answer = client.chat.completions.create(**ASK)
    assert parts_of(answer.choices[0].message) == EXPECTED
    assert (answer.choices[0].finish_reason, answer.model) == ("tool_calls", "fake")
    assert answer.usage.completion_tokens == len(SAID) + 1
    assert answer._request_id in answer.id


def test_a_stream_is_the_chat(client):
    """Put together by hand, and by the package's own helper."""
    chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas).strip() == "so"
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "hmm"
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert "".join(call.function.arguments or "" for call in calls) == '{"a": 1}'
    assert chunks[-1].usage.completion_tokens == len(SAID) + 1
    with client.chat.completions.stream(**ASK) as stream:
        final = stream.until_done().get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == '{"a": 1}'
    assert final.choices[0].finish_reason == "tool_calls"


def test_a_conversation_goes_on_with_what_came_back(client):
    first = client.chat.completions.create(**ASK).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "done"}
    messages = [*HI, first.model_dump(exclude_none=True), result]
    assert client.chat.completions.create(**ASK | {"messages": messages}).choices


async def test_the_async_client(url):
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        answer = await client.chat.completions.create(**ASK)
        assert parts_of(answer.choices[0].message) == EXPECTED
        text = ""
        async for chunk in await client.chat.completions.create(**ASK, stream=True):
            text += chunk.choices[0].delta.content or ""
        assert text == answer.choices[0].message.content
        assert [model.id async for model in client.models.list()] == ["fake"]


def test_completions(client):
    answer = client.completions.create(model="gpt-any", prompt="hi", max_tokens=5, logprobs=1)
    assert answer.choices[0].text == SAID[:5]
    assert len(answer.choices[0].logprobs.tokens) == 5
    chunks = client.completions.create(model="gpt-any", prompt="hi", max_tokens=5, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == SAID[:5]


def test_an_object(plain_url):
    """The package sends a model's schema, and makes an object of what comes."""

    class Answer(pydantic.BaseModel):
        a: int

    with openai.OpenAI(base_url=plain_url, api_key="none", max_retries=0) as client:
        answer = client.chat.completions.parse(model="fake", messages=HI, response_format=Answer, max_tokens=100)
    assert answer.choices[0].message.parsed == Answer(a=7)


def test_errors_are_of_the_classes_that_the_client_knows(url, client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASK, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="other"):
        client.chat.completions.create(**ASK | {"model": "other"})
    with (
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()

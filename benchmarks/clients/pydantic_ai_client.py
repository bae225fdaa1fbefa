"""pydantic-ai: chat, stream, tools (an output that is a call), structured output (a JSON schema)."""

import asyncio

from checks import QUESTION, Server, expect, run
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=99_999_999)


def agent(server: Server, output=str, max_tokens: int = 24) -> Agent:
    model = OpenAIChatModel(server.model, provider=OpenAIProvider(base_url=f"{server.url}/v1", api_key="none"))
    return Agent(model, output_type=output, retries=0, model_settings={"temperature": 0, "max_tokens": max_tokens})


def chat(server: Server) -> None:
    found = agent(server).run_sync(QUESTION)
    expect(found.output, found)


def stream(server: Server) -> None:
    async def streamed() -> str:
        async with agent(server).run_stream(QUESTION) as answer:
            return "".join([part async for part in answer.stream_text(delta=True, debounce_by=None)])

    whole, text = agent(server).run_sync(QUESTION).output, asyncio.run(streamed())
    expect(text == whole, text)


def tools(server: Server) -> None:
    found = agent(server, ToolOutput(City), 128).run_sync(QUESTION)
    expect(isinstance(found.output, City), found)


def structured(server: Server) -> None:
    found = agent(server, NativeOutput(City), 128).run_sync(QUESTION)
    expect(isinstance(found.output, City), found)


if __name__ == "__main__":
    raise SystemExit(run(chat=chat, stream=stream, tools=tools, structured=structured))

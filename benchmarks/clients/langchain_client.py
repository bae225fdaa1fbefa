"""langchain-openai: chat, stream, tools, structured output."""

from checks import QUESTION, Server, expect, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=99_999_999)


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def model(server: Server, max_tokens: int = 24) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model=server.model, temperature=0, max_tokens=max_tokens
    )


def chat(server: Server) -> None:
    answer = model(server).invoke(QUESTION)
    expect(answer.content, answer)
    expect(answer.usage_metadata["output_tokens"] > 0, answer.usage_metadata)


def stream(server: Server) -> None:
    whole = model(server).invoke(QUESTION)
    chunks = list(model(server).stream(QUESTION))
    expect("".join(chunk.content for chunk in chunks) == whole.content, chunks)


def tools(server: Server) -> None:
    """A call that is asked for, its result, and what the model says then."""
    question = HumanMessage(QUESTION)
    called = model(server, 128).bind_tools([weather], tool_choice="required").invoke([question])
    call = called.tool_calls[0]
    expect(call["name"] == "weather" and isinstance(call["args"]["city"], str), called)
    result = ToolMessage("sunny", tool_call_id=call["id"])
    answer = model(server).bind_tools([weather]).invoke([question, called, result])
    expect(answer.content or answer.tool_calls, answer)


def structured(server: Server) -> None:
    found = model(server, 128).with_structured_output(City, method="json_schema").invoke(QUESTION)
    expect(isinstance(found, City), found)


if __name__ == "__main__":
    raise SystemExit(run(chat=chat, stream=stream, tools=tools, structured=structured))

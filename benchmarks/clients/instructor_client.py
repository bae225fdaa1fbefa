"""instructor: objects by a JSON schema and by a tool call, whole and while they grow."""

import instructor
import openai
from checks import QUESTION, Server, expect, run
from pydantic import BaseModel, ConfigDict, Field


class City(BaseModel):
    """A city. A small model that may add members adds them without end."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=99_999_999)


def ask(server: Server, mode: instructor.Mode, method: str = "create", **fields):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{server.url}/v1", api_key="none"), mode=mode)
    return getattr(client.chat.completions, method)(
        model=server.model, messages=[{"role": "user", "content": QUESTION}], response_model=City, max_retries=0,
        temperature=0, max_tokens=600, **fields,
    )  # fmt: skip


def structured(server: Server) -> None:
    found = ask(server, instructor.Mode.JSON_SCHEMA)
    expect(isinstance(found, City), found)


def stream(server: Server) -> None:
    parts = list(ask(server, instructor.Mode.JSON_SCHEMA, "create_partial"))
    expect(parts and parts[-1].population is not None, parts)


def tools(server: Server) -> None:
    """The object is the arguments of a call that the request names."""
    found = ask(server, instructor.Mode.TOOLS)
    expect(isinstance(found, City), found)


if __name__ == "__main__":
    raise SystemExit(run(stream=stream, tools=tools, structured=structured))

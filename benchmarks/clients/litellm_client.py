"""litellm: chat, stream, tools, structured output, and a model of its list that an alias would serve."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # its import would fetch a list of prices otherwise

import litellm
from checks import QUESTION, WEATHER, Server, expect, run

MESSAGES = [{"role": "user", "content": QUESTION}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}},
    "required": ["name"],
    "additionalProperties": False,
}


def ask(server: Server, **fields):
    return litellm.completion(
        model=f"openai/{server.model}", api_base=f"{server.url}/v1", api_key="none", temperature=0, num_retries=0,
        **{"messages": MESSAGES, "max_tokens": 24} | fields,
    )  # fmt: skip


def chat(server: Server) -> None:
    answer = ask(server)
    expect(answer.choices[0].message.content, answer)
    expect(answer.usage.completion_tokens > 0, answer)


def stream(server: Server) -> None:
    whole = ask(server).choices[0].message.content
    chunks = list(ask(server, stream=True))
    expect("".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole, chunks)


def tools(server: Server) -> None:
    called = ask(server, tools=[WEATHER], tool_choice="required", max_tokens=128).choices[0].message
    call = called.tool_calls[0]
    expect(call.function.name == "weather" and json.loads(call.function.arguments)["city"] is not None, called)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    answer = ask(server, tools=[WEATHER], messages=[*MESSAGES, called.model_dump(exclude_none=True), result])
    expect(answer.choices[0].message.content or answer.choices[0].message.tool_calls, answer)


def structured(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    answer = ask(server, response_format=form, max_tokens=128)
    expect(isinstance(json.loads(answer.choices[0].message.content)["name"], str), answer)


if __name__ == "__main__":
    raise SystemExit(run(chat=chat, stream=stream, tools=tools, structured=structured))

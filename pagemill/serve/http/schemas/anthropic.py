"""Bodies of POST /v1/messages and /v1/messages/count_tokens, Anthropic's API, as the chats that they stand for."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, field_validator

from pagemill.errors import RequestError
from pagemill.serve.http.connection import checked
from pagemill.serve.http.schemas.chat import ChatBody
from pagemill.serve.http.schemas.shapes import ClaudeBlock, ClaudeTool, ClaudeTurn
from pagemill.serve.http.schemas.support import ANTHROPIC_HINTS, ANTHROPIC_REFUSED, Refused
from pagemill.serve.http.schemas.translation import Translation
from pagemill.serve.processing.conversation import MAX_MESSAGES
from pagemill.serve.processing.tool_definitions import MAX_TOOLS
from pagemill.utils.text import shown

_ROLES = ("user", "assistant", "system")
_EFFORTS = {"xhigh": "high", "max": "high"}
"""Efforts beyond the highest one that templates know."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_OF_TOOLS = frozenset({"type", "name", "description", "input_schema", "strict", "cache_control"})
"""Members of a tool that have an effect, or cannot have one (see ANTHROPIC_HINTS)."""
_UNREAD = "unread"
"""Key of a message or tool whose translation has none for some of its members: their names."""
_encode = msgspec.json.encode


class Thinking(BaseModel):
    """Whether the model shall think before it answers."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    """After so many tokens the reasoning ends, where a parser tells it apart."""
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(BaseModel):
    """The form of the answer, and how much effort goes into it."""

    model_config = ConfigDict(strict=True, extra="allow")

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Any = None


class CountTokensBody(Translation):
    """A conversation whose tokens are counted."""

    refused: ClassVar[Mapping[str, Refused]] = ANTHROPIC_REFUSED
    hints: ClassVar[Mapping[str, str]] = ANTHROPIC_HINTS
    names: ClassVar[Mapping[str, str]] = {
        "stop": "stop_sequences",
        "response_format": "output_config",
        "structured_outputs": "output_config",
        "include_reasoning": "thinking",
        "thinking_token_budget": "thinking.budget_tokens",
        "reasoning_effort": "output_config",
    }

    messages: Any
    """After validation the messages of a chat, in OpenAI's form."""
    system: Any = None
    tools: Any = None
    """After validation functions in OpenAI's form."""
    tool_choice: Any = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @field_validator("messages", mode="plain", json_schema_input_type=list[ClaudeTurn])
    @classmethod
    def _messages(cls, value: Any) -> list[dict[str, Any]]:
        if not isinstance(value, list) or not value:
            raise RequestError(f"messages={shown(value)} is not allowed: a list of at least one message", "messages")
        if len(value) > MAX_MESSAGES:
            raise RequestError(f"there are {len(value)} messages; at most {MAX_MESSAGES} are allowed", "messages")
        return [part for index, item in enumerate(value) for part in _messages_of(item, f"messages.{index}")]

    @field_validator("system", mode="plain", json_schema_input_type=str | list[ClaudeBlock] | None)
    @classmethod
    def _system(cls, value: Any) -> Any:
        return None if value is None else _texts_of(value, "system")

    @field_validator("tools", mode="plain", json_schema_input_type=list[ClaudeTool] | None)
    @classmethod
    def _tools(cls, value: Any) -> list[dict[str, Any]] | None:
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > MAX_TOOLS:
            raise RequestError(f"tools={shown(value)} is not allowed: a list of at most {MAX_TOOLS} tools", "tools")
        return [_tool_of(item, f"tools.{index}") for index, item in enumerate(value)]

    @field_validator("tool_choice", mode="plain", json_schema_input_type=dict[str, Any] | None)
    @classmethod
    def _choice(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, Mapping) else None
        if value is None or kind in _CHOICES or (kind == "tool" and isinstance(value.get("name"), str)):
            return value
        raise RequestError(
            f"tool_choice={shown(value)} is not allowed: an object of type auto, any, none, or tool with a name",
            "tool_choice",
        )

    def translated(self) -> ChatBody:
        """See `Translation`. A last message of the assistant is one to be continued."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages, unread = _without_unread(self.messages)
        fields: dict[str, Any] = {"model": self.model, "messages": system + messages}
        last = self.messages[-1]
        if last["role"] == "assistant" and "tool_calls" not in last:
            fields["continue_final_message"] = True
        if self.tools:
            tools, more = _without_unread(self.tools)
            unread += more
            fields |= {"tools": tools} | _choice_of(self.tool_choice)
        if self.thinking is not None:
            fields |= _thinking_of(self.thinking)
        if self.output_config is not None:
            fields |= _output_of(self.output_config)
        chat = checked(ChatBody, fields | self._sampling())
        for name, part in (("thinking", self.thinking), ("output_config", self.output_config)):
            unread += [f"{name}.{inner}" for inner in (part.model_extra if part is not None else None) or ()]
        chat.leave_out([*self.unknown_fields, *unread])
        return chat

    def _sampling(self) -> dict[str, Any]:
        return {}


class MessagesBody(CountTokensBody):
    """A conversation to be continued."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    def _sampling(self) -> dict[str, Any]:
        same = ("max_tokens", "stream", "temperature", "top_k", "top_p")
        return {name: getattr(self, name) for name in same} | {"stop": self.stop_sequences}


def _without_unread(items: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages or tools, and the names of what nothing reads of them."""
    if not any(_UNREAD in item for item in items):
        return items, []
    kept = [{name: value for name, value in item.items() if name != _UNREAD} for item in items]
    return kept, [name for item in items for name in item.get(_UNREAD, ())]


def _thinking_of(thinking: Thinking) -> dict[str, Any]:
    """Templates that let one choose know `enable_thinking`."""
    fields: dict[str, Any] = {}
    if thinking.type in ("enabled", "disabled"):
        fields["chat_template_kwargs"] = {"enable_thinking": thinking.type == "enabled"}
    if thinking.type == "enabled":
        fields["thinking_token_budget"] = thinking.budget_tokens
    if thinking.display == "omitted":
        fields["include_reasoning"] = False
    return fields


def _output_of(output: OutputConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if output.effort is not None:
        fields["reasoning_effort"] = _EFFORTS.get(output.effort, output.effort)
    if output.format is not None:
        schema = output.format.get("schema") if isinstance(output.format, Mapping) else None
        if not isinstance(schema, Mapping) or output.format.get("type") != "json_schema":
            raise RequestError(
                f"output_config.format={shown(output.format)} is not allowed: an object of type json_schema with a "
                "schema",
                "output_config.format",
            )
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return fields


def _choice_of(choice: Any) -> dict[str, Any]:
    if choice is None:
        return {}
    fields: dict[str, Any] = {"tool_choice": _CHOICES.get(choice["type"])}
    if choice["type"] == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    return fields


def _tool_of(tool: Any, field: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") not in (None, "custom"):
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        raise RequestError(
            f"{field} is of type {shown(kind)}, which is not supported: tools are called by clients, type 'custom'",
            field,
        )
    if not isinstance(tool.get("input_schema"), Mapping):
        raise RequestError(
            f"{field}.input_schema={shown(tool.get('input_schema'))} is not a JSON schema, which is an object",
            f"{field}.input_schema",
        )
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    found = {"type": "function", "function": function | {"parameters": dict(tool["input_schema"])}}
    unread = [f"{field}.{name}" for name in tool if name not in _OF_TOOLS]
    return found | ({_UNREAD: unread} if unread else {})


def _texts_of(content: Any, field: str) -> Any:
    """Content that is a text, or a list of blocks of text: as the content of a chat's message."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{field}={shown(content)} is neither a text nor a list of blocks", field)
    return [_text_of(_block(block, f"{field}.{index}"), f"{field}.{index}") for index, block in enumerate(content)]


def _text_of(block: Mapping[str, Any], field: str) -> dict[str, Any]:
    if block["type"] != "text":
        raise RequestError(
            f"{field} is of type {shown(block['type'])}, which is not supported here: this model takes text only", field
        )
    return {"type": "text", "text": _string(block, "text", field)}


def _block(block: Any, field: str) -> Mapping[str, Any]:
    if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
        raise RequestError(f"{field}={shown(block)} is not a block, which is an object with a type", field)
    return block


def _string(block: Mapping[str, Any], name: str, field: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{field}.{name}={shown(value)} is not a text", f"{field}.{name}")
    return value


def _messages_of(message: Any, field: str) -> list[dict[str, Any]]:
    """A message as those of a chat: results of tools are messages of their own there, before the rest."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in _ROLES:
        raise RequestError(f"{field}.role={shown(role)} is not one of {', '.join(_ROLES)}", f"{field}.role")
    content = message.get("content")
    field = f"{field}.content"
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise RequestError(f"{field}={shown(content)} is neither a text nor a list of blocks", field)
    blocks = [(_block(block, f"{field}.{index}"), f"{field}.{index}") for index, block in enumerate(content)]
    if role == "assistant":
        return [_answer_of(blocks)]
    results = [_result_of(block, name) for block, name in blocks if block["type"] == "tool_result"]
    texts = [_text_of(block, name) for block, name in blocks if block["type"] != "tool_result"]
    return results + ([{"role": role, "content": texts}] if texts or not results else [])


def _result_of(block: Mapping[str, Any], field: str) -> dict[str, Any]:
    content = _texts_of(block.get("content") or "", f"{field}.content")
    unread = {_UNREAD: [f"{field}.is_error"]} if block.get("is_error") else {}
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id", field), "content": content} | unread


def _answer_of(blocks: list[tuple[Mapping[str, Any], str]]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block, field in blocks:
        match block["type"]:
            case "thinking":
                thoughts.append(_string(block, "thinking", field))
            case "redacted_thinking":
                continue  # nobody but its author can read it
            case "tool_use":
                calls.append(_call_of(block, field))
            case _:
                texts.append(_text_of(block, field)["text"])
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call_of(block: Mapping[str, Any], field: str) -> dict[str, Any]:
    if not isinstance(block.get("input"), Mapping):
        raise RequestError(f"{field}.input={shown(block.get('input'))} is not an object", f"{field}.input")
    function = {"name": _string(block, "name", field), "arguments": _encode(block["input"]).decode()}
    return {"id": _string(block, "id", field), "type": "function", "function": function}

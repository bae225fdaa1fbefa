"""Chat messages as users send them -> messages as chat templates expect them.
Does not know templates or tokenizers."""

from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from pagemill.errors import RequestError
from pagemill.utils.text import shown

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 4096


class Conversation(list[dict[str, Any]]):
    """Messages that `parse_conversation` has made."""


def parse_conversation(messages: Any) -> Conversation:
    """Checked copies of OpenAI-style messages: `content` is one text (parts are joined by newlines), the role
    `developer` is called `system`, the arguments of an assistant's tool calls are objects, and its reasoning has both
    of the names that templates know. Further keys are kept for the template. What this has made is left as it is.

    Raises RequestError.
    """
    if isinstance(messages, Conversation):
        return messages
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError(f"messages={shown(messages)} is not allowed: a list of at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"there are {len(messages)} messages; at most {MAX_MESSAGES} are allowed", "messages")
    return Conversation(_parse_message(message, f"messages.{index}") for index, message in enumerate(messages))


def _parse_message(message: Any, field: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{field}={shown(message)} is not an object with role and content", field)
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{field}.role={shown(role)} is not one of {', '.join(ROLES)}", f"{field}.role")
    parsed = {
        **message,
        "role": "system" if role == "developer" else role,
        "content": _parse_content(message.get("content"), role, f"{field}.content"),
    }
    if role == "assistant":
        _complete_answer(parsed, field)
    return parsed


def _complete_answer(message: dict[str, Any], field: str) -> None:
    """An assistant's message as templates expect it."""
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if isinstance(reasoning, str):
        message["reasoning"] = message["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, (list, tuple)):
            raise RequestError(f"{field}.tool_calls={shown(calls)} is not a list", f"{field}.tool_calls")
        message["tool_calls"] = [_parse_call(call, f"{field}.tool_calls.{n}") for n, call in enumerate(calls)]


def _parse_call(call: Any, field: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{field}={shown(call)} is not an object with a function that has a name", field)
    arguments = _parse_arguments(function.get("arguments"), f"{field}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _parse_arguments(arguments: Any, field: str) -> dict[str, Any]:
    """The object that a text of JSON stands for; no text stands for an empty one."""
    value = arguments
    if isinstance(arguments, str):
        try:
            value = from_json(arguments, allow_inf_nan=False) if arguments.strip() else {}
        except ValueError as error:
            raise RequestError(f"{field}={shown(arguments)} is not valid JSON", field) from error
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(f"{field}={shown(arguments)} is not the JSON text of an object", field)
    return dict(value)


def _parse_content(content: Any, role: str, field: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":  # a turn that only called tools
        return ""
    if not isinstance(content, (list, tuple)):
        raise RequestError(f"{field}={shown(content)} is neither a text nor a list of text parts", field)
    return "\n".join(_parse_part(part, f"{field}.{index}") for index, part in enumerate(content))


def _parse_part(part: Any, field: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("text", "input_text"):
        raise RequestError(f"{field} is of type {shown(kind)}; this model takes parts of type 'text' only", field)
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{field}.text={shown(text)} is not a text", f"{field}.text")
    return text

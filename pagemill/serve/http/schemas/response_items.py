"""Items of the Responses API: checked and brought into one form, and as the messages of the chat that they stand for.
Do not know where they are kept."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pydantic_core import from_json

from pagemill.errors import RequestError
from pagemill.serve.processing.conversation import MAX_MESSAGES
from pagemill.utils.text import shown

MAX_ID_CHARS = 128
MESSAGE = "message"
REASONING = "reasoning"
CALL = "function_call"
RESULT = "function_call_output"
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text")
_PREFIXES = {MESSAGE: "msg", REASONING: "rs", CALL: "fc", RESULT: "fco"}
Item = dict[str, Any]


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return f"{prefix}_{secrets.token_hex(24)}"


def parse_items(value: Any, field: str = "input", most: int = MAX_MESSAGES) -> list[Item]:
    """Items in the form in which the API gives them back, each with an id. A text is a message of the user's. Raises
    RequestError, which names the item, for what is no list of 1 to `most` items that are known here."""
    if isinstance(value, str):
        return [_message({"role": "user", "content": value}, field)]
    if not isinstance(value, list) or not value:
        raise RequestError(f"{field}={shown(value)} is not allowed: a text, or a list of at least one item", field)
    if len(value) > most:
        raise RequestError(f"there are {len(value)} items in {field}; at most {most} are allowed", field)
    return [_item(item, f"{field}.{index}") for index, item in enumerate(value)]


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages that items stand for. What an assistant thinks, says and calls in one go is one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        match item["type"]:
            case "message" if item["role"] != "assistant":
                messages.append({"role": item["role"], "content": _text_of(item["content"])})
            case "message":
                said = _answer_in(messages, lambda found: not found["content"] or "tool_calls" in found)
                said["content"] += _text_of(item["content"])
            case "reasoning":
                if thought := _text_of(item["content"]) or _text_of(item["summary"]):
                    said = _answer_in(messages, lambda found: not found["content"] and "tool_calls" not in found)
                    said["reasoning"] = said.get("reasoning", "") + thought
            case "function_call":
                _answer_in(messages, lambda found: True).setdefault("tool_calls", []).append(_call_of(item))
            case _:
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
    return messages


def _answer_in(messages: list[dict[str, Any]], goes_on: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The last message, where it is an assistant's that goes on; otherwise a new one."""
    if not messages or messages[-1]["role"] != "assistant" or not goes_on(messages[-1]):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text_of(parts: Sequence[Mapping[str, Any]]) -> str:
    return "".join([part["text"] if "text" in part else part["refusal"] for part in parts])


def _call_of(item: Mapping[str, Any]) -> dict[str, Any]:
    """A call as chats have it. Of one that was cut short, the members that are complete."""
    text = item["arguments"]
    try:
        arguments = from_json(text, allow_partial=True, allow_inf_nan=False) if text.strip() else {}
    except ValueError:
        arguments = {}
    function = {"name": item["name"], "arguments": arguments if isinstance(arguments, dict) else {}}
    return {"id": item["call_id"], "type": "function", "function": function}


def _item(item: Any, field: str) -> Item:
    if not isinstance(item, Mapping):
        raise RequestError(f"{field}={shown(item)} is not an item, which is an object", field)
    kind = item.get("type", MESSAGE if "role" in item else None)
    make = _KINDS.get(kind) if isinstance(kind, str) else None
    if make is None:
        raise RequestError(
            f"{field} is of type {shown(kind)}, which is not supported: an item is one of {', '.join(_KINDS)}", field
        )
    return make(item, field)


def _message(item: Mapping[str, Any], field: str) -> Item:
    role = item.get("role")
    if role not in _ROLES:
        raise RequestError(f"{field}.role={shown(role)} is not one of {', '.join(_ROLES)}", f"{field}.role")
    content = item.get("content")
    texts = _texts(content, f"{field}.content", refusals=role == "assistant")
    return _named(
        item, MESSAGE, {"role": role, "status": "completed", "content": [_part(role, text) for text in texts]}
    )


def _part(role: str, text: str) -> dict[str, Any]:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": "input_text", "text": text}


def _reasoning(item: Mapping[str, Any], field: str) -> Item:
    """What was thought. Where it is encrypted, nobody but its author can read it: nothing is left of it."""
    return _named(
        item,
        REASONING,
        {
            "summary": _thoughts(item, "summary", "summary_text", field),
            "content": _thoughts(item, "content", "reasoning_text", field),
        },
    )


def _thoughts(item: Mapping[str, Any], name: str, kind: str, field: str) -> list[dict[str, Any]]:
    parts = item.get(name)
    field = f"{field}.{name}"
    if parts is None:
        return []
    if not isinstance(parts, list):
        raise RequestError(f"{field}={shown(parts)} is not a list of parts", field)
    return [{"type": kind, "text": _part_text(part, (kind,), f"{field}.{n}")} for n, part in enumerate(parts)]


def _call(item: Mapping[str, Any], field: str) -> Item:
    text = _string(item, "arguments", field)
    status = "incomplete" if item.get("status") == "incomplete" else "completed"
    if status == "completed":
        _check_arguments(text, f"{field}.arguments")
    call = {"call_id": _string(item, "call_id", field), "name": _string(item, "name", field)}
    return _named(item, CALL, call | {"arguments": text, "status": status})


def _check_arguments(text: str, field: str) -> None:
    try:
        value = from_json(text, allow_inf_nan=False) if text.strip() else {}
    except ValueError as error:
        raise RequestError(f"{field}={shown(text)} is not valid JSON", field) from error
    if not isinstance(value, dict):
        raise RequestError(f"{field}={shown(text)} is not the JSON text of an object", field)


def _result(item: Mapping[str, Any], field: str) -> Item:
    output = "\n".join(_texts(item.get("output"), f"{field}.output"))
    return _named(item, RESULT, {"call_id": _string(item, "call_id", field), "output": output, "status": "completed"})


_KINDS: Final[Mapping[str, Callable[[Mapping[str, Any], str], Item]]] = {
    MESSAGE: _message,
    REASONING: _reasoning,
    CALL: _call,
    RESULT: _result,
}


def _named(item: Mapping[str, Any], kind: str, fields: Mapping[str, Any]) -> Item:
    """With the id that it came with, or one of its own."""
    given = item.get("id")
    is_id = isinstance(given, str) and 0 < len(given) <= MAX_ID_CHARS
    return {"id": given if is_id else new_id(_PREFIXES[kind]), "type": kind, **fields}


def _texts(content: Any, field: str, *, refusals: bool = False) -> list[str]:
    """The texts of content that is one text, or a list of parts."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise RequestError(f"{field}={shown(content)} is neither a text nor a list of parts", field)
    kinds = (*_TEXTS, "refusal") if refusals else _TEXTS
    return [_part_text(part, kinds, f"{field}.{index}") for index, part in enumerate(content)]


def _part_text(part: Any, kinds: tuple[str, ...], field: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in kinds:
        raise RequestError(
            f"{field} is of type {shown(kind)}, which is not supported here: this model takes text only, in parts of "
            f"type {', '.join(kinds)}",
            field,
        )
    return _string(part, "refusal" if kind == "refusal" else "text", field)


def _string(item: Mapping[str, Any], name: str, field: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{field}.{name}={shown(value)} is not a text", f"{field}.{name}")
    return value

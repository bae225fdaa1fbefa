"""Chat messages as users send them -> messages as chat templates expect them.
Does not know templates or tokenizers."""

from collections.abc import Mapping
from typing import Any

from pagemill.errors import RequestError
from pagemill.serve.processing.checks import shown

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 4096


def parse_conversation(messages: Any) -> list[dict[str, Any]]:
    """Checked copies of OpenAI-style messages: `content` is one text (parts are joined by newlines), the role
    `developer` is called `system`. Further keys are kept for the template. Raises RequestError."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError(f"messages={shown(messages)} is not allowed: a list of at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"there are {len(messages)} messages; at most {MAX_MESSAGES} are allowed", "messages")
    return [_parse_message(message, f"messages.{index}") for index, message in enumerate(messages)]


def _parse_message(message: Any, field: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{field}={shown(message)} is not an object with role and content", field)
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{field}.role={shown(role)} is not one of {', '.join(ROLES)}", f"{field}.role")
    return {
        **message,
        "role": "system" if role == "developer" else role,
        "content": _parse_content(message.get("content"), role, f"{field}.content"),
    }


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

"""The two forms of a message's `content`, a text or a list of parts, and turning one into the other.
Knows nothing about templates."""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from pagemill.errors import RequestError


class ContentForm(Enum):
    """What a chat template takes."""

    STRING = "string"
    PARTS = "parts"
    EITHER = "either"


STRING = ContentForm.STRING
PARTS = ContentForm.PARTS


def convert(messages: Sequence[Mapping[str, Any]], form: ContentForm) -> list[dict[str, Any]]:
    """Copies of the messages with `content` in the form that is wanted; text parts are joined by newlines.

    Raises RequestError for a part that is not text: nothing else can be shown to a text model.
    """
    return [_converted(message, form, f"messages[{i}].content") for i, message in enumerate(messages)]


def text_of(part: object) -> str | None:
    """The text of one part; None when it is not a text part."""
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    return None


def _converted(message: Mapping[str, Any], form: ContentForm, field: str) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str) and form is PARTS:
        return {**message, "content": [{"type": "text", "text": content}]}
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        texts = [_required_text(part, f"{field}[{i}]") for i, part in enumerate(content)]
        if form is STRING:
            return {**message, "content": "\n".join(texts)}
        return {**message, "content": [{"type": "text", "text": text} for text in texts]}
    return dict(message)


def _required_text(part: object, field: str) -> str:
    text = text_of(part)
    if text is None:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise RequestError(f"{field} is of type {kind!r}; allowed: 'text'", field)
    return text

"""Shapes of fields that are checked elsewhere, for /openapi.json only: nothing is validated by them."""

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict


class TextPart(TypedDict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(TypedDict, total=False):
    """A message of a chat; further members are for the chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None
    name: str
    reasoning: str
    tool_calls: list[dict[str, Any]]
    tool_call_id: str


class Document(TypedDict):
    """What is ranked."""

    text: str


Messages = Annotated[list[Message], Field(min_length=1)]


class Function(TypedDict, total=False):
    """What a tool is called, what it is for, and the JSON schema of its arguments."""

    name: str
    description: str
    parameters: dict[str, Any]
    strict: bool


class Tool(TypedDict):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class ClaudeBlock(TypedDict, total=False):
    """A block of a message: text, thinking, tool_use or tool_result."""

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str
    thinking: str
    id: str
    name: str
    input: dict[str, Any]
    tool_use_id: str
    content: Any


class ClaudeTurn(TypedDict):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ClaudeBlock]


class ClaudeTool(TypedDict, total=False):
    """A tool that a client runs."""

    type: Literal["custom"]
    name: str
    description: str
    input_schema: dict[str, Any]


class OllamaTurn(TypedDict, total=False):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    thinking: str
    tool_name: str
    tool_calls: list[dict[str, Any]]


Text = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Texts = Text | Annotated[list[Text], Field(min_length=1)]
Prompts = Texts | TokenIds | Annotated[list[TokenIds], Field(min_length=1)]
"""A text, several, token ids, or several lists of those."""

"""Bodies of errors, as /openapi.json describes them."""

from typing import Literal

from pydantic import BaseModel


class OpenAIProblem(BaseModel):
    """What is wrong."""

    message: str
    """Names the field, the value and what is allowed."""
    type: str
    param: str | None
    """The field."""
    code: str | None


class OpenAIError(BaseModel):
    """An error as OpenAI's clients know it."""

    error: OpenAIProblem


class ClaudeProblem(BaseModel):
    """What is wrong."""

    type: str
    message: str


class ClaudeError(BaseModel):
    """An error as Anthropic's clients know it."""

    type: Literal["error"]
    error: ClaudeProblem
    request_id: str | None


class OllamaError(BaseModel):
    """An error as Ollama's clients know it."""

    error: str

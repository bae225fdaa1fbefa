"""Bodies of POST /tokenize and POST /detokenize. Do not know tokenizers."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import field_validator, model_validator

from pagemill.errors import RequestError
from pagemill.serve.http.connection import checked
from pagemill.serve.http.schemas.base import RequestBody
from pagemill.serve.http.schemas.chat import ChatBody
from pagemill.serve.http.schemas.support import TOKENIZE_REFUSED, Refused
from pagemill.utils.text import shown

_OF_CHATS = (
    "messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "reasoning_effort", "tools",
)  # fmt: skip


class TokenizeBody(RequestBody):
    """A text, or a conversation."""

    refused: ClassVar[Mapping[str, Refused]] = TOKENIZE_REFUSED

    prompt: str | None = None
    messages: Any = None
    """A conversation, in place of `prompt`; the next five are about how it is rendered."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: Any = None
    add_special_tokens: bool | None = None
    """Whether the text gets the tokenizer's own begin-of-sequence token; by default a prompt does, a chat does not."""
    return_token_strs: bool | None = None
    """Whether the answer has the text of each token."""

    @model_validator(mode="after")
    def _one_of_the_two(self) -> "TokenizeBody":
        given = self._chat_fields
        if self.prompt is None and "messages" not in given:
            raise RequestError("prompt is missing: send prompt, a text, or messages, a conversation", "prompt")
        if self.prompt is not None and "messages" in given:
            raise RequestError("prompt does not go with messages: send one of the two", "prompt")
        if self.prompt is not None and given:
            raise RequestError(f"{next(iter(given))} does not go with prompt: send messages instead", next(iter(given)))
        return self

    @property
    def _chat_fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _OF_CHATS if getattr(self, name) is not None}

    @property
    def adds_special_tokens(self) -> bool:
        """`add_special_tokens`, or its default."""
        return self.prompt is not None if self.add_special_tokens is None else self.add_special_tokens

    def to_chat(self) -> ChatBody | None:
        """The conversation, as the body of a chat; None for a text. Raises RequestError."""
        return None if self.prompt is not None else checked(ChatBody, self._chat_fields)


class DetokenizeBody(RequestBody):
    """Tokens whose text is asked for."""

    tokens: Any
    """After validation a list of integers."""

    @field_validator("tokens", mode="plain", json_schema_input_type=list[int])
    @classmethod
    def _ids(cls, value: Any) -> list[int]:
        if isinstance(value, list) and set(map(type, value)) <= {int}:
            return value
        raise RequestError(f"tokens={shown(value)} is not allowed: a list of token ids", "tokens")

"""Body of POST /v1/chat/completions/batch: a chat's, with several conversations."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from pagemill.errors import RequestError
from pagemill.serve.http.schemas.chat import ChatBody
from pagemill.serve.http.schemas.completions import MAX_PROMPTS
from pagemill.serve.http.schemas.shapes import Messages
from pagemill.serve.processing.conversation import Conversation, parse_conversation
from pagemill.utils.text import shown

_ALONE: Mapping[str, tuple[Any, ...]] = {"n": (None, 1), "stream": (None, False), "use_beam_search": (None, False)}
"""Fields that have no effect on several conversations -> values that ask for none."""


class BatchChatBody(ChatBody):
    """Conversations to be continued, each by one message."""

    messages: Any
    """After validation a list of conversations."""

    @field_validator("messages", mode="plain", json_schema_input_type=Annotated[list[Messages], Field(min_length=1)])
    @classmethod
    def _messages(cls, value: Any) -> Any:
        if not isinstance(value, list) or not value or not all(isinstance(item, list) for item in value):
            raise RequestError(
                f"messages={shown(value)} is not allowed: a list of conversations, which are lists of messages",
                "messages",
            )
        if len(value) > MAX_PROMPTS:
            raise RequestError(
                f"messages holds {len(value)} conversations; at most {MAX_PROMPTS} per request", "messages"
            )
        return [_conversation(item, f"messages.{number}") for number, item in enumerate(value)]

    @model_validator(mode="after")
    def _each_has_one_whole_answer(self) -> "BatchChatBody":
        for name, allowed in _ALONE.items():
            value = getattr(self, name)
            if value not in allowed:
                raise RequestError(
                    f"{name}={shown(value)} is not allowed with several conversations: use /v1/chat/completions", name
                )
        return self

    def chats(self) -> list[ChatBody]:
        """The chats that it stands for."""
        return [self.model_copy(update={"messages": conversation}) for conversation in self.messages]


def _conversation(value: list[Any], field: str) -> Conversation:
    try:
        return parse_conversation(value)
    except RequestError as error:
        message = str(error).replace("messages", field, 1)
        raise RequestError(message, (error.field or field).replace("messages", field, 1)) from None

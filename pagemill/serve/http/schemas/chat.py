"""Body of POST /v1/chat/completions. Does not know templates."""

from collections.abc import Collection
from typing import Any

from pydantic import field_validator, model_validator

from pagemill.errors import RequestError
from pagemill.messages.sampling_params import SamplingParams
from pagemill.serve.chat_renderer import ChatOptions
from pagemill.serve.http.schemas.generation import GenerationBody
from pagemill.serve.processing.conversation import parse_conversation

RESERVED_TEMPLATE_NAMES = frozenset(
    {
        "add_generation_prompt", "bos_token", "chat_template", "continue_final_message", "conversation", "documents",
        "eos_token", "messages", "pad_token", "raise_exception", "return_dict", "return_tensors", "self",
        "strftime_now", "tokenize", "tokenizer", "tools", "unk_token",
    }
)  # fmt: skip
"""Names that a template gets from the server; a request cannot replace them."""


class ChatBody(GenerationBody):
    """A conversation to be continued."""

    messages: Any
    max_completion_tokens: int | None = None
    """The newer name of max_tokens; wins when both are given."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    """How much the model is to think; for templates that ask for a variable of this name."""

    @field_validator("messages", mode="plain")
    @classmethod
    def _messages(cls, value: Any) -> list[dict[str, Any]]:
        return parse_conversation(value)

    @model_validator(mode="after")
    def _template_variables_are_free(self) -> "ChatBody":
        reserved = sorted(name for name in self.chat_template_kwargs or () if name in RESERVED_TEMPLATE_NAMES)
        if reserved:
            raise RequestError(f"chat_template_kwargs must not set {', '.join(reserved)}", "chat_template_kwargs")
        wrong = [name for name in self.chat_template_kwargs or () if not name.isidentifier()]
        if wrong:
            raise RequestError("chat_template_kwargs has a name that is not an identifier", "chat_template_kwargs")
        return self

    def to_sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """Sampling parameters; max_tokens None means the room in the context. Raises RequestError."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sampling_params(defaults, limit)

    def leave_unread(self, variables: Collection[str]) -> None:
        """Name fields that set these variables of the template among those without effect: it does not read them."""
        for name in variables:
            is_kwarg = name in (self.chat_template_kwargs or ())
            self._ignored.append(f"chat_template_kwargs.{name}" if is_kwarg else name)

    @property
    def echoed(self) -> str:
        """What answers begin with: the last message, if an assistant's, where `echo` asks for it."""
        last = self.messages[-1]
        return str(last["content"]) if self.echo and last["role"] == "assistant" else ""

    def to_chat_options(self) -> ChatOptions:
        """How to render the conversation. Continuing a message excludes the header of a new one."""
        continues = bool(self.continue_final_message)
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return ChatOptions(
            add_generation_prompt=not continues if self.add_generation_prompt is None else self.add_generation_prompt,
            continue_final_message=continues,
            template_variables=effort | (self.chat_template_kwargs or {}),
        )

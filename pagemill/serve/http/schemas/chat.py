"""Body of POST /v1/chat/completions. Does not know templates."""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

from pydantic import field_validator, model_validator

from pagemill.errors import RequestError
from pagemill.messages.sampling_params import SamplingParams
from pagemill.serve.chat_renderer import ChatOptions
from pagemill.serve.http.schemas.generation import GenerationBody
from pagemill.serve.http.schemas.shapes import Messages, Tool
from pagemill.serve.http.schemas.support import CHAT_HINTS, CHAT_REFUSED, Refused
from pagemill.serve.parsers.interface import MessageForm
from pagemill.serve.processing.conversation import Conversation, parse_conversation
from pagemill.serve.processing.documents import parse_documents
from pagemill.serve.processing.tool_choice import NONE, REQUIRED, ToolChoice
from pagemill.serve.processing.tool_definitions import parse_tools

PROMPT_END_CHARS = 64
"""Of a prompt, for parsers: the template may have begun the answer there."""
RESERVED_TEMPLATE_NAMES = frozenset(
    {
        "add_generation_prompt", "bos_token", "chat_template", "continue_final_message", "conversation", "documents",
        "eos_token", "messages", "pad_token", "raise_exception", "return_dict", "return_tensors", "self",
        "strftime_now", "tokenize", "tokenizer", "tools", "unk_token",
    }
)  # fmt: skip
"""Names that a template gets from the server; a request cannot replace them."""


@contextlib.contextmanager
def naming_top_logprobs() -> Iterator[None]:
    """In errors: `SamplingParams.logprobs` is the `top_logprobs` of a chat."""
    try:
        yield
    except RequestError as error:
        if error.field != "logprobs":
            raise
        raise RequestError(f"top_{error}", "top_logprobs") from error


class ChatBody(GenerationBody):
    """A conversation to be continued."""

    refused: ClassVar[Mapping[str, Refused]] = CHAT_REFUSED
    hints: ClassVar[Mapping[str, str]] = CHAT_HINTS
    names: ClassVar[Mapping[str, str]] = {"prompt": "messages"}

    messages: Any
    logprobs: bool | None = None
    """Log-probabilities of the answer's tokens."""
    top_logprobs: int | None = None
    """How many of the most likely tokens come with each of them; needs logprobs."""
    max_completion_tokens: int | None = None
    """The newer name of max_tokens; wins when both are given."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    """How much the model is to think; for templates that ask for a variable of this name."""
    documents: Any = None
    """Texts that the answer may draw on, for templates that show them. After validation a list of objects."""

    include_reasoning: bool | None = None
    """Whether the answer has the reasoning, where a parser tells it apart; by default it has."""
    tools: Any = None
    """After validation a list of functions."""
    tool_choice: Any = None
    """After validation a `ToolChoice`, or None."""
    thinking_token_budget: int | None = None
    """After so many tokens of reasoning, its end is written."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may call several tools; by default it may."""

    @field_validator("messages", mode="plain", json_schema_input_type=Messages)
    @classmethod
    def _messages(cls, value: Any) -> Conversation:
        return parse_conversation(value)

    @field_validator("tools", mode="plain", json_schema_input_type=list[Tool] | None)
    @classmethod
    def _tools(cls, value: Any) -> list[dict[str, Any]]:
        return parse_tools(value)

    @field_validator("documents", mode="plain", json_schema_input_type=list[dict[str, Any]] | None)
    @classmethod
    def _documents(cls, value: Any) -> list[dict[str, Any]]:
        return parse_documents(value)

    @field_validator("tool_choice", mode="plain", json_schema_input_type=str | dict[str, Any] | None)
    @classmethod
    def _tool_choice(cls, value: Any) -> ToolChoice | None:
        return ToolChoice.of(value)

    @model_validator(mode="after")
    def _tools_can_be_chosen(self) -> "ChatBody":
        if self.tool_choice is not None:
            self.tool_choice.check(self.tools or [])
        budget = self.thinking_token_budget
        if budget is not None and budget < 0:
            raise RequestError(
                f"thinking_token_budget={budget} is not allowed: a number of tokens, 0 or more", "thinking_token_budget"
            )
        return self

    @model_validator(mode="after")
    def _template_variables_are_free(self) -> "ChatBody":
        reserved = sorted(name for name in self.chat_template_kwargs or () if name in RESERVED_TEMPLATE_NAMES)
        if reserved:
            raise RequestError(f"chat_template_kwargs must not set {', '.join(reserved)}", "chat_template_kwargs")
        wrong = [name for name in self.chat_template_kwargs or () if not name.isidentifier()]
        if wrong:
            raise RequestError("chat_template_kwargs has a name that is not an identifier", "chat_template_kwargs")
        return self

    def to_sampling_params(self, defaults: SamplingParams, most_tokens: int | None = None) -> SamplingParams:
        """Sampling parameters; max_tokens None means the room in the context. Raises RequestError."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        params = self.sampling_params(defaults, limit, most_tokens)
        if self.logprobs:
            with naming_top_logprobs():
                return params.replace(logprobs=self.top_logprobs or 0)
        if self.top_logprobs:
            raise RequestError(f"top_logprobs={self.top_logprobs} is not allowed without logprobs=true", "top_logprobs")
        return params

    def leave_unread(self, variables: Collection[str]) -> None:
        """Name fields that set these variables of the template among those without effect: it does not read them.
        Raises RequestError for `documents`, without which the answer would be another one."""
        for name in variables:
            if name == "documents":
                raise RequestError(
                    "documents is not supported by this model, whose chat template does not show them: write what they "
                    "would add into the messages",
                    name,
                )
            is_kwarg = name in (self.chat_template_kwargs or ())
            self._ignored.append(f"chat_template_kwargs.{name}" if is_kwarg else name)

    @property
    def echoed(self) -> str:
        """What answers begin with: the last message, if an assistant's, where `echo` asks for it."""
        last = self.messages[-1]
        return str(last["content"]) if self.echo and last["role"] == "assistant" else ""

    @property
    def calls_tools(self) -> bool:
        """Whether the answer may call any."""
        return bool(self.tools) and self.choice.mode != NONE

    @property
    def choice(self) -> ToolChoice:
        """Which tools are to be called."""
        return self.tool_choice or ToolChoice()

    def message_form(self, prompt: str) -> MessageForm:
        """What parsers are told of the answer to this prompt."""
        return MessageForm(
            prompt_end=prompt[-PROMPT_END_CHARS:],
            begun=str(self.messages[-1]["content"]) if self.continue_final_message else "",
            tools=self.tools if self.calls_tools else [],
            parallel_tool_calls=self.parallel_tool_calls is not False and not self.choice.one,
            include_reasoning=self.include_reasoning is not False,
            is_forced=self.choice.mode == REQUIRED,
        )

    def to_chat_options(self, hide_unused_tools: bool = False) -> ChatOptions:
        """How to render the conversation. Continuing a message excludes the header of a new one.

        `hide_unused_tools`: tools that must not be called are not shown to the model.
        """
        continues = bool(self.continue_final_message)
        tools = {"tools": self.tools} if self.calls_tools or (self.tools and not hide_unused_tools) else {}
        extra: dict[str, Any] = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        if self.documents:
            extra["documents"] = self.documents
        return ChatOptions(
            add_generation_prompt=not continues if self.add_generation_prompt is None else self.add_generation_prompt,
            continue_final_message=continues,
            template_variables=extra | (self.chat_template_kwargs or {}) | tools,
        )

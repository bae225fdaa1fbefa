"""Body of POST /v1/responses, OpenAI's Responses API, as the chat that it stands for. Does not know what is kept."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, PrivateAttr, field_validator

from pagemill.errors import RequestError
from pagemill.serve.http.connection import checked
from pagemill.serve.http.schemas.chat import ChatBody
from pagemill.serve.http.schemas.response_items import Item, messages_of, parse_items
from pagemill.serve.http.schemas.support import RESPONSES_HINTS, RESPONSES_REFUSED, Refused
from pagemill.serve.http.schemas.translation import Translation
from pagemill.serve.processing.tool_definitions import MAX_TOOLS, parse_tools
from pagemill.utils.text import shown

MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_CHARS = 512
LOGPROBS: Final = "message.output_text.logprobs"
ENCRYPTED: Final = "reasoning.encrypted_content"
_INCLUDABLE = (
    LOGPROBS, ENCRYPTED, "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "file_search_call.results", "message.input_image.image_url", "web_search_call.action.sources",
    "web_search_call.results",
)  # fmt: skip
"""What answers may be asked to include; beyond the first, they hold nothing of the kind."""
_AS_IN_CHATS = (
    "add_special_tokens", "cache_salt", "chat_template_kwargs", "frequency_penalty", "ignore_eos",
    "include_stop_str_in_output", "logit_bias", "min_p", "min_tokens", "parallel_tool_calls", "presence_penalty",
    "priority", "repetition_penalty", "seed", "skip_special_tokens", "stop", "stop_token_ids", "stream",
    "structured_outputs", "temperature", "top_k", "top_p", "vllm_xargs",
)  # fmt: skip
_encode = msgspec.json.encode


class ResponseForm(msgspec.Struct, frozen=True):
    """What the answer to a body repeats of it, and what becomes of it."""

    fields: bytes
    """JSON of an object."""
    items: bytes
    """JSON of the list of its own items."""
    store: bool | None = None
    """Whether the answer is to be stored; None: nothing is said."""
    background: bool = False
    conversation: str | None = None
    """The id of that which gets its items and those of the answer."""


class Continued(msgspec.Struct, frozen=True):
    """A body, and the items that come before its own."""

    before: msgspec.Raw
    """JSON of a list."""
    body: msgspec.Raw


class TextConfig(BaseModel):
    """The form of the text."""

    model_config = ConfigDict(strict=True, extra="ignore")

    format: Any = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(BaseModel):
    """How much the model is to think."""

    model_config = ConfigDict(strict=True, extra="ignore")

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """The older name of summary."""


class ResponsesBody(Translation):
    """Items to be answered."""

    refused: ClassVar[Mapping[str, Refused]] = RESPONSES_REFUSED
    hints: ClassVar[Mapping[str, str]] = RESPONSES_HINTS
    names: ClassVar[Mapping[str, str]] = {
        "include_reasoning": "reasoning",
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "prompt": "input",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
    }

    input: Any
    """After validation a list of items."""
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Any = None
    """After validation functions in the form of chats."""
    tool_choice: Any = None
    include: Any = None
    top_logprobs: int | None = None
    metadata: Any = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    """A stored answer, which this one follows with all that came before."""
    conversation: Any = None
    """A stored conversation, which comes before the input, and gets it and the output: its id, or an object with it.
    After validation the id."""
    user: str | None = None

    add_special_tokens: Any = None
    cache_salt: Any = None
    chat_template_kwargs: Any = None
    frequency_penalty: Any = None
    ignore_eos: Any = None
    include_stop_str_in_output: Any = None
    logit_bias: Any = None
    min_p: Any = None
    min_tokens: Any = None
    parallel_tool_calls: Any = None
    presence_penalty: Any = None
    priority: Any = None
    repetition_penalty: Any = None
    seed: Any = None
    skip_special_tokens: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    stream: bool | None = None
    structured_outputs: Any = None
    temperature: Any = None
    top_k: Any = None
    top_p: Any = None
    vllm_xargs: Any = None

    _before: Sequence[Item] = PrivateAttr(default=())

    @field_validator("input", mode="plain", json_schema_input_type=str | list[dict[str, Any]])
    @classmethod
    def _items(cls, value: Any) -> list[Item]:
        return parse_items(value)

    @field_validator("tools", mode="plain")
    @classmethod
    def _tools(cls, value: Any) -> list[dict[str, Any]]:
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > MAX_TOOLS:
            raise RequestError(f"tools={shown(value)} is not allowed: a list of at most {MAX_TOOLS} functions", "tools")
        tools = [_tool_of(item, f"tools.{index}") for index, item in enumerate(value)]
        try:
            return parse_tools(tools)
        except RequestError as error:  # there, what is said of a function is inside an object of its own
            raise RequestError(str(error).replace(".function.", ".", 1), _flat(error.field)) from None

    @field_validator("include", mode="plain")
    @classmethod
    def _included(cls, value: Any) -> list[str]:
        for item in [] if value is None else value if isinstance(value, list) else [value]:
            if item not in _INCLUDABLE:
                raise RequestError(
                    f"include={shown(value)} is not allowed: a list of {', '.join(_INCLUDABLE)}", "include"
                )
        return value or []

    @field_validator("metadata", mode="plain")
    @classmethod
    def _metadata(cls, value: Any) -> dict[str, str]:
        return parse_metadata(value)

    @field_validator("conversation", mode="plain", json_schema_input_type=str | dict[str, str])
    @classmethod
    def _conversation(cls, value: Any) -> str | None:
        return conversation_id(value)

    def follow(self, items: Sequence[Item]) -> None:
        """What came before the input."""
        self._before = items

    def check_alone(self) -> None:
        """Raises RequestError when it says that something came before, which nobody has looked up."""
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise RequestError(
                    f"{name} is not supported by this server, which stores nothing: send the whole conversation as "
                    "input, or start the server with --response-store-bytes",
                    name,
                )

    def translated(self) -> ChatBody:
        """See `Translation`."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        fields: dict[str, Any] = {name: getattr(self, name) for name in _AS_IN_CHATS}
        fields |= {"model": self.model, "messages": system + messages_of([*self._before, *self.input])}
        fields["max_completion_tokens"] = self.max_output_tokens
        if self.tools:
            fields |= {"tools": self.tools, "tool_choice": _choice_of(self.tool_choice)}
        elif self.tool_choice not in (None, "auto", "none"):
            raise RequestError(f"tool_choice={shown(self.tool_choice)} is not allowed without tools", "tool_choice")
        fields |= self._reasoning() | self._form() | self._logprobs()
        chat = checked(ChatBody, fields)
        chat.leave_out([*self.unknown_fields, *self._without_effect()])
        return chat

    def form(self) -> ResponseForm:
        """What the answer needs of it besides the chat."""
        text = {"format": (self.text and self.text.format) or {"type": "text"}}
        fields = {
            "conversation": None if self.conversation is None else {"id": self.conversation},
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": self.reasoning and self.reasoning.effort, "summary": None},
            "text": text,
            "tool_choice": self.tool_choice or "auto",
            "tools": [{"type": "function", "strict": False} | tool["function"] for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0,
            "truncation": "disabled",
            "user": self.user,
        }
        return ResponseForm(_encode(fields), _encode(self.input), self.store, bool(self.background), self.conversation)

    def _reasoning(self) -> dict[str, Any]:
        """Templates that let one choose whether it thinks know `enable_thinking`."""
        effort = self.reasoning and self.reasoning.effort
        if effort != "none":
            return {"reasoning_effort": effort}
        kwargs = self.chat_template_kwargs if isinstance(self.chat_template_kwargs, dict) else {}
        return {"chat_template_kwargs": {"enable_thinking": False} | kwargs}

    def _form(self) -> dict[str, Any]:
        if self.text is None:
            return {}
        if self.text.verbosity not in (None, "medium"):
            raise RequestError(
                f"text.verbosity={self.text.verbosity!r} is not supported by this server: say in the input how long "
                "the answer shall be",
                "text.verbosity",
            )
        given = self.text.format
        kind = given.get("type") if isinstance(given, Mapping) else None
        if given is None or kind == "text":
            return {}
        if kind == "json_object":
            return {"response_format": {"type": kind}}
        if kind != "json_schema" or not isinstance(given.get("schema"), Mapping):
            raise RequestError(
                f"text.format={shown(given)} is not allowed: an object of type text, json_object, or json_schema with "
                "a schema",
                "text.format",
            )
        schema = {name: given[name] for name in ("name", "description", "schema", "strict") if given.get(name)}
        return {"response_format": {"type": kind, "json_schema": {"name": "answer"} | schema}}

    def _logprobs(self) -> dict[str, Any]:
        if self.top_logprobs is None and LOGPROBS not in (self.include or ()):
            return {}
        return {"logprobs": True, "top_logprobs": self.top_logprobs or 0}

    def _without_effect(self) -> list[str]:
        asked = {"include": ENCRYPTED in (self.include or ())}
        if self.reasoning is not None:
            asked["reasoning.summary"] = bool(self.reasoning.summary or self.reasoning.generate_summary)
        return [name for name, is_asked in asked.items() if is_asked]


def conversation_id(value: Any) -> str | None:
    """Of a conversation, as a body names it. Raises RequestError."""
    name = value.get("id") if isinstance(value, Mapping) else value
    if name is None and value is None:
        return None
    if not isinstance(name, str):
        raise RequestError(
            f"conversation={shown(value)} is not allowed: the id of a conversation, or an object with it",
            "conversation",
        )
    return name


def parse_metadata(value: Any) -> dict[str, str]:
    """A client's labels; None is none. Raises RequestError."""
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise RequestError(
            f"metadata={shown(value)} is not allowed: an object of at most {MAX_METADATA} texts", "metadata"
        )
    for key, text in value.items():
        if not isinstance(text, str) or len(text) > MAX_METADATA_CHARS or len(key) > MAX_METADATA_KEY_CHARS:
            raise RequestError(
                f"metadata has {shown(key)}: {shown(text)}, which is not allowed: keys have at most "
                f"{MAX_METADATA_KEY_CHARS} characters, values are texts of at most {MAX_METADATA_CHARS}",
                "metadata",
            )
    return value


def _flat(field: str | None) -> str | None:
    return None if field is None else field.replace(".function.", ".", 1)


def _tool_of(tool: Any, field: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        raise RequestError(
            f"{field} is of type {shown(kind)}, which is not supported: the server runs no tools; those of type "
            "'function' are called by clients",
            field,
        )
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _choice_of(choice: Any) -> Any:
    """As chats have it, where a function's name is inside an object of its own."""
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [_choice_of(tool) for tool in choice["tools"]]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return choice

"""Bodies of Ollama's API, as those of OpenAI's that they stand for."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import ConfigDict, PrivateAttr, field_validator, model_validator

from pagemill.errors import RequestError
from pagemill.serve.http.connection import checked
from pagemill.serve.http.schemas.base import RequestBody
from pagemill.serve.http.schemas.chat import ChatBody
from pagemill.serve.http.schemas.completions import CompletionBody
from pagemill.serve.http.schemas.embeddings import EmbeddingBody
from pagemill.serve.http.schemas.llama_sampling import ALL_ROOM, LlamaSampling
from pagemill.serve.http.schemas.shapes import OllamaTurn
from pagemill.serve.http.schemas.support import (
    OLLAMA_HINTS,
    OLLAMA_OPTION_HINTS,
    OLLAMA_OPTIONS_REFUSED,
    OLLAMA_REFUSED,
    Refused,
    check_extras,
)
from pagemill.serve.http.schemas.translation import Translation
from pagemill.serve.processing.fill_in import Gap
from pagemill.utils.text import shown

Body = TypeVar("Body", ChatBody, CompletionBody, EmbeddingBody)
LATEST = ":latest"
"""A name without a tag has this one."""
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "max": "high"}


class Options(LlamaSampling):
    """How tokens are sampled, and how many."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    _unknown: list[str] = PrivateAttr(default_factory=list)

    num_predict: int | None = None
    """Most tokens; -1 and -2: as many as the context has room for."""

    @model_validator(mode="after")
    def _extras_are_refused_or_known(self) -> "Options":
        try:
            self._unknown = check_extras(self.model_extra or {}, OLLAMA_OPTIONS_REFUSED, OLLAMA_OPTION_HINTS)
        except RequestError as error:
            raise RequestError(f"options.{error}", f"options.{error.field}") from None
        return self

    @property
    def unknown(self) -> list[str]:
        """Names of options that nobody knows."""
        return [f"options.{name}" for name in self._unknown]

    def fields(self) -> dict[str, Any]:
        """As fields of OpenAI's bodies."""
        return self.sampling() | {"max_tokens": None if self.num_predict in (-1, -2) else self.num_predict}


_OPTION_NAMES = {
    name: f"options.{name}"
    for name in ("temperature", "top_k", "top_p", "min_p", "stop", "seed", "presence_penalty", "frequency_penalty")
} | {"repetition_penalty": "options.repeat_penalty", "max_tokens": "options.num_predict"}


class _Body(Translation):
    """What all of them have in common."""

    refused: ClassVar[Mapping[str, Refused]] = OLLAMA_REFUSED
    hints: ClassVar[Mapping[str, str]] = OLLAMA_HINTS
    names: ClassVar[Mapping[str, str]] = _OPTION_NAMES | {"structured_outputs": "format", "response_format": "format"}

    model: str
    options: Options | None = None

    @property
    def served_model(self) -> str:
        """See `Translation`."""
        return self.model.removesuffix(LATEST)

    def _complete(self, body: Body, unread: Iterable[str] = ()) -> Body:
        """`unread`: fields that have no effect on this one."""
        body.leave_out([*self.unknown_fields, *(self.options.unknown if self.options is not None else ()), *unread])
        return body


class _Embedding(_Body):
    """Of those that make vectors: nothing is sampled."""

    def _complete(self, body: Body, unread: Iterable[str] = ()) -> Body:
        given = self.options.model_fields_set if self.options is not None else frozenset[str]()
        names: list[str] = [f"options.{name}" for name in Options.model_fields if name in given]
        return super()._complete(body, [*unread, *names])


class _Generation(_Body):
    """Of those that generate text."""

    format: Any = None
    """The form of the output: "json", or a JSON schema."""
    stream: bool | None = None
    think: Any = None
    """Whether the model is to think, or how much."""

    @field_validator("think", mode="plain", json_schema_input_type=bool | str | None)
    @classmethod
    def _thinks(cls, value: Any) -> Any:
        if value is None or isinstance(value, bool) or (isinstance(value, str) and value in _EFFORTS):
            return value
        raise RequestError(f"think={shown(value)} is not allowed: true, false, {', '.join(_EFFORTS)}", "think")

    @property
    def streams(self) -> bool:
        """Unless it says otherwise."""
        return self.stream is not False

    def _common(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"model": self.served_model, "stream": self.streams}
        if self.options is not None:
            fields |= self.options.fields()
        if self.format not in (None, ""):
            fields["response_format"] = _format_of(self.format)
        return fields

    def _chat(self, messages: list[Any], more: Mapping[str, Any]) -> ChatBody:
        fields = self._common() | {"messages": messages, **more}
        if self.think is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": self.think is not False}
        if isinstance(self.think, str):
            fields["reasoning_effort"] = _EFFORTS[self.think]
        return self._complete(checked(ChatBody, fields))


class OllamaChatBody(_Generation):
    """POST /api/chat."""

    messages: Any = None
    """After validation the messages of a chat, in OpenAI's form."""
    tools: Any = None

    @field_validator("messages", mode="plain", json_schema_input_type=list[OllamaTurn] | None)
    @classmethod
    def _messages(cls, value: Any) -> Any:
        if value is None or (isinstance(value, list) and all(isinstance(item, Mapping) for item in value)):
            return [_message_of(item, f"messages.{index}") for index, item in enumerate(value or ())]
        raise RequestError(f"messages={shown(value)} is not allowed: a list of messages", "messages")

    @property
    def is_empty(self) -> bool:
        """See `Translation`."""
        return not self.messages

    def translated(self) -> ChatBody:
        """See `Translation`."""
        return self._chat(self.messages, {"tools": self.tools} if self.tools else {})


class OllamaGenerateBody(_Generation):
    """POST /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    """What stands after the text that is to be written; the prompt then stands before it, without the chat template."""
    system: str | None = None
    raw: bool | None = None
    """Whether the prompt is taken as it is, without the chat template."""

    @property
    def is_empty(self) -> bool:
        """See `Translation`."""
        return not self.prompt and not self.suffix

    @property
    def gap(self) -> Gap | None:
        """See `Translation`."""
        if not self.suffix:
            return None
        if self.system:
            raise RequestError("system does not go with suffix: write it into the prompt", "system")
        return Gap(self.prompt or "", self.suffix, "", [])

    @property
    def gap_tokens(self) -> int | None:
        """See `Translation`."""
        return self.options.fields()["max_tokens"] if self.options is not None else None

    def translated(self) -> ChatBody | CompletionBody:
        """See `Translation`."""
        if self.suffix:
            return self._completion(self.gap_token_ids)
        if self.raw:
            if self.system:
                raise RequestError("system does not go with raw=true: write it into the prompt", "system")
            return self._completion(self.prompt)
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self._chat([*system, {"role": "user", "content": self.prompt}], {})

    def _completion(self, prompt: Any) -> CompletionBody:
        fields = self._common() | {"prompt": prompt}
        if fields.get("max_tokens") is None:
            fields["max_tokens"] = ALL_ROOM
        return self._complete(checked(CompletionBody, fields), () if self.think is None else ("think",))


class OllamaEmbedBody(_Embedding):
    """POST /api/embed."""

    input: Any
    truncate: bool | None = None
    """Whether what does not fit the context is cut; by default it is."""
    dimensions: int | None = None

    def translated(self) -> EmbeddingBody:
        """See `Translation`."""
        fields = {"model": self.served_model, "input": self.input, "dimensions": self.dimensions}
        return self._complete(checked(EmbeddingBody, fields))

    @property
    def cut(self) -> Mapping[str, Any] | None:
        """See `Translation`."""
        return None if self.truncate is False else {}


class OllamaEmbeddingsBody(_Embedding):
    """POST /api/embeddings, an older route for one text, which is always cut to the context."""

    prompt: str

    def translated(self) -> EmbeddingBody:
        """See `Translation`."""
        return self._complete(checked(EmbeddingBody, {"model": self.served_model, "input": self.prompt}))

    @property
    def cut(self) -> Mapping[str, Any] | None:
        """See `Translation`."""
        return {}


class ShowBody(RequestBody):
    """POST /api/show."""

    hints: ClassVar[Mapping[str, str]] = {"verbose": "there is no more to be shown"}

    name: str | None = None
    """An older name of `model`."""

    @property
    def served_model(self) -> str:
        """The name of the model. Raises RequestError where there is none."""
        name = self.model if self.model is not None else self.name
        if not name:
            raise RequestError("model is missing: send the name of the model", "model")
        return name.removesuffix(LATEST)


def _format_of(value: Any) -> dict[str, Any]:
    if value == "json":
        return {"type": "json_object"}
    if isinstance(value, Mapping):
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": value}}
    raise RequestError(f"format={shown(value)} is not allowed: 'json' or a JSON schema, which is an object", "format")


def _message_of(message: Mapping[str, Any], field: str) -> dict[str, Any]:
    """In OpenAI's form: reasoning is called so, arguments are texts, and who gave a tool's result is its name."""
    if message.get("images"):
        raise RequestError(f"{field}.images is not supported: this model takes text only", f"{field}.images")
    found = {name: value for name, value in message.items() if name not in ("images", "thinking", "tool_name")}
    found.setdefault("content", "")
    if message.get("thinking"):
        found["reasoning"] = message["thinking"]
    if message.get("tool_name"):
        found["name"] = message["tool_name"]
    return found

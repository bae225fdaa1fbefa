"""The fields that every generating endpoint shares. Does not know how prompts are given."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationInfo, field_validator, model_validator

from pagemill.errors import RequestError
from pagemill.messages.sampling_params import RequestOutputKind, SamplingParams
from pagemill.serve.http.schemas.support import GENERATION_HINTS, GENERATION_REFUSED, Refused, check_extras, header_of
from pagemill.serve.processing.checks import shown

MAX_TEMPERATURE = 2.0
_TOKEN_ID = re.compile(r"[0-9]{1,10}")


class StreamOptions(BaseModel):
    """How a stream is made."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    """End with an event that has the token counts."""

    @model_validator(mode="after")
    def _known(self) -> "StreamOptions":
        for name, value in (self.model_extra or {}).items():
            if value:
                raise RequestError(f"stream_options.{name} is not supported", "stream_options")
        return self


class GenerationBody(BaseModel):
    """What chat and text completions have in common. Types are strict; null means "not given"."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    sampling_fields: ClassVar[tuple[str, ...]] = (
        "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos",
        "include_stop_str_in_output", "skip_special_tokens", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words",
    )  # fmt: skip

    refused: ClassVar[Mapping[str, Refused]] = GENERATION_REFUSED
    hints: ClassVar[Mapping[str, str]] = GENERATION_HINTS
    _ignored: list[str] = PrivateAttr(default_factory=list)

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Any = None
    """Token ids -> numbers; the ids are texts in JSON, and integers after validation."""
    allowed_token_ids: Any = None
    bad_words: Any = None
    seed: int | None = None
    stop: Any = None
    stop_token_ids: Any = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    """Whether the text gets the tokenizer's own begin-of-sequence token."""
    echo: bool | None = None
    """Begin each text with its prompt, or in a chat with the message that it continues."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    user: str | None = None

    @field_validator("stop", mode="plain")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        if value is None or isinstance(value, str) or _is_list_of(str, value):
            return value
        raise RequestError(f"stop={shown(value)} is not allowed: a text or a list of texts", "stop")

    @field_validator("bad_words", mode="plain")
    @classmethod
    def _words(cls, value: Any) -> Any:
        if value is None or _is_list_of(str, value):
            return value
        raise RequestError(f"bad_words={shown(value)} is not allowed: a list of texts", "bad_words")

    @field_validator("stop_token_ids", "allowed_token_ids", mode="plain")
    @classmethod
    def _ids(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None or _is_list_of(int, value):
            return value
        raise RequestError(f"{info.field_name}={shown(value)} is not allowed: a list of token ids", info.field_name)

    @field_validator("logit_bias", mode="plain")
    @classmethod
    def _bias(cls, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, dict) and all(_TOKEN_ID.fullmatch(key) for key in value):
            return {int(key): bias for key, bias in value.items()}
        raise RequestError(
            f"logit_bias={shown(value)} is not allowed: an object of token ids, each with a number", "logit_bias"
        )

    @model_validator(mode="after")
    def _extras_are_refused_or_named(self) -> "GenerationBody":
        self._ignored = check_extras(self.model_extra or {}, self.refused, self.hints)
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed with stream=true", "stream_options")
        return self

    @property
    def ignored_fields(self) -> str:
        """Names of fields without effect, as the value of a header; empty when there are none."""
        return header_of(self._ignored)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling_params(self, defaults: SamplingParams, max_tokens: int | None) -> SamplingParams:
        """What the body asks for, over the model's defaults. Raises RequestError."""
        if self.temperature is not None and self.temperature > MAX_TEMPERATURE:
            raise RequestError(
                f"temperature={self.temperature:g} is not allowed: 0 to {MAX_TEMPERATURE:g}", "temperature"
            )
        given = {name: getattr(self, name) for name in self.sampling_fields if getattr(self, name) is not None}
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return defaults.replace(**given, max_tokens=max_tokens, output_kind=kind)


def _is_list_of(kind: type, value: Any) -> bool:
    """One look at the types, and no report per item: a list may have millions."""
    return isinstance(value, list) and set(map(type, value)) <= {kind}

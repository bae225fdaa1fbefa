"""The fields that every generating endpoint shares, and what none of them supports yet.
Does not know how prompts are given."""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from pagemill.errors import RequestError
from pagemill.log import get_logger
from pagemill.messages.sampling_params import RequestOutputKind, SamplingParams
from pagemill.serve.processing.checks import shown

logger = get_logger(__name__)

MAX_TEMPERATURE = 2.0

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Fields whose effect does not exist yet -> values, besides null, that ask for none. Anything else is refused,
because a client that asked for it would get an answer to another question."""


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
        "include_stop_str_in_output", "skip_special_tokens",
    )  # fmt: skip

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Any = None
    stop_token_ids: Any = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
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

    @field_validator("stop_token_ids", mode="plain")
    @classmethod
    def _ids(cls, value: Any) -> Any:
        if value is None or _is_list_of(int, value):
            return value
        raise RequestError(f"stop_token_ids={shown(value)} is not allowed: a list of token ids", "stop_token_ids")

    @model_validator(mode="after")
    def _extras_are_harmless(self) -> "GenerationBody":
        extra = self.model_extra or {}
        for name, value in extra.items():
            if name not in NEUTRAL:
                logger.debug("request field %s is unknown and ignored", shown(name))
            elif value is not None and not _is_neutral(name, value):
                raise RequestError(f"{name}={shown(value)} is not supported by this server", name)
        if extra.get("tools") and extra.get("tool_choice") != "none":
            raise RequestError("tools are not supported by this server, unless tool_choice is 'none'", "tools")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed with stream=true", "stream_options")
        return self

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


def _is_neutral(name: str, value: Any) -> bool:
    """Equal to a neutral value; 0 is not false here (`logprobs: 0` asks for something)."""
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in NEUTRAL[name])


def _is_list_of(kind: type, value: Any) -> bool:
    """One look at the types, and no report per item: a list may have millions."""
    return isinstance(value, list) and set(map(type, value)) <= {kind}

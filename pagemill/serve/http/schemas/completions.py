"""Body of POST /v1/completions: one prompt or several, as text or as token ids."""

from typing import Any

import msgspec
from pydantic import field_validator, model_validator

from pagemill.errors import RequestError
from pagemill.messages.prompts import Prompt
from pagemill.messages.sampling_params import SamplingParams
from pagemill.serve.http.schemas.generation import GenerationBody
from pagemill.serve.http.schemas.shapes import Prompts
from pagemill.serve.http.token_details import TokenDetails
from pagemill.utils.text import shown

MAX_PROMPTS = 1024
MAX_COMPLETIONS = 4096
"""Prompts times n, of one HTTP request."""
DEFAULT_MAX_TOKENS = 16


class CompletionBody(GenerationBody):
    """Texts to be continued."""

    prompt: Any
    """After validation a list of prompts, each a text or token ids."""
    logprobs: int | None = None
    """Log-probabilities of each token, with so many of the most likely ones; with `echo`, of the prompt's too."""

    @field_validator("prompt", mode="plain", json_schema_input_type=Prompts)
    @classmethod
    def _prompts(cls, value: Any) -> list[Prompt]:
        return parse_prompts(value)

    @model_validator(mode="after")
    def _few_enough(self) -> "CompletionBody":
        total = len(self.prompt) * (self.n or 1)
        if total > MAX_COMPLETIONS:
            raise RequestError(
                f"{len(self.prompt)} prompts with n={shown(self.n or 1)} are too many: "
                f"at most {MAX_COMPLETIONS} completions per request",
                "n",
            )
        if self.stream and self.echo and self.logprobs is not None and (self.n or 1) > 1:
            raise RequestError(
                f"n={self.n} is not available with stream=true, echo=true and logprobs: the prompt's log-probabilities "
                "come with the first completion; send the request without stream",
                "n",
            )
        return self

    def to_sampling_params(self, defaults: SamplingParams, most_tokens: int | None = None) -> SamplingParams:
        """Sampling parameters; max_tokens is 16 unless given. Raises RequestError."""
        limit = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        params = self.sampling_params(defaults, limit, most_tokens)
        if self.logprobs is None:
            return params
        of_prompt = self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs
        return params.replace(logprobs=self.logprobs, prompt_logprobs=of_prompt)

    def token_details(self, params: SamplingParams) -> TokenDetails:
        """What the answer says of its tokens; `params`: what was made of the body."""
        details = super().token_details(params)
        return msgspec.structs.replace(details, echoes=bool(self.echo) and details.logprobs)


def parse_prompts(value: Any, field: str = "prompt") -> list[Prompt]:
    """The four forms of a prompt as a list. Raises RequestError that names the field. Ids are checked on admission."""
    if isinstance(value, str):
        return [value]
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    if kinds == {int}:
        return [value]
    if kinds not in ({str}, {list}):
        raise RequestError(
            f"{field}={shown(value)} is not allowed: a text, a list of texts, a list of token ids, or a list of those; "
            "not empty and not mixed",
            field,
        )
    if len(value) > MAX_PROMPTS:
        raise RequestError(f"{field} holds {len(value)} prompts; at most {MAX_PROMPTS} per request", field)
    return list(value)

"""What the answers of several endpoints are made of: the model's name in the API, token counts, the fields that all
events of an answer repeat. Does not know how an answer is generated."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from pagemill.config.model_names import ModelNames
from pagemill.errors import ModelNotFoundError
from pagemill.messages.engine_io import EngineCoreRequest
from pagemill.messages.outputs import RequestOutput
from pagemill.serve.http.errors import ApiError
from pagemill.serve.processing.input_processor import PreparedRequest

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode


class ServedModel(msgspec.Struct, frozen=True):
    """The model under the name that the API gives it."""

    name: str
    created: int
    """Unix time in seconds."""
    names: ModelNames | None = None
    """All that requests may call it; None: the one name."""

    @classmethod
    def of(cls, names: ModelNames, created: int) -> "ServedModel":
        """The model under several names."""
        return cls(names.served[0], created, names)

    @property
    def listed(self) -> tuple[str, ...]:
        """Names that clients are told of."""
        return (self.name,) if self.names is None else self.names.listed

    def check(self, requested: str | None) -> None:
        """Raises ModelNotFoundError unless the request means this model (or none in particular)."""
        if requested is None or requested == self.name or (self.names is not None and self.names.means(requested)):
            return
        served = ", ".join(map(repr, self.listed))
        raise ModelNotFoundError(f"the model {requested[:100]!r} is not served here; {served} is", "model")


class Usage:
    """Token counts of one HTTP request."""

    def __init__(self, requests: Sequence[PreparedRequest], block_size: int) -> None:
        """`block_size`: tokens of a block of the prefix cache."""
        self._requests = requests
        self._block_size = block_size
        self.num_prompt_tokens = sum(len(item.request.prompt_token_ids) for item in requests)
        self._num_cached = [0] * len(requests)
        self.num_completion_tokens = 0
        self.num_reasoning_tokens: int | None = None
        """Of the completions' tokens; None where nothing is known of them."""
        self.num_draft_tokens = 0
        """That were verified for the completions."""
        self.num_accepted_tokens = 0
        """Of the completions' tokens, those that were drafts."""

    def count(self, prompt_index: int, output: RequestOutput) -> None:
        """Add what is new."""
        request = self._requests[prompt_index].request
        self._num_cached[prompt_index] = told_cached_tokens(request, output.num_cached_tokens, self._block_size)
        for completion in output.outputs:
            self.num_completion_tokens += len(completion.token_ids)
            self.num_draft_tokens += completion.num_draft_tokens
            self.num_accepted_tokens += completion.num_accepted_tokens

    def count_reasoning(self, num_tokens: int | None) -> None:
        """Add tokens that are known to be reasoning; None: nothing is known of a message."""
        if num_tokens is not None:
            self.num_reasoning_tokens = (self.num_reasoning_tokens or 0) + num_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompts' tokens, those found in the prefix cache, as far as clients are told."""
        return sum(self._num_cached)

    def to_json(self) -> dict[str, Any]:
        """The usage object of the API."""
        counts = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }
        details = {} if self.num_reasoning_tokens is None else {"reasoning_tokens": self.num_reasoning_tokens}
        if self.num_draft_tokens:
            details["accepted_prediction_tokens"] = self.num_accepted_tokens
            details["rejected_prediction_tokens"] = self.num_draft_tokens - self.num_accepted_tokens
        return counts | {"completion_tokens_details": details} if details else counts


def told_cached_tokens(request: EngineCoreRequest, num_cached: int, block_size: int) -> int:
    """How many cached tokens of a prompt its client is told of. Whole blocks, where the prefix may be another client's:
    to the token, it could be guessed one token after the other."""
    return num_cached if request.cache_salt is not None else num_cached - num_cached % block_size


class ResponseHead(msgspec.Struct, frozen=True):
    """What all events of a response repeat."""

    id: str
    model: str
    created: int

    def fields(self, kind: str) -> dict[str, Any]:
        """As the first fields of a body; `kind` is the API's name of the object."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def around_choices(self, kind: str, with_usage: bool) -> tuple[bytes, bytes]:
        """The constant bytes before and after the one choice of an event."""
        prefix = b"data: " + _encode(self.fields(kind))[:-1] + b',"choices":['
        return prefix, b'],"usage":null}\n\n' if with_usage else b"]}\n\n"

    def end(self, kind: str, usage: Usage | None) -> bytes:
        """What follows the last choice of a stream: an event with the token counts, where there are any to be told."""
        if usage is None:
            return DONE
        return b"data: " + _encode({**self.fields(kind), "choices": [], "usage": usage.to_json()}) + b"\n\n" + DONE


def broken_off(error: ApiError) -> bytes:
    """What a stream ends with that cannot go on."""
    return b"data: " + error.body() + b"\n\n" + DONE


def now() -> int:
    """Unix time in seconds, as the API gives it."""
    return int(time.time())

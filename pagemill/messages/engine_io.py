"""The seam serve <-> engine: requests down, outputs up. Token ids only; the engine knows no text.

The collector does not look at what comes by the thousand (gc=False): none of it can be part of a cycle.
"""

from enum import Enum

import msgspec
import numpy as np
import numpy.typing as npt

from pagemill.messages.logprobs import TokenLogprobs
from pagemill.messages.pooling_params import PoolingParams
from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.stats import SchedulerStats
from pagemill.messages.structured_outputs import FormRules, GrammarSpec


class FinishReason(Enum):
    """Why a request ended; the values are those of the API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


class MultimodalItem(msgspec.Struct, frozen=True, array_like=True):
    """Something in the prompt that is no text: the placeholder tokens that stand for it, and what it is."""

    offset: int
    """Position of its first placeholder in the prompt."""
    num_tokens: int
    """Placeholders that it takes."""
    content_hash: str
    """Equal hashes mean equal embeddings."""


class LoRARequest(msgspec.Struct, frozen=True, array_like=True):
    """The adapter that a request runs with."""

    name: str
    lora_id: int
    """Another one for every loading, so that an adapter loaded again under its old name shares nothing with it."""
    path: str


class EngineCoreRequest(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False, kw_only=True):
    """One admitted request. Everything is validated; the engine never rejects, it only schedules or aborts.

    Of SamplingParams, the seed is set, max_tokens is set and fits the context, and stop_token_ids holds all ids that
    end the output (the model's end-of-sequence ids included unless ignore_eos). Of PoolingParams, every field is set
    but `dimensions`, which the model has.
    """

    request_id: str
    """Chosen by the front end, never by a client."""
    prompt_token_ids: list[int]
    params: SamplingParams | PoolingParams
    arrival_time: float
    """Seconds of time.monotonic() in the front end."""
    emitted_token_ids: list[int] = []
    """Already sent to the client: a resumed request. Apart from the prompt, so that min/max tokens stay right."""
    priority: int = 0
    """Lower runs first, under the priority policy."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    mm_items: tuple[MultimodalItem, ...] = ()
    """In order of their offsets; they do not overlap."""
    lora: LoRARequest | None = None
    grammar: GrammarSpec | None = None
    """What the output must look like; checked, so that a grammar can be made of it."""
    rank: int = 0
    """Completions that the user asked for in the same call, before this one. The first of a call comes before the
    later ones of other calls, whoever came earlier."""


class Finish(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """The end of a request."""

    reason: FinishReason
    stop_token_id: int | None = None
    """The token that ended it, when the reason is STOP."""
    message: str | None = None
    """What went wrong, when the reason is ERROR."""


class EngineCoreOutput(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False, kw_only=True):
    """What is new about one request after a step."""

    request_id: str
    new_token_ids: list[int] = []
    finish: Finish | None = None
    """None: still running."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; sent once, with the first output."""
    queued_at: float | None = None
    """When the engine got it; like the next one in seconds of the engine's clock, and sent with the first output."""
    scheduled_at: float | None = None
    """When it first ran."""
    pooled: npt.NDArray[np.float32] | None = None
    """[D] what a pooling request asked for; with its only output, which ends it."""
    logprobs: TokenLogprobs | None = None
    """Of new_token_ids, where the request asks for them."""
    prompt_logprobs: TokenLogprobs | None = None
    """Of all prompt tokens but the first, where the request asks for them; with its first output."""
    num_drafts: int = 0
    """Drafts that the step verified."""
    num_accepted: int = 0
    """Of new_token_ids, those that were drafts."""

    @classmethod
    def failed(cls, request_id: str, message: str) -> "EngineCoreOutput":
        """The last output of a request that ends with an error."""
        return cls(request_id=request_id, finish=Finish(FinishReason.ERROR, message=message))


class EngineCoreOutputs(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False, kw_only=True):
    """What one step produced. A request that merely got one more token is a row of the two parallel lists; only
    those with more to say (first output, several tokens, finished) have an object of their own. A request appears
    in one of the two, once."""

    engine_index: int = 0
    request_ids: list[str] = []
    token_ids: list[int] = []
    """token_ids[i] is the one new token of request_ids[i]."""
    outputs: list[EngineCoreOutput] = []
    stats: SchedulerStats | None = None
    step_at: float = 0.0
    """When the engine had the tokens, in seconds of its clock (time.monotonic()): one time for all of them."""
    num_step_tokens: int = 0
    """Tokens that the step computed, of prompts and outputs; 0 where there was no step."""


class EngineReady(msgspec.Struct, frozen=True, kw_only=True):
    """What was learnt while the engine started; sent once, before the first request."""

    max_model_len: int
    """Tokens of prompt and output together."""
    vocab_size: int
    """Width of the logits: valid token ids are 0 <= id < vocab_size."""
    num_blocks: int
    block_size: int
    """Tokens per block."""
    logits_processors: tuple[str, ...] = ()
    """`module:Class` of those that are not pagemill's own: they check requests that have arguments for them."""
    max_logprobs: int = 20
    """Most candidates whose log-probabilities a request may ask for; -1: all tokens."""
    gives_raw_logprobs: bool = True
    """Whether the log-probabilities of tokens are the model's own (`logprobs_mode`), as a beam search needs them."""
    forms: FormRules = FormRules()
    """Of structured outputs."""

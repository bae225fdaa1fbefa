"""`Request`: the engine's state of one request. Knows nothing about blocks, budgets or text."""

import time
from array import array
from dataclasses import dataclass, field
from enum import IntEnum

from pagemill.engine.grammar import Grammar
from pagemill.messages.engine_io import EngineCoreRequest
from pagemill.messages.logprobs import TokenLogprobs
from pagemill.messages.pooling_params import PoolingParams
from pagemill.messages.sampling_params import SamplingParams


class RequestStatus(IntEnum):
    """Where a request is; everything from FINISHED_STOPPED on is an end."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    """Waiting again: its blocks were taken, and its tokens will be computed anew."""
    FINISHED_STOPPED = 3
    FINISHED_LENGTH = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6

    @property
    def finished(self) -> bool:
        """Whether the request has ended, one way or another."""
        return self >= RequestStatus.FINISHED_STOPPED


@dataclass(slots=True)
class ForcedTokens:
    """Tokens that a grammar forced and no output has reported."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of these tokens, as far as they were computed, in order."""
    unscored_from: int | None = None
    """Position of the first whose log-probability is to be computed; None where none is asked for."""


class Request:
    """One admitted request.

    While it runs, its newest tokens are kept in the arrays of its slot (scheduler/slots.py) and `token_ids` lags by
    at most a block; it is complete whenever the request does not run.
    """

    __slots__ = (
        "announced",
        "arrival_time",
        "block_hashes",
        "cache_salt",
        "forced",
        "grammar",
        "length_limit",
        "lora",
        "mm_items",
        "num_cached_tokens",
        "num_prompt_tokens",
        "params",
        "priority",
        "prompt_logprobs",
        "queued_at",
        "rank",
        "request_id",
        "scheduled_at",
        "scores_prompt",
        "sequence",
        "slot",
        "status",
        "token_ids",
    )

    def __init__(
        self, core_request: EngineCoreRequest, *, sequence: int, max_model_len: int, grammar: Grammar | None = None
    ) -> None:
        """`sequence` is the order of arrival at this engine; `grammar`: where one restricts the output. Raises
        OverflowError or TypeError for token ids that are not 32-bit integers, ValueError for a prompt that does not
        fit, with a token if one is to be sampled."""
        prompt = core_request.prompt_token_ids
        params = core_request.params
        self.request_id = core_request.request_id
        self.params = params
        self.priority = core_request.priority
        self.rank = core_request.rank
        self.arrival_time = core_request.arrival_time
        self.cache_salt = core_request.cache_salt
        self.lora = core_request.lora
        self.mm_items = core_request.mm_items
        self.grammar = grammar
        self.forced = ForcedTokens()
        """Those that wait: at the beginning of the output for the first one to be sampled, and where log-probabilities
        are asked for until these are there."""
        self.sequence = sequence
        self.token_ids = array("i", prompt)
        """Prompt and generated tokens, those that the client was sent before included."""
        self.token_ids.extend(core_request.emitted_token_ids)
        self.num_prompt_tokens = len(prompt)
        most = max_model_len if isinstance(params, PoolingParams) else max_model_len - 1
        if not 0 < len(prompt) <= most:
            raise ValueError(f"the prompt has {len(prompt)} tokens; 1 to {most} are allowed")
        self.length_limit = _length_limit(len(prompt), params, max_model_len)
        """Tokens of prompt and output at which the request ends."""
        self.scores_prompt = _scores_prompt(core_request)
        """Whether its first output must have log-probabilities of the prompt."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Those of the parts that were computed so far, in order."""
        self.status = RequestStatus.WAITING
        self.slot: int | None = None
        """None unless running."""
        self.queued_at = time.monotonic()
        self.scheduled_at = 0.0
        """When it first ran, by the same clock."""
        self.announced = False
        """Whether an output of it was reported."""
        self.num_cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache when it first ran; None before that."""
        self.block_hashes: list[bytes] = []
        """Of its full blocks, as far as anyone asked (prefix_hash.py)."""

    @property
    def reads_all_tokens(self) -> bool:
        """Whether every token's hidden state is needed, so that none may come from the prefix cache."""
        return self.scores_prompt or (isinstance(self.params, PoolingParams) and self.params.reads_all_tokens)

    @property
    def scores_output(self) -> bool:
        """Whether each token of the output is reported with its log-probability."""
        return isinstance(self.params, SamplingParams) and self.params.num_candidates is not None

    @property
    def max_cached_tokens(self) -> int:
        """Tokens that may come from the prefix cache. Somebody must compute the last one, to sample the next, and those
        before tokens whose log-probabilities are to be told."""
        unscored = self.forced.unscored_from
        return (self.num_tokens if unscored is None else min(self.num_tokens, unscored)) - 1

    @property
    def keeps_no_token(self) -> bool:
        """Whether it is to end with its prompt: it samples one token, which nobody gets."""
        return isinstance(self.params, SamplingParams) and self.params.max_tokens == 0

    @property
    def num_tokens(self) -> int:
        """Tokens in `token_ids`."""
        return len(self.token_ids)

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name}, {self.num_tokens} tokens)"


def _scores_prompt(core_request: EngineCoreRequest) -> bool:
    """One that goes on after the end of an engine has had its first output."""
    params = core_request.params
    asks = isinstance(params, SamplingParams) and params.prompt_logprobs is not None
    return asks and not core_request.emitted_token_ids


def _length_limit(num_prompt_tokens: int, params: SamplingParams | PoolingParams, max_model_len: int) -> int:
    if isinstance(params, PoolingParams):
        return num_prompt_tokens + 1  # a vector takes the place of the one token that would be sampled
    wanted = max_model_len if params.max_tokens is None else params.max_tokens
    # One that is to generate nothing samples a token all the same.
    return min(num_prompt_tokens + max(wanted, 1), max_model_len)

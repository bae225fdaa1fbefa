"""`Request`: the engine's state of one request. Knows nothing about blocks, budgets or text."""

import time
from array import array
from enum import IntEnum

from pagemill.engine.grammar import Grammar
from pagemill.messages.engine_io import EngineCoreRequest
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
        "queued_at",
        "rank",
        "reads_all_tokens",
        "request_id",
        "scheduled_at",
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
        prompt, params = core_request.prompt_token_ids, core_request.params
        self.request_id = core_request.request_id
        self.params = params
        self.priority = core_request.priority
        self.rank = core_request.rank
        self.arrival_time = core_request.arrival_time
        self.cache_salt = core_request.cache_salt
        self.lora = core_request.lora
        self.mm_items = core_request.mm_items
        self.grammar = grammar
        self.forced: list[int] = []
        """Tokens that the grammar forced at the beginning of the output, until the first output reports them."""
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
        self.reads_all_tokens = isinstance(params, PoolingParams) and params.reads_all_tokens
        """Whether every token's hidden state is needed, so that none may come from the prefix cache."""
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
    def num_tokens(self) -> int:
        """Tokens in `token_ids`."""
        return len(self.token_ids)

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name}, {self.num_tokens} tokens)"


def _length_limit(num_prompt_tokens: int, params: SamplingParams | PoolingParams, max_model_len: int) -> int:
    if isinstance(params, PoolingParams):
        return num_prompt_tokens + 1  # a vector takes the place of the one token that would be sampled
    wanted = max_model_len if params.max_tokens is None else params.max_tokens
    return min(num_prompt_tokens + wanted, max_model_len)

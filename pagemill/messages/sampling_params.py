"""`SamplingParams`: how one request is sampled and when it stops. Knows nothing about models or tokenizers."""

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Final

import msgspec

from pagemill.errors import RequestError

MAX_SEED: Final = 2**64 - 1
MAX_N: Final = 64
MAX_STOP_STRINGS: Final = 64
MAX_STOP_CHARS: Final = 1024
MAX_ALL_STOP_CHARS: Final = 4096
"""Of all stop strings of a request together."""
MAX_STOP_TOKEN_IDS: Final = 1024
"""That a request may name."""
MAX_END_TOKEN_IDS: Final = 64
"""End-of-sequence tokens of a model, which are added to them."""
MAX_BIASED_TOKENS: Final = 16_384
"""Entries of `logit_bias`, and of `allowed_token_ids`."""
MAX_BAD_WORDS: Final = 256
MAX_BAD_WORD_CHARS: Final = 256
MAX_BAD_WORD_TOKENS: Final = 64
GREEDY_TEMPERATURE: Final = 1e-5
_SWITCHES: Final = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize")


class RequestOutputKind(IntEnum):
    """What a streamed output carries: everything so far, the difference, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="sampling"):
    """Sampling parameters of one request; the names are those of the OpenAI API and its usual extensions.

    Bounds that need no model are checked on construction (RequestError, a ValueError, names the field);
    those that do (token ids below the logits width, room in the context) are checked on admission.
    """

    n: int = 1
    """Completions per prompt, 1 to 64."""
    temperature: float = 1.0
    """0 to 2 in the API, any finite value >= 0 here; below 1e-5 means greedy."""
    top_p: float = 1.0
    """Smallest set of tokens whose probability reaches top_p, in (0, 1]."""
    top_k: int = 0
    """Number of most likely tokens considered; 0 or -1 means all."""
    min_p: float = 0.0
    """Least probability relative to the most likely token, in [0, 1]."""
    seed: int | None = None
    """Same seed, same noise at each position. None: one is drawn on admission."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that was generated, -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted as often as a token was generated, -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of all tokens of prompt and output; 0.01 to 100."""
    logit_bias: Mapping[int, float] | None = None
    """Token id -> what is added to its logit, -100 to 100; at most 16,384 of them."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that are sampled, at most 16,384; kept as a tuple."""
    bad_words: Sequence[str] | None = None
    """Texts that are not generated, alone or after a blank, at most 256 of at most 256 characters; kept as a tuple."""
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    """Sequences of tokens that are not generated; on admission, those of `bad_words` are added."""
    stop: Sequence[str] | str | None = None
    """Strings that end the output; kept as a tuple."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the output, besides the model's end-of-sequence ids; kept as a tuple."""
    include_stop_str_in_output: bool = False
    """Whether the text keeps the stop string that ended it."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""
    max_tokens: int | None = 16
    """Most tokens to generate; None: as many as the context has room for."""
    min_tokens: int = 0
    """Before this many tokens, end-of-sequence and stop tokens are not sampled and stop strings do not match."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    detokenize: bool = True
    """False: outputs carry token ids only."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What streamed outputs carry."""

    def __post_init__(self) -> None:
        force = msgspec.structs.force_setattr
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        force(self, "stop", stop)
        force(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        force(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        force(self, "bad_words", tuple(self.bad_words) if self.bad_words else None)
        for check in (_check_numbers, _check_lengths, _check_stops, _check_switches, _check_penalties, _check_tokens):
            check(self)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without noise."""
        return self.temperature < GREEDY_TEMPERATURE

    def replace(self, **changes: Any) -> "SamplingParams":
        """A copy with some fields changed, checked again."""
        return msgspec.structs.replace(self, **changes)


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name}={value!r} is not allowed: an integer from {low} to {high}", name)


def _number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    bracket = "(" if open_low else "["
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= value <= high or (open_low and value == low):
        raise RequestError(f"{name}={value!r} is not allowed: a finite number in {bracket}{low:g}, {high:g}]", name)


def _check_switches(params: SamplingParams) -> None:
    for name in _SWITCHES:
        if not isinstance(getattr(params, name), bool):
            raise RequestError(f"{name}={getattr(params, name)!r} is not allowed: true or false", name)


def _check_numbers(params: SamplingParams) -> None:
    _number("temperature", params.temperature, 0.0, 1e4)
    _number("top_p", params.top_p, 0.0, 1.0, open_low=True)
    _number("min_p", params.min_p, 0.0, 1.0)
    _integer("top_k", params.top_k, 0, 2**31 - 1)
    _integer("n", params.n, 1, MAX_N)
    if params.greedy and params.n > 1:
        raise RequestError(f"n={params.n} is not allowed with temperature=0: greedy completions are all equal", "n")
    if params.seed is not None:
        _integer("seed", params.seed, -(2**63), MAX_SEED)


def _check_penalties(params: SamplingParams) -> None:
    _number("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _number("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _number("repetition_penalty", params.repetition_penalty, 0.01, 100.0)


def _check_tokens(params: SamplingParams) -> None:
    """Of parameters that name tokens or words; that the model has them is checked on admission."""
    _check_bias(params.logit_bias)
    if params.allowed_token_ids is not None:
        msgspec.structs.force_setattr(params, "allowed_token_ids", tuple(params.allowed_token_ids))
        _count("allowed_token_ids", params.allowed_token_ids, 1, MAX_BIASED_TOKENS)
        for token in params.allowed_token_ids:
            _integer("allowed_token_ids", token, 0, 2**31 - 1)
    _count("bad_words", params.bad_words or (), 0, MAX_BAD_WORDS)
    for text in params.bad_words or ():
        if not isinstance(text, str) or not 0 < len(text) <= MAX_BAD_WORD_CHARS:
            raise RequestError(f"bad_words must hold strings of 1 to {MAX_BAD_WORD_CHARS} characters", "bad_words")
    if params.bad_words_token_ids is not None:
        words = tuple(tuple(word) for word in params.bad_words_token_ids)
        msgspec.structs.force_setattr(params, "bad_words_token_ids", words)
        # Complete parameters hold those of bad_words too, two for each.
        _count("bad_words_token_ids", words, 0, 3 * MAX_BAD_WORDS)
        for word in words:
            _count("bad_words_token_ids", word, 1, MAX_BAD_WORD_TOKENS)
            for token in word:
                _integer("bad_words_token_ids", token, 0, 2**31 - 1)


def _check_bias(bias: Mapping[int, float] | None) -> None:
    if bias is None:
        return
    if not isinstance(bias, Mapping):
        kind = type(bias).__name__
        raise RequestError(f"logit_bias is a {kind}; it must be a map of token ids to numbers", "logit_bias")
    _count("logit_bias", bias, 0, MAX_BIASED_TOKENS)
    for token, value in bias.items():
        _integer("logit_bias", token, 0, 2**31 - 1)
        _number("logit_bias", value, -100.0, 100.0)


def _count(name: str, values: Sequence[object] | Mapping[int, float], low: int, high: int) -> None:
    if not low <= len(values) <= high:
        raise RequestError(f"{name} has {len(values)} entries; {low} to {high} are allowed", name)


def _check_lengths(params: SamplingParams) -> None:
    if params.max_tokens is not None:
        _integer("max_tokens", params.max_tokens, 1, 2**31 - 1)
    _integer("min_tokens", params.min_tokens, 0, 2**31 - 1)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError(
            f"min_tokens={params.min_tokens} is larger than max_tokens={params.max_tokens}", "min_tokens"
        )


def _check_stops(params: SamplingParams) -> None:
    stops, stop_ids = params.stop or (), params.stop_token_ids or ()
    if len(stops) > MAX_STOP_STRINGS:
        raise RequestError(f"stop has {len(stops)} strings; at most {MAX_STOP_STRINGS} are allowed", "stop")
    for text in stops:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARS:
            raise RequestError(f"stop must hold strings of 1 to {MAX_STOP_CHARS} characters", "stop")
    total = sum(map(len, stops))
    if total > MAX_ALL_STOP_CHARS:
        raise RequestError(
            f"stop has {total} characters in all its strings; at most {MAX_ALL_STOP_CHARS} are allowed", "stop"
        )
    if stops and not params.detokenize:
        raise RequestError("stop strings need detokenize=True", "stop")
    # Complete parameters hold the model's tokens too; what a request may name is checked on admission.
    if len(stop_ids) > MAX_STOP_TOKEN_IDS + MAX_END_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids has {len(stop_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed", "stop_token_ids"
        )
    for token in stop_ids:
        _integer("stop_token_ids", token, 0, 2**31 - 1)

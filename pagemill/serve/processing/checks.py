"""What a request must satisfy before the engine sees it: one function per rule, run as a list.
Does not know where the prompt came from; it is token ids by now."""

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pagemill.errors import RequestError
from pagemill.messages.pooling_params import PoolingParams
from pagemill.messages.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams

_SALT = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_MAX_SHOWN = 60
_MAX_BITS = 128
_MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the running engine allows."""

    max_model_len: int
    """Tokens of prompt and output together."""
    vocab_size: int
    """Valid token ids are 0 <= id < vocab_size."""
    has_priorities: bool
    embedding_size: int | None = None
    """Numbers of a vector, where prompts become vectors; None where they are continued."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A request on its way in: prompt as token ids, parameters as given."""

    token_ids: Sequence[int]
    params: SamplingParams | PoolingParams
    priority: int = 0
    cache_salt: str | None = None


def shown(value: Any) -> str:
    """A value for an error message: its repr, shortened. Costs the same however large the value is."""
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return _bits(value)
    text = repr(_clipped(value, [_MAX_SHOWN]))
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


class _Written(str):
    """A text that stands for a value as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _bits(value: int) -> str:
    return f"a number of {value.bit_length()} bits"


def _clipped(value: Any, left: list[int]) -> Any:
    """A value whose repr begins as that of `value`; `left` counts what may still be looked at: every item is at least
    one character of the result, so that what comes after would not be shown."""
    left[0] -= 1
    match value:
        case str() | bytes():
            return value[: _MAX_SHOWN + 1]
        case int():
            return _Written(_bits(value)) if value.bit_length() > _MAX_BITS else value
        case dict():
            pairs = itertools.takewhile(lambda _: left[0] >= 0, value.items())
            return {_clipped(key, left): _clipped(item, left) for key, item in pairs}
        case list() | tuple():
            items = itertools.takewhile(lambda _: left[0] >= 0, value)
            return type(value)([_clipped(item, left) for item in items])
    return value


def _prompt_is_not_empty(admission: Admission, bounds: Bounds) -> None:
    if not admission.token_ids:
        raise RequestError("the prompt is empty; it must hold at least one token", "prompt")


def _prompt_fits(admission: Admission, bounds: Bounds) -> None:
    pools = isinstance(admission.params, PoolingParams)
    num_tokens, most = len(admission.token_ids), bounds.max_model_len - (not pools)
    if num_tokens > most:
        raise RequestError(
            f"the prompt has {num_tokens} tokens, at most {most} fit: this model's context is "
            f"{bounds.max_model_len} tokens{'' if pools else ', prompt and output together'}",
            "prompt",
        )


def _token_ids_are_known(admission: Admission, bounds: Bounds) -> None:
    ids = admission.token_ids
    if any(kind is not int for kind in set(map(type, ids))):
        wrong = next(item for item in ids if type(item) is not int)
        raise RequestError(f"token id {shown(wrong)} in the prompt is not an integer", "prompt")
    if min(ids) < 0 or max(ids) >= bounds.vocab_size:
        wrong = next(item for item in ids if not 0 <= item < bounds.vocab_size)
        raise RequestError(
            f"token id {shown(wrong)} in the prompt is not allowed: 0 to {bounds.vocab_size - 1}", "prompt"
        )


def _dimensions_are_there(admission: Admission, bounds: Bounds) -> None:
    params, most = admission.params, bounds.embedding_size or 0
    if isinstance(params, PoolingParams) and (params.dimensions or 0) > most:
        raise RequestError(f"dimensions={shown(params.dimensions)} is not allowed: 1 to {most}", "dimensions")


def _stop_token_ids_are_known(admission: Admission, bounds: Bounds) -> None:
    params = admission.params
    stop_ids = (isinstance(params, SamplingParams) and params.stop_token_ids) or ()
    if len(stop_ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids has {len(stop_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed", "stop_token_ids"
        )
    for token in stop_ids:
        if token >= bounds.vocab_size:
            raise RequestError(
                f"stop_token_ids holds {shown(token)}; token ids are 0 to {bounds.vocab_size - 1}", "stop_token_ids"
            )


def _named_tokens_are_known(admission: Admission, bounds: Bounds) -> None:
    params = admission.params
    if not isinstance(params, SamplingParams):
        return
    named: dict[str, Iterable[int]] = {
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words_token_ids": itertools.chain.from_iterable(params.bad_words_token_ids or ()),
    }
    for field, tokens in named.items():
        for token in tokens:
            if token >= bounds.vocab_size:
                raise RequestError(f"{field} holds {shown(token)}; token ids are 0 to {bounds.vocab_size - 1}", field)


def _texts_are_unicode(admission: Admission, bounds: Bounds) -> None:
    params = admission.params
    if isinstance(params, SamplingParams):
        for stop in params.stop or ():
            check_unicode(stop, "stop")
        for word in params.bad_words or ():
            check_unicode(word, "bad_words")


def _priority_is_in_use(admission: Admission, bounds: Bounds) -> None:
    priority = admission.priority
    if type(priority) is not int or abs(priority) > _MAX_PRIORITY:
        raise RequestError(
            f"priority={shown(priority)} is not allowed: an integer from {-_MAX_PRIORITY} to {_MAX_PRIORITY}",
            "priority",
        )
    if priority and not bounds.has_priorities:
        raise RequestError(
            f"priority={priority} has no effect under the fcfs policy; start with --scheduling-policy priority",
            "priority",
        )


def _salt_is_well_formed(admission: Admission, bounds: Bounds) -> None:
    salt = admission.cache_salt
    if salt is not None and not (isinstance(salt, str) and _SALT.fullmatch(salt)):
        raise RequestError(
            f"cache_salt={shown(salt)} is not allowed: 1 to 128 characters out of A-Z a-z 0-9 _ . : -", "cache_salt"
        )


CHECKS: tuple[Callable[[Admission, Bounds], None], ...] = (
    _dimensions_are_there,
    _prompt_is_not_empty,
    _prompt_fits,
    _token_ids_are_known,
    _stop_token_ids_are_known,
    _named_tokens_are_known,
    _texts_are_unicode,
    _priority_is_in_use,
    _salt_is_well_formed,
)


def check_kind(kind: type[SamplingParams] | type[PoolingParams], bounds: Bounds) -> None:
    """Raises RequestError when the engine does the other kind of work."""
    if kind is SamplingParams and bounds.embedding_size is not None:
        raise RequestError("this model makes embeddings and generates no text (--runner pooling); ask for embeddings")
    if kind is PoolingParams and bounds.embedding_size is None:
        raise RequestError("this model generates text and makes no embeddings; for those, start with --runner pooling")


def check_unicode(text: str, field: str) -> None:
    """Raises RequestError when a text cannot be written as UTF-8 (a lone surrogate)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{field} is not valid Unicode at character {error.start}", field) from None

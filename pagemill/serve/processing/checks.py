"""What a request must satisfy before the engine sees it: one function per rule, run as a list.
Does not know where the prompt came from; it is token ids by now."""

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Protocol

import msgspec

from pagemill.errors import RequestError
from pagemill.messages.bounds import check_integer
from pagemill.messages.pooling_params import PoolingParams
from pagemill.messages.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from pagemill.utils.text import shown

_SALT = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_MAX_PRIORITY = 2**31 - 1
MAX_PROMPT_LOGPROBS = 1 << 22
"""Values that come with one prompt, in one message: 20 candidates of 199,000 tokens, or a whole vocabulary of few."""

MAX_ANSWER_LOGPROBS = 1 << 22
"""Values of log-probabilities in one answer: those of prompts, in each choice that repeats them, and those of tokens
with more than FEW_CANDIDATES."""
FEW_CANDIDATES = 20
"""Candidates of generated tokens that are not counted: what limits the tokens limits their values."""


class TakesArguments(Protocol):
    """What is asked of the class of a logits processor."""

    arguments: Sequence[str]
    """Names in `extra_args` that it reads."""

    def check(self, params: SamplingParams) -> None:
        """Raises ValueError for values that make no sense."""


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
    processors: tuple[TakesArguments, ...] = ()
    """Logits processors that requests may have arguments for."""
    max_logprobs: int = 20
    """Most candidates of a token that a request may ask for; `vocab_size` where there is no limit."""
    max_prompt_len: int | None = None
    """Most tokens of a prompt that is split where it is longer than `max_model_len`; None: none is."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A request on its way in: prompt as token ids, parameters as given."""

    token_ids: Sequence[int]
    params: SamplingParams | PoolingParams
    priority: int = 0
    cache_salt: str | None = None


def _prompt_is_not_empty(admission: Admission, bounds: Bounds) -> None:
    if not admission.token_ids:
        raise RequestError("the prompt is empty; it must hold at least one token", "prompt")


def _prompt_fits(admission: Admission, bounds: Bounds) -> None:
    params = admission.params
    pools = isinstance(params, PoolingParams)
    num_tokens = len(admission.token_ids)
    most = bounds.max_model_len - (not pools)
    if isinstance(params, PoolingParams) and bounds.max_prompt_len is not None and not params.per_token:
        most = max(most, bounds.max_prompt_len)
    if num_tokens > most:
        raise RequestError(
            f"the prompt has {num_tokens} tokens, at most {most} fit: this model's context is "
            f"{bounds.max_model_len} tokens{'' if pools else ', prompt and output together'}",
            "prompt",
        )


def _token_ids_are_known(admission: Admission, bounds: Bounds) -> None:
    ids = admission.token_ids
    if list(map(type, ids)).count(int) != len(ids):  # subclasses, which the type below takes, cannot be sent
        wrong = next(item for item in ids if type(item) is not int)
        raise RequestError(f"token id {shown(wrong)} in the prompt is not an integer", "prompt")
    try:
        msgspec.convert(ids, _list_of_ids(bounds.vocab_size))  # one pass, where least and greatest are two
    except msgspec.ValidationError:
        wrong = next(item for item in ids if not 0 <= item < bounds.vocab_size)
        raise RequestError(
            f"token id {shown(wrong)} in the prompt is not allowed: 0 to {bounds.vocab_size - 1}", "prompt"
        ) from None


@cache
def _list_of_ids(vocab_size: int) -> Any:
    """The type of a list of so many different ids."""
    return list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]


def _dimensions_are_there(admission: Admission, bounds: Bounds) -> None:
    params = admission.params
    most = bounds.embedding_size or 0
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
        "logprob_token_ids": params.logprob_token_ids or (),
        "bad_words_token_ids": itertools.chain.from_iterable(params.bad_words_token_ids or ()),
    }
    for field, tokens in named.items():
        for token in tokens:
            if token >= bounds.vocab_size:
                raise RequestError(f"{field} holds {shown(token)}; token ids are 0 to {bounds.vocab_size - 1}", field)


def _extra_args_are_read(admission: Admission, bounds: Bounds) -> None:
    params = admission.params
    if not isinstance(params, SamplingParams) or not params.extra_args:
        return
    known = {name for processor in bounds.processors for name in processor.arguments}
    unknown = [name for name in params.extra_args if name not in known]
    if unknown:
        names = f"known: {', '.join(sorted(known))}" if known else "there is no logits processor that reads arguments"
        raise RequestError(f"extra_args (vllm_xargs) has {shown(unknown[0])}; {names}", "vllm_xargs")
    for processor in bounds.processors:
        try:
            processor.check(params)
        except ValueError as error:
            raise RequestError(str(error), "vllm_xargs") from error


def _logprobs_are_few(admission: Admission, bounds: Bounds) -> None:
    params = admission.params
    most = bounds.max_logprobs
    if not isinstance(params, SamplingParams):
        return
    asked = {"logprobs": params.logprobs, "prompt_logprobs": params.prompt_logprobs}
    if params.logprob_token_ids is not None and most < bounds.vocab_size:
        asked["logprob_token_ids"] = len(params.logprob_token_ids)
    for field, count in asked.items():
        if count is not None and (bounds.vocab_size if count == -1 else count) > most:
            what = f"{field} has {count} ids" if field == "logprob_token_ids" else f"{field}={count} is not allowed"
            raise RequestError(f"{what}: at most {most} (--max-logprobs), or 0 for the token alone", field)
    count = params.prompt_logprobs or 0
    num_values = len(admission.token_ids) * (1 + (bounds.vocab_size if count == -1 else count))
    if params.prompt_logprobs is not None and num_values > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"prompt_logprobs={count} is too much for a prompt of {len(admission.token_ids)} tokens: {num_values} "
            f"log-probabilities; at most {MAX_PROMPT_LOGPROBS} come with one prompt",
            "prompt_logprobs",
        )


def _texts_are_unicode(admission: Admission, bounds: Bounds) -> None:
    params = admission.params
    if isinstance(params, SamplingParams):
        for stop in params.stop or ():
            check_unicode(stop, "stop")
        for word in params.bad_words or ():
            check_unicode(word, "bad_words")


def _priority_is_in_use(admission: Admission, bounds: Bounds) -> None:
    priority = admission.priority
    check_integer("priority", priority, -_MAX_PRIORITY, _MAX_PRIORITY)
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
    _extra_args_are_read,
    _logprobs_are_few,
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


def check_tokens_are_left(params: SamplingParams) -> None:
    """Raises RequestError when complete parameters allow some tokens only and exclude each of them from the start."""
    if params.allowed_token_ids is None:
        return
    excluded = {word[0] for word in params.bad_words_token_ids or () if len(word) == 1}
    if params.min_tokens:
        excluded.update(params.stop_token_ids or ())
    if excluded.issuperset(params.allowed_token_ids):
        raise RequestError(
            f"allowed_token_ids={shown(params.allowed_token_ids)} is not allowed: bad_words, or min_tokens with the "
            "tokens that end the output, exclude all of them",
            "allowed_token_ids",
        )


def num_answer_logprobs(params: SamplingParams, num_prompt_tokens: int) -> int:
    """Values that count for MAX_ANSWER_LOGPROBS, of the completions of one prompt. `params` are complete."""
    per_choice = 0
    if params.prompt_logprobs is not None:
        per_choice += num_prompt_tokens * (1 + params.prompt_logprobs)
    if (params.num_candidates or 0) > FEW_CANDIDATES:
        per_choice += (params.max_tokens or 0) * (1 + (params.num_candidates or 0))
    return params.n * per_choice


def check_answer_logprobs(num_values: int, params: SamplingParams) -> None:
    """Raises RequestError when an answer may have more values of log-probabilities than MAX_ANSWER_LOGPROBS."""
    if num_values <= MAX_ANSWER_LOGPROBS:
        return
    field = "logprobs" if (params.num_candidates or 0) > FEW_CANDIDATES else "prompt_logprobs"
    if params.logprob_token_ids is not None and field == "logprobs":
        field = "logprob_token_ids"
    raise RequestError(
        f"{field} asks for too much: {num_values} log-probabilities; at most {MAX_ANSWER_LOGPROBS} come with one "
        f"answer (those of its prompts, and of tokens with more than {FEW_CANDIDATES} candidates): ask for fewer "
        "candidates, max_tokens, completions or prompts",
        field,
    )


def check_unicode(text: str, field: str) -> None:
    """Raises RequestError when a text cannot be written as UTF-8 (a lone surrogate)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{field} is not valid Unicode at character {error.start}", field) from None

"""`InputProcessor`: a prompt and sampling parameters become a validated engine request.
Does not know where requests come from or go to."""

import dataclasses
import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pagemill.catalog.registry import load_path
from pagemill.errors import ModelError, RequestError
from pagemill.grammar.translate import Translations
from pagemill.messages.bounds import check_count
from pagemill.messages.engine_io import EngineCoreRequest, EngineReady
from pagemill.messages.pooling_params import PoolingParams
from pagemill.messages.prompts import Prompt
from pagemill.messages.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BANNED_SEQUENCES,
    MAX_END_TOKEN_IDS,
    MAX_SEED,
    SamplingParams,
)
from pagemill.messages.structured_outputs import FreeStart, GrammarSpec, StructuredOutputsParams, Thinking
from pagemill.serve.processing.checks import (
    CHECKS,
    Admission,
    Bounds,
    check_kind,
    check_tokens_are_left,
    check_unicode,
)
from pagemill.serve.processing.cutting import Cut
from pagemill.serve.processing.fill_in import Gap, GapPrompt, gap_prompt
from pagemill.serve.processing.free_start import free_before
from pagemill.serve.processing.pooling_params import Pooling
from pagemill.tokenizers.control_text import unmarked
from pagemill.tokenizers.interface import Tokenizer
from pagemill.tokenizers.pair_cut import PairCut
from pagemill.utils.text import shown

HURRIED_STEPS = 4000
"""Of the translation of a form: about 10 ms, several times what schemas of people take."""
MAX_CHARS_PER_TOKEN = 64
"""No text of more characters per token than this can fit; it is refused before it costs any tokenizing."""


@dataclass(frozen=True, slots=True)
class WatchedOutput:
    """What an output is watched for: where it reasons, and where a form begins that does not hold before."""

    thinking: Thinking | None = None
    triggers: tuple[bytes, ...] = ()
    first_triggers: tuple[bytes, ...] = ()
    parts: tuple[tuple[str, str], ...] = ()
    """See `GrammarSpec`."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How a prompt is to be taken, besides its sampling parameters."""

    priority: int = 0
    cache_salt: str | None = None
    add_special_tokens: bool = True
    """Whether a text gets the tokenizer's own begin-of-sequence token; rendered chats have theirs already."""
    rendered: bool = False
    """Whether a text was made by a chat template."""
    clamp_max_tokens: bool = False
    """True: max_tokens beyond the room in the context means the room. False: it is an error."""
    hurried: bool = False
    """Whether a form that takes more than some milliseconds to translate is left to others: TakesTimeError."""
    reasoning: FreeStart | None = None
    """What a form leaves free before it, unless it says so itself; None: nothing."""
    form_field: str = "structured_outputs"
    """What the client calls the form, for errors that are found later."""
    watched: WatchedOutput | None = None
    """What the output is watched for; None: nothing."""


PLAIN = RequestOptions()
WHOLE = PairCut()


class PreparedRequest(NamedTuple):
    """A request that passed every check."""

    prompt: str | None
    """None when the prompt was given as token ids."""
    request: EngineCoreRequest


class InputProcessor:
    """Checks and completes requests for one running engine."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        ready: EngineReady,
        eos_token_ids: tuple[int, ...],
        has_priorities: bool,
        pooling: Pooling | None = None,
    ) -> None:
        """`pooling`: of an engine that makes vectors and no text."""
        self._tokenizer = tokenizer
        self._pooling = pooling
        size = None if pooling is None else pooling.embedding_size
        processors = tuple(load_path("logits processor", path) for path in ready.logits_processors)
        most = ready.vocab_size if ready.max_logprobs == -1 else min(ready.max_logprobs, ready.vocab_size)
        longest = None if pooling is None else pooling.max_text_tokens
        self._bounds = Bounds(ready.max_model_len, ready.vocab_size, has_priorities, size, processors, most, longest)
        self._eos_token_ids = tuple(sorted(token for token in set(eos_token_ids) if 0 <= token < ready.vocab_size))
        if len(self._eos_token_ids) > MAX_END_TOKEN_IDS:
            raise ModelError(
                f"the model has {len(self._eos_token_ids)} end-of-sequence tokens; "
                f"at most {MAX_END_TOKEN_IDS} are allowed"
            )
        self._forms = ready.forms
        self._translations = Translations(ready.forms.backend, token_of=self._token_named)
        self._prefix = secrets.token_hex(8)
        self._count = itertools.count()

    @property
    def pools(self) -> bool:
        """Whether the engine makes vectors and no text."""
        return self._pooling is not None

    @property
    def pooling(self) -> Pooling:
        """What the engine makes of prompts. Raises RequestError when it generates text."""
        check_kind(PoolingParams, self._bounds)
        return self._pooling  # type: ignore[return-value]  # or the check had failed

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        return self._bounds.max_model_len

    def check_generates(self) -> None:
        """Raises RequestError when the engine makes vectors."""
        check_kind(SamplingParams, self._bounds)

    def prepare(
        self, prompt: Prompt, params: SamplingParams | PoolingParams, options: RequestOptions
    ) -> PreparedRequest:
        """The engine request for a prompt; `n` is kept (see `parallel_sampling`). Raises RequestError, and
        TakesTimeError where `options` say so.

        The parameters of the result are complete, as `EngineCoreRequest` promises, but for a seed
        that was not given. Its id is made here and unknown to clients.
        """
        check_kind(type(params), self._bounds)
        text, token_ids = self._tokens_of(prompt, options)
        admission = Admission(token_ids, params, options.priority, options.cache_salt)
        for check in CHECKS:
            check(admission, self._bounds)
        request = EngineCoreRequest(
            request_id=f"{self._prefix}-{next(self._count)}",
            prompt_token_ids=token_ids,
            params=self._complete(params, len(token_ids), options.clamp_max_tokens),
            arrival_time=time.monotonic(),
            priority=options.priority,
            cache_salt=options.cache_salt,
            grammar=self._grammar(params, options),
        )
        return PreparedRequest(text, request)

    def prepare_pair(
        self,
        first: object,
        second: object,
        params: PoolingParams,
        options: RequestOptions = PLAIN,
        cut: PairCut = WHOLE,
    ) -> PreparedRequest:
        """`prepare`, of two texts that are one prompt, as the tokenizer joins them. `cut`: how many of their tokens are
        kept. Raises RequestError."""
        texts = []
        for text, field, most in ((first, "text_1", cut.first), (second, "text_2", cut.second)):
            if not isinstance(text, str):
                raise RequestError(f"{shown(text)} is not allowed: this model scores pairs of texts", field)
            kept = _roughly_cut(text, cut.most, cut.keep_end) if most is None else _roughly_cut(text, most)
            self._check_text(kept, field)
            texts.append(kept)
        token_ids, second_at = self._tokenizer.encode_pair(texts[0], texts[1], None if cut == WHOLE else cut)
        return self.prepare(token_ids, params.replace(second_text_at=second_at), options)

    def tokenize(self, text: str, options: RequestOptions) -> list[int]:
        """The tokens of a text, which need not fit the context. Raises RequestError for one that is empty, no Unicode,
        or cannot fit by its length."""
        return self._tokenize(text, options)

    def tokenize_cut(
        self,
        text: str | Sequence[int],
        options: RequestOptions,
        most: int | None = None,
        keep_end: bool = False,
        most_plain: int | None = None,
    ) -> list[int]:
        """The first tokens of a text, or with `keep_end` the last ones: as many as fit the context, and at most `most`.
        Special tokens around the text stay, as transformers leaves them when it truncates; of token ids all are alike.
        `most_plain`: most tokens of the text by itself, the first ones. Raises RequestError."""
        room = self._bounds.max_model_len
        most = room if most is None else min(most, room)
        if not isinstance(text, str):
            return list(text[-most:] if keep_end else text[:most])
        text = _roughly_cut(text, most, keep_end) if most_plain is None else _roughly_cut(text, most_plain)
        token_ids = self._tokenize(text, options)
        if len(token_ids) <= min(most, most_plain or most):
            return token_ids
        plain = self._tokenize(text, dataclasses.replace(options, add_special_tokens=False))
        starts = range(len(token_ids) - len(plain) + 1)
        start = next((at for at in starts if token_ids[at : at + len(plain)] == plain), 0)
        first, last = token_ids[:start], token_ids[start + len(plain) :]
        plain = plain[:most_plain]
        num_kept = min(max(most - len(first) - len(last), 0), len(plain))
        kept = plain[len(plain) - num_kept :] if keep_end else plain[:num_kept]
        return [*first, *kept, *last][:most]

    def cut(self, prompt: Any, cut: Cut) -> list[int]:
        """The tokens of a prompt, in any form that it may have, as many as `cut` says. Raises RequestError."""
        return self.tokenize_cut(_plain(prompt), PLAIN, *cut)

    def pair_cut(self, cut: Cut | None) -> PairCut:
        """How two texts are cut that are read together; None: not at all."""
        if cut is None:
            return WHOLE
        room = self._bounds.max_model_len
        return PairCut(room if cut.most is None else min(cut.most, room), keep_end=cut.keep_end)

    def tokenize_gap(self, gap: Gap, max_tokens: int | None) -> GapPrompt:
        """A text with a gap as tokens, cut to leave room for `max_tokens`, up to half of the context (None: a quarter).
        Raises RequestError, also for a model without tokens to fill in with."""
        if self._tokenizer.fill_in is None:
            raise RequestError("this model has no tokens to fill in with")
        most = self._bounds.max_model_len
        room = most - (most // 4 if max_tokens is None else max(1, min(max_tokens, most // 2)))
        return gap_prompt(self._tokenizer, self._tokenizer.fill_in, gap, room)

    @property
    def fill_in_end_ids(self) -> tuple[int, ...]:
        """Tokens that end what fills a gap, besides those that end any output."""
        return () if self._tokenizer.fill_in is None else self._tokenizer.fill_in.ends

    def check_token_ids(self, token_ids: list[int], field: str) -> None:
        """Raises RequestError, which names the field, for ids that the model does not have."""
        known = range(self._bounds.vocab_size)
        wrong = next((item for item in token_ids if type(item) is not int or item not in known), None)
        if wrong is not None:
            raise RequestError(f"{field} holds {shown(wrong)}; token ids are 0 to {self._bounds.vocab_size - 1}", field)

    def source_of(self, form: StructuredOutputsParams, hurried: bool = False) -> str:
        """A form as the source of a grammar. Raises RequestError for one that cannot be followed, as far as that shows
        without trying; and TakesTimeError where it is `hurried`."""
        return self._translations.of(self._forms.applied(form), HURRIED_STEPS if hurried else None)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an output by themselves."""
        return self._eos_token_ids

    def is_end_of_sequence(self, token_id: int | None) -> bool:
        """Whether a token ends the output by itself, without a request naming it."""
        return token_id in self._eos_token_ids

    def _tokens_of(self, prompt: Any, options: RequestOptions) -> tuple[str | None, list[int]]:
        prompt = _plain(prompt)
        if isinstance(prompt, str):
            return unmarked(prompt) if options.rendered else prompt, self._tokenize(prompt, options)
        return None, prompt

    def _token_named(self, text: str) -> int | None:
        """The id of the control token of this name, or of the token that is this text by itself; None: neither."""
        ids = self._tokenizer.encode(text, add_special_tokens=False, rendered=self._tokenizer.hides(text))
        return ids[0] if len(ids) == 1 else None

    def _tokenize(self, text: str, options: RequestOptions) -> list[int]:
        self._check_text(text, "prompt")
        return self._tokenizer.encode(text, add_special_tokens=options.add_special_tokens, rendered=options.rendered)

    def _check_text(self, text: str, field: str) -> None:
        """Raises RequestError for a text that is empty, no Unicode, or cannot fit by its length."""
        if not text:
            raise RequestError("the prompt is empty; it must hold at least one character", field)
        num_tokens = self._bounds.max_prompt_len or self._bounds.max_model_len
        most = num_tokens * MAX_CHARS_PER_TOKEN
        if len(text) > most:
            raise RequestError(
                f"the prompt has {len(text)} characters, which cannot fit the context of "
                f"{num_tokens} tokens (at most {most} characters are tried)",
                field,
            )
        check_unicode(text, field)

    def _complete(
        self, params: SamplingParams | PoolingParams, num_prompt_tokens: int, clamp: bool
    ) -> SamplingParams | PoolingParams:
        if isinstance(params, PoolingParams):
            return self.pooling.completed(params)
        return self._complete_sampling(params, num_prompt_tokens, clamp)

    def _complete_sampling(self, params: SamplingParams, num_prompt_tokens: int, clamp: bool) -> SamplingParams:
        room = self._bounds.max_model_len - num_prompt_tokens
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if max_tokens > room and not clamp:
            raise RequestError(
                f"max_tokens={max_tokens} is too large: the prompt has {num_prompt_tokens} tokens, so at most {room} "
                f"are left of this model's context of {self._bounds.max_model_len} tokens",
                "max_tokens",
            )
        max_tokens = min(max_tokens, room)
        if params.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens={params.min_tokens} is not allowed: at most {max_tokens} tokens can be generated",
                "min_tokens",
            )
        stop_ids = tuple(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_ids = tuple(dict.fromkeys(stop_ids + self._eos_token_ids))
        seed = None if params.seed is None else params.seed & MAX_SEED
        words = self._bad_words(params) or None
        every = self._bounds.vocab_size
        complete = params.completed(
            max_tokens=max_tokens,
            stop_token_ids=stop_ids,
            seed=seed,
            bad_words_token_ids=words,
            logprobs=every if params.logprobs == -1 else params.logprobs,
            structured_outputs=None,
            prompt_logprobs=every if params.prompt_logprobs == -1 else params.prompt_logprobs,
        )
        check_tokens_are_left(complete)
        return complete

    def _grammar(self, params: SamplingParams | PoolingParams, options: RequestOptions) -> GrammarSpec | None:
        form = params.structured_outputs if isinstance(params, SamplingParams) else None
        watched = options.watched or WatchedOutput()
        if form is None:
            return None if watched.thinking is None else GrammarSpec("", thinking=watched.thinking)
        form = self._forms.applied(form)
        start, tokens = free_before(form, options.reasoning, self._tokenizer)
        form = msgspec.structs.replace(form, free_until=None)
        source = self._translations.of(form, HURRIED_STEPS if options.hurried else None, start)
        return GrammarSpec(
            source,
            tokens,
            options.form_field,
            watched.thinking,
            watched.triggers,
            watched.first_triggers,
            watched.parts,
        )

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """What must not be generated, as tokens: a word is other tokens after a blank than without."""
        found = dict.fromkeys(tuple(word) for word in params.bad_words_token_ids or ())
        for word in params.bad_words or ():
            for text in (word, f" {word.lstrip()}"):
                ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
                if not 0 < len(ids) <= MAX_BAD_WORD_TOKENS:
                    raise RequestError(
                        f"bad_words holds {shown(word)}, which is {len(ids)} tokens; 1 to {MAX_BAD_WORD_TOKENS} are "
                        "allowed",
                        "bad_words",
                    )
                if max(ids) < self._bounds.vocab_size:  # or it is never generated
                    found[ids] = None
        check_count("bad_words_token_ids", found, 0, MAX_BANNED_SEQUENCES)
        return tuple(found)


def _plain(prompt: Any) -> str | list[int]:
    """A prompt in any form that it may have -> a text, or token ids. Raises RequestError."""
    if isinstance(prompt, Mapping):
        prompt = _only_value(prompt)
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, (list, tuple)):
        return list(prompt)
    raise RequestError(f"the prompt is {shown(prompt)}; it must be a text or a list of token ids", "prompt")


def _only_value(prompt: Mapping[str, Any]) -> Any:
    """The text or the ids of a dict prompt."""
    if set(prompt) == {"prompt"} and isinstance(prompt["prompt"], str):
        return prompt["prompt"]
    if set(prompt) == {"prompt_token_ids"} and isinstance(prompt["prompt_token_ids"], (list, tuple, np.ndarray)):
        return prompt["prompt_token_ids"]
    raise RequestError(
        "a prompt given as a dict must be {'prompt': text} or {'prompt_token_ids': [ids]}; "
        f"this one has the keys {shown(sorted(map(str, prompt)))}",
        "prompt",
    )


def _roughly_cut(text: str, most: int | None, keep_end: bool = False) -> str:
    """What of a text could be among its first, or last, so many tokens; None: all."""
    if most is None:
        return text
    num_chars = most * MAX_CHARS_PER_TOKEN
    return text[-num_chars:] if keep_end else text[:num_chars]

"""`GuidanceBackend`: grammars that llguidance follows. Limits bound what one of them takes of memory, and of the time
of one token."""

import json
import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import llguidance
import numpy as np
import numpy.typing as npt

from pagemill.grammar.interface import BatchFill, Form, GrammarTooComplexError, JsonOptions
from pagemill.grammar.lark import ANY_TEXT, LarkWriter, choice_lark, grammar_lark, regex_lark, text
from pagemill.grammar.structural_tags import tag_rule
from pagemill.grammar.token_writer import TokenWriter
from pagemill.grammar.vocabulary import TokenTable
from pagemill.messages.structured_outputs import FreeStart
from pagemill.tokenizers.interface import Tokenizer

MAX_LEXER_STATES: Final = 50_000
"""Some 350 bytes each, of all outputs that share them; when they run out, they are made anew."""
MAX_GRAMMAR_SIZE: Final = 200_000
INITIAL_FUEL: Final = 200_000
STEP_FUEL: Final = 100_000
STEP_ITEMS: Final = 20_000
BOUNDED_WHITESPACE: Final = r"\n?[ ]{0,40}"
BYTES_PER_CHAR: Final = 512
"""What a grammar is taken to need for each character of its source, several times what schemas of the conformance
corpus were seen to take, since a grammar grows while outputs follow it."""
LEAST_BYTES: Final = 1 << 20
"""What a small one is taken to need."""
LEAST_USES: Final = 200
"""Masks and tokens that states must have served before they are made anew for an output that goes on. Where they run
out sooner, the form is too complex, and making them again and again would cost others their time."""
MAX_THREADS: Final = 8
"""That fill masks, at most half as many as there are CPUs: more would wake up for a mask or two each."""
_MAX_MESSAGE: Final = 300
_MATCHES_NOTHING: Final = ("NoExtension", "NoExtensionBias")
"""The library's whole message for a grammar that no text can follow, not even an empty one."""


class GuidanceBackend:
    """Implements `GrammarBackend` with llguidance, for one vocabulary."""

    check_s: ClassVar[float] = 0.4

    def __init__(self, table: TokenTable, tokenizer: Tokenizer | None = None) -> None:
        writer = TokenWriter(table.tokens, table.special, tokenizer)
        wrapper = llguidance.TokenizerWrapper(_Wrapped(table, writer))
        self._vocabulary = llguidance.LLTokenizer(
            wrapper, n_vocab=len(table.tokens), eos_token=table.ends, slices=llguidance.LLTokenizer.json_slices()
        )

    @staticmethod
    def check_installed() -> None:
        """It is imported above."""

    @staticmethod
    def source(form: Form) -> str:
        options = _json_options(form.options)
        match form.kind:
            case "json":
                found = _one(json_schema={**form.content, "x-guidance": options})
            case "regex":
                found = _one(lark_grammar=regex_lark(form.content))
            case "choice":
                found = _one(lark_grammar=choice_lark(form.content))
            case "grammar":
                found = _one(lark_grammar=grammar_lark(form.content))
            case _:
                writer = LarkWriter(options, form.schema)
                found = writer.source(tag_rule(form.content, writer, form.token_of))
        if form.start is not None:
            found = _after(form.start, found)
        return json.dumps(found, ensure_ascii=False)

    def matcher(self, source: str) -> "GuidanceMatcher":
        states = _States(lambda: self._made(source))
        return GuidanceMatcher(states.begin(), states, max(LEAST_BYTES, BYTES_PER_CHAR * len(source)))

    def _made(self, source: str) -> llguidance.LLMatcher:
        found = llguidance.LLMatcher(self._vocabulary, source, log_level=0, limits=limits())
        if found.is_error():
            raise ValueError(explain(found.get_error()))
        return found


class _States:
    """What the library works out of one grammar, for all outputs that follow it: it has a limit, and when that is
    reached, none of them can go on with it."""

    def __init__(self, make: Callable[[], llguidance.LLMatcher]) -> None:
        """Raises ValueError that says what is wrong with the grammar."""
        self._make = make
        self._start = make()
        self._next: _States | None = None
        self._first_forced: list[int] | None = None
        self._first_mask: npt.NDArray[np.int32] | None = None
        self.num_uses = 0
        self.worn = False

    def begin(self) -> llguidance.LLMatcher:
        """An output that is about to begin."""
        return self._start.deep_copy()

    def first_forced(self) -> list[int]:
        """What outputs begin with where there is no choice. Worked out once: it is the same for all of them, and part
        of the time to their first token."""
        if self._first_forced is None:
            self._first_forced = self.begin().compute_ff_tokens()
        return list(self._first_forced)

    def first_mask(self) -> npt.NDArray[np.int32] | None:
        """The mask of the first token, where one was noted."""
        return self._first_mask

    def note_first_mask(self, mask: npt.NDArray[np.int32]) -> None:
        """It is that of every output that has no tokens yet, too."""
        if self._first_mask is None:
            self._first_mask = mask.copy()

    def next(self) -> "_States":
        """New ones, the same for all outputs that ask."""
        if self._next is None:
            self._next = _States(self._make)
        return self._next.next() if self._next.ran_out else self._next

    @property
    def ran_out(self) -> bool:
        """Whether a limit was reached after so much use that new ones would serve as long."""
        return self.worn and self.num_uses >= LEAST_USES


class GuidanceMatcher:
    """Implements `TokenMatcher`. When what it shares with other outputs has run out, it goes on with new states, in
    which it follows its tokens again."""

    def __init__(
        self, matcher: llguidance.LLMatcher, states: _States, num_bytes: int, taken: Sequence[int] = ()
    ) -> None:
        """`taken`: the tokens that it has followed."""
        self._matcher = matcher
        self._states = states
        self._taken = list(taken)
        self.num_bytes = num_bytes

    def copy(self) -> "GuidanceMatcher":
        return GuidanceMatcher(self._matcher.deep_copy(), self._states, self.num_bytes, self._taken)

    @property
    def worn(self) -> bool:
        return self._states.worn

    def accept(self, token_ids: Sequence[int]) -> int:
        tokens = list(token_ids)
        self._states.num_uses += 1
        count = self._matcher.try_consume_tokens(tokens)
        # States that have run out refuse tokens, too, and do not always say why.
        while count < len(tokens) and self._ran_out() and self._renew(tokens[:count]):
            count += self._matcher.try_consume_tokens(tokens[count:])
        if self._matcher.is_error():
            self._check()
        self._taken += tokens[:count]
        return count

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        return self._matcher.validate_tokens(list(token_ids))

    def forced(self) -> list[int]:
        if not self._taken:
            return self._states.first_forced()
        return self._matcher.compute_ff_tokens()

    @property
    def complete(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def ended(self) -> bool:
        return self._matcher.is_stopped()

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        if not mask.flags.c_contiguous:
            raise ValueError("a mask must be contiguous")
        if self.copy_first_mask(mask):
            return
        self._states.num_uses += 1
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error() and self._renew():
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        if not self._taken:
            self._states.note_first_mask(mask)

    def copy_first_mask(self, mask: npt.NDArray[np.int32]) -> bool:
        """Fill the mask of the first token from what other outputs worked out; False where there is nothing, or the
        output has begun."""
        found = None if self._taken else self._states.first_mask()
        if found is None:
            return False
        mask[:] = found
        return True

    @staticmethod
    def batch(parallel: bool) -> BatchFill:
        num_threads = min(MAX_THREADS, (os.cpu_count() or 1) // 2) if parallel else 1
        # A single thread beside this one would only be waited for, and look for work where there is none.
        return _fill_with(llguidance.LLExecutor(num_threads)) if num_threads > 1 else _fill_here

    def filled(self, masks: npt.NDArray[np.int32], row: int) -> str | None:
        """Why the output cannot be followed any further within the limits, after a call that was to fill its mask, one
        of several; None where it can, and the mask is there."""
        self._states.num_uses += 1
        if not self._matcher.is_error():
            return None
        if self._renew():
            mask = masks[row]
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return self._problem()

    def _ran_out(self) -> bool:
        if self._matcher.is_stopped():
            return self._matcher.is_error()
        probe = self._matcher.deep_copy()
        probe.compute_bitmask()
        return probe.is_error()

    def _renew(self, taken: Sequence[int] = ()) -> bool:
        """Follow the output in new states, with these further tokens. Whether it can go on."""
        self._states.worn = True
        if not self._states.ran_out:
            return False
        states = self._states.next()
        matcher = states.begin()
        tokens = [*self._taken, *taken]
        if matcher.try_consume_tokens(tokens) < len(tokens) or matcher.is_error():
            return False
        self._matcher, self._states = matcher, states
        return True

    def _problem(self) -> str | None:
        if not self._matcher.is_error():
            return None
        self._states.worn = True
        return explain(self._matcher.get_error())

    def _check(self) -> None:
        problem = self._problem()
        if problem is not None:
            raise GrammarTooComplexError(problem)


def _fill_here(matchers: Sequence[GuidanceMatcher], masks: npt.NDArray[np.int32]) -> list[str | None]:
    """Implements `BatchFill`, on the thread that calls it."""
    address, num_bytes = masks.ctypes.data, masks.strides[0]
    for row, matcher in enumerate(matchers):
        if not matcher.copy_first_mask(masks[row]):
            matcher._matcher.unsafe_compute_mask_ptr(address + row * num_bytes, num_bytes)
    return _filled(matchers, masks)


def _fill_with(executor: llguidance.LLExecutor) -> BatchFill:
    """Implements `BatchFill`, on the threads of an executor."""

    def fill(matchers: Sequence[GuidanceMatcher], masks: npt.NDArray[np.int32]) -> list[str | None]:
        handles = [(matcher._matcher, row) for row, matcher in enumerate(matchers)]
        executor.unsafe_compute_mask_ptr(handles, masks.ctypes.data, masks.strides[0], len(masks))
        return _filled(matchers, masks)

    return fill


def _filled(matchers: Sequence[GuidanceMatcher], masks: npt.NDArray[np.int32]) -> list[str | None]:
    return [matcher.filled(masks, row) for row, matcher in enumerate(matchers)]


def limits() -> llguidance.LLParserLimits:
    """What one grammar may take."""
    return llguidance.LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        initial_lexer_fuel=INITIAL_FUEL,
        step_lexer_fuel=STEP_FUEL,
        step_max_items=STEP_ITEMS,
        # Without it, the limits of a step do not hold where a lexeme is large.
        precompute_large_lexemes=True,
        verbose_errors=False,
    )


def explain(error: str) -> str:
    """The library's words for what is wrong with a grammar, without what helps nobody."""
    if error.startswith("oneOf constraints are not supported"):
        error = "oneOf is not supported where its branches may allow the same value" + error.partition("anyOf")[2]
    error = error.replace("<non-verbose/>", "").replace("Unimplemented keys: ", "these keywords are not supported: ")
    if error.strip() in _MATCHES_NOTHING:
        return "nothing can match it: a $ref, or a rule, leads to itself before anything else is asked for"
    return " ".join(error.split())[:_MAX_MESSAGE]


def _one(**content: Any) -> dict[str, Any]:
    return {"grammars": [{"name": "answer", **content}]}


def _after(free: FreeStart, found: dict[str, Any]) -> dict[str, Any]:
    """Free text, and then the rest."""
    names = [f"thought_{number}" for number in range(len(free.ends))]
    gap = " GAP?" if free.gap else ""
    thought = f"{' '.join(names)}{gap}"
    before = ""
    if free.begin is not None:
        thought = f"({thought})?"
        before = f"{text(free.begin)} "
    lines = [f"start: {thought} @{found['grammars'][0]['name']}"]
    for name, ends in zip(names, free.ends, strict=True):
        lines.append(f"{name}[lazy]: {before}{ANY_TEXT} ({' | '.join(map(text, ends))})")
        before = ""
    if free.gap:
        lines.append(r"GAP: /\n\n?/")
    return {"grammars": [{"name": "thought_first", "lark_grammar": "\n".join(lines)}, *found["grammars"]]}


def _json_options(options: JsonOptions) -> dict[str, Any]:
    found: dict[str, Any] = {"lenient": False, "coerce_one_of": False}
    if options.compact:
        return {**found, "whitespace_flexible": False}
    return {**found, "whitespace_pattern": BOUNDED_WHITESPACE if options.whitespace is None else options.whitespace}


class _Wrapped:
    """What the library reads of a tokenizer."""

    bos_token_id = None

    def __init__(self, table: TokenTable, encode: Callable[[bytes], list[int]]) -> None:
        self.eos_token_id = table.ends[0]
        self.special_token_ids = table.special
        self.tokens = table.tokens
        self._encode = encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text)

"""`GuidanceBackend`: grammars that llguidance follows. Limits bound what one of them takes of memory, and of the time
of one token."""

import json
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

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
"""One or two KiB each."""
MAX_GRAMMAR_SIZE: Final = 200_000
INITIAL_FUEL: Final = 200_000
STEP_FUEL: Final = 100_000
STEP_ITEMS: Final = 20_000
BOUNDED_WHITESPACE: Final = r"\n?[ ]{0,40}"
BYTES_PER_CHAR: Final = 512
"""What a grammar is taken to need for each character of its source, several times what schemas of the conformance
corpus were seen to take, since a grammar grows while outputs follow it."""
LEAST_BYTES: Final = 256 << 10
"""What a small one is taken to need."""
MAX_THREADS: Final = 8
"""That fill masks, at most half as many as there are CPUs: more would wake up for a mask or two each."""
_MAX_MESSAGE: Final = 300


class GuidanceBackend:
    """Implements `GrammarBackend`."""

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
                found = writer.source(tag_rule(form.content, writer))
        if form.start is not None:
            found = _after(form.start, found)
        return json.dumps(found, ensure_ascii=False)

    def matcher(self, source: str) -> "GuidanceMatcher":
        found = llguidance.LLMatcher(self._vocabulary, source, log_level=0, limits=limits())
        if found.is_error():
            raise ValueError(explain(found.get_error()))
        return GuidanceMatcher(found, max(LEAST_BYTES, BYTES_PER_CHAR * len(source)))


class GuidanceMatcher:
    """Implements `TokenMatcher`."""

    def __init__(self, matcher: llguidance.LLMatcher, num_bytes: int) -> None:
        self._matcher = matcher
        self.num_bytes = num_bytes

    def copy(self) -> "GuidanceMatcher":
        return GuidanceMatcher(self._matcher.deep_copy(), self.num_bytes)

    def accept(self, token_ids: Sequence[int]) -> int:
        count = self._matcher.try_consume_tokens(list(token_ids))
        self._check()
        return count

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        return self._matcher.validate_tokens(list(token_ids))

    def forced(self) -> list[int]:
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
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()

    @staticmethod
    def batch() -> BatchFill:
        num_threads = min(MAX_THREADS, (os.cpu_count() or 1) // 2)
        # A single thread beside this one would only be waited for, and look for work where there is none.
        return _fill_with(llguidance.LLExecutor(num_threads)) if num_threads > 1 else _fill_here

    def problem(self) -> str | None:
        """Why the output cannot be followed any further within the limits; None where it can."""
        return explain(self._matcher.get_error()) if self._matcher.is_error() else None

    def _check(self) -> None:
        problem = self.problem()
        if problem is not None:
            raise GrammarTooComplexError(problem)


def _fill_here(matchers: Sequence[GuidanceMatcher], masks: npt.NDArray[np.int32]) -> list[str | None]:
    """Implements `BatchFill`, on the thread that calls it."""
    address, num_bytes = masks.ctypes.data, masks.strides[0]
    for row, matcher in enumerate(matchers):
        matcher._matcher.unsafe_compute_mask_ptr(address + row * num_bytes, num_bytes)
    return [matcher.problem() for matcher in matchers]


def _fill_with(executor: llguidance.LLExecutor) -> BatchFill:
    """Implements `BatchFill`, on the threads of an executor."""

    def fill(matchers: Sequence[GuidanceMatcher], masks: npt.NDArray[np.int32]) -> list[str | None]:
        handles = [(matcher._matcher, row) for row, matcher in enumerate(matchers)]
        executor.unsafe_compute_mask_ptr(handles, masks.ctypes.data, masks.strides[0], len(masks))
        return [matcher.problem() for matcher in matchers]

    return fill


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

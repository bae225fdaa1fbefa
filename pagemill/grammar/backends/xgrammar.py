"""`XGrammarBackend`: grammars that xgrammar follows, an optional extra. It gets them as EBNF, whatever their kind: its
own reading of JSON schemas ignores what it does not know. It bounds nothing by itself."""

import importlib.util
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from pagemill.errors import ConfigError
from pagemill.grammar.ebnf.forms import ebnf_of
from pagemill.grammar.interface import WORD_BITS, BatchFill, Form, fill_each, num_words
from pagemill.grammar.vocabulary import TokenTable
from pagemill.tokenizers.interface import Tokenizer

INSTALL: Final = "pip install 'pagemill[xgrammar]'"
_MAX_MESSAGE: Final = 300


class XGrammarBackend:
    """Implements `GrammarBackend` with xgrammar, for one vocabulary."""

    check_s: ClassVar[float] = 1.5

    def __init__(self, table: TokenTable, tokenizer: Tokenizer | None = None) -> None:
        # Deferred: an optional package, which imports torch.
        import xgrammar

        self._library = xgrammar
        hidden = {*table.special, *table.ends}
        # What has no bytes is never allowed, but for the tokens that end an output.
        tokens = [b"" if token in hidden else content for token, content in enumerate(table.tokens)]
        info = self._library.TokenizerInfo(
            tokens, vocab_type=self._library.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=table.ends
        )
        self._compiler = self._library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._ends = frozenset(table.ends)
        only_ends = np.zeros(num_words(len(tokens)), np.uint32)
        for token in table.ends:
            only_ends[token // WORD_BITS] |= np.uint32(1 << token % WORD_BITS)
        self._only_ends = only_ends.view(np.int32)

    @staticmethod
    def check_installed() -> None:
        if importlib.util.find_spec("xgrammar") is None:
            raise ConfigError(f"structured_outputs_config: backend='xgrammar' is not installed; {INSTALL}")

    @staticmethod
    def source(form: Form) -> str:
        return ebnf_of(form)

    def matcher(self, source: str) -> "XGrammarMatcher":
        try:
            compiled = self._compiler.compile_grammar(source)
        except RuntimeError as error:
            raise ValueError(_explained(str(error))) from None
        found = self._library.GrammarMatcher(compiled)
        return XGrammarMatcher(found, self._ends, self._only_ends, compiled.memory_size_bytes)


class XGrammarMatcher:
    """Implements `TokenMatcher`. Forces no tokens: a mask with one token says as much."""

    worn = False

    def __init__(self, matcher: Any, ends: frozenset[int], only_ends: npt.NDArray[np.int32], num_bytes: int) -> None:
        """`only_ends`: the mask of the tokens `ends`."""
        self._matcher = matcher
        self._ends = ends
        self._only_ends = only_ends
        self._mask: npt.NDArray[np.int32] | None = None
        """Of what may come next, once it was asked for."""
        self.num_bytes = num_bytes

    def copy(self) -> "XGrammarMatcher":
        return XGrammarMatcher(self._matcher.fork(), self._ends, self._only_ends, self.num_bytes)

    def accept(self, token_ids: Sequence[int]) -> int:
        self._mask = None
        for count, token in enumerate(token_ids):
            if not self._takes(token):
                return count
        return len(token_ids)

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        return self.copy().accept(token_ids)

    def forced(self) -> list[int]:
        return []

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_terminated() or self._matcher.is_completed())

    @property
    def ended(self) -> bool:
        if self._matcher.is_terminated():
            return True
        return bool(self._matcher.is_completed()) and np.array_equal(self._next(), self._only_ends)

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        if not mask.flags.c_contiguous:
            raise ValueError("a mask must be contiguous")
        mask[:] = self._next()

    @staticmethod
    def batch(parallel: bool) -> BatchFill:
        return fill_each

    def _takes(self, token: int) -> bool:
        if self._matcher.is_terminated():
            return False
        return bool(self._matcher.accept_token(token))

    def _next(self) -> npt.NDArray[np.int32]:
        if self._mask is None:
            if self._matcher.is_terminated():
                self._mask = self._only_ends
            else:
                self._mask = np.full(len(self._only_ends), -1, np.int32)
                self._matcher.fill_next_token_bitmask(self._mask[None])
        return self._mask


def _explained(error: str) -> str:
    """The library's words for what is wrong with a grammar, without the place in its source."""
    lines = [line.partition(" is false: ")[2] or line for line in error.splitlines() if line.strip()]
    return " ".join((lines[-1] if lines else "the grammar is malformed").split())[:_MAX_MESSAGE]

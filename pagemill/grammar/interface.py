"""The seam between structured output and the libraries that follow grammars: a `GrammarBackend` writes the form of an
output down as a source, and makes a `TokenMatcher` of a source. Knows no library."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import numpy as np
import numpy.typing as npt

from pagemill.grammar.json_values import Budget
from pagemill.grammar.structural_tags import TokenOf
from pagemill.grammar.vocabulary import TokenTable
from pagemill.messages.structured_outputs import FreeStart
from pagemill.tokenizers.interface import Tokenizer

WORD_BITS: Final = 32


def num_words(vocab_size: int) -> int:
    """32-bit words of a mask."""
    return -(-vocab_size // WORD_BITS)


class GrammarTooComplexError(ValueError):
    """An output cannot be followed any further within the limits."""


class TokenMatcher(Protocol):
    """The state of one output: follows it token by token, and says which tokens may come next. Copies share what was
    worked out of the grammar, and no state."""

    num_bytes: int
    """Memory that the grammar is taken to need."""

    def copy(self) -> "TokenMatcher":
        """Another output from here on."""

    @property
    def worn(self) -> bool:
        """Whether what copies share has reached a limit: then the next output needs a matcher that is made anew."""

    def accept(self, token_ids: Sequence[int]) -> int:
        """The output goes on with these tokens; how many of them may come, from the first one on. What follows the
        first that may not is not taken. Raises GrammarTooComplexError."""

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these may come next, from the first one on. The output does not go on."""

    def forced(self) -> list[int]:
        """Tokens that must come next, as the tokenizer would write them; none where there is a choice, or where the
        library does not say."""

    @property
    def complete(self) -> bool:
        """Whether the output may end here."""

    @property
    def ended(self) -> bool:
        """Whether nothing but an end-of-sequence token may come next, or that has come."""

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        """[ceil(V / 32)] words, a bit for each token that may come next: token t is bit t % 32 of word t // 32. Raises
        GrammarTooComplexError, and ValueError for a mask that is not contiguous."""

    @staticmethod
    def batch(parallel: bool) -> "BatchFill":
        """What fills the masks of several outputs of this library at once: `fill_each`, or something faster.
        `parallel`: whether there are cores with nothing to do for threads of its own."""


BatchFill = Callable[[Sequence[Any], npt.NDArray[np.int32]], list[str | None]]
"""[K] matchers of one library and their masks, contiguous rows -> why there is none, for each output that cannot be
followed any further. Called by one thread at a time."""


def fill_each(matchers: Sequence[TokenMatcher], masks: npt.NDArray[np.int32]) -> list[str | None]:
    """Implements `BatchFill`: one after the other."""
    problems: list[str | None] = []
    for matcher, mask in zip(matchers, masks, strict=True):
        try:
            matcher.fill(mask)
            problems.append(None)
        except GrammarTooComplexError as error:
            problems.append(str(error))
    return problems


@dataclass(frozen=True)
class JsonOptions:
    """How JSON is written."""

    whitespace: str | None
    """Regular expression of what may stand between its parts; None: at most a newline and 40 blanks."""
    compact: bool
    """Whether nothing may."""


@dataclass(frozen=True)
class Form:
    """What an output must look like, checked as far as that needs no library."""

    kind: str
    """`json`, `regex`, `choice`, `grammar` or `structural_tag`; a JSON object is `json`."""
    content: Any
    """A schema (as `grammar.json_schema.supported` gives it), a pattern, texts, a grammar, or the object of a tag."""
    options: JsonOptions
    """Of JSON, also inside a structural tag."""
    schema: Callable[[Any], dict[str, Any]]
    """Makes a schema inside a structural tag a supported one. Raises ValueError."""
    start: FreeStart | None = None
    """What may come before it."""
    token_of: TokenOf = lambda text: None
    """Finds the tokens that a structural tag names."""
    budget: Budget | None = None
    """For the work of a backend on it as well. None: what the backend allows each part."""


class GrammarBackend(Protocol):
    """A library, and the vocabulary of one model in the form that it works with. Used from several threads."""

    check_s: ClassVar[float]
    """Processor time that one grammar may take to be tried; what takes more is refused. Nearly all should take much
    less, also on a slow machine; where all cores are busy, the refusal takes several times as long."""

    def __init__(self, table: TokenTable, tokenizer: Tokenizer | None = None) -> None:
        """Takes up to seconds for a large vocabulary. Without a tokenizer, forced tokens need not be those that it
        would choose; all else is the same."""

    @staticmethod
    def check_installed() -> None:
        """Raises ConfigError that says what to install, when the library is not there."""

    @staticmethod
    def source(form: Form) -> str:
        """The form in the library's terms; takes a bounded time and does not need the library. Raises ValueError,
        which says what is not supported."""

    def matcher(self, source: str) -> TokenMatcher:
        """Of an output that is about to begin. May take seconds, and lets go of the interpreter meanwhile. Raises
        ValueError that says what is wrong with the grammar."""

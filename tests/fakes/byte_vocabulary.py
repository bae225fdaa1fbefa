"""A vocabulary of 256 tokens for the bytes, one of each value, some longer ones, and one that ends an output; and what
follows grammars over it."""

from typing import Any

from pagemill.catalog.grammars import GRAMMARS, GUIDANCE
from pagemill.grammar.interface import GrammarBackend, TokenMatcher
from pagemill.grammar.translate import translated
from pagemill.grammar.vocabulary import TokenTable
from pagemill.messages.structured_outputs import FreeStart, StructuredOutputsParams
from pagemill.tokenizers.interface import VocabularyBytes

END = 256
TABLE = TokenTable([bytes([byte]) for byte in range(256)] + [b"<end>", b'":', b'{"', b"true"], [END], [END])


class ByteTokens:
    """What is read of a tokenizer: it has these tokens, and writes texts as bytes."""

    eos_token_ids = (END,)

    def vocabulary_bytes(self) -> VocabularyBytes:
        """The tokens."""
        return VocabularyBytes(TABLE.tokens, TABLE.special)

    def encode(self, text: str, add_special_tokens: bool = True, *, rendered: bool = False) -> list[int]:
        """One token for each byte."""
        return list(text.encode())


class Following:
    """A grammar backend over the vocabulary."""

    def __init__(self, name: str = GUIDANCE) -> None:
        self.name = name
        self.backend: GrammarBackend = GRAMMARS.resolve(name)(TABLE)

    def matcher(self, start: FreeStart | None = None, **form: Any) -> TokenMatcher:
        """Of an output of this form, after `start`. Raises ValueError."""
        return self.backend.matcher(translated(StructuredOutputsParams(**form), self.name, start=start))


def accepts(vocabulary: Following, text: str, **form: Any) -> bool:
    """Whether an output of this form may be this text, byte by byte."""
    return matches(vocabulary.matcher(**form), text)


def matches(matcher: TokenMatcher, text: str) -> bool:
    """Whether an output may be this text, byte by byte."""
    copy = matcher.copy()
    tokens = list(text.encode())
    return copy.accept(tokens) == len(tokens) and copy.complete

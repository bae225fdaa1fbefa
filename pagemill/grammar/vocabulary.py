"""The tokens of a model as bytes, which is all that a grammar needs to know of it."""

from collections.abc import Sequence

import msgspec

from pagemill.tokenizers.interface import Tokenizer


class TokenTable(msgspec.Struct, frozen=True):
    """What a grammar needs to know of a vocabulary."""

    tokens: list[bytes]
    """By id, as many as the logits are wide; nothing for an id without a token."""
    special: list[int]
    """Control tokens, whose bytes are their names."""
    ends: list[int]
    """Tokens that end an output; at least one."""


def token_table(tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> TokenTable:
    """Of a model whose logits are `vocab_size` wide. Raises ValueError when the tokens cannot be told as bytes, or none
    of `ends` is among them: a grammar would have no way to say that it is complete."""
    found = tokenizer.vocabulary_bytes()
    if found is None:
        raise ValueError("the model's tokenizer does not say which bytes each token stands for")
    kept = sorted({token for token in ends if 0 <= token < vocab_size})
    if not kept:
        raise ValueError("the model has no end-of-sequence token")
    tokens = found.tokens[:vocab_size]
    tokens += [b""] * (vocab_size - len(tokens))
    return TokenTable(tokens, [token for token in found.special if token < vocab_size], kept)

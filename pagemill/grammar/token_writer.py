"""`TokenWriter`: bytes that an output must have, as tokens that stand for exactly these bytes. Knows no grammar."""

from collections.abc import Iterator, Sequence
from typing import Final

from pagemill.errors import RequestError
from pagemill.tokenizers.control_text import ControlText
from pagemill.tokenizers.interface import Tokenizer

_BEFORE: Final = ("\x02", "\n")
"""What may stand before a text, where a tokenizer writes the very first word of a text in another way, such as with a
blank: characters that it joins with nothing."""
_LONGEST: Final = 64
"""Bytes of a token that are looked at where no tokenizer is asked."""


class TokenWriter:
    """Writes bytes as the tokenizer would. Where it would write other bytes (it normalizes characters), or there is
    none, or the bytes end inside a character, they are the longest tokens that fit, one after the other."""

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], tokenizer: Tokenizer | None = None) -> None:
        """`tokens`: the bytes of each token, by id; `special`: ids of control tokens, whose bytes are their names. No
        bytes are written as one of these: spelling the name of a control token is not saying it."""
        self._tokens = tokens
        self._special = frozenset(special)
        self._tokenizer = tokenizer
        self._control = ControlText(tokens[token].decode(errors="replace") for token in special)
        self._ids = {token: index for index, token in enumerate(tokens) if token and index not in self._special}
        self._longest = min(max(map(len, self._ids), default=1), _LONGEST)

    def __call__(self, text: bytes) -> list[int]:
        """Their tokens; bytes that no token begins with are left out."""
        for found in self._as_written(text):
            if self._stand_for(found, text):
                return found
        return self._longest_first(text)

    def _as_written(self, text: bytes) -> Iterator[list[int]]:
        if self._tokenizer is None:
            return
        try:
            words = text.decode()
            yield self._encode(words)
            for before in _BEFORE:
                start = self._encode(before)
                found = self._encode(before + words)
                if found[: len(start)] == start:
                    yield found[len(start) :]
        except (UnicodeDecodeError, RequestError):
            return

    def _encode(self, text: str) -> list[int]:
        marked = self._control.as_text(text)
        tokenizer = self._tokenizer
        if tokenizer is None:
            return []
        return tokenizer.encode(marked, add_special_tokens=False, rendered=marked != text)

    def _stand_for(self, token_ids: Sequence[int], text: bytes) -> bool:
        if any(token in self._special or token >= len(self._tokens) for token in token_ids):
            return False
        return b"".join([self._tokens[token] for token in token_ids]) == text

    def _longest_first(self, text: bytes) -> list[int]:
        found = []
        at = 0
        while at < len(text):
            for length in range(self._longest, 0, -1):
                token = self._ids.get(text[at : at + length])
                if token is not None:
                    found.append(token)
                    break
            at += length
        return found

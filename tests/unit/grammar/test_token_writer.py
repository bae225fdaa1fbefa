import pytest

from pagemill.grammar.token_writer import TokenWriter
from pagemill.tokenizers.control_text import MARK

TOKENS = [b" ", b"a", b"b", b"ab", b" ab", b"<", b">", b"<b>", b"\x02", b"\xc3", b"\xa9", b"e", b"ba"]
CONTROL = [7]


class Words:
    """Writes words that it knows, and control tokens; `first`: what it adds to the very first word."""

    def __init__(self, first="", changes=None):
        self.first = first
        self.changes = changes or {}

    def encode(self, text, add_special_tokens=True, *, rendered=False):
        assert not add_special_tokens
        if rendered:
            text = text.replace(MARK, "\0")
        data = (self.first + "".join(self.changes.get(char, char) for char in text)).encode()
        found = []
        while data:
            sizes = [len(token) for token in TOKENS if data.startswith(token)]
            if not sizes:
                data = data[1:]
                continue
            found.append(TOKENS.index(data[: max(sizes)]))
            data = data[max(sizes) :]
        return found


def written(text, tokenizer=None):
    found = TokenWriter(TOKENS, CONTROL, tokenizer)(text)
    assert b"".join(TOKENS[token] for token in found) == text
    assert not set(found) & set(CONTROL)
    return [TOKENS[token] for token in found]


@pytest.mark.parametrize("first", ["", " "])
def test_bytes_are_written_as_the_tokenizer_writes_them(first):
    """Also by one that adds a blank before the first word."""
    assert written(b"ab ab", Words(first)) == [b"ab", b" ab"]
    assert written(b"bab", Words(first)) == [b"ba", b"b"]


def test_the_name_of_a_control_token_is_text():
    assert written(b"a<b>", Words()) == [b"a", b"<", b"b", b">"]
    assert written(b"<b>") == [b"<", b"b", b">"]


def test_what_the_tokenizer_would_change_is_written_as_it_is():
    assert written("é".encode(), Words(changes={"é": "e"})) == [b"\xc3", b"\xa9"]


def test_bytes_that_end_inside_a_character():
    assert written(b"ab\xc3", Words()) == [b"ab", b"\xc3"]

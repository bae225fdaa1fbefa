"""`ControlText`: text that spells a control token, kept apart from the control token itself.

A mark is put inside the spelling, so that the tokenizer does not find the token; where it goes on, with `MARK` removed,
the text is what it was. Knows nothing about conversations but that they are made of texts, and nothing about requests.
"""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

MARK: Final = "\ufdd0\ufdd1"
"""Two code points that are no characters: Unicode keeps them for the inside of programs."""
_FIRST: Final = MARK[0]
_ESCAPED: Final = _FIRST + MARK
"""What may begin a MARK, in a text or with the text that a template puts behind it: without the MARK it is there again,
and is none with what follows."""
_PROSE: Final = frozenset({"arguments", "content", "name", "reasoning", "reasoning_content", "text"})
"""Keys of messages whose texts a template puts next to others, so that a token may be spelled by two of them."""
_DOCUMENTS: Final = "documents"

_Trie = dict[str, Any]


def unmarked(text: str) -> str:
    """The text as it was before any marks."""
    return text.replace(MARK, "")


class ControlText:
    """The control tokens of one tokenizer. All work is linear in the length of the texts."""

    def __init__(self, tokens: Iterable[str]) -> None:
        # A token of one character has no inside.
        known = sorted({token for token in tokens if len(token) > 1})
        self._spelling = re.compile(_pattern(known)) if known else None
        self._firsts = frozenset(token[0] for token in known)
        self._lasts = frozenset(token[-1] for token in known)
        self._shortest = min(map(len, known), default=0)
        self._longest = max(map(len, known), default=0)
        self._beginnings = frozenset(token[:end] for token in known for end in range(1, len(token)))
        self._endings = frozenset(token[start:] for token in known for start in range(1, len(token)))
        self._all = "\0".join(known)

    def escaped(self, text: str) -> str:
        """The same text, in which a MARK of its own is no mark, nor one that it begins."""
        return text.replace(_FIRST, _ESCAPED) if _FIRST in text else text

    def as_text(self, text: str) -> str:
        """The text with a mark in each control token that it spells."""
        text = self.escaped(text)
        cuts = [0, *(start + 1 for start in self._starts(text)), len(text)]
        return MARK.join(text[begin:end] for begin, end in itertools.pairwise(cuts))

    def sealed(self, text: str) -> str:
        """`as_text`, with marks also where the text may be one end of a control token that what stands before or after
        it completes."""
        if not text:
            return text
        text = self.as_text(text)
        begin = len(text) - len(text.lstrip())
        end = len(text.rstrip())
        if begin >= end:
            return text
        if self._may_begin(text[begin:end]):
            text = text[:end] + MARK + text[end:]
        if self._may_end(text[begin:end]):
            text = text[:begin] + MARK + text[begin:]
        return text

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Copies of messages in which every text is text."""
        return [{key: self._value(value, key) for key, value in message.items()} for message in messages]

    def variables(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of a template's variables in which every text is text. Those of documents stand next to others, under
        whatever keys."""
        return {
            key: self._sealed_value(value) if key == _DOCUMENTS else self._value(value)
            for key, value in variables.items()
        }

    def _value(self, value: Any, key: object = None) -> Any:
        if isinstance(value, str):
            return self.sealed(value) if key in _PROSE else self.as_text(value)
        if isinstance(value, Mapping):
            return {self._value(name): self._value(item, name) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._value(item, key) for item in value]
        return value

    def _sealed_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.sealed(value)
        if isinstance(value, Mapping):
            return {self._value(name): self._sealed_value(item) for name, item in value.items()}
        return [self._sealed_value(item) for item in value] if isinstance(value, (list, tuple)) else value

    def _starts(self, text: str) -> list[int]:
        """Where control tokens begin, also inside others."""
        if self._spelling is None or len(text) < self._shortest or not any(char in text for char in self._firsts):
            return []
        found = []
        at = 0
        while (match := self._spelling.search(text, at)) is not None:
            found.append(match.start())
            at = match.start() + 1
        return found

    def _may_begin(self, text: str) -> bool:
        """Whether its last characters are the first ones of a token, or it lies inside of one."""
        if len(text) < self._longest and text in self._all:
            return True
        tail = text[-self._longest :]
        if self._firsts.isdisjoint(tail):
            return False
        return any(char in self._firsts and tail[at:] in self._beginnings for at, char in enumerate(tail))

    def _may_end(self, text: str) -> bool:
        """Whether its first characters are the last ones of a token."""
        head = text[: self._longest]
        if self._lasts.isdisjoint(head):
            return False
        return any(head[:size] in self._endings for size in range(1, len(head) + 1))


def _pattern(tokens: Sequence[str]) -> str:
    """A regular expression that matches at the start of every token, without trying one after the other."""
    trie: _Trie = {}
    for token in tokens:
        node = trie
        for char in token:
            node = node.setdefault(char, {})
            if "" in node:
                break  # a shorter token begins here too
        node.clear()
        node[""] = {}
    return _branches(trie)


def _branches(node: _Trie) -> str:
    parts = []
    for char, after in node.items():
        run = re.escape(char)
        while len(after) == 1 and "" not in after:
            (char, after), *_ = after.items()
            run += re.escape(char)
        parts.append(run if "" in after else run + _branches(after))
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"

"""Text on a terminal: what may be sent to it, and how. Knows nothing about models."""

import unicodedata
from typing import TextIO

_KEPT_CONTROLS = "\n\t"


def printable(text: str) -> str:
    """The text without control characters: a model must not be able to move the cursor or retitle the window."""
    return "".join(char for char in text if char in _KEPT_CONTROLS or unicodedata.category(char) != "Cc")


def write_dim(text: str, stream: TextIO) -> None:
    """A faint line of its own, on a terminal."""
    stream.write(f"\x1b[2m{text}\x1b[0m\n")
    stream.flush()

"""Reads what the user types, with history across sessions where readline is there. Knows nothing about its meaning."""

import contextlib
import sys
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Self

from pagemill import envs

MAX_HISTORY_LINES = 1000


class LineReader:
    """A context in which `read` offers line editing; history is kept in the cache, readable by its owner only."""

    def __init__(self) -> None:
        self._readline = _load_readline() if sys.stdin.isatty() else None
        self._file = envs.cache_home() / "chat_history"

    def read(self, prompt: str) -> str:
        """One line without its newline. Raises EOFError at the end of the input, KeyboardInterrupt on Ctrl-C."""
        return input(prompt if sys.stdin.isatty() else "")

    def __enter__(self) -> Self:
        if self._readline is not None:
            # The history is a convenience: a file that cannot be read or written must not keep anyone from talking.
            with contextlib.suppress(OSError):
                self._readline.read_history_file(self._file)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._readline is not None:
            with contextlib.suppress(OSError):
                _create_private(self._file)
                self._readline.set_history_length(MAX_HISTORY_LINES)
                self._readline.write_history_file(self._file)


def _create_private(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)


def _load_readline() -> ModuleType | None:
    try:
        import readline  # deferred: an optional part of Python, and it changes how input() behaves
    except ImportError:
        return None
    return readline

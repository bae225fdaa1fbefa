"""Text of a growing token sequence, piece by piece, without ever showing part of a character.
Knows nothing about requests or stop strings.

Definition: with P the text of the prompt, the pieces of `step` and `flush` together are the text of prompt + output
with P taken off the front. Where the prompt ends within a character, P ends before it if the output completes it, so
that the pieces begin with that character; otherwise its bytes are the prompt's alone, and U+FFFD for them is part of P.
"""

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import Final

from pagemill.tokenizers.pieces import PieceTable

_MAX_CHAR_BYTES: Final = 4
_REPLACEMENT: Final = "\ufffd"
_UTF8: Final = codecs.getincrementaldecoder("utf-8")


class PieceDecoder:
    """For decoders that work token by token: constant time per token, however long the sequence."""

    def __init__(
        self,
        pieces: PieceTable,
        skipped: Collection[int],
        strips_first_space: bool,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._pieces = pieces
        self._skipped = skipped
        self._utf8 = _UTF8("replace")
        tail = self._last_bytes(prompt_token_ids)
        self._at_start = strips_first_space and not tail
        self._utf8.decode(_from_last_lead(tail))
        self._begun: bytes = self._utf8.getstate()[0]
        """Bytes of a character that the prompt began, and those that follow, until it is known what becomes of it."""
        # One U+FFFD as a rule, but two of ED A0, which Python's decoder waits for though nothing can follow.
        self._shown_by_prompt = len(self._begun.decode("utf-8", "replace"))

    def step(self, token_ids: Sequence[int]) -> str:
        """Append tokens; return the text that is now certain (may be empty)."""
        pieces = self._pieces
        skipped = self._skipped
        data = b"".join([pieces[token] for token in token_ids if token not in skipped])
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        text = self._utf8.decode(data)
        return self._after_prompt(data, text) if self._begun else text

    def flush(self) -> str:
        """U+FFFD for bytes that never became a character; the decoder then starts a new sequence."""
        text = self._utf8.decode(b"", True)
        return self._after_prompt(b"", text) if self._begun else text

    def _after_prompt(self, data: bytes, text: str) -> str:
        """What `text`, of which `data` was decoded last, has of the output: it begins with what became of the prompt's
        last bytes."""
        self._begun += data
        if not text:
            return ""
        begun, self._begun = self._begun, b""
        return text if begun.startswith(text[0].encode()) else text[self._shown_by_prompt :]

    def _last_bytes(self, token_ids: Sequence[int]) -> bytes:
        """The prompt's last bytes: enough to hold an unfinished character, empty only if the prompt shows nothing."""
        data = b""
        for token in reversed(token_ids):
            if token not in self._skipped:
                data = self._pieces[token] + data
            if len(data) >= _MAX_CHAR_BYTES:
                break
        return data[-_MAX_CHAR_BYTES:]


class WindowDecoder:
    """For every other decoder: decodes a short window of tokens before and after each step and returns the difference.

    Exact for decoders whose text of a token depends on its few predecessors only.
    """

    _CONTEXT: Final = 8
    _MAX_HELD: Final = 16
    """Tokens that may wait for the end of a character; longer waits are for bytes that never become one."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_token_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(prompt_token_ids[-self._CONTEXT :])
        prompt = self._decode(self._window)
        self._shown = len(prompt.rstrip(_REPLACEMENT))
        self._begun = prompt[self._shown :]
        """What the prompt shows of a character that it began, until it is known whether the output completes it."""

    def step(self, token_ids: Sequence[int]) -> str:
        """Append tokens; return the text that is now certain (may be empty)."""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) and len(self._window) <= self._CONTEXT + self._MAX_HELD:
            return ""
        new = self._new(text)
        self._window = self._window[-self._CONTEXT :]
        self._shown = len(self._decode(self._window))
        return new

    def flush(self) -> str:
        """The text still held back when the sequence ends."""
        text = self._decode(self._window)
        new = self._new(text)
        self._shown = len(text)
        return new

    def _new(self, text: str) -> str:
        """What has not been shown, and is not the prompt's."""
        new = text[self._shown :].removeprefix(self._begun)
        self._begun = ""
        return new


def _from_last_lead(tail: bytes) -> bytes:
    """The bytes from the last one that can begin a character, where a decoder is in step again; else none."""
    for start in range(len(tail) - 1, -1, -1):
        if tail[start] & 0xC0 != 0x80:
            return tail[start:]
    return b""

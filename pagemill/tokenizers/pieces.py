"""What each token id adds to the output, as bytes: the table behind decoding, for decoders that work token by token.
Knows nothing about sequences; `incremental` joins the pieces."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import tokenizers

_SPACE_MARK: Final = "\u2581"


def _byte_level_alphabet() -> dict[str, int]:
    """character -> byte: printable bytes stand for themselves, the others for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET: Final = _byte_level_alphabet()


class PieceTable:
    """id -> bytes, filled on first use of an id. Unknown ids have no bytes."""

    def __init__(self, id_to_token: Callable[[int], str | None], to_bytes: Callable[[str], bytes]) -> None:
        self._id_to_token = id_to_token
        self._to_bytes = to_bytes
        self._pieces: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._id_to_token(token_id)
            piece = self._pieces[token_id] = b"" if token is None else self._to_bytes(token)
        return piece


class PieceRule:
    """How a decoder turns a token's text into bytes, and whether it drops one space at the very beginning."""

    def __init__(self, to_bytes: Callable[[str], bytes], strips_first_space: bool) -> None:
        self.to_bytes = to_bytes
        self.strips_first_space = strips_first_space


def piece_rule(tokenizer: tokenizers.Tokenizer) -> PieceRule | None:
    """The rule of the tokenizer's decoder; None when it does not work token by token (WordPiece, ...)."""
    if tokenizer.decoder is None:
        return None
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    if decoder.get("type") == "ByteLevel":
        return PieceRule(_from_byte_level, strips_first_space=False)
    steps = decoder.get("decoders", [])
    names = [step.get("type") for step in steps]
    if names[:3] != ["Replace", "ByteFallback", "Fuse"] or not _is_space_mark(steps[0]):
        return None
    if names[3:] == []:
        return PieceRule(_from_byte_fallback, strips_first_space=False)
    if names[3:] == ["Strip"] and (steps[3]["content"], steps[3]["start"], steps[3]["stop"]) == (" ", 1, 0):
        return PieceRule(_from_byte_fallback, strips_first_space=True)
    return None


def _is_space_mark(step: Mapping[str, Any]) -> bool:
    return step.get("pattern") == {"String": _SPACE_MARK} and step.get("content") == " "


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        # An added token, spelled in plain text.
        return token.encode("utf-8", "replace")


def _from_byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(_SPACE_MARK, " ").encode("utf-8", "replace")

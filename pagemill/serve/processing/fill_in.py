"""A text with a gap, and files beside it, as the tokens of a prompt. Does not know who asks.

The order of its parts is that of llama.cpp's server: the name of a repository and files where the model has tokens for
them, then what is before the gap, what is after it, and what the answer begins with.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from pagemill.errors import RequestError
from pagemill.serve.processing.checks import check_unicode
from pagemill.tokenizers.fill_in import FillInTokens
from pagemill.tokenizers.interface import Tokenizer

_REPOSITORY: Final = "myproject\n"
_CURRENT_FILE: Final = "filename\n"
"""Names that requests do not tell: models have seen some name there."""
_BETWEEN_FILES: Final = "\n\n--- snippet ---\n\n"
"""Before a file, where the model has no token for that."""
_MAX_CHARS_PER_TOKEN = 64
"""Of a text of more characters per token that there is room for, only the nearer part is tokenized."""


class File(NamedTuple):
    """A text beside the one with the gap."""

    name: str
    text: str


class Gap(NamedTuple):
    """A text with a gap."""

    before: str
    after: str
    begun: str
    """What the text in the gap begins with."""
    files: Sequence[File]


class GapPrompt(NamedTuple):
    """A gap as tokens."""

    token_ids: list[int]
    is_cut: bool
    """Whether some of the texts had no room."""


def gap_prompt(tokenizer: Tokenizer, tokens: FillInTokens, gap: Gap, room: int) -> GapPrompt:
    """At most `room` tokens: of what is before and after the gap the nearest, about three to one, and of the files as
    much as is left, the last first. Raises RequestError where not even the beginning of the answer fits."""
    _check_texts(gap)
    frame = tokenizer.encode("", add_special_tokens=True)
    frame = frame[:1] if frame[:1] == [tokenizer.bos_token_id] else []
    begun = _literal(tokenizer, gap.begun) if len(gap.begun) <= room * _MAX_CHARS_PER_TOKEN else None
    left = room - len(frame) - 3 - (room if begun is None else len(begun))
    if begun is None or left < 0:
        raise RequestError(f"prompt is too long: the text and its gap may have {room} tokens altogether", "prompt")
    most_chars = left * _MAX_CHARS_PER_TOKEN
    before = _literal(
        tokenizer, gap.before[len(gap.before) - most_chars :] if most_chars < len(gap.before) else gap.before
    )
    after = _literal(tokenizer, gap.after[:most_chars])
    num_after = min(len(after), max(left // 4, left - len(before)))
    num_before = min(len(before), left - num_after)
    is_cut = num_before < len(before) or num_after < len(after) or max(len(gap.before), len(gap.after)) > most_chars
    files, some_missing = _files(tokenizer, tokens, gap.files, left - num_before - num_after)
    return GapPrompt(
        [
            *frame,
            *files,
            tokens.prefix,
            *before[len(before) - num_before :],
            tokens.suffix,
            *after[:num_after],
            tokens.middle,
            *begun,
        ],
        is_cut or some_missing,
    )


def _files(tokenizer: Tokenizer, tokens: FillInTokens, files: Sequence[File], room: int) -> tuple[list[int], bool]:
    """What stands before the gap's own file, at most `room` tokens of its end; whether there would be more."""
    pieces: list[tuple[str, int | None, str]] = []
    if tokens.repository is not None:
        pieces.append(("", tokens.repository, _REPOSITORY))
    for file in files:
        if tokens.file is None:
            pieces.append((_BETWEEN_FILES, None, file.text))
        else:
            pieces.append(("", tokens.file, f"{file.name}\n{file.text}"))
    if tokens.file is not None:
        pieces.append(("", tokens.file, _CURRENT_FILE))
    found: list[int] = []
    for separator, token, text in reversed(pieces):
        left = room - len(found)
        if left <= 0:
            return found, True
        kept = text[-left * _MAX_CHARS_PER_TOKEN :]
        ids = [] if token is None else [token]
        ids += [*(_literal(tokenizer, separator)), *_literal(tokenizer, kept)]
        found[:0] = ids[-left:]
        if len(ids) > left or len(kept) < len(text):
            return found, True
    return found, False


def _literal(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_literal(text) if text else []


def _check_texts(gap: Gap) -> None:
    check_unicode(gap.before, "input_prefix")
    check_unicode(gap.after, "input_suffix")
    check_unicode(gap.begun, "prompt")
    for file in gap.files:
        check_unicode(file.name, "input_extra")
        check_unicode(file.text, "input_extra")

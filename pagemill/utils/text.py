"""`shown`: a value in an error message; `shown_name`: what a file calls something; `index_of`: a number in a name."""

import itertools
from typing import Any

from pagemill.utils.log_text import one_line

_MAX_SHOWN = 60
_MAX_NAME = 120
_MAX_BITS = 128
_MAX_DIGITS = 9


def shown(value: Any) -> str:
    """A value for an error message: its repr, shortened. Costs the same however large the value is."""
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return _bits(value)
    text = repr(_clipped(value, [_MAX_SHOWN]))
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def shown_name(name: str) -> str:
    """A name that a file gives, of a tensor say, for one line of an error message: as it is, but for what cannot be
    printed, and the end of one that is too long for any model."""
    return one_line(name, _MAX_NAME)


def index_of(text: str) -> int | None:
    """The number, from 0 up, that a part of a name is; None of anything else, and of a number too long to count
    something: Python refuses to read those."""
    return int(text) if text.isdecimal() and text.isascii() and len(text) <= _MAX_DIGITS else None


class _Written(str):
    """A text that stands for a value as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _bits(value: int) -> str:
    return f"a number of {value.bit_length()} bits"


def _clipped(value: Any, left: list[int]) -> Any:
    """A value whose repr begins as that of `value`; `left` counts what may still be looked at: every item is at least
    one character of the result, so that what comes after would not be shown."""
    left[0] -= 1
    match value:
        case str() | bytes():
            return value[: _MAX_SHOWN + 1]
        case int():
            return _Written(_bits(value)) if value.bit_length() > _MAX_BITS else value
        case dict():
            pairs = itertools.takewhile(lambda _: left[0] >= 0, value.items())
            return {_clipped(key, left): _clipped(item, left) for key, item in pairs}
        case list() | tuple():
            items = itertools.takewhile(lambda _: left[0] >= 0, value)
            return type(value)([_clipped(item, left) for item in items])
    return value

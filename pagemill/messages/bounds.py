"""What the values of a request's parameters may be: checks that name the parameter, the value and what is allowed.

Every error is a RequestError of the parameter. Knows no parameter.
"""

from collections.abc import Iterable, Mapping, Sized
from typing import Any, Final

from pagemill.errors import RequestError
from pagemill.utils.text import shown

MAX_INT32: Final = 2**31 - 1


def refusal(name: str, value: Any, allowed: str, field: str | None = None) -> RequestError:
    """The error to raise for a value that is not allowed; `field`: the field of the request, if it has another name."""
    return RequestError(f"{name}={shown(value)} is not allowed: {allowed}", field or name)


def check_integer(name: str, value: Any, low: int, high: int, field: str | None = None) -> None:
    """An integer from `low` to `high`, and no boolean."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise refusal(name, value, f"an integer from {low} to {high}", field)


def check_number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    """A number from `low` to `high`; `open_low`: above `low`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # What is not a number is between no bounds.
    if not is_number or not low <= value <= high or (open_low and value == low):
        raise refusal(name, value, f"a finite number in {'(' if open_low else '['}{low:g}, {high:g}]")


def check_switch(name: str, value: Any) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise refusal(name, value, "true or false")


def check_count(name: str, values: Sized, low: int, high: int) -> None:
    """A number of entries from `low` to `high`."""
    if not low <= len(values) <= high:
        raise RequestError(f"{name} has {len(values)} entries; {low} to {high} are allowed", name)


def check_texts(name: str, texts: Iterable[Any], max_chars: int) -> None:
    """Texts of 1 to `max_chars` characters."""
    for text in texts:
        if not isinstance(text, str) or not 0 < len(text) <= max_chars:
            raise RequestError(f"{name} must hold strings of 1 to {max_chars} characters", name)


def check_token_ids(name: str, token_ids: Iterable[Any]) -> None:
    """Token ids, of whatever model."""
    for token_id in token_ids:
        check_integer(name, token_id, 0, MAX_INT32)


def as_tuple(name: str, values: Any, what: str) -> tuple[Any, ...]:
    """The items of a list; `what`: what it is a list of."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise refusal(name, values, f"a list of {what}")
    return tuple(values)

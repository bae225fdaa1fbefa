"""Numbers of JSON between bounds, as rules of an EBNF grammar. Exact: bounds are decimal, and so is what is written."""

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

from pagemill.grammar.ebnf.writer import EMPTY, EbnfWriter

MAX_WHOLE_DIGITS: Final = 18
MAX_FRACTION_DIGITS: Final = 16
MAX_BOUND_DIGITS: Final = 40
MAX_VALUES: Final = 1000
"""Multiples between bounds that are written one by one."""
MAX_DIVISOR: Final = 200
"""Of multiples without bounds, which take a rule for each remainder."""
_ANY_NUMBER: Final = (
    f'"-"? ("0" | [1-9] [0-9]{{0,{MAX_WHOLE_DIGITS - 1}}}) ("." [0-9]{{1,{MAX_FRACTION_DIGITS}}})? '
    "([eE] [+\\u002d]? [0-9]{1,3})?"
)


@dataclass(frozen=True)
class Bounds:
    """Which numbers are meant."""

    least: Decimal | None = None
    most: Decimal | None = None
    above: bool = False
    """Whether `least` itself is not meant."""
    below: bool = False
    """Whether `most` itself is not meant."""
    step: Decimal | None = None
    """They are multiples of this."""


def decimal_of(value: Any) -> Decimal:
    """A number of a schema, as it is written. Raises ValueError for one that is none, or too long."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r:.40} where a number must be")
    found = Decimal(repr(value))
    if not found.is_finite() or not -MAX_BOUND_DIGITS < found.adjusted() < MAX_BOUND_DIGITS:
        raise ValueError(f"the bound {value!r:.40} is too large or too small")
    return found


def number(writer: EbnfWriter, bounds: Bounds, *, whole: bool) -> str | None:
    """The body of numbers, of integers if `whole`; None when there are none. Raises ValueError for multiples that
    cannot be written."""
    step = bounds.step
    if step is not None and step <= 0:
        raise ValueError("multipleOf must be above 0")
    if step is not None and (whole or step != step.to_integral()):
        # A multiple of a fraction that must be whole is one of the least whole multiple.
        ratio = Fraction(step)
        step = Decimal(ratio.numerator) if whole else step
    if step is None or (whole and step == 1):
        if not whole and bounds.least is None and bounds.most is None:
            return writer.rule(_ANY_NUMBER)
        return _signed(writer, bounds, 0 if whole else None)
    if not whole and step.as_tuple().digits == (1,) and step <= 1:
        return _signed(writer, bounds, -step.adjusted())
    return _multiples(writer, bounds, step)


def _signed(writer: EbnfWriter, bounds: Bounds, places: int | None) -> str | None:
    """Numbers of at most so many decimal places; None: of any number."""
    found = []
    least, most = bounds.least, bounds.most
    if least is not None and most is not None and (least > most or (least == most and (bounds.above or bounds.below))):
        return None
    if most is None or most > 0 or (most == 0 and not bounds.below):
        if least is None or least < 0:
            body = _positive(writer, Decimal(0), most, False, bounds.below, places)
        else:
            body = _positive(writer, least, most, bounds.above, bounds.below, places)
        found += body
    if least is None or least < 0:
        low = Decimal(0) if most is None or most > 0 else -most
        strict = most is not None and most <= 0 and bounds.below
        # Zero is written without a sign.
        strict = strict or low == 0
        body = _positive(writer, low, None if least is None else -least, strict, bounds.above, places)
        found += [f'"-" {part}' for part in body]
    return writer.rule(" | ".join(found)) if found else None


def _positive(
    writer: EbnfWriter, low: Decimal, high: Decimal | None, above: bool, below: bool, places: int | None
) -> list[str]:
    """Bodies of numbers without a sign from `low` on."""
    digits = _Fractions(writer, places)
    first, first_rest = _split(low)
    if high is None:
        found = _both(f'"{first}"', digits.between(first_rest, None, above, False))
        longest = 10 ** max(MAX_WHOLE_DIGITS, len(str(first)) + 1) - 1
        return found + _both(_digits(writer, first + 1, longest), digits.between("", None, False, False))
    last, last_rest = _split(high)
    if first == last:
        return _both(f'"{first}"', digits.between(first_rest, last_rest, above, below))
    found = _both(f'"{first}"', digits.between(first_rest, None, above, False))
    if first + 1 < last:
        found += _both(_digits(writer, first + 1, last - 1), digits.between("", None, False, False))
    return found + _both(f'"{last}"', digits.between("", last_rest, False, below))


def _both(whole: str | None, fraction: str | None) -> list[str]:
    if whole is None or fraction is None:
        return []
    return [whole if fraction == EMPTY else f"{whole} {fraction}"]


def _split(value: Decimal) -> tuple[int, str]:
    """The whole part, and the digits of the fraction without zeros at the end."""
    places = max(0, -int(value.as_tuple().exponent))
    scaled = int(Fraction(value) * 10**places)
    return scaled // 10**places, str(scaled % 10**places).zfill(places).rstrip("0") if places else ""


def _digits(writer: EbnfWriter, low: int, high: int) -> str | None:
    """Whole numbers without a sign."""
    if low > high:
        return None
    found = []
    for length in range(len(str(low)), len(str(high)) + 1):
        begin = str(max(low, 10 ** (length - 1) if length > 1 else 0))
        end = str(min(high, 10**length - 1))
        found += _same_length(begin, end)
    return writer.rule(" | ".join(found))


def _same_length(low: str, high: str) -> list[str]:
    """Bodies of digits from one number to another one of as many digits."""
    if not low:
        return [EMPTY]
    rest = len(low) - 1
    if set(low) == {"0"} and set(high) == {"9"}:
        return [f"[0-9]{{{len(low)}}}"]
    if low[0] == high[0]:
        return [f'"{low[0]}" {body}' for body in _same_length(low[1:], high[1:])]
    first, last = int(low[0]), int(high[0])
    found = []
    if low[1:].strip("0"):
        found += [f'"{first}" {body}' for body in _same_length(low[1:], "9" * rest)]
        first += 1
    tail = []
    if high[1:].strip("9"):
        tail = [f'"{last}" {body}' for body in _same_length("0" * rest, high[1:])]
        last -= 1
    if first <= last:
        found.append(f"[{first}-{last}]" + (f" [0-9]{{{rest}}}" if rest else ""))
    return found + tail


class _Fractions:
    """Decimal places between bounds, digit by digit."""

    def __init__(self, writer: EbnfWriter, places: int | None) -> None:
        self._writer = writer
        self._places = places

    def between(self, low: str, high: str | None, above: bool, below: bool) -> str | None:
        """The body of a point and digits, or of nothing; None when there is none. `high` None: any."""
        self._low, self._high, self._above, self._below = low, high, above, below
        longest = max(len(low), len(high or "")) + MAX_FRACTION_DIGITS
        self._most = longest if self._places is None else self._places
        self._known: dict[tuple[int, bool, bool], str | None] = {}
        tight = (True, high is not None)
        ends = self._ends(0, *tight)
        more = self._more(0, *tight)
        found = ([EMPTY] if ends else []) + ([f'"." {more}'] if more else [])
        return self._writer.rule(" | ".join(found)) if len(found) > 1 else found[0] if found else None

    def _ends(self, at: int, above: bool, below: bool) -> bool:
        """Whether no digit need follow. `above`, `below`: whether all so far are those of the bound."""
        if above and (self._low[at:] or self._above):
            return False
        return not below or bool((self._high or "")[at:]) or not self._below

    def _more(self, at: int, above: bool, below: bool) -> str | None:
        """The body of one digit and what may follow it."""
        if at >= self._most:
            return None
        if not above and not below:
            return f"[0-9]{{1,{min(self._most - at, MAX_FRACTION_DIGITS)}}}"
        key = (at, above, below)
        if key not in self._known:
            low = int(self._low[at : at + 1] or 0) if above else 0
            high = int((self._high or "")[at : at + 1] or 0) if below else 9
            bodies = []
            for digit in range(low, high + 1):
                follows = (at + 1, above and digit == low, below and digit == high)
                rest = self._more(*follows)
                if self._ends(*follows):
                    bodies.append(f'"{digit}"' if rest is None else f'"{digit}" ({rest})?')
                elif rest is not None:
                    bodies.append(f'"{digit}" {rest}')
            self._known[key] = self._writer.rule(" | ".join(bodies)) if bodies else None
        return self._known[key]


def _multiples(writer: EbnfWriter, bounds: Bounds, step: Decimal) -> str | None:
    least, most = bounds.least, bounds.most
    ratio = Fraction(step)
    if least is not None and most is not None:
        first, last = -(-Fraction(least) // ratio), Fraction(most) // ratio
        first += bounds.above and first * ratio == Fraction(least)
        last -= bounds.below and last * ratio == Fraction(most)
        if last - first >= MAX_VALUES:
            raise ValueError(f"multipleOf between bounds is supported for {MAX_VALUES} values only")
        values = [_plain(step * int(times)) for times in range(int(first), int(last) + 1)]
        return writer.rule(" | ".join(f'"{value}"' for value in values)) if values else None
    divisor = int(step)
    if step != divisor or divisor > MAX_DIVISOR:
        raise ValueError(f"multipleOf={step} is not supported without bounds: whole numbers up to {MAX_DIVISOR} are")
    if most is not None or least not in (None, Decimal(0)) or bounds.above:
        raise ValueError("multipleOf beside one bound is not supported")
    names = [writer.reserve() for _ in range(divisor)]
    for remainder, name in enumerate(names):
        bodies = [f'"{digit}" {names[(remainder * 10 + digit) % divisor]}' for digit in range(10)]
        writer.define(name, " | ".join([EMPTY, *bodies] if remainder == 0 else bodies))
    begun = " | ".join(f'"{digit}" {names[digit % divisor]}' for digit in range(1, 10))
    sign = '"-"? ' if least is None else ""
    return writer.rule(f'"0" | {sign}({begun})')


def _plain(value: Decimal) -> str:
    """A number in decimal notation, without an exponent and without zeros at its end."""
    found = format(value, "f")
    return found.rstrip("0").rstrip(".") if "." in found else found

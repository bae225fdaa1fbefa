"""How much what templates call may make: filters, methods of texts, formats. Asked before the call, because most of
these make all of it at once, in C. Knows nothing about Jinja's syntax."""

import re
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, Final

from pagemill.tokenizers.template_budget import ITEM, Budget, TooMuchError

SLOW_CHARS: Final = 128 << 10
"""Of what is computed character by character in Python, or by regular expressions."""
MOST_STRIPPED: Final = 1024
"""Characters to strip, each of which is compared with each."""
MOST_COMPARED: Final = 256 << 20
"""Pairs of characters that a search from the end may compare: at worst each of the text with each of the pattern."""
LINE_ITEMS: Final = 10_000
ENCODINGS: Final = frozenset({"utf-8", "utf8", "ascii", "latin-1"})
"""Those that templates have use for; others compare every character with every one (idna, punycode)."""
_SPECIFIER_CHARS: Final = 400
"""What a number may take that is written without a width."""
_REPR: Final = 4
"""Characters that one of a value may take where the value is written as Python does."""
_WIDE: Final = re.compile(r"\d{5}")
_NUMBER: Final = re.compile(r"\d+")
_REPEATS: Final = re.compile(r"%\(|\{\s*\w")
"""Arguments by name or number, which may be used more than once."""
_STARRED: Final = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*\{")
"""A width that is an argument itself."""

_PLAIN: Final = frozenset({str, list, dict, tuple, int, bool, float, type(None)})

Values = tuple[Any, ...]
Named = Mapping[str, Any]
Limit = Callable[[Budget, Any, Values, Named], None]
"""Raises TooMuchError: (budget, the value that is filtered or whose method it is, further arguments by place and by
name)."""


def is_iterator(value: Any) -> bool:
    """Whether values come one by one, from something that may go on for long."""
    if type(value) in _PLAIN:  # what nearly all are; to ask for abstract classes takes long
        return False
    return isinstance(value, (Iterator, ItemsView, KeysView, ValuesView))


def check_format(limits: Budget, text: Any, values: Values, named: Named) -> None:
    """Of `%` and of `format`."""
    if isinstance(text, (bytes, bytearray)):
        text = bytes(text).decode("latin-1")
    text = str(text)
    if len(text) > SLOW_CHARS:
        raise TooMuchError(f"it formats by more than {SLOW_CHARS} characters")
    text = text.replace("{{", "").replace("}}", "").replace("%%", "")
    if _WIDE.search(text) or _STARRED.search(text):
        raise TooMuchError("it formats to a width of more than 9999, or of an argument")
    given = [*values, *named.values()]
    flat = [item for value in given for item in (value.values() if isinstance(value, Mapping) else [value])]
    sizes = [len(item) if isinstance(item, str) else _REPR * limits.size(item) for item in flat]
    count = text.count("%") + text.count("{")
    width = max((int(found.group()) for found in _NUMBER.finditer(text)), default=0)
    inside = count * max(sizes, default=0) if _REPEATS.search(text) else sum(sizes)
    limits.spend(len(text) + inside + count * (width + _SPECIFIER_CHARS))


def _argument(values: Values, named: Named, place: int, name: str, default: Any) -> Any:
    return values[place] if len(values) > place else named.get(name, default)


def _width(place: int, default: int) -> Limit:
    def limit(limits: Budget, text: Any, values: Values, named: Named) -> None:
        width = _argument(values, named, place, "width", default)
        limits.spend(limits.size(text) + (width if isinstance(width, int) else 0))

    return limit


def _replace(limits: Budget, text: Any, values: Values, named: Named) -> None:
    old = _argument(values, named, 0, "old", "")
    new = _argument(values, named, 1, "new", "")
    if not isinstance(text, (str, bytes)):
        text = str(text) if limits.size(text) * _REPR < SLOW_CHARS else ""
    count = text.count(old) if isinstance(old, type(text)) and old else len(text) + 1
    limits.spend(len(text) + count * limits.size(new))


def _join(limits: Budget, between: Any, items: Any) -> None:
    values = [*items] if isinstance(items, (list, tuple, set, frozenset, dict, str, range)) else []
    sizes = (len(item) if isinstance(item, str) else _REPR * limits.size(item) for item in values)
    limits.spend(sum(sizes) + len(values) * limits.size(between))


def _join_filter(limits: Budget, items: Any, values: Values, named: Named) -> None:
    _join(limits, str(_argument(values, named, 0, "d", "")), items)


def _join_method(limits: Budget, text: Any, values: Values, named: Named) -> None:
    _join(limits, text, values[0] if values else ())


def _indent(limits: Budget, text: Any, values: Values, named: Named) -> None:
    width = _argument(values, named, 0, "width", 4)
    text = str(text)
    limits.spend(len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else limits.size(width)))


def _expandtabs(limits: Budget, text: Any, values: Values, named: Named) -> None:
    width = _argument(values, named, 0, "tabsize", 8)
    limits.spend(
        len(text) + text.count("\t" if isinstance(text, str) else b"\t") * (width if isinstance(width, int) else 0)
    )


def _translate(limits: Budget, text: Any, values: Values, named: Named) -> None:
    table = values[0] if values else {}
    limits.size(table)
    items = table.values() if isinstance(table, Mapping) else ()
    limits.spend(len(text) * max((limits.size(item) for item in items), default=1))


def _strip(limits: Budget, text: Any, values: Values, named: Named) -> None:
    if not values and not named:
        return
    if any(limits.size(value) > MOST_STRIPPED for value in (*values, *named.values()) if value is not None):
        raise TooMuchError(f"it strips more than {MOST_STRIPPED} different characters")


def _backwards(limits: Budget, text: Any, values: Values, named: Named) -> None:
    pattern = _argument(values, named, 0, "sep", None)
    if isinstance(pattern, (str, bytes)) and len(text) * len(pattern) > MOST_COMPARED:
        raise TooMuchError(f"it searches from the end for {len(pattern)} characters in {len(text)}")


def _encoding(limits: Budget, text: Any, values: Values, named: Named) -> None:
    name = _argument(values, named, 0, "encoding", "utf-8")
    if not isinstance(name, str) or name.lower() not in ENCODINGS:
        raise TooMuchError(f"it encodes or decodes by what is none of {', '.join(sorted(ENCODINGS))}")


def _to_bytes(limits: Budget, number: Any, values: Values, named: Named) -> None:
    limits.spend(_argument(values, named, 0, "length", 1))


def _written(limits: Budget, value: Any, values: Values, named: Named) -> None:
    limits.spend(limits.size(value) * (1 if isinstance(value, str) else _REPR))


def _slow(limits: Budget, value: Any, values: Values, named: Named) -> None:
    if sum(limits.size(item) for item in (value, *values, *named.values())) > SLOW_CHARS:
        raise TooMuchError(f"it gives more than {SLOW_CHARS} characters to a filter that is slow")


def _wordwrap(limits: Budget, text: Any, values: Values, named: Named) -> None:
    _slow(limits, text, values, named)
    limits.spend(len(text) * (1 + limits.size(_argument(values, named, 2, "wrapstring", None) or "\n")))


def _compared(limits: Budget, items: Any, values: Values, named: Named) -> None:
    if hasattr(items, "__len__") and len(items) > SLOW_CHARS:
        raise TooMuchError(f"it sorts or compares more than {SLOW_CHARS} items")


def _in_lines(limits: Budget, items: Any, values: Values, named: Named) -> None:
    given = [value for value in (*values, *named.values()) if isinstance(value, int)]
    if max(given, default=1) > LINE_ITEMS:
        raise TooMuchError(f"it makes lines of more than {LINE_ITEMS} items")
    filler = sum(limits.size(value) for value in (*values, *named.values()))
    limits.spend(ITEM * LINE_ITEMS + LINE_ITEMS * filler if filler > 2 * ITEM else ITEM * LINE_ITEMS)


def _precision(limits: Budget, number: Any, values: Values, named: Named) -> None:
    precision = _argument(values, named, 0, "precision", 0)
    if isinstance(precision, int) and abs(precision) > 100:
        raise TooMuchError("it rounds to more than 100 places")


def _sum(limits: Budget, items: Any, values: Values, named: Named) -> None:
    if not isinstance(_argument(values, named, 1, "start", 0), (int, float)):
        raise TooMuchError("it sums what are no numbers")


FILTERS: Final[dict[str, Limit]] = {
    "center": _width(0, 80),
    "indent": _indent,
    "replace": _replace,
    "join": _join_filter,
    "format": check_format,
    "wordwrap": _wordwrap,
    "batch": _in_lines,
    "slice": _in_lines,
    "round": _precision,
    "sum": _sum,
    "string": _written,
    "escape": _written,
    "e": _written,
    "trim": _strip,
    "forceescape": _written,
    **dict.fromkeys(("sort", "dictsort", "unique", "groupby", "min", "max"), _compared),
    **dict.fromkeys(("pprint", "striptags", "title", "truncate", "urlencode", "urlize", "wordcount", "xmlattr"), _slow),
}
METHODS: Final[dict[str, Limit]] = {
    "center": _width(0, 0),
    "ljust": _width(0, 0),
    "rjust": _width(0, 0),
    "zfill": _width(0, 0),
    "replace": _replace,
    "join": _join_method,
    "expandtabs": _expandtabs,
    "translate": _translate,
    "to_bytes": _to_bytes,
    "strip": _strip,
    "lstrip": _strip,
    "rstrip": _strip,
    **dict.fromkeys(("rfind", "rindex", "rpartition", "rsplit"), _backwards),
    "encode": _encoding,
    "decode": _encoding,
    "format": check_format,
    "format_map": check_format,
}

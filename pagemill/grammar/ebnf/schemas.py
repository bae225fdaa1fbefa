"""`JsonRules`: JSON that a schema describes, as rules of an EBNF grammar. Exact: what a schema allows is written in one
order of keys and one spelling of texts, and a keyword that is not followed is an error. Knows nothing about tokens."""

from collections.abc import Mapping
from typing import Any, Final

from pagemill.grammar.ebnf.formats import FORMATS
from pagemill.grammar.ebnf.merging import merged, plain
from pagemill.grammar.ebnf.numbers import Bounds, decimal_of, number
from pagemill.grammar.ebnf.writer import (
    EMPTY,
    ESCAPED,
    PLAIN_BUT,
    EbnfWriter,
    class_char,
    is_in,
    json_char,
    json_chars,
    json_scalar,
    json_text,
    minus,
    repeated,
    text,
)
from pagemill.grammar.json_values import ANNOTATIONS, Budget, allows, at_pointer
from pagemill.grammar.regexes import Chars, Node, Repeat, Sequence, lengths, ranges_of, searched, whole

MAX_STEPS: Final = 50_000
MAX_DEPTH: Final = 64
MAX_BRANCHES: Final = 64
"""Alternatives of one schema, after its anyOf and allOf are multiplied out."""
MAX_COUNTED: Final = 64
"""Properties that are counted, where minProperties or maxProperties say how many there are."""
_ALL_TYPES: Final = ["null", "boolean", "number", "string", "array", "object"]
_MALFORMED: Final = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ZeroDivisionError)


class JsonRules:
    """Of one schema, whose references lead to parts of it."""

    def __init__(self, writer: EbnfWriter, gap: str, root: Any, budget: Budget | None = None) -> None:
        """`gap`: the body of what may stand between the parts of JSON; `budget`: for the work (default: MAX_STEPS)."""
        self._writer = writer
        self._root = root
        self._budget = budget or Budget(MAX_STEPS)
        self._references: dict[str, str] = {}
        self._any: str | None = None
        spaces = "" if gap == EMPTY else f"{writer.rule(gap)} "
        self._open = {bracket: f"{text(bracket)} {spaces}".rstrip() for bracket in "{["}
        self._close = {bracket: f"{spaces}{text(bracket)}" for bracket in "}]"}
        self._comma = f'{spaces}"," {spaces}'.rstrip()
        self._colon = f'{spaces}":" {spaces}'.rstrip()
        self._escape = writer.rule(json_chars(ESCAPED))
        self._char = writer.rule(f"[^{PLAIN_BUT}] | {self._escape}")

    def rule(self, schema: Any) -> str:
        """The rule of all of it. Raises ValueError that names a keyword which is not supported, and for a schema that
        is malformed or allows nothing."""
        try:
            found = self._value(schema, 0)
        except _MALFORMED as error:
            raise ValueError(f"the schema is malformed: {type(error).__name__}: {str(error)[:100]}") from None
        if found is None:
            raise ValueError("the schema allows nothing")
        return found

    def _value(self, schema: Any, depth: int) -> str | None:
        """The rule of the values of a schema; None when there are none."""
        if depth > MAX_DEPTH:
            raise ValueError(f"the schema is nested more than {MAX_DEPTH} levels deep")
        bodies = []
        for branch in self._branches(schema, 0):
            self._budget.spend()
            if not branch:
                return self._any_value()
            bodies += [self._referred(branch["$ref"])] if "$ref" in branch else self._of_plain(branch, depth)
        return self._writer.rule(" | ".join(dict.fromkeys(bodies))) if bodies else None

    def _any_value(self) -> str:
        """The rule of any JSON."""
        if self._any is None:
            self._any = self._writer.reserve()
            self._writer.define(self._any, " | ".join(self._of_plain({}, 0)))
        return self._any

    def _branches(self, schema: Any, depth: int) -> list[dict[str, Any]]:
        """Alternatives that are plain, or a reference alone."""
        self._budget.spend()
        if depth > MAX_DEPTH:
            raise ValueError("the schema refers to itself without end")
        if isinstance(schema, bool):
            return [{}] if schema else []
        if not isinstance(schema, Mapping):
            raise ValueError(f"the schema is malformed: {str(schema)[:40]!r} where a schema must be")
        parts = [name for name in schema if name not in ANNOTATIONS or name == "format"]
        if parts == ["$ref"]:
            return [{"$ref": schema["$ref"]}]
        found = [plain(schema)]
        factors = [[item] for item in schema.get("allOf", ())]
        factors += [schema["anyOf"]] if "anyOf" in schema else []
        factors += [[at_pointer(schema["$ref"], self._root)]] if "$ref" in schema else []
        for factor in factors:
            options = [branch for item in factor for branch in self._branches(item, depth + 1)]
            if found == [{}] and len(factors) == 1:
                return options
            options = [part for option in options for part in self._without_reference(option, depth)]
            if len(found) * len(options) > MAX_BRANCHES:
                raise ValueError(f"anyOf and allOf have more than {MAX_BRANCHES} combinations")
            found = [merged(left, right, self._budget) for left in found for right in options]
        return found

    def _without_reference(self, branch: dict[str, Any], depth: int) -> list[dict[str, Any]]:
        """What a reference stands for, to be merged with other keywords."""
        if "$ref" not in branch:
            return [branch]
        found = self._branches(at_pointer(branch["$ref"], self._root), depth + 1)
        return [part for one in found for part in self._without_reference(one, depth + 1)]

    def _referred(self, pointer: str) -> str:
        name = self._references.get(pointer)
        if name is None:
            name = self._references[pointer] = self._writer.reserve()
            found = self._value(at_pointer(pointer, self._root), 0)
            if found is None:
                raise ValueError(f"$ref={pointer!r:.80} leads to a schema that allows nothing")
            self._writer.define(name, found)
        return name

    def _of_plain(self, schema: dict[str, Any], depth: int) -> list[str]:
        if "enum" in schema:
            return self._values(schema)
        found = [self._of_type(kind, schema, depth) for kind in schema.get("type", _ALL_TYPES)]
        return [body for body in found if body is not None]

    def _values(self, schema: dict[str, Any]) -> list[str]:
        rest = {name: operand for name, operand in schema.items() if name not in ("enum", "format")}
        found = []
        for value in schema["enum"]:
            allowed = allows(rest, value, self._root, self._budget)
            if allowed is None:
                raise ValueError(f"enum or const is not supported beside {', '.join(rest)}")
            if allowed:
                found.append(self._written(value, 0))
        return found

    def _written(self, value: Any, depth: int) -> str:
        """The body of one value."""
        self._budget.spend()
        if isinstance(value, list):
            items = f" {self._comma} ".join(self._written(item, depth + 1) for item in value)
            return f"{self._open['[']} {items} {self._close[']']}"
        if isinstance(value, dict):
            members = [f"{self._key(key)} {self._written(item, depth + 1)}" for key, item in value.items()]
            return f"{self._open['{']} {f' {self._comma} '.join(members)} {self._close['}']}"
        return json_scalar(value)

    def _key(self, key: str) -> str:
        return f"{json_scalar(key)} {self._colon}"

    def _of_type(self, kind: str, schema: dict[str, Any], depth: int) -> str | None:
        match kind:
            case "null":
                return '"null"'
            case "boolean":
                return '"true" | "false"'
            case "integer" | "number":
                return self._number(schema, whole=kind == "integer")
            case "string":
                return self._string(schema)
            case "array":
                return self._array(schema, depth)
        return self._object(schema, depth)

    def _number(self, schema: dict[str, Any], *, whole: bool) -> str | None:
        given = {name: decimal_of(schema[name]) for name in _NUMERIC if name in schema}
        lows = [(given[name], name == "exclusiveMinimum") for name in ("minimum", "exclusiveMinimum") if name in given]
        highs = [
            (-given[name], name == "exclusiveMaximum") for name in ("maximum", "exclusiveMaximum") if name in given
        ]
        least, above = max(lows, default=(None, False))
        most, below = max(highs, default=(None, False))
        bounds = Bounds(least, None if most is None else -most, above, below, given.get("multipleOf"))
        return number(self._writer, bounds, whole=whole)

    def _string(self, schema: dict[str, Any]) -> str | None:
        least, most = _count(schema, "minLength", 0), _count(schema, "maxLength", None)
        least = least or 0
        if most is not None and least > most:
            return None
        described = [name for name in ("pattern", "format") if name in schema]
        if len(described) == 2:
            raise ValueError("pattern and format of the same string are not supported")
        if not described:
            return f'"\\"" {repeated(self._char, least, most)} "\\""'
        node = searched(schema["pattern"]) if described == ["pattern"] else whole(FORMATS[schema["format"]])
        return f'"\\"" {self._expression(_limited(node, least, most, described[0]))} "\\""'

    def _expression(self, node: Node) -> str:
        return self._writer.expression(node, json_chars)

    def _array(self, schema: dict[str, Any], depth: int) -> str | None:
        least, most = _count(schema, "minItems", 0) or 0, _count(schema, "maxItems", None)
        first = [self._value(item, depth + 1) for item in schema.get("prefixItems", ())]
        if None in first:  # it ends before an item that nothing can be
            most = min(first.index(None), len(first) if most is None else most)
        rest = self._value(schema.get("items", True), depth + 1) if most is None or most > len(first) else None
        if rest is None:
            most = len(first) if most is None else min(most, len(first))
        if least > (least if most is None else most):
            return None
        items = self._items([item for item in first if item is not None], rest, 0, least, most)
        return f"{self._open['[']} {items} {self._close[']']}"

    def _items(self, first: list[str], rest: str | None, at: int, least: int, most: int | None) -> str:
        """The body of all items from one place on."""
        self._budget.spend()
        if most is not None and at >= most:
            return EMPTY
        comma = f"{self._comma} " if at else ""
        if at < len(first):
            body = f"{comma}{first[at]} {self._items(first, rest, at + 1, least, most)}"
        elif rest is None:
            return EMPTY
        else:
            more = self._writer.rule(f"{self._comma} {rest}")
            low, high = max(0, least - at), None if most is None else most - at
            if at:
                return repeated(more, low, high)
            body = f"{rest} {repeated(more, max(0, low - 1), None if high is None else high - 1)}"
        return body if at < least else self._writer.rule(f"{EMPTY} | {body}")

    def _object(self, schema: dict[str, Any], depth: int) -> str | None:
        least, most = _count(schema, "minProperties", 0) or 0, _count(schema, "maxProperties", None)
        required = list(schema.get("required", ()))
        others = schema.get("additionalProperties", True)
        named: dict[str, Any] = dict(schema.get("properties", {}))
        patterns = schema.get("patternProperties", {})
        if patterns and (named or required or others is not False or len(patterns) > 1):
            raise ValueError("patternProperties are supported alone, and beside additionalProperties=false only")
        for key in required:
            named.setdefault(key, others)
        values = {key: self._value(item, depth + 1) for key, item in named.items()}
        if any(values[key] is None for key in required):
            return None
        other = self._other_member(others, list(named), patterns, depth)
        members = [
            (None if value is None else self._writer.rule(f"{self._key(key)} {value}"), key in required)
            for key, value in values.items()
        ]
        body = _Members(self._writer, self._comma, members, other, least, most, self._budget).body()
        return None if body is None else f"{self._open['{']} {body} {self._close['}']}"

    def _other_member(self, others: Any, names: list[str], patterns: Mapping[str, Any], depth: int) -> str | None:
        """The rule of a member with none of these names."""
        if patterns:
            ((pattern, item),) = patterns.items()
            value = self._value(item, depth + 1)
            key = self._expression(searched(pattern))
        else:
            value = self._value(others, depth + 1)
            key = self._other_key(names)
        return None if value is None else self._writer.rule(f'"\\"" {key} "\\"" {self._colon} {value}')

    def _other_key(self, names: list[str]) -> str:
        """The body of a text that is none of these."""
        tree: dict[str, Any] = {}
        for name in names:
            self._budget.spend(len(name) + 1)
            json_text(name)
            node = tree
            for char in name:
                node = node.setdefault(char, {})
            node[""] = {}
        return self._unlike(tree)

    def _unlike(self, tree: dict[str, Any]) -> str:
        if not tree:
            return f"{self._char}*"
        bodies = [] if "" in tree else [EMPTY]
        for char, rest in tree.items():
            if char:
                below = self._unlike(rest)
                bodies.append(f"{text(json_char(ord(char)))} {below}")
        bodies.append(f"{self._char_but(tree)} {self._char}*")
        return self._writer.rule(" | ".join(bodies))

    def _char_but(self, tree: Mapping[str, Any]) -> str:
        """The body of one character that does not lead further down."""
        named = [ord(char) for char in tree if char]
        escape = self._escape
        if any(is_in(code, ESCAPED) for code in named):
            escape = json_chars(ranges_of(minus(ESCAPED, ranges_of((code, code) for code in named))))
        return f"([^{PLAIN_BUT}{''.join(map(class_char, named))}] | {escape})"


_NUMERIC: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class _Members:
    """The members of an object: named ones in their order, and then others."""

    def __init__(
        self, writer: EbnfWriter, comma: str, members: list[tuple[str | None, bool]], other: str | None,
        least: int, most: int | None, budget: Budget,
    ) -> None:  # fmt: skip
        """`members`: the rule of each, None where it cannot be there, and whether it must be."""
        self._writer = writer
        self._comma = comma
        self._members = members
        self._other = other
        must = sum(required for _, required in members)
        self._least = 0 if least <= must else least
        self._most = None if most is None or (other is None and most >= len(members)) else most
        self._counted = max(1, self._least, self._most or 0)
        if self._counted > MAX_COUNTED and members:
            raise ValueError(f"minProperties and maxProperties are supported up to {MAX_COUNTED}")
        self._budget = budget
        self._known: dict[tuple[int, int], str | None] = {}

    def body(self) -> str | None:
        """All of them; None when they cannot be."""
        for at in range(len(self._members), -1, -1):  # not by recursion: there may be thousands
            for count in range(min(at, self._counted) + 1):
                self._known[at, count] = self._from(at, count)
        return self._known[0, 0]

    def _from(self, at: int, count: int) -> str | None:
        """What may come from one place on, where `count` have come already."""
        self._budget.spend()
        if at == len(self._members):
            return self._others(count)
        member, required = self._members[at]
        bodies = []
        after = self._known[at + 1, min(count + 1, self._counted)]
        if member is not None and after is not None and (self._most is None or count < self._most):
            comma = f"{self._comma} " if count else ""
            bodies.append(f"{comma}{member}" if after == EMPTY else f"{comma}{member} {after}")
        if not required and (skipped := self._known[at + 1, count]) is not None:
            bodies.append(skipped)
        return self._writer.rule(" | ".join(bodies)) if bodies else None

    def _others(self, count: int) -> str | None:
        need = max(0, self._least - count)
        room = None if self._most is None else self._most - count
        if self._other is None or room == 0:
            return None if need else EMPTY
        if need > 1:
            # Two others may have the same name, and be one.
            raise ValueError("minProperties above 1 is supported where that many are required only")
        more = self._writer.rule(f"{self._comma} {self._other}")
        if count:
            return repeated(more, need, room)
        body = f"{self._other} {repeated(more, 0, None if room is None else room - 1)}"
        return self._writer.rule(body if need else f"{EMPTY} | {body}")


def _count(schema: Mapping[str, Any], name: str, default: int | None) -> int | None:
    value = schema.get(name, default)
    if value is None:
        return None
    if isinstance(value, bool) or int(value) != value or value < 0:
        raise ValueError(f"{name}={value!r:.40} must be a whole number that is not negative")
    return int(value)


def _limited(node: Node, least: int, most: int | None, name: str) -> Node:
    """Texts of an expression that are neither shorter nor longer."""
    low, high = lengths(node)
    if low >= least and (most is None or (high is not None and high <= most)):
        return node
    parts = list(node.parts) if isinstance(node, Sequence) else [node]
    sizes = [lengths(part) for part in parts]
    varied = [at for at, (short, long) in enumerate(sizes) if short != long]
    fixed = sum(short for short, long in sizes if short == long)
    if len(varied) == 1 and isinstance(part := parts[varied[0]], Repeat) and isinstance(part.part, Chars):
        low = max(part.least, least - fixed)
        high = part.most if most is None else most - fixed if part.most is None else min(part.most, most - fixed)
        if high is not None and high < low:
            raise ValueError(f"{name} and the length of a string contradict each other")
        parts[varied[0]] = Repeat(part.part, low, high)
        return Sequence(tuple(parts))
    raise ValueError(f"minLength or maxLength beside this {name} is not supported")

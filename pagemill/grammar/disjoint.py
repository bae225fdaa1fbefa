"""Whether two JSON schemas can allow a common value, and what a schema does not allow. Both answers are exact or not
given. Knows nothing about grammars."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pagemill.grammar.json_values import ANNOTATIONS, TYPES, Budget, allows, resolve, types_of_value

_ALL_TYPES = frozenset(TYPES)
_BOUNDS = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
"""Keyword -> the type it is about, the keyword of what it refuses, and how far that is from its own bound."""


def disjoint(left: Any, right: Any, root: Any, budget: Budget, among: frozenset[str] = _ALL_TYPES) -> bool:
    """Whether no value of these types is allowed by both schemas, as far as that can be proved."""
    budget.spend()
    if _never(left, root) or _never(right, root):
        return True
    for one, other in ((left, right), (right, left)):
        values = _values(one, root, budget)
        if values is not None:
            return all(allows(other, value, root, budget) is False for value in values)
    shared = types_of(left, root, budget) & types_of(right, root, budget) & among
    return all(
        (kind == "object" and _objects_disjoint(left, right, root, budget))
        or (kind in ("number", "integer") and _ranges_disjoint(left, right, root, budget))
        for kind in shared
    )


def all_disjoint(schemas: Sequence[Any], root: Any, budget: Budget, among: frozenset[str] = _ALL_TYPES) -> bool:
    """Whether no value of these types is allowed by two of the schemas, as far as that can be proved."""
    named = [_values(schema, root, budget) for schema in schemas]
    values = [budget.numbers(item) for item in named if item is not None]
    budget.spend(sum(map(len, values)))
    if len(values) == len(schemas) and len(frozenset().union(*values)) == sum(map(len, values)):
        return True
    return all(disjoint(a, b, root, budget, among) for a, b in itertools.combinations(schemas, 2))


def types_of(schema: Any, root: Any, budget: Budget) -> frozenset[str]:
    """Types of values that a schema may allow."""
    found = _ALL_TYPES
    for part in _parts(schema, root, budget):
        named = part.get("type")
        if named is not None:
            names = {named} if isinstance(named, str) else set(named)
            budget.spend(len(names))
            found &= names | ({"integer"} if "number" in names else set())
        values = _own_values(part)
        if values is not None:
            budget.spend(len(values))
            found &= frozenset().union(*map(types_of_value, values))
    return found


def refused_by(schema: Any, root: Any, budget: Budget) -> Any:
    """The schema of all values that this one refuses; None where it cannot be written."""
    budget.spend()
    schema = resolve(schema, root)
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, Mapping):
        return None
    budget.spend(len(schema))
    keywords = [name for name in schema if name not in ANNOTATIONS]
    parts = []
    for name in keywords:
        part = _refused_by_keyword(name, schema[name], schema, root, budget)
        if part is None:
            return None
        if part is not False:
            parts.append(part)
    if not parts:
        return False
    return parts[0] if len(parts) == 1 else {"anyOf": parts}


def _refused_by_keyword(name: str, operand: Any, schema: Mapping[str, Any], root: Any, budget: Budget) -> Any:
    match name:
        case "not":
            return operand
        case "type":
            return _other_types([operand] if isinstance(operand, str) else operand)
        case "const" | "enum":
            return _other_values([operand] if name == "const" else operand, budget)
        case "anyOf" | "allOf":
            parts = [refused_by(item, root, budget) for item in operand]
            return None if None in parts else {"allOf" if name == "anyOf" else "anyOf": parts}
        case "required":
            budget.spend(len(operand))
            return {"type": "object", "anyOf": [{"properties": {key: False}} for key in operand]} if operand else False
        case "properties":
            parts = [(key, refused_by(item, root, budget)) for key, item in operand.items()]
            if any(part is None for _, part in parts):
                return None
            each = [
                {"type": "object", "properties": {key: part}, "required": [key]}
                for key, part in parts
                if part is not False
            ]
            return {"anyOf": each} if each else False
    if name in _BOUNDS and not isinstance(operand, bool):
        kind, opposite, offset = _BOUNDS[name]
        bound = operand + offset
        return {"type": kind, opposite: bound} if offset == 0 or bound >= 0 else False
    return None


def _other_types(names: list[str]) -> Any:
    if "integer" in names and "number" not in names:
        return None  # numbers that are no integers cannot be written
    others = [kind for kind in TYPES if kind not in names and kind != "integer"]
    return {"type": others} if others else False


def _other_values(values: list[Any], budget: Budget) -> Any:
    """All types but those of the values; of the boolean ones the other."""
    if any(not isinstance(value, (bool, type(None))) for value in values):
        return None
    rest = [kind for kind in TYPES if kind not in ("integer", "boolean", "null")]
    left = [value for value in (True, False, None) if budget.number(value) not in budget.numbers(values)]
    return {"anyOf": [{"type": rest}, {"enum": left}]} if left else {"type": rest}


def _never(schema: Any, root: Any) -> bool:
    return resolve(schema, root) is False


def _parts(schema: Any, root: Any, budget: Budget, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """The schema and those that it demands as well."""
    budget.spend()
    schema = resolve(schema, root)
    if isinstance(schema, Mapping) and depth < 16:
        yield schema
        for item in schema.get("allOf", ()):
            yield from _parts(item, root, budget, depth + 1)


def _own_values(part: Mapping[str, Any]) -> list[Any] | None:
    if "const" in part:
        return [part["const"]]
    values = part.get("enum")
    return values if isinstance(values, list) else None


def _values(schema: Any, root: Any, budget: Budget) -> list[Any] | None:
    """All values that a schema may allow, where it names them."""
    parts = _parts(schema, root, budget)
    return next((found for part in parts if (found := _own_values(part)) is not None), None)


def _objects_disjoint(left: Any, right: Any, root: Any, budget: Budget) -> bool:
    """Whether no object is allowed by both: one needs a property that the other does not have, or that must be
    another there."""
    needed = _required(left, root, budget), _required(right, root, budget)
    if any(_forbids(right, key, root, budget) for key in needed[0]):
        return True
    if any(_forbids(left, key, root, budget) for key in needed[1]):
        return True
    return any(
        disjoint(mine, theirs, root, budget)
        for key in needed[0] & needed[1]
        for mine in _property(left, key, root, budget)
        for theirs in _property(right, key, root, budget)
    )


def _required(schema: Any, root: Any, budget: Budget) -> set[str]:
    found: set[str] = set()
    for part in _parts(schema, root, budget):
        names = part.get("required", ())
        budget.spend(len(names))
        found.update(key for key in names if isinstance(key, str))
    return found


def _property(schema: Any, key: str, root: Any, budget: Budget) -> list[Any]:
    return [part["properties"][key] for part in _parts(schema, root, budget) if key in part.get("properties", {})]


def _forbids(schema: Any, key: str, root: Any, budget: Budget) -> bool:
    return any(_never(item, root) for item in _property(schema, key, root, budget)) or any(
        part.get("additionalProperties") is False
        and not part.get("patternProperties")
        and key not in part.get("properties", {})
        for part in _parts(schema, root, budget)
    )


def _ranges_disjoint(left: Any, right: Any, root: Any, budget: Budget) -> bool:
    (low, high), (other_low, other_high) = _range(left, root, budget), _range(right, root, budget)
    return high < other_low or other_high < low


def _range(schema: Any, root: Any, budget: Budget) -> tuple[float, float]:
    """Bounds of the numbers that a schema may allow; they may be wider than they are."""
    low, high = float("-inf"), float("inf")
    for part in _parts(schema, root, budget):
        for name in ("minimum", "exclusiveMinimum"):
            if isinstance(part.get(name), (int, float)) and not isinstance(part[name], bool):
                low = max(low, part[name])
        for name in ("maximum", "exclusiveMaximum"):
            if isinstance(part.get(name), (int, float)) and not isinstance(part[name], bool):
                high = min(high, part[name])
    return low, high

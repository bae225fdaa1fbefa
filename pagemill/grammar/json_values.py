"""Which JSON values a schema allows, and which values are equal, as far as that can be told without regular
expressions, in bounded time. Knows nothing about grammars."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

ANNOTATIONS = frozenset({
    "$anchor", "$comment", "$defs", "$id", "$schema", "$vocabulary", "contentEncoding", "contentMediaType",
    "contentSchema", "default", "definitions", "deprecated", "description", "example", "examples", "format", "id",
    "readOnly", "title", "writeOnly",
})  # fmt: skip
"""Keywords that restrict nothing, or whose values are schemas for others to refer to."""
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
MAX_REFERENCES = 16
MAX_POINTER_CHARS = 1024
"""Of a reference that is followed here."""


class OverBudgetError(ValueError):
    """A schema would cause more work than it may."""


class Budget:
    """Bounds the work that one schema may cause: whatever takes time in proportion to the schema is paid for."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._numbers: dict[Any, int] = {}
        self._of_object: dict[int, tuple[Any, Any]] = {}

    def spend(self, steps: int = 1) -> None:
        """Raises OverBudgetError when nothing is left."""
        self._steps -= steps
        if self._steps < 0:
            raise OverBudgetError("the schema is too large or too deeply intertwined")

    def number(self, value: Any) -> int:
        """The same number for JSON values that are equal: 1 and 1.0 are, 1 and true are not. A value of the schema is
        looked at once, however often it is compared."""
        if not isinstance(value, (list, dict)):
            scalar = (type(value) if isinstance(value, (bool, str)) else None, value)
            return self._numbers.setdefault(scalar, len(self._numbers))
        known = self._of_object.get(id(value))
        if known is not None:
            return int(known[1])
        content: Any
        if isinstance(value, list):
            content = tuple(map(self.number, value))
        else:
            content = frozenset((key, self.number(item)) for key, item in value.items())
        found = self._numbers.setdefault((type(value), content), len(self._numbers))
        self._of_object[id(value)] = value, found  # the value too: an id is another's after its end
        return found

    def numbers(self, values: list[Any]) -> frozenset[int]:
        """Those of all of them."""
        known = self._of_object.get(~id(values))
        if known is None:
            known = self._of_object[~id(values)] = values, frozenset(map(self.number, values))
        found: frozenset[int] = known[1]
        return found


def types_of_value(value: Any) -> frozenset[str]:
    """Names of the types that a value has: a number without a fraction is an integer too."""
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, (int, float)):
        whole = isinstance(value, int) or (
            value == value and value not in (float("inf"), float("-inf")) and value % 1 == 0
        )
        return frozenset({"number", "integer"}) if whole else frozenset({"number"})
    if isinstance(value, str):
        return frozenset({"string"})
    return frozenset({"array"}) if isinstance(value, list) else frozenset({"object"})


def resolve(schema: Any, root: Any) -> Any:
    """The schema that a local reference leads to; None where there is none to be found. Any other is itself."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        pointer = schema["$ref"]
        if not isinstance(pointer, str) or len(pointer) > MAX_POINTER_CHARS:
            return None
        if any(name not in ANNOTATIONS and name != "$ref" for name in schema):
            return None
        schema = at_pointer(pointer, root)
    return None


def at_pointer(pointer: str, root: Any) -> Any:
    """The schema that a local reference leads to; None where there is none to be found."""
    if pointer == "#":
        return root
    if not pointer.startswith("#/"):
        return None
    found = root
    for part in pointer[2:].split("/"):
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and part in found:
            found = found[part]
        elif isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            return None
    return found


def allows(schema: Any, value: Any, root: Any, budget: Budget) -> bool | None:
    """Whether a schema allows a value; None where this cannot be told."""
    budget.spend()
    schema = resolve(schema, root)
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        return None
    budget.spend(len(schema) + len(schema.get("required", ())) + len(schema.get("type", ())))
    return _all(_keyword_allows(name, schema, value, root, budget) for name in schema if name not in ANNOTATIONS)


def _all(results: Any) -> bool | None:
    unsure = False
    for result in results:
        if result is False:
            return False
        unsure = unsure or result is None
    return None if unsure else True


def _keyword_allows(name: str, schema: Mapping[str, Any], value: Any, root: Any, budget: Budget) -> bool | None:
    operand = schema[name]
    if name in _OF_TYPE:
        of_type, check = _OF_TYPE[name]
        return True if of_type not in types_of_value(value) else check(operand, value)
    if name in _COMBINATIONS:
        return _combination_allows(name, operand, value, root, budget)
    if name in ("properties", "additionalProperties", "patternProperties"):
        return not isinstance(value, dict) or _members_allowed(name, schema, value, root, budget)
    match name:
        case "type":
            return not types_of_value(value).isdisjoint([operand] if isinstance(operand, str) else operand)
        case "const":
            return budget.number(operand) == budget.number(value)
        case "enum":
            return budget.number(value) in budget.numbers(operand)
        case "items":
            if not isinstance(value, list) or not value:
                return True
            if isinstance(operand, (Mapping, bool)) and "prefixItems" not in schema:
                return _all(allows(operand, item, root, budget) for item in value)
    return None


_COMBINATIONS = ("not", "allOf", "anyOf", "oneOf")


def _combination_allows(name: str, operand: Any, value: Any, root: Any, budget: Budget) -> bool | None:
    if name == "not":
        return _opposite(allows(operand, value, root, budget))
    results = [allows(item, value, root, budget) for item in operand]
    if name == "allOf":
        return _all(results)
    if name == "anyOf":  # some branch allows it, unless all of them refuse it
        return _opposite(_all(map(_opposite, results)))
    return None if None in results else results.count(True) == 1


def _members_allowed(
    name: str, schema: Mapping[str, Any], value: Mapping[str, Any], root: Any, budget: Budget
) -> bool | None:
    operand = schema[name]
    budget.spend(len(value))
    if name == "properties":
        return _all(allows(operand[key], item, root, budget) for key, item in value.items() if key in operand)
    if not value or operand in (True, {}):
        return True
    if name == "patternProperties" or schema.get("patternProperties"):
        return None
    named = schema.get("properties", {})
    return _all(allows(operand, item, root, budget) for key, item in value.items() if key not in named)


def _opposite(result: bool | None) -> bool | None:
    return None if result is None else not result


def _exact(value: Any) -> Fraction:
    """A number as it is written in JSON."""
    return Fraction(repr(value))


_OF_TYPE: dict[str, tuple[str, Any]] = {
    "minimum": ("number", lambda bound, value: value >= bound),
    "maximum": ("number", lambda bound, value: value <= bound),
    "exclusiveMinimum": ("number", lambda bound, value: None if isinstance(bound, bool) else value > bound),
    "exclusiveMaximum": ("number", lambda bound, value: None if isinstance(bound, bool) else value < bound),
    "multipleOf": ("number", lambda part, value: _exact(value) % _exact(part) == 0 if part > 0 else None),
    "minLength": ("string", lambda bound, value: len(value) >= bound),
    "maxLength": ("string", lambda bound, value: len(value) <= bound),
    "pattern": ("string", lambda pattern, value: None),
    "minItems": ("array", lambda bound, value: len(value) >= bound),
    "maxItems": ("array", lambda bound, value: len(value) <= bound),
    "minProperties": ("object", lambda bound, value: len(value) >= bound),
    "maxProperties": ("object", lambda bound, value: len(value) <= bound),
    "required": ("object", lambda names, value: all(name in value for name in names)),
}
"""Keyword -> the type of values that it is about, and whether it allows a value of that type."""

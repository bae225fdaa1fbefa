"""Two JSON schemas as one that allows what both allow. Exact, or an error that names the keyword. Knows nothing about
grammars."""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Final

from pagemill.grammar.json_values import TYPES, Budget

ASSERTIONS: Final = frozenset({
    "additionalProperties", "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "items", "maxItems",
    "maxLength", "maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf",
    "pattern", "patternProperties", "prefixItems", "properties", "required", "type",
})  # fmt: skip
"""Keywords of schemas that are merged here: those that stand for themselves."""
UNSUPPORTED: Final = frozenset({
    "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if",
    "maxContains", "minContains", "not", "oneOf", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
    "uniqueItems",
})  # fmt: skip
"""Keywords that restrict values and are not followed."""
_KINDS: Final[dict[str, type]] = {
    "enum": list, "patternProperties": dict, "prefixItems": list, "properties": dict, "required": list,
}  # fmt: skip
_LEAST: Final = {"minItems", "minLength", "minProperties", "minimum", "exclusiveMinimum"}
_MOST: Final = {"maxItems", "maxLength", "maxProperties", "maximum", "exclusiveMaximum"}


def plain(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that restrict values; anyOf, allOf and $ref are left to others. Types are a list, and bounds are
    numbers. Raises ValueError that names a keyword which is not supported."""
    unsupported = sorted(UNSUPPORTED & schema.keys())
    if unsupported:
        raise ValueError(f"these keywords are not supported: {', '.join(unsupported)}")
    found = {name: schema[name] for name in schema if name in ASSERTIONS}
    for name, kind in _KINDS.items():
        if not isinstance(found.get(name, kind()), kind):
            raise ValueError(f"{name}={found[name]!r:.40} must be {'a list' if kind is list else 'an object'}")
    if "type" in found:
        named = found["type"]
        found["type"] = _types([named] if isinstance(named, str) else list(named))
    if "const" in found:
        value = found.pop("const")
        found = merged(found, {"enum": [value]}, Budget(1000))
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(found.get(exclusive), bool) and found.pop(exclusive) and bound in found:
            found[exclusive] = found.pop(bound)
    if isinstance(found.get("items"), list):
        found["prefixItems"] = found.pop("items")
        found["items"] = schema.get("additionalItems", True)
    if "prefixItems" in found and "items" not in found:
        found["items"] = True
    return found


def _types(names: list[str]) -> list[str]:
    unknown = [name for name in names if name not in TYPES]
    if unknown:
        raise ValueError(f"type={unknown[0]!r:.40} is not one of {', '.join(TYPES)}")
    return [name for name in TYPES if name in names and not (name == "integer" and "number" in names)]


def merged(left: Mapping[str, Any], right: Mapping[str, Any], budget: Budget) -> dict[str, Any]:
    """Of two schemas as `plain` makes them. Raises ValueError that names a keyword of which both have one, where these
    cannot be made one."""
    budget.spend(1 + len(left) + len(right))
    found = dict(left)
    if {"properties", "additionalProperties", "patternProperties"} & left.keys() & _members(right):
        found |= _merged_members(left, right, budget)
    if {"items", "prefixItems"} & left.keys() and {"items", "prefixItems"} & right.keys():
        found |= _merged_items(left, right)
    for name, operand in right.items():
        if name not in left:
            found.setdefault(name, operand)
        elif name not in _APART:
            found[name] = _merged_operands(name, left[name], operand, budget)
    return found


_APART: Final = {"properties", "additionalProperties", "patternProperties", "items", "prefixItems"}


def _members(schema: Mapping[str, Any]) -> set[str]:
    own = {"properties", "additionalProperties", "patternProperties"}
    return own if own & schema.keys() else set()


def _merged_operands(name: str, left: Any, right: Any, budget: Budget) -> Any:
    if name in _LEAST:
        return max(left, right)
    if name in _MOST:
        return min(left, right)
    match name:
        case "type":
            shared = [kind for kind in TYPES if _has(left, kind) and _has(right, kind)]
            return _types(shared)
        case "enum":
            budget.spend(len(left) + len(right))
            numbers = budget.numbers(right)
            return [value for value in left if budget.number(value) in numbers]
        case "required":
            budget.spend(len(left) + len(right))
            return list(dict.fromkeys([*left, *right]))
        case "multipleOf":
            return _common_multiple(left, right)
    if left == right:
        return left
    raise ValueError(f"several {name} for the same value are not supported")


def _has(types: list[str], kind: str) -> bool:
    return kind in types or (kind == "integer" and "number" in types)


def _common_multiple(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        return math.lcm(left, right)
    if Fraction(repr(left)) % Fraction(repr(right)) == 0:
        return left
    if Fraction(repr(right)) % Fraction(repr(left)) == 0:
        return right
    raise ValueError("several multipleOf for the same value are not supported")


def _merged_members(left: Mapping[str, Any], right: Mapping[str, Any], budget: Budget) -> dict[str, Any]:
    patterns = [schema.get("patternProperties", {}) for schema in (left, right)]
    if patterns[0] != patterns[1] and any(patterns):
        raise ValueError("patternProperties beside properties of another schema are not supported")
    named = [schema.get("properties", {}) for schema in (left, right)]
    others = [schema.get("additionalProperties", True) for schema in (left, right)]
    keys = dict.fromkeys([*named[0], *named[1]])
    budget.spend(len(keys))
    if any(patterns) and named[0].keys() != named[1].keys():
        raise ValueError("patternProperties beside properties of another schema are not supported")
    found: dict[str, Any] = {
        "properties": {key: _both(named[0].get(key, others[0]), named[1].get(key, others[1])) for key in keys},
        "additionalProperties": _both(*others),
    }
    if any(patterns):
        found["patternProperties"] = patterns[0]
    return found


def _merged_items(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    first = [schema.get("prefixItems", []) for schema in (left, right)]
    rest = [schema.get("items", True) for schema in (left, right)]
    length = max(map(len, first))
    items = [part + [more] * (length - len(part)) for part, more in zip(first, rest, strict=True)]
    found: dict[str, Any] = {"items": _both(*rest)}
    if length:
        found["prefixItems"] = [_both(*pair) for pair in zip(*items, strict=True)]
    return found


def _both(left: Any, right: Any) -> Any:
    if left is False or right is False:
        return False
    if left in (True, {}):
        return right
    if right in (True, {}) or left == right:
        return left
    return {"allOf": [left, right]}

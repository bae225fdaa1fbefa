"""JSON schemas in the keywords that llguidance implements: what it would refuse is written in another way, where that
means exactly the same, and left as it is where it cannot be; nothing is left out but annotations. Knows nothing about
tokens."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Final

from pagemill.grammar.disjoint import all_disjoint, disjoint, refused_by, types_of
from pagemill.grammar.json_values import Budget, allows

MAX_DEPTH: Final = 64
MAX_STEPS: Final = 50_000
MAX_DIGITS: Final = 18
"""Of integers that have no bounds of their own."""
MAX_MULTIPLE: Final = 10_000
"""Of `multipleOf`, in units of its last digit: the library takes time and memory for each of them."""
MAX_EXCLUSIVE: Final = 16
"""Branches of a `oneOf` that are told apart by what they refuse."""
FORMATS: Final = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
})  # fmt: skip
"""Those that are followed. All others are annotations, as JSON Schema has it."""
_BELOW: Final = {
    "additionalProperties", "additionalItems", "contains", "contentSchema", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip
_LISTS: Final = {"allOf", "anyOf", "oneOf", "prefixItems", "items"}
_MAPS: Final = {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
_NUMERIC: Final = {
    "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf", "$ref", "allOf",
    "anyOf", "oneOf",
}  # fmt: skip
_MALFORMED: Final = (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ZeroDivisionError)


def supported(
    schema: Any, *, disable_additional_properties: bool = False, budget: Budget | None = None
) -> dict[str, Any]:
    """The schema in supported keywords; what it means is the same, but for the length of integers. Raises ValueError
    for one that is malformed, allows nothing, is too large, or sets options of the library. `budget`: for the work that
    it may cause (default: MAX_STEPS)."""
    if schema is True:
        return {}
    if not isinstance(schema, Mapping):
        raise ValueError("a schema is an object, and one that is false allows nothing")
    rewriting = _Rewriting(schema, disable_additional_properties, budget or Budget(MAX_STEPS))
    try:
        found = rewriting.of(schema, 0)
    except _MALFORMED as error:
        raise ValueError(f"the schema is malformed: {type(error).__name__}: {str(error)[:100]}") from None
    if found is False:
        raise ValueError("the schema allows nothing")
    return {} if found is True else found


class _Rewriting:
    """Goes through one schema, from its root down."""

    def __init__(self, root: Mapping[str, Any], closed: bool, budget: Budget) -> None:
        """`closed`: objects have no properties but those that they name."""
        self._root = root
        self._closed = closed
        self._budget = budget
        self._rules: tuple[Callable[[dict[str, Any]], dict[str, Any] | bool], ...] = (
            self._finite,
            self._exclusive_branches,
            self._refusal,
            self._dependencies,
            self._condition,
            self._names,
        )

    def of(self, schema: Any, depth: int) -> Any:
        """The schema in supported keywords."""
        self._budget.spend()
        if depth > MAX_DEPTH:
            raise ValueError(f"the schema is nested more than {MAX_DEPTH} levels deep")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise ValueError(f"the schema is malformed: {str(schema)[:40]!r} where a schema must be")
        if "x-guidance" in schema:
            raise ValueError("x-guidance is not allowed in a schema")
        found: dict[str, Any] | bool = self._without_annotations(dict(schema))
        for rule in self._rules:
            if isinstance(found, bool):
                return found
            found = rule(found)
        return found if isinstance(found, bool) else self._below(found, depth)

    def _below(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        for name, operand in schema.items():
            if name in _MAPS and isinstance(operand, Mapping):
                schema[name] = {key: self.of(item, depth + 1) for key, item in operand.items()}
            elif name in _LISTS and isinstance(operand, list):
                schema[name] = [self.of(item, depth + 1) for item in operand]
            elif name in _BELOW:
                schema[name] = self.of(operand, depth + 1)
        return schema

    def _without_annotations(self, schema: dict[str, Any]) -> dict[str, Any]:
        if schema.get("format", "date") not in FORMATS:
            del schema["format"]
        if "multipleOf" in schema and Fraction(repr(schema["multipleOf"])).numerator > MAX_MULTIPLE:
            raise ValueError(f"multipleOf={schema['multipleOf']!r:.40} is too large: at most {MAX_MULTIPLE} is allowed")
        unique = schema.get("uniqueItems")
        if unique is False or (unique is True and schema.get("maxItems", 2) < 2):
            del schema["uniqueItems"]
        if schema.get("type") == "integer" and not _NUMERIC & set(schema):
            schema["maximum"] = 10**MAX_DIGITS - 1
            schema["minimum"] = -schema["maximum"]
        if self._closed and "additionalProperties" not in schema and "unevaluatedProperties" not in schema:
            names = schema.get("type")
            if "properties" in schema or names == "object":
                schema["additionalProperties"] = False
        return schema

    def _finite(self, schema: dict[str, Any]) -> dict[str, Any] | bool:
        """A schema that names its values allows those of them that its other keywords allow."""
        owner = next((part for part in [schema, *_all_of(schema)] if "const" in part or "enum" in part), None)
        if owner is None or not _mentions(schema, _HARD):
            return schema
        values = [owner["const"]] if "const" in owner else owner["enum"]
        verdicts = [allows(schema, value, self._root, self._budget) for value in values]
        if None in verdicts:
            return schema
        kept = [value for value, allowed in zip(values, verdicts, strict=True) if allowed]
        kept_definitions: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        return {**kept_definitions, "enum": kept} if kept else False

    def _exclusive_branches(self, schema: dict[str, Any]) -> dict[str, Any] | bool:
        """A `oneOf` of which no two branches allow the same value is an `anyOf`; otherwise each branch goes with what
        the others refuse."""
        branches = schema.get("oneOf")
        if not isinstance(branches, list) or not branches:
            return schema
        among = types_of({key: item for key, item in schema.items() if key != "oneOf"}, self._root, self._budget)
        if not all_disjoint(branches, self._root, self._budget, among):
            if len(branches) > MAX_EXCLUSIVE:
                return schema
            others = [refused_by(branch, self._root, self._budget) for branch in branches]
            if None in others:
                return schema
            branches = [
                {"allOf": [branch, *(other for k, other in enumerate(others) if k != at)]}
                for at, branch in enumerate(branches)
            ]
        del schema["oneOf"]
        return _and(schema, {"anyOf": branches}, "anyOf")

    def _refusal(self, schema: dict[str, Any]) -> dict[str, Any] | bool:
        """`not` as what is left."""
        if "not" not in schema:
            return schema
        operand = schema["not"]
        rest = {key: item for key, item in schema.items() if key != "not"}
        if disjoint(rest, operand, self._root, self._budget):
            return rest
        left = refused_by(operand, self._root, self._budget)
        if left is None:
            return schema
        if left is False:
            return False
        return rest if left is True else _and(rest, {"allOf": [left]}, "allOf")

    def _dependencies(self, schema: dict[str, Any]) -> dict[str, Any] | bool:
        """A property that needs others, or another schema, is not there or has what it needs."""
        parts = []
        for name in ("dependencies", "dependentRequired", "dependentSchemas"):
            for key, need in (schema.pop(name, None) or {}).items():
                demanded = {"required": need} if isinstance(need, list) else need
                parts.append({"anyOf": [{"properties": {key: False}}, demanded]})
        return _and(schema, {"allOf": parts}, "allOf") if parts else schema

    def _condition(self, schema: dict[str, Any]) -> dict[str, Any] | bool:
        """`if`: it holds and `then` does, or it does not and `else` does."""
        rest = {key: item for key, item in schema.items() if key not in ("if", "then", "else")}
        then, otherwise = schema.get("then", True), schema.get("else", True)
        condition = schema.get("if")
        if condition is None or (then is True and otherwise is True):
            return rest
        left = refused_by(condition, self._root, self._budget)
        if left is None:
            return schema
        branches = [{"allOf": [condition, then]}, {"allOf": [left, otherwise]}]
        return _and(rest, {"allOf": [{"anyOf": branches}]}, "allOf")

    def _names(self, schema: dict[str, Any]) -> dict[str, Any] | bool:
        """`propertyNames` as patterns or names of properties, where nothing else says what these are."""
        rule = schema.get("propertyNames")
        if rule is None:
            return schema
        if rule is True:
            del schema["propertyNames"]
            return schema
        if not isinstance(rule, Mapping) or "patternProperties" in schema:
            return schema
        keywords = {key for key in rule if key not in ("type", "description", "title", "$comment")}
        if rule.get("type", "string") != "string" or keywords not in ({"pattern"}, {"enum"}):
            return schema
        item = schema.get("additionalProperties", True)
        named = schema.get("properties", {})
        if keywords == {"pattern"}:
            if named:
                return schema
            schema["patternProperties"] = {rule["pattern"]: item}
        else:
            schema["properties"] = {key: named.get(key, item) for key in rule["enum"]}
        del schema["propertyNames"]
        schema["additionalProperties"] = False
        return schema


_HARD: Final = frozenset({"not", "oneOf", "if", "uniqueItems", "contains", "dependencies", "propertyNames"})


def _all_of(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    parts = schema.get("allOf", [])
    return [part for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []


def _mentions(schema: Mapping[str, Any], keywords: frozenset[str]) -> bool:
    return any(keywords & set(part) for part in [schema, *_all_of(schema)])


def _and(schema: dict[str, Any], more: Mapping[str, Any], keyword: str) -> dict[str, Any]:
    """The schema and another one, which has this keyword alone."""
    if keyword not in schema:
        return {**schema, **more}
    if keyword == "allOf":
        return {**schema, "allOf": [*schema["allOf"], *more["allOf"]]}
    return {**schema, "allOf": [*schema.get("allOf", []), dict(more)]}

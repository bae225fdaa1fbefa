"""`in_schema_order`: a JSON value with its keys in the order in which a schema names them."""

from collections.abc import Iterator
from typing import Any

from pagemill.grammar.json_values import Budget, allows


def in_schema_order(value: Any, schema: Any, root: Any = None) -> Any:
    """The keys that the schema does not name come last, in their own order."""
    return _ordered(value, [schema], schema if root is None else root)


def _ordered(value: Any, schemas: list[Any], root: Any) -> Any:
    parts = [part for schema in schemas for part in _parts(schema, value, root, 0)]
    if isinstance(value, list):
        items = [part["items"] for part in parts if isinstance(part.get("items"), dict)]
        tuples = [part.get("prefixItems", part.get("items")) for part in parts]
        return [
            _ordered(item, items + [given[at] for given in tuples if isinstance(given, list) and at < len(given)], root)
            for at, item in enumerate(value)
        ]
    if not isinstance(value, dict):
        return value
    named: dict[str, list[Any]] = {}
    for part in parts:
        for key, schema in part.get("properties", {}).items():
            named.setdefault(key, []).append(schema)
        for key in part.get("required", ()):
            named.setdefault(key, [])
    others = [part["additionalProperties"] for part in parts if isinstance(part.get("additionalProperties"), dict)]
    others += [schema for part in parts for schema in part.get("patternProperties", {}).values()]
    keys = [key for key in named if key in value] + [key for key in value if key not in named]
    return {key: _ordered(value[key], named.get(key, []) + others, root) for key in keys}


def _parts(schema: Any, value: Any, root: Any, depth: int) -> Iterator[dict[str, Any]]:
    """A schema and those that it refers to or is made of, in order; of alternatives, those that may allow the value."""
    if not isinstance(schema, dict) or depth > 12:
        return
    yield schema
    reference = schema.get("$ref", "")
    if reference.startswith("#"):
        found = root
        for part in reference[1:].split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            found = found[int(part)] if isinstance(found, list) else found.get(part, {})
        yield from _parts(found, value, root, depth + 1)
    for name in ("allOf", "anyOf", "oneOf"):
        for item in schema.get(name, ()):
            if name != "allOf" and allows(item, value, root, Budget(10_000)) is False:
                continue
            yield from _parts(item, value, root, depth + 1)
    for name in ("then", "else"):
        yield from _parts(schema.get(name), value, root, depth + 1)

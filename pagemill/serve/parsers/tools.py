"""`Tools`: what readers of calls know of the functions that may be called; and the protocol of those readers."""

from collections.abc import Mapping
from typing import Any, Final, Protocol

from pagemill.serve.parsers.json_scan import Scan

NO_ARGUMENTS: Final = "{}"
JSON_TYPES: Final = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
MAX_DEPTH: Final = 8
"""Of alternatives in a schema that are looked into."""


class CallReader(Protocol):
    """Reads one call while its text arrives."""

    name: str
    status: Scan
    """ENDED: the call was closed. FAILED: this is no call; or, once told, what follows is no part of one."""
    is_told: bool
    """Whether the name has been passed on; what was passed on before is arguments."""
    is_valid: bool
    """Whether the arguments have ended and are a JSON object."""

    @property
    def text(self) -> str:
        """What was read of a call that is not told."""

    def feed(self, text: str, at: int, final: bool) -> tuple[str, int]:
        """Read on from a place. The arguments' next characters; and the place up to which the text was read. Where the
        status is OPEN, the rest is fed again, with more; `final`: there is no more."""


class Tools:
    """The functions of a request."""

    __slots__ = ("_must_be_known", "_schemas")

    def __init__(self, schemas: Mapping[str, Any], must_be_known: bool = False) -> None:
        """`schemas`: name -> JSON schema of the arguments. `must_be_known`: other names cannot be called."""
        self._schemas = schemas
        self._must_be_known = must_be_known

    @classmethod
    def of(cls, tools: list[dict[str, Any]], must_be_known: bool = False) -> "Tools":
        """From tools as the API describes them."""
        found: dict[str, Any] = {}
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, dict):
                found[str(function.get("name"))] = function.get("parameters")
        return cls(found, must_be_known)

    def known(self) -> "Tools":
        """The same, where only these can be called."""
        return Tools(self._schemas, must_be_known=True)

    def allows(self, name: str) -> bool:
        """Whether a function of this name may be called."""
        return bool(name) and (not self._must_be_known or name in self._schemas)

    def types(self, name: str, argument: str) -> frozenset[str]:
        """JSON types that an argument may have; empty: nothing is known."""
        schema = self._schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        described = properties.get(argument) if isinstance(properties, dict) else None
        return frozenset(types_of(described, schema))


def types_of(schema: Any, root: Any, depth: int = MAX_DEPTH) -> set[str]:
    """The types that a schema names, its alternatives included."""
    if not isinstance(schema, dict) or depth == 0:
        return set()
    found: set[str] = set()
    named = schema.get("type")
    for kind in named if isinstance(named, list) else [named]:
        if kind in JSON_TYPES:
            found.add(kind)
    for key in ("anyOf", "oneOf", "allOf"):
        alternatives = schema.get(key)
        for alternative in alternatives if isinstance(alternatives, list) else []:
            found |= types_of(alternative, root, depth - 1)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not found and isinstance(values, list):
        found |= {_type_of(value) for value in values}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found |= types_of(referred(root, reference), root, depth - 1)
    return found


def referred(root: Any, reference: str) -> Any:
    """What a reference within a schema points to; None when it is not there."""
    place = root
    for part in reference[2:].split("/"):
        if not isinstance(place, dict):
            return None
        place = place.get(part.replace("~1", "/").replace("~0", "~"))
    return place


def _type_of(value: Any) -> str:
    """The JSON type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"

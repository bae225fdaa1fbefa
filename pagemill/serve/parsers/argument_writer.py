"""Arguments of calls as the forms that an output is held to, where they are not one JSON object: elements, and literals
of a language. Does not know what stands around them."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pagemill.errors import RequestError
from pagemill.serve.parsers.call_spec import Function, Item, Marks, Spec, either
from pagemill.serve.parsers.format import ElementCall, Head, NotationCall
from pagemill.serve.parsers.tools import referred, types_of

MAX_OPTIONAL: Final = 32
"""Arguments that may all be left out, where a comma stands between two."""
_MAX_DEPTH: Final = 3
"""Of lists and objects within each other, where any value may be written."""
_MAX_LEVELS: Final = 16
"""Of a schema."""
_KEY: Final[Spec] = {"type": "regex", "pattern": "[A-Za-z_][A-Za-z0-9_]{0,63}"}
_SCALAR: Final[Spec] = {"type": "json_schema", "json_schema": {"type": ["number", "boolean", "null"]}}
_STRING: Final = "string"
_LIMITS_OF_TEXT: Final = ("format", "maxLength", "minLength", "pattern")
_SCALARS: Final = ("integer", "number", "boolean", "null")
_PYTHON: Final = {True: "True", False: "False", None: "None"}

HeadItems = Callable[[Head, str, str], list[Item]]
"""A head, a name and a type -> what names an argument."""


def element_arguments(form: ElementCall, function: Function, marks: Marks, head: HeadItems) -> list[Item]:
    """An element for each argument, in the order of the schema. Raises RequestError."""
    wrap = "\n" if form.wraps else ""

    def element(names: list[Item], value: Item) -> Spec:
        end = [] if value is text else [wrap, form.value_end]
        return marks.sequence([*names, form.value_begin, wrap, value, *end, wrap])

    text = marks.until(form.value_end)
    named = _properties(function)
    if named is None:
        before, after = _around(head(form.argument, "\0", _STRING))
        return [wrap, {"type": "star", "content": element([before, _KEY, after], text)}]
    items: list[Item] = [wrap]
    for name, schema, required in named:
        types = types_of(schema, function.schema or {})
        kind = _STRING if not types or _STRING in types else min(types)
        values = _listed(schema)
        if values is not None:
            value: Item = either([{"type": "const_string", "value": _plain(item)} for item in values])
        elif kind == _STRING:
            _check_text(function, name, schema)
            value = text
        else:
            value = _json_value(schema, function)
        one = element(head(form.argument, name, kind), value)
        items.append(one if required else {"type": "optional", "content": one})
    return items


def notation_arguments(form: NotationCall, function: Function, marks: Marks) -> list[Item]:
    """Arguments with commas between them, required ones first. Raises RequestError."""
    writer = _LiteralWriter(form, function, marks)
    named = _properties(function)
    if named is None:
        one = marks.sequence([_KEY, form.assigns, writer.any_value(_MAX_DEPTH)])
        return [_list_of(one, marks, 0, None)]
    pairs = [
        (marks.sequence([name, form.assigns, writer.value(schema, _MAX_LEVELS)]), needed)
        for name, schema, needed in named
    ]
    return [_in_order(pairs, marks, function)]


class _LiteralWriter:
    """Values of arguments."""

    def __init__(self, form: NotationCall, function: Function, marks: Marks) -> None:
        self._form = form
        self._function = function
        self._marks = marks
        self._is_json = form.escapes and '"' in form.quotes
        """Whether literals may be JSON."""

    def value(self, schema: Any, levels: int) -> Spec:
        """One value of a schema."""
        if self._is_json:
            return self._python_value(schema)
        schema = _resolved(schema, self._function, levels)
        if (values := _listed(schema)) is not None:
            return either([self._marks.sequence([self._literal(value)]) for value in values])
        branches = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(branches, list) and branches:
            return either([self.value(branch, levels - 1) for branch in branches])
        types = schema.get("type")
        kinds = types if isinstance(types, list) else [types]
        return either([self._of_kind(kind, schema, levels) for kind in kinds])

    def any_value(self, depth: int) -> Spec:
        """Any value."""
        if self._is_json:
            return {"type": "json_schema", "json_schema": {}}
        found = [_SCALAR, self._string()]
        if depth > 0:
            inner = self.any_value(depth - 1)
            pair = self._marks.sequence([_KEY, ":", inner])
            found.append(self._marks.sequence(["[", _list_of(inner, self._marks, 0, None), "]"]))
            found.append(self._marks.sequence(["{", _list_of(pair, self._marks, 0, None), "}"]))
        return either(found)

    def _python_value(self, schema: Any) -> Spec:
        types = types_of(schema, self._function.schema or {})
        values = [True, False] if types == {"boolean"} else [None] if types == {"null"} else None
        if values is not None and _listed(schema) is None:
            return either([{"type": "const_string", "value": _PYTHON[value]} for value in values])
        return _json_value(schema, self._function)

    def _of_kind(self, kind: Any, schema: Mapping[str, Any], levels: int) -> Spec:
        if kind == _STRING:
            _check_text(self._function, "a string", schema)
            return self._string()
        if kind in _SCALARS:
            return _json_value({**schema, "type": kind}, self._function)
        if kind == "array":
            items = schema.get("items", True)
            item = self.any_value(_MAX_DEPTH) if items in (True, {}) else self.value(items, levels - 1)
            low, high = schema.get("minItems", 0), schema.get("maxItems")
            return self._marks.sequence(["[", _list_of(item, self._marks, low, high), "]"])
        if kind == "object":
            return self._object(schema, levels)
        return self.any_value(_MAX_DEPTH)

    def _object(self, schema: Mapping[str, Any], levels: int) -> Spec:
        named = _named_in(schema)
        if named is None:
            pair = self._marks.sequence([_KEY, ":", self.any_value(_MAX_DEPTH)])
            return self._marks.sequence(["{", _list_of(pair, self._marks, 0, None), "}"])
        pairs = [
            (self._marks.sequence([name, ":", self.value(inner, levels - 1)]), needed) for name, inner, needed in named
        ]
        return self._marks.sequence(["{", _in_order(pairs, self._marks, self._function), "}"])

    def _string(self) -> Spec:
        quote = self._form.quotes[0]
        return self._marks.sequence([quote, self._marks.until(quote)])

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._form.quotes[0]}{value}{self._form.quotes[0]}"
        return json.dumps(value, ensure_ascii=False)


def _properties(function: Function) -> list[tuple[str, Any, bool]] | None:
    """Name, schema and whether it is required, of each argument; None: any may be given. Raises RequestError for a
    schema that does not name them."""
    schema = function.schema
    if schema is None:
        return None
    other = [name for name in ("allOf", "anyOf", "oneOf", "not", "if", "$ref", "patternProperties") if name in schema]
    if other:
        raise RequestError(
            f"{function.field} has {other[0]} beside or instead of properties, which the model's format of calls "
            "cannot be held to: name the arguments in properties",
            function.field,
        )
    return _named_in(schema)


def _named_in(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]] | None:
    """The same of any object."""
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    listed = schema.get("required")
    required = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    names = list(dict.fromkeys([*properties, *required]))
    if not names and schema.get("additionalProperties", True) is not False:
        return None
    return [(name, properties.get(name, {}), name in required) for name in names]


def _resolved(schema: Any, function: Function, levels: int) -> Mapping[str, Any]:
    """A schema without a reference at its top. Raises RequestError for one that is too deep, or refers to itself."""
    for _ in range(_MAX_LEVELS):
        if levels <= 0:
            break
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = referred(function.schema, reference) if reference.startswith("#/") else None
    raise RequestError(
        f"{function.field} is nested more than {_MAX_LEVELS} levels deep, or refers to itself, which the model's "
        "format of calls cannot be held to",
        function.field,
    )


def _in_order(pairs: Sequence[tuple[Spec, bool]], marks: Marks, function: Function) -> Spec:
    """Those that must be there, then any of the others, with commas between them."""
    needed = [pair for pair, is_needed in pairs if is_needed]
    others = [pair for pair, is_needed in pairs if not is_needed]
    if needed:
        commas: list[Item] = [item for pair in needed for item in (", ", pair)][1:]
        return marks.sequence([*commas, *_after_comma(others, marks)])
    if len(others) > MAX_OPTIONAL:
        raise RequestError(
            f"{function.field} has {len(others)} properties and none of them is required, which the model's format of "
            f"calls cannot be held to: at most {MAX_OPTIONAL}",
            function.field,
        )
    first = [marks.sequence([pair, *_after_comma(others[at + 1 :], marks)]) for at, pair in enumerate(others)]
    return {"type": "optional", "content": either(first)} if first else marks.sequence([])


def _after_comma(pairs: Sequence[Spec], marks: Marks) -> list[Item]:
    return [{"type": "optional", "content": marks.sequence([", ", pair])} for pair in pairs]


def _list_of(item: Spec, marks: Marks, low: int, high: int | None) -> Spec:
    """Items with commas between them."""
    if high == 0:
        return marks.sequence([])
    more = {"type": "repeat", "content": marks.sequence([", ", item]), "min": max(0, low - 1)}
    if high is not None:
        more["max"] = high - 1
    one = marks.sequence([item, more])
    return one if low > 0 else {"type": "optional", "content": one}


def _json_value(schema: Any, function: Function) -> Spec:
    """A JSON value of a part of the function's schema, to whose definitions it may refer."""
    if isinstance(schema, Mapping):
        given = function.schema or {}
        shared = {name: given[name] for name in ("$defs", "definitions") if name in given}
        schema = {**shared, **schema}
    return {"type": "json_schema", "json_schema": schema}


def _listed(schema: Any) -> list[Any] | None:
    """The values that a schema names; None: it names none."""
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) and values else None


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _check_text(function: Function, name: str, schema: Any) -> None:
    """Raises RequestError for a strict function with a string whose text is restricted."""
    found = [key for key in _LIMITS_OF_TEXT if isinstance(schema, Mapping) and key in schema]
    if found and function.is_strict:
        raise RequestError(
            f"{function.field}: {found[0]} of {name} is not supported with strict=true: the model's format of calls "
            "writes strings as they are",
            function.field,
        )


def _around(items: Sequence[Item]) -> tuple[Item, Item]:
    """What stands before and after the name in a head."""
    before, _, after = "".join(item for item in items if isinstance(item, str)).partition("\0")
    return before, after

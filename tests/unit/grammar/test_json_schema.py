import contextlib
import json

import pytest

from pagemill.grammar.json_schema import MAX_MULTIPLE, supported
from tests.fakes.byte_vocabulary import accepts

OBJECT = {"type": "object", "additionalProperties": False}
A_OR_B = {**OBJECT, "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "string", "format": "country-code"}, ["x"], [1]),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, ["x", None], [1]),
        ({"oneOf": [{"const": 1}, {"const": 2}]}, [1, 2], [3]),
        ({"oneOf": [{"enum": [1, 1, "a"]}, {"const": True}, {"enum": [None]}]}, [1, "a", True, None], [2, False]),
        ({**A_OR_B, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 2}]),
        ({"type": ["string", "null"], "not": {"type": "null"}}, ["x"], [None]),
        ({"type": "integer", "not": {"minimum": 5}}, [4, -1], [5, 6]),
        ({"enum": [1, 2, "a"], "not": {"enum": [2, "a"]}}, [1], [2, "a"]),
        ({"allOf": [{"enum": [6, 7]}, {"not": {"multipleOf": 2}}]}, [7], [6]),
        ({**A_OR_B, "dependencies": {"a": ["b"]}}, [{"b": 1}, {"a": 1, "b": 1}, {}], [{"a": 1}]),
        ({"type": "integer", "if": {"minimum": 10}, "then": {"maximum": 20}}, [9, 20], [21]),
        ({"type": "object", "propertyNames": {"pattern": "^x"}}, [{"x1": 1}, {}], [{"y": 1}]),
        ({"type": "array", "maxItems": 1, "uniqueItems": True}, [[1], []], [[1, 1]]),
        ({"enum": [1, [1], {"a": 1}], "not": {"enum": [[1.0], {"a": True}, 1.0]}}, [{"a": 1}], [1, [1]]),
        ({"enum": [True, 1, 0, False], "not": {"enum": [True, 0]}}, [1, False], [True, 0]),
    ],
)
def test_what_the_library_would_refuse_means_the_same(vocabulary, schema, valid, invalid):
    for value in valid:
        assert accepts(vocabulary, json.dumps(value), json=schema), value
    for value in invalid:
        assert not accepts(vocabulary, json.dumps(value), json=schema), value


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "oneOf"),
        ({"type": "string", "not": {"pattern": "a"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"type": "null"}}, "contains"),
        ({"type": "integer", "multipleOf": MAX_MULTIPLE + 1}, "multipleOf"),
        ({"type": "string", "x-guidance": {"lenient": True}}, "x-guidance"),
        ({"properties": [1]}, "properties"),
        ({"enum": [1], "not": {"const": 1}}, "nothing"),
        (False, "false"),
    ],
)
def test_a_refusal_names_the_keyword(vocabulary, schema, word):
    with pytest.raises(ValueError, match=word):
        accepts(vocabulary, "1", json=schema)


def test_nothing_but_annotations_is_left_out():
    schema = {"type": "object", "properties": {"a": {"format": "path", "pattern": "x", "title": "t"}}}
    assert supported(schema)["properties"]["a"] == {"pattern": "x", "title": "t"}


def test_values_are_not_schemas():
    schema = {"enum": [{"format": "path", "oneOf": []}], "default": {"not": 1}}
    assert supported(schema) == schema


def test_deep_schemas_are_refused():
    schema = {}
    for _ in range(80):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="levels deep"):
        supported(schema)


def test_work_is_bounded():
    part = {"$ref": "#/definitions/a"}
    schema = {"definitions": {"a": {"anyOf": [part] * 8}}, "not": {"anyOf": [part] * 8}}
    with pytest.raises(ValueError, match=r"intertwined|malformed|not"):
        supported(schema)


def test_objects_can_be_closed(vocabulary):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert accepts(vocabulary, '{"a":1,"c":2}', json=schema)
    assert not accepts(vocabulary, '{"a":1,"c":2}', json=schema, disable_additional_properties=True)


NAMES = [f"p{number}" for number in range(9000)]
CIRCLE = {
    "$defs": {name: {"allOf": [{"$ref": f"#/$defs/{other}"}] * 20} for name, other in ("ab", "ba")},
    "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
}
LONG = {"$defs": {}, "oneOf": [{"$ref": "#" + "/$defs" * 20000}, {"type": "integer"}] * 8}


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [True] * 20000},
        {"enum": list(range(20000)), "not": {"const": "x"}},
        {"enum": [[0] * 300 + [number] for number in range(100)], "not": {"const": "x"}},
        {"enum": list(range(5000)), "not": {"anyOf": [{"required": NAMES}, {"type": NAMES}]}},
        {"oneOf": [{"type": "object", "required": NAMES}] * 2},
        {"dependentRequired": {name: [] for name in NAMES}},
        CIRCLE,
        LONG,
    ],
)
def test_no_schema_takes_long(schema):
    """In the process that answers everybody. Without limits, each takes a minute, gigabytes, or for ever."""
    with contextlib.suppress(ValueError):
        assert supported(schema)

import itertools
import json

import jsonschema
import pytest

from pagemill.grammar.ebnf.formats import FORMATS
from tests.fakes.byte_vocabulary import Following, accepts, matches
from tests.fakes.schema_order import in_schema_order

CLOSED = {"type": "object", "additionalProperties": False}
A, B = {"type": "integer"}, {"type": "string"}
VALUES = [
    None, True, 0, 3, -1, 2.5, "", "a", "ab", "abcd", 'a"\\\n\u0001é/', [], [1], [1, "x"], [1, 2, 3], ["a", "b"], {},
    {"a": 1}, {"a": "x"}, {"b": "x"}, {"a": 1, "b": "x"}, {"a": 1, "c": [None]}, {"ab": 1}, {"": 0}, {"b": 1}, {"c": 1},
    {"a": {"a": {}}}, {"x1": 3}, {"x1": "a"}, {"c": 1, "d": 2}, {"a": 1, "b": "x", "c": 3}, [[]], [{"a": 1}],
]  # fmt: skip
SCHEMAS = [
    {}, {"type": "null"}, {"type": ["integer", "null"]}, {"type": "number"}, {"type": "string"}, {"type": "array"},
    {"type": "object"}, {"minimum": 1}, {"minLength": 2}, {"type": "string", "minLength": 1, "maxLength": 2},
    {"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "b$"}, {"type": "string", "pattern": "[\"/]"},
    {"type": "string", "pattern": "^[a-d]*$", "maxLength": 2}, 
    {"type": "string", "pattern": "^a[a-d]*$", "minLength": 2},
    {"items": A}, {"type": "array", "items": A, "minItems": 1, "maxItems": 2}, {"type": "array", "maxItems": 0},
    {"type": "array", "prefixItems": [A, B]}, {"type": "array", "prefixItems": [A, B], "items": False},
    {"type": "array", "prefixItems": [A], "items": A, "minItems": 2}, {"type": "array", "prefixItems": [False]},
    {"type": "array", "items": False}, {"type": "array", "prefixItems": [A, A], "maxItems": 1},
    {"type": "object", "properties": {"a": A}}, {"type": "object", "properties": {"a": A, "b": B}, "required": ["b"]},
    {**CLOSED, "properties": {"a": A, "b": B}}, {**CLOSED, "properties": {"a": A, "b": B}, "required": ["a"]},
    {"properties": {"a": A}, "required": ["a"]}, {"type": "object", "additionalProperties": A}, {"required": ["c"]},
    {"type": "object", "properties": {"a": False}}, {"type": "object", "properties": {"a": A}, "minProperties": 2,
    "required": ["a", "b"]}, {"type": "object", "minProperties": 1}, {"type": "object", "maxProperties": 1},
    {"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}, 
    {**CLOSED, "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2},
    {"type": "object", "patternProperties": {"^x": A}, "additionalProperties": False},
    {"enum": [1, "a", None, [1, "x"], {"a": 1}]}, {"const": {"a": {"a": {}}}}, {"enum": [1, 3, "a"], "type": "integer"},
    {"anyOf": [A, B]}, {"anyOf": [{"minimum": 1}, {"maxLength": 1}], "type": ["integer", "string"]},
    {"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object", "properties": {"a": A, "b": B}},
    {"allOf": [{"type": "object", "properties": {"a": A}}, {"properties": {"b": B}, "required": ["b"]}]},
    {"allOf": [{"minimum": 1}, {"maximum": 3}, {"type": "integer"}]}, {"allOf": [{"enum": [1, 2, 3]}, {"minimum": 2}]},
    {"$ref": "#/$defs/a", "$defs": {"a": A}}, {"$ref": "#/$defs/a", "$defs": {"a": A}, "minimum": 1},
    {"$defs": {"t": {"type": "object", "additionalProperties": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
    {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}],
     "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}},
    {"allOf": [{"type": "array", "prefixItems": [A]}, {"items": {"minimum": 1}}]},
    {"type": "integer", "minimum": 1, "exclusiveMinimum": True, "$schema": "http://json-schema.org/draft-04/schema#"},
    {"allOf": [{"additionalProperties": False, "properties": {"a": {}}}, {"properties": {"a": A, "b": B}}]},
]  # fmt: skip


@pytest.fixture(scope="module")
def by_rules():
    return Following("xgrammar")


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_values_are_those_that_a_validator_allows(by_rules, schema):
    matcher = by_rules.matcher(json=schema)
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    for value in VALUES:
        for indent in (None, 2):
            text = json.dumps(in_schema_order(value, schema), ensure_ascii=False, indent=indent)
            assert matches(matcher, text) is validator.is_valid(value), text


def test_named_keys_come_in_their_order_and_have_one_spelling(by_rules):
    schema = {"type": "object", "properties": {"a": A, "ab": A, "/": A}}
    accepted = ['{"a":1,"ab":2}', '{"b":"x"}', '{"abc":"x","aa":1}', '{"":"x"}']
    refused = ['{"ab":1,"a":2}', '{"b":1,"a":2}', r'{"\u0061":"x"}', r'{"\/":"x"}', '{"a":1,"a":2}', '{"ab":"x"}']
    for text in accepted:
        assert accepts(by_rules, text, json=schema), text
    for text in refused:
        assert not accepts(by_rules, text, json=schema), text


def test_texts_have_one_spelling(by_rules):
    for text in (r'"\n\t\"\\"', r'"\u0001\u001f"', '"é/\x7f"'):
        assert accepts(by_rules, text, json={"type": "string"}), text
    for text in (r'"\/"', r'"\u0061"', r'"\u000a"', '"\n"', r'"\ud800"', '"'):
        assert not accepts(by_rules, text, json={"type": "string"}), text


GOOD = {
    "date": ["2024-02-29", "1999-12-31", "2000-02-29"], "time": ["23:59:59Z", "00:00:00.5+02:00"],
    "date-time": ["2024-02-29T01:02:03Z"], "duration": ["P1Y2M3D", "PT5M", "P3W", "P1DT1H"],
    "email": ["a.b+c@example.com"], "hostname": ["a-1.example.com"], "ipv4": ["0.1.255.9"],
    "ipv6": ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4", "a:b::c"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"], "uri": ["https://a.b/c?d=e#f", "urn:x"],
}  # fmt: skip
BAD = {
    "date": ["2023-02-29", "1900-02-29", "2024-13-01", "2024-04-31", "0000-01-01"], "time": ["24:00:00Z", "1:00:00Z"],
    "date-time": ["2024-02-30T01:02:03Z", "2024-02-29"], "duration": ["P", "1Y", "PT", "P1W2D"],
    "email": ["a", "a@", ".a@b"], "hostname": ["-a", "a..b", "a_b"], "ipv4": ["1.2.3", "256.1.1.1", "01.2.3.4"],
    "ipv6": [":", "1:2:3:4:5:6:7", "::1::", "1:2:3:4:5:6:7:8:9", "12345::"],
    "uuid": ["123e4567e89b12d3a456426614174000"], "uri": ["a b", "no", "http://a b"],
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_formats(by_rules, name):
    matcher = by_rules.matcher(json={"type": "string", "format": name})
    for text in GOOD[name]:
        assert matches(matcher, json.dumps(text)), text
    for text in BAD[name]:
        assert not matches(matcher, json.dumps(text)), text


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"contains": {}}, "contains"), ({"type": "object", "patternProperties": {"a": A}}, "patternProperties"),
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "pattern"), ({"$ref": "#/nowhere"}, "malformed"),
        ({"type": "string", "pattern": "^a+b+$", "maxLength": 5}, "maxLength"), ({"pattern": "(?=a)"}, "group"),
        ({"type": "object", "minProperties": 2}, "minProperties"), ({"properties": {"a": 3}}, "malformed"),
        ({"enum": ["a"], "pattern": "b"}, "pattern"), ({"type": "x"}, "type"), ({"minLength": -1}, "minLength"),
        ({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "$ref": "#/$defs/a"}, "without end"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties"), ({"type": "array", "uniqueItems": True}, "unique"),
        ({"type": "object", "required": ["a"], "properties": {"a": False}}, "nothing"),
    ],
)  # fmt: skip
def test_what_is_not_followed_is_refused(by_rules, schema, word):
    with pytest.raises(ValueError, match=word):
        by_rules.matcher(json=schema)


def test_many_properties(by_rules):
    schema = {"type": "object", "properties": {f"p{number}": A for number in range(400)}}
    text = json.dumps({f"p{number}": number for number in range(0, 400, 7)})
    assert accepts(by_rules, text, json=schema)


def test_combinations_are_bounded(by_rules):
    parts = [{"anyOf": [{"minimum": a}, {"maximum": b}]} for a, b in itertools.product(range(3), range(3))]
    with pytest.raises(ValueError, match="combinations"):
        by_rules.matcher(json={"allOf": parts})

import random
from decimal import Decimal

import jsonschema
import pytest

from pagemill.grammar.ebnf.numbers import decimal_of
from tests.fakes.byte_vocabulary import Following, matches

BOUNDS = [
    {}, {"minimum": 0}, {"maximum": 0}, {"exclusiveMinimum": 0}, {"exclusiveMaximum": 0},
    {"minimum": -3, "maximum": 120},
    {"minimum": 0.5}, {"maximum": -0.25}, {"minimum": -1.5, "maximum": 1.25}, {"exclusiveMinimum": 1, "maximum": 2},
    {"minimum": 9.99, "exclusiveMaximum": 10.01}, {"minimum": 100, "maximum": 100}, {"exclusiveMinimum": -0.1,
    "exclusiveMaximum": 0.1}, {"minimum": 1, "exclusiveMinimum": 1}, {"minimum": 7, "maximum": 1007},
    {"multipleOf": 7}, {"multipleOf": 0.01}, {"multipleOf": 5, "minimum": -20, "maximum": 33}, {"multipleOf": 3,
    "minimum": 0}, {"minimum": 1e-3, "maximum": 1e3}, {"multipleOf": 0.5, "minimum": 0, "maximum": 3},
]  # fmt: skip


@pytest.fixture(scope="module")
def by_rules():
    return Following("xgrammar")


def candidates(bounds):
    """Numbers around the bounds, and others."""
    noise = random.Random(str(bounds))
    near = [decimal_of(value) for value in bounds.values()] + [Decimal(0), Decimal(10)]
    steps = [Decimal(step) for step in ("0", "1", "-1", "0.01", "-0.01", "0.001", "5", "-7")]
    found = {format((value + step), "f") for value in near for step in steps}
    found |= {str(noise.randint(-1500, 1500)) for _ in range(40)}
    found |= {f"{noise.uniform(-15, 15):.{noise.randint(1, 4)}f}" for _ in range(40)}
    return sorted(found - {"-0", "-0.0", "-0.00", "-0.000"})


@pytest.mark.parametrize("kind", ["number", "integer"])
@pytest.mark.parametrize("bounds", BOUNDS)
def test_numbers_between_bounds(by_rules, kind, bounds):
    schema = {"type": kind, **bounds}
    matcher = by_rules.matcher(json=schema)
    validator = jsonschema.Draft202012Validator(schema)
    for text in candidates(bounds):
        if kind == "integer" and "." in text:
            assert not matches(matcher, text), text
            continue
        if "multipleOf" in bounds and "." in text and Decimal(text) % decimal_of(bounds["multipleOf"]) == 0:
            continue  # floats are not exact
        if "multipleOf" in bounds and "." in text:
            assert not matches(matcher, text), text
            continue
        assert matches(matcher, text) is validator.is_valid(int(text) if "." not in text else float(text)), text


def test_forms_of_numbers(by_rules):
    matcher = by_rules.matcher(json={"type": "number"})
    for text in ("0", "-1", "1.50", "1e5", "-2.5E-3", "1e+300"):
        assert matches(matcher, text), text
    for text in ("01", ".5", "1.", "+1", "--1", "1e", "NaN", "1e5.0"):
        assert not matches(matcher, text), text
    assert matches(by_rules.matcher(json={"type": "number", "multipleOf": 0.01}), "1.25")


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"minimum": "1"}, "number must be"), ({"multipleOf": 0}, "above 0"), ({"multipleOf": 1000}, "bounds"),
        ({"multipleOf": 7, "minimum": 3}, "one bound"), ({"multipleOf": 7, "minimum": 0, "maximum": 1e9}, "values"),
        ({"minimum": 1e300}, "too large"), ({"minimum": 3, "maximum": 2}, "allows nothing"),
    ],
)  # fmt: skip
def test_what_is_not_followed_is_refused(by_rules, schema, word):
    with pytest.raises(ValueError, match=word):
        by_rules.matcher(json={"type": "integer", **schema})

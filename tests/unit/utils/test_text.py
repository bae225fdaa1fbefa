"""Values in error messages: short, and made at a cost that does not depend on the value."""

from typing import Any

import pytest

from pagemill.utils.text import index_of, shown, shown_name


class Counting(dict[str, Any]):
    """Counts what is looked at."""

    def __init__(self, value: dict[str, Any]) -> None:
        super().__init__(value)
        self.num_seen = 0

    def items(self) -> Any:
        for pair in super().items():
            self.num_seen += 1
            yield pair


@pytest.mark.parametrize(
    "value",
    [
        1, -3.5, True, None, "text", "it's", b"bytes", [], [1, [2, (3,)], {"a": [None]}], {"a": 1, "b": {"c": "d"}}, (),
    ],
)  # fmt: skip
def test_short_values_are_shown_as_they_are(value: Any) -> None:
    assert shown(value) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        "x" * 1000,
        list(range(1000)),
        [[0] * 100] * 100,
        {str(number): number for number in range(1000)},
        {"a": {"b": ["c" * 1000] * 1000}},
        [[[[[[[[["deep" * 100]]]]]]]]] * 50,
        [""] * 1000,
    ],
)
def test_long_values_are_cut_where_their_repr_would_be(value: Any) -> None:
    assert shown(value) == repr(value)[:60] + "..."


def test_huge_numbers_are_named_by_their_size() -> None:
    assert shown(1 << 100_000) == "a number of 100001 bits"
    assert shown([1, 1 << 100_000]) == "[1, a number of 100001 bits]"


@pytest.mark.slow
def test_a_large_value_is_not_walked_through() -> None:
    value = Counting({str(number): [number] for number in range(100_000)})
    shown({"logit_bias": value})
    assert value.num_seen < 100
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    assert shown(nested) == "[" * 60 + "..."


@pytest.mark.parametrize("name", ["model.layers.0.mlp.experts.127.down_proj.weight_scale_inv", "", "\u00e9", "x" * 120])
def test_names_are_shown_as_they_are(name: str) -> None:
    assert shown_name(name) == name


def test_names_are_one_line_that_can_be_printed() -> None:
    assert shown_name("a\nb\x1b[31m\ud800") == r"a\nb\x1b[31m\ud800"
    assert shown_name("x" * 10_000_000) == "x" * 120 + "... (9999880 more characters)"


@pytest.mark.parametrize(("text", "found"), [("0", 0), ("007", 7), ("123456789", 123_456_789)])
def test_numbers_in_names(text: str, found: int) -> None:
    assert index_of(text) == found


@pytest.mark.parametrize("text", ["", "x", "-1", "1.0", " 1", "\u0663", "\u00b2", "1234567890", "9" * 5000])
def test_what_is_no_number_of_anything(text: str) -> None:
    assert index_of(text) is None

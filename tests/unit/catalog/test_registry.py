"""Registry: lazy, unique, and helpful about unknown names."""

import collections

import pytest

from pagemill.catalog.registry import Registry
from pagemill.errors import ConfigError


def test_it_resolves_on_demand():
    registry = Registry("thing", {"good": "collections:OrderedDict", "bad": "no_such_module:X"})
    assert registry.resolve("good") is collections.OrderedDict
    assert list(registry) == ["good", "bad"]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="unknown thing 'x'; known: a, b"):
        Registry("thing", {"b": "m:B", "a": "m:A"}).resolve("x")


def test_a_taken_name_is_refused_but_the_same_line_twice_is_not():
    registry = Registry("thing", {"a": "m:A"})
    registry.add("a", "m:A")
    with pytest.raises(ConfigError, match="already registered"):
        registry.add("a", "m:B")


@pytest.mark.parametrize("path", ["m", "m:", ":A", ""])
def test_a_malformed_path_is_refused(path):
    with pytest.raises(ConfigError, match="module:attribute"):
        Registry("thing").add("a", path)

import pytest

from pagemill.config.model_names import ModelNames
from pagemill.config.server_config import ServerConfig
from pagemill.errors import ConfigError


def test_the_model_is_called_as_it_was_given() -> None:
    names = ModelNames.of(ServerConfig(), "org/m")
    assert names.served == names.listed == ("org/m",)
    assert names.means("org/m") and not names.means("m")


def test_one_name_may_be_a_text_and_several_are_kept_once() -> None:
    assert ModelNames.of(ServerConfig(served_model_name="a"), "m").served == ("a",)  # type: ignore[arg-type]
    assert ModelNames.of(ServerConfig(served_model_name=("a", "b", "a")), "m").served == ("a", "b")


@pytest.mark.parametrize("alias", ["claude-*", "=default", "x=", "x=other", "x=m"])
def test_an_alias_that_means_nothing_is_an_error(alias: str) -> None:
    with pytest.raises(ConfigError, match="model_alias"):
        ModelNames.of(ServerConfig(served_model_name=("a",), model_alias=(alias,)), "m")


def test_an_empty_name_is_an_error() -> None:
    with pytest.raises(ConfigError, match="served_model_name"):
        ModelNames.of(ServerConfig(served_model_name=("a", " ")), "m")


def test_only_the_star_of_a_pattern_stands_for_others() -> None:
    names = ModelNames.of(ServerConfig(model_alias=("a.?[b]*=default",)), "m")
    assert names.means("a.?[b]") and names.means("a.?[b]x\ny")
    assert not names.means("axyb") and not names.means("ax?[b]")


@pytest.mark.parametrize(("pattern", "name", "fits"), [
    ("*", "", True), ("*", "x", True), ("a*a", "a", False), ("a*a", "aa", True), ("a*b*c", "abc", True),
    ("a*b*c", "acb", False), ("a*bc*c", "abc", False), ("**", "x", True), ("a*b", "a*b", True),
])  # fmt: skip
def test_stars_stand_for_any_characters(pattern: str, name: str, fits: bool) -> None:
    assert ModelNames.of(ServerConfig(model_alias=(f"{pattern}=default",)), "m").means(name) is fits

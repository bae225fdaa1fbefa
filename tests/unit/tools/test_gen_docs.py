import dataclasses
from pathlib import Path

import pytest

from pagemill.config.fields import setting
from tools import gen_docs


@dataclasses.dataclass(frozen=True)
class Section:
    """For the test."""

    size: int | None = setting(None, "how large", low=1)
    kind: str = setting("a", "a | b", choices=("a", "b"))
    extra: dict[str, object] = setting({}, "more")


def test_rows_of_a_section():
    assert list(gen_docs.flag_rows(Section)) == [
        ("`--size`", "`size`", "", "how large; at least 1"),
        ("`--kind`", "`kind`", "`a`", "a | b; one of `a`, `b`"),
        ("`--extra`", "`extra`", "`{}`", "more"),
    ]


@dataclasses.dataclass(frozen=True)
class Outer:
    """For the test."""

    inner_settings: Section = setting(Section(), "JSON object")


def test_a_setting_with_fields_of_its_own_has_a_table():
    assert list(gen_docs.flag_rows(Outer)) == [("`--inner-settings`", "`inner_settings`", "`{}`", "JSON object")]
    text = gen_docs.nested_section("inner_settings", Section)
    assert text.startswith("\n### --inner-settings\n\nFor the test.\n\n| field | default | meaning |\n")
    assert "| `kind` | `a` | a \\| b; one of `a`, `b` |\n" in text


def test_bars_do_not_split_cells():
    assert gen_docs.table(("head",), [("a | b",)]) == "| head |\n| --- |\n| a \\| b |\n"


def test_first_sentence_joins_lines_and_keeps_dots_inside_words(tmp_path: Path):
    module = tmp_path / "m.py"
    module.write_text('"""Reads config.json and\nfriends. Knows nothing else.\n\nMore.\n"""\n')
    assert gen_docs.first_sentence(module) == "Reads config.json and friends"


def test_layers_come_in_the_order_of_the_contracts():
    order = gen_docs.layer_order()["pagemill"]
    assert order["serve"] < order["engine"] < order["worker"] < order["model"] < order["messages"] < order["errors"]


def test_a_file_without_markers_is_refused():
    with pytest.raises(SystemExit, match="markers"):
        gen_docs.between("# Architecture\n", gen_docs.TREE_BEGIN, gen_docs.TREE_END, "tree")

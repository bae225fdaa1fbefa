"""Plug-ins are loaded once, before a process first looks into a table; one that fails costs a line."""

from importlib.metadata import EntryPoint

import pytest

from pagemill.catalog import plugins
from pagemill.catalog.models import MODELS
from pagemill.catalog.registry import Registry

CALLS = []


def register(catalogue):
    CALLS.append(catalogue)
    catalogue.models.add("PluginForCausalLM", "nowhere:Plugin")
    assert "LlamaForCausalLM" in catalogue.models, "a plug-in may look something up"


def fail(catalogue):
    raise ValueError("two\nlines")


def general():
    CALLS.append("general")


GROUPS = {
    plugins.GROUP: {"good": "register", "bad": "fail"},
    plugins.VLLM_GENERAL_GROUP: {"other": "general"},
    "vllm.platform_plugins": {"chip": "general"},
}


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """The entry points of GROUPS, in a process that has loaded none yet."""

    def entry_points(group):
        return [EntryPoint(name, f"{__name__}:{what}", group) for name, what in GROUPS.get(group, {}).items()]

    monkeypatch.setattr(plugins, "entry_points", entry_points)
    monkeypatch.setattr(plugins, "_loaded", False)
    monkeypatch.delenv("PAGEMILL_PLUGINS", raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    CALLS.clear()
    yield
    MODELS.remove("PluginForCausalLM")


@pytest.mark.parametrize(
    "look", [lambda t: list(t), lambda t: "a" in t, lambda t: t.resolve("a"), lambda t: t.check("a")]
)
def test_the_first_look_into_any_table_loads_them_once(look):
    table = Registry("thing", {"a": "collections:OrderedDict"})
    look(table)
    look(table)
    assert len(CALLS) == 1
    assert "PluginForCausalLM" in MODELS


def test_adding_a_line_loads_none():
    Registry("thing").add("a", "m:A")
    assert CALLS == []


def test_one_that_fails_is_one_line(caplog, monkeypatch):
    monkeypatch.setattr(plugins.logger, "warning", lambda text, *values: lines.append(text % values))
    lines = []
    plugins.load_plugins()
    assert lines == [f"plug-in bad ({__name__}:fail) skipped: ValueError: two lines"]
    assert len(CALLS) == 1


@pytest.mark.parametrize(
    ("variable", "value", "calls", "warnings"),
    [
        ("PAGEMILL_PLUGINS", "", 0, 0),
        ("PAGEMILL_PLUGINS", "good", 1, 0),
        ("VLLM_PLUGINS", "good, other", 2, 0),
        ("PAGEMILL_PLUGINS", "other,chip,nobody", 1, 2),
    ],
)
def test_those_that_are_named(monkeypatch, variable, value, calls, warnings):
    lines = []
    monkeypatch.setattr(plugins.logger, "warning", lambda text, *values: lines.append(text % values))
    monkeypatch.setenv(variable, value)
    plugins.load_plugins()
    assert len(CALLS) == calls
    assert len(lines) == warnings
    assert sum("chip skipped: a class of vllm.platform_plugins" in line for line in lines) == (warnings == 2)


def test_every_table_is_on_the_page():
    catalogue = plugins.Catalogue()
    tables = [getattr(catalogue, name) for name in vars(catalogue)]
    assert all(isinstance(table, Registry) for table in tables)
    assert len({table.kind for table in tables}) == len(tables)

"""A setting with fields of its own on the command line: JSON, or field by field."""

import argparse

import pytest

from pagemill.config.arguments import add_flags, make_section
from pagemill.config.graph_config import CompilationSettings, GraphSettings, PassConfig
from pagemill.config.kv_events_config import KVEventsConfig
from pagemill.config.sections import CacheSettings


def parse(*argv):
    parser = argparse.ArgumentParser()
    add_flags(parser, [GraphSettings])
    return make_section(GraphSettings, vars(parser.parse_args(argv)))


@pytest.mark.parametrize("argv", (["-O3"], ["-O", "3"], ["-O=3"], ["--optimization-level", "3"]))
def test_levels(argv):
    assert parse(*argv).optimization_level == 3


@pytest.mark.parametrize("name", ("--compilation-config", "-cc"))
def test_json(name):
    given = parse(name, '{"cudagraph_mode": "full", "cudagraph_capture_sizes": [1, 2]}').compilation_config
    assert given == CompilationSettings(cudagraph_mode="FULL", cudagraph_capture_sizes=(1, 2))


@pytest.mark.parametrize("name", ("--compilation-config", "-cc"))
def test_field_by_field(name):
    given = parse(f"{name}.mode", "3", f"{name}.cudagraph_mode", "PIECEWISE", f"{name}.cudagraph_lazy_capture", "False")
    assert given.compilation_config == CompilationSettings(
        mode=3, cudagraph_mode="PIECEWISE", cudagraph_lazy_capture=False
    )


@pytest.mark.parametrize("text", ("1,2,4", "[1, 2, 4]"))
def test_lists(text):
    assert parse("-cc.cudagraph_capture_sizes", text).compilation_config.cudagraph_capture_sizes == (1, 2, 4)
    assert parse("--cudagraph-capture-sizes", "1", "2", "4").cudagraph_capture_sizes == (1, 2, 4)


def test_an_empty_list():
    assert parse("-cc.splitting_ops", "[]").compilation_config.splitting_ops == ()


def test_fields_of_fields():
    assert parse("-cc.pass_config.fuse_attn", "true").compilation_config.pass_config == PassConfig(True)
    assert parse("-cc.pass_config", '{"fuse_attn": true}').compilation_config.pass_config == PassConfig(True)


def test_what_comes_later_is_laid_over_what_was_before():
    given = parse(
        "-cc", '{"mode": 3, "backend": "eager"}', "-cc.mode", "0", "-cc", '{"cudagraph_mode": "NONE"}'
    ).compilation_config
    assert given == CompilationSettings(mode=0, backend="eager", cudagraph_mode="NONE")


def test_text_stays_text():
    assert parse("-cc.cache_dir", "1").compilation_config.cache_dir == "1"


@pytest.mark.parametrize("argv", (["-cc", "{"], ["-cc", "[1]"], ["-cc.modes", "3"]))
def test_usage_errors(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(*argv)
    assert caught.value.code == 2
    assert argv[0] in capsys.readouterr().err


def test_every_setting_with_fields_has_the_form():
    parser = argparse.ArgumentParser()
    add_flags(parser, [CacheSettings])
    values = vars(parser.parse_args(["--kv-events-config.enable_kv_cache_events", "true"]))
    assert make_section(CacheSettings, values).kv_events_config == KVEventsConfig(enable_kv_cache_events=True)

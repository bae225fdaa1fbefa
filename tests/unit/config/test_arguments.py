"""Flags and keywords, derived from the sections."""

import argparse

import pytest

from pagemill.config.arguments import EngineArgs, add_flags, make_section
from pagemill.config.sections import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, ServerConfig

SECTIONS = (ModelConfig, CacheConfig, SchedulerConfig, ParallelConfig, ServerConfig)


def parse(*argv):
    parser = argparse.ArgumentParser()
    add_flags(parser, SECTIONS)
    return vars(parser.parse_args(argv))


def test_an_unknown_keyword_is_a_type_error_that_names_it():
    with pytest.raises(TypeError, match="max_num_sequences"):
        EngineArgs("m", max_num_sequences=3)


def test_flags_that_are_not_given_stay_unset():
    assert set(parse().values()) == {None}


def test_flags_reach_their_sections():
    values = parse("--max-num-seqs", "3", "--no-enable-prefix-caching", "--hf-overrides", '{"a": 1}', "--port", "0")
    assert make_section(SchedulerConfig, values).max_num_seqs == 3
    assert make_section(CacheConfig, values).enable_prefix_caching is False
    assert make_section(ModelConfig, values).hf_overrides == {"a": 1}
    assert make_section(ServerConfig, values).port == 0


def test_a_bad_choice_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--dtype", "int3")
    assert caught.value.code == 2
    assert "--dtype" in capsys.readouterr().err


def test_every_field_has_help():
    for section in SECTIONS:
        for field in section.__dataclass_fields__.values():
            assert field.metadata["help"], field.name


def test_short_names_of_flags():
    assert make_section(ParallelConfig, parse("-tp", "2", "-pp", "3")) == ParallelConfig(2, 3)
    assert make_section(ParallelConfig, parse("--tensor-parallel-size", "4")) == ParallelConfig(4, 1)

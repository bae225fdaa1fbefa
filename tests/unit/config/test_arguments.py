"""Flags and keywords, derived from the sections."""

import argparse

import pytest

from pagemill.config.arguments import EngineArgs, add_flags, make_section
from pagemill.config.fleet_config import FleetConfig
from pagemill.config.kv_events_config import KVEventsConfig
from pagemill.config.sections import CacheSettings, ModelSettings, ParallelSettings, SchedulerSettings
from pagemill.config.server_config import ServerConfig
from pagemill.errors import ConfigError

SECTIONS = (ModelSettings, CacheSettings, SchedulerSettings, ParallelSettings, ServerConfig)


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
    assert make_section(SchedulerSettings, values).max_num_seqs == 3
    assert make_section(CacheSettings, values).enable_prefix_caching is False
    assert make_section(ModelSettings, values).hf_overrides == {"a": 1}
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
    assert make_section(ParallelSettings, parse("-tp", "2", "-pp", "3")) == ParallelSettings(2, 3)
    assert make_section(ParallelSettings, parse("--tensor-parallel-size", "4")) == ParallelSettings(4, 1)
    assert make_section(ParallelSettings, parse("-ep")).enable_expert_parallel
    assert make_section(ModelSettings, parse("-q", "int8")).quantization == "int8"
    assert make_section(CacheSettings, parse("--device-memory-utilization", "0.5")).gpu_memory_utilization == 0.5


def test_a_setting_with_fields_of_its_own_is_a_json_object():
    values = parse("--kv-events-config", '{"enable_kv_cache_events": true, "hwm": 3, "replay_endpoint": null}')
    events = make_section(CacheSettings, values).kv_events_config
    assert events == KVEventsConfig(enable_kv_cache_events=True, hwm=3)
    assert events.active
    assert make_section(CacheSettings, {"kv_events_config": events}).kv_events_config is events
    assert not make_section(CacheSettings, {}).kv_events_config.active


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"endpiont": "tcp://*:1"}, "kv_events_config: unknown field 'endpiont'; known: enable_kv_cache_events, "),
        ({"hwm": "3"}, "kv_events_config: hwm='3' is not of type int"),
        ({"hwm": 0}, "kv_events_config: hwm=0 is too small: at least 1"),
        ({"publisher": "kafka"}, "kv_events_config: publisher='kafka' is not one of zmq, null"),
        ({"enable_kv_cache_events": "yes"}, "enable_kv_cache_events='yes' is not of type bool"),
        ([1], r"kv_events_config=\[1\] is not of type KVEventsConfig"),
    ],
)
def test_what_is_wrong_in_it_is_named(given, message):
    with pytest.raises(ConfigError, match=message):
        EngineArgs("m", kv_events_config=given)


def test_a_setting_that_is_no_json_object_is_a_usage_error(capsys):
    for text in ("{", "3"):
        with pytest.raises(SystemExit):
            parse("--kv-events-config", text)
        assert "--kv-events-config" in capsys.readouterr().err


@pytest.mark.parametrize(("section", "name"), [
    (ServerConfig, "shutdown_timeout"), (FleetConfig, "engine_hang_timeout"),
    (FleetConfig, "data_parallel_node_timeout"),
    (CacheSettings, "kv_cache_metrics_sample"),
])  # fmt: skip
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_finite_number_is_refused_by_name(section, name, value):
    with pytest.raises(ConfigError, match=f"{name}={value!r} is not a finite number"):
        make_section(section, {name: value})


def test_a_command_keeps_its_own_short_names():
    parser = argparse.ArgumentParser()
    parser.add_argument("-q", "--question")
    add_flags(parser, SECTIONS)
    values = vars(parser.parse_args(["-q", "why", "--quantization", "int8"]))
    assert (values["question"], values["quantization"]) == ("why", "int8")

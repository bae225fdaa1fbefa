"""Lists of CPUs per worker, as text."""

import pytest

from pagemill.config.thread_lists import join_lists, parse_lists
from pagemill.errors import ConfigError
from tests.fakes.configs import cpu_config


def test_lists_and_words():
    assert parse_lists("0-2|8, 4-5") == ((0, 1, 2), (4, 5, 8))
    assert parse_lists("auto") == parse_lists("nobind") == ()
    assert join_lists([(0, 1, 2), (4, 5, 8)]) == "0-2|4-5,8"
    assert join_lists([]) == "nobind"


@pytest.mark.parametrize("bind", ["", "all", "0-3|", "0;1", "AUTO", "0|0"])
def test_what_is_not_allowed(bind):
    with pytest.raises(ConfigError, match="cpu_threads_bind="):
        parse_lists(bind)


def test_an_engine_has_the_lists_of_its_workers():
    config = cpu_config(cpu_threads=1, cpu_threads_bind="0|1|2|3-4")
    second = config.of_engine(1, 2)
    assert (second.cpu_threads, second.cpu_threads_bind) == (1, "2|3-4")
    assert (second.cpus_of(0), second.cpus_of(1)) == ((2,), (3, 4))
    for unbound in (cpu_config(), cpu_config(cpu_threads_bind="nobind")):
        assert unbound.of_engine(1, 2) == unbound
        assert unbound.cpus_of(3) == ()

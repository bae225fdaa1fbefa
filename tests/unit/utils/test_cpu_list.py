"""Lists of CPUs as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.utils.cpu_list import format_cpu_list, parse_cpu_list


def test_lists():
    assert parse_cpu_list("0-3, 8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert format_cpu_list([8, 0, 1, 3, 2, 10]) == "0-3,8,10"


@given(st.sets(st.integers(0, 300), min_size=1))
def test_what_is_written_is_read(cpus):
    assert parse_cpu_list(format_cpu_list(cpus)) == sorted(cpus)


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "-1", "1,,2", "0-99999999999", "0-2,1", "1-2-3"])
def test_what_is_no_list(text):
    with pytest.raises(ValueError, match="CPU"):
        parse_cpu_list(text)

"""Text of others in a line of the log."""

import pytest

from pagemill.utils.log_text import one_line, stack_of

NASTY = ["a\nINFO forged", "a\rb", "\x1b[31mred", "a\x00b", "\u202egnp.exe", "a\u2028b", "\ud800"]


@pytest.mark.parametrize("text", NASTY)
def test_what_cannot_be_printed_is_escaped(text):
    line = one_line(text, 100)
    assert line.isprintable()
    assert "\\" in line
    line.encode()


def test_a_text_is_shown_as_it_is_and_cut():
    assert one_line("Grüße, 世界", 100) == "Grüße, 世界"
    assert one_line("abcdef", 4) == "abcd... (2 more characters)"
    assert one_line("abcd", 4) == "abcd"
    assert one_line("ab", 0) == "... (2 more characters)"


def test_a_stack_is_one_line():
    def fail():
        raise ValueError("bad\nvalue " + "x" * 1000)

    with pytest.raises(ValueError, match="bad") as raised:
        fail()
    line = stack_of(raised.value)
    assert line.isprintable()
    assert line.startswith("ValueError: bad\\nvalue xxx")
    assert f"{__file__}:" in line
    assert " fail)" in line
    assert len(line) < 2000
    assert stack_of(KeyError("k")) == "KeyError: 'k' (raised nowhere)"

"""Errors in one line."""

from pagemill.utils.reasons import MAX_REASON_CHARS, reason


def test_a_reason_is_one_bounded_line():
    assert reason(ValueError("two\n  lines")) == "ValueError: two lines"
    assert reason(KeyError()) == "KeyError"
    assert len(reason(OSError("x" * 10_000))) == MAX_REASON_CHARS + len("OSError: ")

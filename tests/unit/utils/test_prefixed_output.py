import io

import pytest

from pagemill.utils.prefixed_output import PrefixedOutput


@pytest.mark.parametrize(
    ("writes", "out"),
    [
        (["one\n"], "(w) one\n"),
        (["one", "\n", "two\n"], "(w) one\n(w) two\n"),
        (["one\ntwo\nthr", "ee\n"], "(w) one\n(w) two\n(w) three\n"),
        (["\n\n"], "(w) \n(w) \n"),
        (["", "half"], ""),
    ],
)
def test_every_line_has_the_prefix_and_is_written_whole(writes, out):
    stream = io.StringIO()
    output = PrefixedOutput(stream, "(w) ")
    for text in writes:
        assert output.write(text) == len(text)
    assert stream.getvalue() == out


def test_flush_writes_half_a_line_and_the_rest_has_no_second_prefix():
    stream = io.StringIO()
    output = PrefixedOutput(stream, "(w) ")
    print("50%", end="", file=output, flush=True)
    print(" done", file=output)
    assert stream.getvalue() == "(w) 50% done\n"


def test_the_stream_stays_open():
    stream = io.StringIO()
    output = PrefixedOutput(stream, "(w) ")
    assert output.writable() and not output.isatty()
    output.close()
    stream.write("still open")

import pytest

from pagemill.utils.sse import SseParser

STREAM = 'data: {"a": "ü"}\n\n: comment\nevent: x\ndata: one\ndata:two\nid: 3\n\n\n\r\ndata: last\r\n\r\n'.encode()


@pytest.mark.parametrize("size", range(1, 9))
def test_events_do_not_depend_on_where_the_bytes_are_cut(size: int):
    parser = SseParser()
    events = [event for at in range(0, len(STREAM), size) for event in parser.feed(STREAM[at : at + size])]
    assert events == ['{"a": "ü"}', "one\ntwo", "last"]


def test_an_unfinished_event_is_not_handed_out():
    assert SseParser().feed(b"data: half\n") == []
    assert SseParser().feed(b"data: half") == []


def test_an_empty_event_is_an_event():
    assert SseParser().feed(b"data:\n\n") == [""]

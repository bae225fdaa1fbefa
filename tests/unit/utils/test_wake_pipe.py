"""Waking a thread that polls."""

import select

from pagemill.utils.wake_pipe import WakePipe


def is_readable(pipe: WakePipe) -> bool:
    return bool(select.select([pipe.fd], [], [], 0)[0])


def test_it_is_readable_from_a_wake_to_the_next_drain():
    pipe = WakePipe()
    pipe.drain()
    assert not is_readable(pipe)
    for _ in range(1 << 17):  # more than a pipe holds
        pipe.wake()
    assert is_readable(pipe)
    while is_readable(pipe):
        pipe.drain()
    pipe.wake()
    assert is_readable(pipe)
    pipe.close()

"""What a server does about signals that would end it as it stands: by default, each of them leaves folders behind.

Knows nothing about how a server ends; that is what it does about SIGTERM.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from pagemill.utils.stacks import STACKS_SIGNAL, write_stacks

LIKE_SIGTERM = (signal.SIGHUP, signal.SIGUSR2)


@contextlib.contextmanager
def no_sudden_end() -> Iterator[None]:
    """In the body, SIGHUP (the terminal is closed) and SIGUSR2 do what SIGTERM does, unless they are ignored (nohup),
    and STACKS_SIGNAL writes the stacks of all threads to stderr. On the main thread only; elsewhere, nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    replaced = [number for number in LIKE_SIGTERM if signal.getsignal(number) is signal.SIG_DFL]
    for number in replaced:
        signal.signal(number, end_this_process)
    before = signal.signal(STACKS_SIGNAL, write_stacks)
    try:
        yield
    finally:
        signal.signal(STACKS_SIGNAL, before)
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)


def end_this_process(*_: object) -> None:
    """End this process as SIGTERM would. From any thread, or as the handler of another signal."""
    os.kill(os.getpid(), signal.SIGTERM)

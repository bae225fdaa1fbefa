"""The stacks of a process's threads, written to its stderr when another process, or an operator, asks for them.

There are two ways, as neither does for both cases. A process that is to live on writes them in a handler in Python,
which runs while it holds the interpreter, so that no thread moves meanwhile; but it does not run while the main thread
is inside native code. faulthandler's handler always runs, and reads the frames of threads that may be running: now and
then this ends the process (SIGSEGV). That is for a process that is killed next.
"""

import faulthandler
import signal

STACKS_SIGNAL = signal.SIGUSR1
"""A process writes the stacks of its threads as soon as its main thread is in Python code."""
LAST_STACKS_SIGNAL = signal.SIGQUIT
"""A process writes the stacks of its threads at once, and may die of it."""
STDERR_FD = 2


def write_stacks_on_signals() -> None:
    """Answer both signals, for as long as this process lives. Only the main thread may call this (ValueError)."""
    signal.signal(STACKS_SIGNAL, write_stacks)
    faulthandler.register(LAST_STACKS_SIGNAL, STDERR_FD, all_threads=True, chain=False)


def write_stacks(*_: object) -> None:
    """Write the stacks of all threads of this process to stderr. From any thread, or as the handler of a signal."""
    faulthandler.dump_traceback(STDERR_FD, all_threads=True)

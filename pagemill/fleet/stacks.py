"""Asking other processes for the stacks of their threads (pagemill/utils/stacks.py has their side).

Knows nothing about why: a process has stalled, or is killed next.
"""

import contextlib
import signal
import time
from pathlib import Path

import psutil

from pagemill.log import get_logger
from pagemill.utils.stacks import LAST_STACKS_SIGNAL, STACKS_SIGNAL

logger = get_logger(__name__)

DUMP_S = 1.5
"""What processes get to write their stacks."""


def ask_for_stacks(pid: int, *, last: bool) -> None:
    """Let a process and all its children write their stacks, and give them the time for it. `last`: they are killed
    next; those that are stopped (SIGSTOP) are continued, as they could not write otherwise."""
    try:
        process = psutil.Process(pid)
        processes = [process, *process.children(recursive=True)]
    except psutil.Error:
        return
    number = LAST_STACKS_SIGNAL if last else STACKS_SIGNAL
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if not _catches(process.pid, number):
                continue
            state = process.status()
            logger.error("stacks of process %d (%s, %s):", process.pid, " ".join(process.cmdline()).strip(), state)
            process.send_signal(number)
            if last and state == psutil.STATUS_STOPPED:
                process.send_signal(signal.SIGCONT)
    time.sleep(DUMP_S)


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal: a compiler that a worker has started has none, and would end."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it is gone, or this system has no /proc
        return not Path("/proc/self").exists()
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)

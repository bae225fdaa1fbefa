"""`AwakeClock`: seconds for which this process was able to watch others.

Knows nothing about who is watched. When a whole machine or container pauses, everybody looks silent on waking, and
whoever judged by the clock on the wall would take all of them for dead.
"""

import threading
import time


class AwakeClock:
    """A monotonic clock that stands still while its owner is stopped.

    Its owner calls `now` more often than every `max_gap_s` seconds. A longer gap between two calls means that the owner
    itself was stopped or starved, and counts as `max_gap_s`: those who are watched get as much time again. From any
    thread.
    """

    def __init__(self, max_gap_s: float) -> None:
        self._max_gap_s = max_gap_s
        self._lock = threading.Lock()
        self._last_call = time.monotonic()
        self._now = 0.0

    def now(self) -> float:
        """Seconds since the clock was made, gaps left out."""
        with self._lock:
            call = time.monotonic()
            self._now += min(call - self._last_call, self._max_gap_s)
            self._last_call = call
            return self._now

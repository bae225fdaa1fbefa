"""`LoadProgress`: how far loading is, for whoever waits for it: a bar on a terminal, lines in a log elsewhere, nothing
where it is quick. Knows nothing about what is loaded."""

import sys
import time
from collections.abc import Callable
from typing import Any

from pagemill.log import get_logger

logger = get_logger(__name__)

PATIENCE_S = 2.0
"""Before anything is shown."""
INTERVAL_S = 10.0
"""Between two lines of a log."""


class LoadProgress:
    """Counts up to `total`; `close` ends it, also where it was not reached."""

    def __init__(self, total: int, *, shown: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = max(total, 1)
        self._done = 0
        self._clock = clock
        self._start = clock()
        self._next_line = self._start + PATIENCE_S
        on_terminal = sys.stderr.isatty()
        self._logs = shown and not on_terminal
        self._logged = False
        self._bar = _bar(self._total) if shown and on_terminal else None

    def add(self, amount: int) -> None:
        """So much more is loaded."""
        self._done += amount
        if self._bar is not None:
            self._bar.update(amount)
        if self._logs and self._clock() >= self._next_line:
            self._next_line = self._clock() + INTERVAL_S
            self._logged = True
            logger.info("loading weights: %d%%", 100 * min(self._done, self._total) // self._total)

    def close(self) -> None:
        """Leave the terminal as it was; a log that had lines gets a last one."""
        if self._bar is not None:
            self._bar.close()
        if self._logged:
            logger.info("loading weights took %.1f s", self._clock() - self._start)


def _bar(total: int) -> Any:
    from tqdm import tqdm  # deferred: only terminals have bars

    return tqdm(
        desc="loading weights",
        total=total,
        delay=PATIENCE_S,
        leave=False,
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}",
    )

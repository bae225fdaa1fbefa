"""`WorkerHealth`: whether the workers of one executor are alive; the first death among them is that of all.

Knows nothing about where workers run, nor how they are started and ended.
"""

import threading
from collections.abc import Callable, Iterable

from pagemill.errors import EngineDeadError, PagemillError
from pagemill.log import get_logger

logger = get_logger(__name__)


class WorkerHealth:
    """The death that counts, and the silence that is one. Thread-safe.

    `silences()` are the workers with the seconds since their last pulse; one that is silent for more than `silent_s`
    is dead. `on_death` is called once, on the thread that finds the first death.
    """

    def __init__(
        self,
        silences: Callable[[], Iterable[tuple[str, float]]],
        silent_s: float,
        on_death: Callable[[EngineDeadError], None] | None,
    ) -> None:
        self._silences = silences
        self._silent_s = silent_s
        self._on_death = on_death
        self._lock = threading.Lock()
        self._death: tuple[type[PagemillError], str] | None = None
        self._has_died = threading.Event()
        self._is_stopping = False

    @property
    def is_dead(self) -> bool:
        """Whether a worker has died before `begin_stop`."""
        return self._death is not None

    @property
    def is_stopping(self) -> bool:
        """Whether `begin_stop` was called."""
        return self._is_stopping

    def check(self) -> None:
        """Raise EngineDeadError (at start ConfigError or ModelError, where that is the cause) when a worker is gone,
        and EngineDeadError when one gives no pulse or after `begin_stop`."""
        if self._death is not None:
            kind, reason = self._death
            raise kind(reason)
        if self._is_stopping:
            raise EngineDeadError("the workers were stopped")
        for worker, silent_s in self._silences():
            if silent_s > self._silent_s:
                raise self.die(f"{worker} has given no sign of life for {silent_s:.0f} s")

    def die(self, reason: str, kind: type[PagemillError] = EngineDeadError) -> PagemillError:
        """Declare the workers dead. The first reason given is the one that counts; returns it, as an exception."""
        with self._lock:
            is_first = self._death is None and not self._is_stopping
            kind, reason = self._death or (kind, reason)
            if is_first:
                self._death = (kind, reason)
        if is_first:
            logger.error("%s", reason)
            self._has_died.set()
            if self._on_death is not None:
                self._on_death(EngineDeadError(reason))
        return kind(reason)

    def wait_for_death(self, timeout_s: float) -> None:
        """Return when a death is declared, or after `timeout_s`."""
        self._has_died.wait(timeout_s)

    def begin_stop(self) -> bool:
        """From now on nothing counts as a death; whether this is the first call."""
        with self._lock:
            is_first = not self._is_stopping
            self._is_stopping = True
        return is_first

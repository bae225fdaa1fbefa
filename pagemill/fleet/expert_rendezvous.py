"""`ExpertRendezvous`: where the workers of engines that share their experts connect to each other.

The connections of a group are made once, by all engines together. When one engine is gone the others cannot compute:
all start again and connect at a new address. Does not know how engines are started or stopped.
"""

import threading

from pagemill.messages.worker_rank import Replicas


class ExpertRendezvous:
    """Engines 0 to `size` - 1, all of this machine; `folder` is where they meet. Thread-safe."""

    def __init__(self, size: int, folder: str) -> None:
        self._size = size
        self._folder = folder
        self._lock = threading.Lock()
        self._number = 0
        self._joined: dict[int, int] = {}
        """Engine -> its incarnation at the present meeting."""

    def join(self, index: int, incarnation: int) -> Replicas:
        """Where this incarnation of an engine meets the others."""
        with self._lock:
            self._joined[index] = incarnation
            return Replicas(index, self._size, f"file://{self._folder}/experts-{self._number}")

    def leave(self, index: int, incarnation: int) -> list[tuple[int, int]] | None:
        """An engine is gone: (engine, incarnation) of those that must be replaced. The first that leaves a meeting ends
        it; None for those that leave after it."""
        with self._lock:
            if self._joined.get(index) != incarnation:
                return None
            others = [member for member in self._joined.items() if member[0] != index]
            self._joined = {}
            self._number += 1
            return others

"""`ExpertRendezvous`: where the workers of engines that share their experts connect to each other.

The connections of a group are made once, by all engines together. When one engine is gone the others cannot compute:
all start again and connect at a new address. Does not know how engines are started or stopped.
"""

import threading

from pagemill.messages.worker_rank import Replicas


class ExpertRendezvous:
    """Engines 0 to `size` - 1, all of this machine; `folder` is for the files over which they connect. Thread-safe."""

    def __init__(self, size: int, folder: str) -> None:
        self._size = size
        self._folder = folder
        self._lock = threading.Lock()
        self._group = 0
        """Number of the present group: part of its address."""
        self._members: dict[int, int] = {}
        """Engine -> its incarnation in the present group."""

    def join(self, index: int, incarnation: int) -> Replicas:
        """Add this incarnation of an engine to the present group; where it connects to the others."""
        with self._lock:
            self._members[index] = incarnation
            return Replicas(index, self._size, f"file://{self._folder}/experts-{self._group}")

    def leave(self, index: int, incarnation: int) -> list[tuple[int, int]] | None:
        """An engine is gone: (engine, incarnation) of those that must be replaced. The first that leaves a group ends
        it; None for those that leave after it."""
        with self._lock:
            if self._members.get(index) != incarnation:
                return None
            others = [member for member in self._members.items() if member[0] != index]
            self._members = {}
            self._group += 1
            return others

"""`GrowingPause`: how long to wait before something that failed is tried again. Knows nothing about what is tried."""

FIRST_S, LONGEST_S = 1.0, 30.0


class GrowingPause:
    """Nothing after a success, then 1, 2, 4 seconds and so on, up to half a minute."""

    def __init__(self) -> None:
        self._next_s = FIRST_S

    def next_s(self, succeeded: bool) -> float:
        """The pause after an attempt that succeeded, or failed, in seconds."""
        if succeeded:
            self._next_s = FIRST_S
            return 0.0
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, LONGEST_S)
        return pause_s

"""`Backoff`: how long to wait between attempts that fail."""


class Backoff:
    """Seconds to wait between attempts: twice as long each time, up to `longest_s`."""

    def __init__(self, first_s: float = 0.1, longest_s: float = 5.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def next_s(self) -> float:
        """Seconds to wait before the next attempt."""
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self._longest_s)
        return pause_s

    def reset(self) -> None:
        """An attempt succeeded: the next pause is the first again."""
        self._next_s = self._first_s

"""Phase timing of start-up: what took how long, printed as one line."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Collects named durations in seconds, in the order in which the phases began."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body; a name used twice adds up."""
        start = time.perf_counter()
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def summary(self) -> str:
        """`config 0.10 s, weights 0.52 s, total 0.62 s`."""
        parts = [f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items()]
        return ", ".join([*parts, f"total {sum(self.seconds.values()):.2f} s"])

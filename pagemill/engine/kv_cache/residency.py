"""`ResidencySampler`: how long blocks stay in the cache, how long they lie unused, and how soon they are used again.

Follows a share of the blocks; knows nothing about what they hold.
"""

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence

from pagemill.engine.kv_cache.pool_observer import PoolObserver
from pagemill.messages.stats import ResidencySamples

MAX_SAMPLES = 1024
"""Of each kind between two reports; the newest are kept."""


class _Stay:
    __slots__ = ("begin", "used")

    def __init__(self, now: float) -> None:
        self.begin = self.used = now


class ResidencySampler(PoolObserver):
    """Told by the block pool when blocks are taken, used again and let go of. Each block that is taken is followed
    with the probability `share`, until it is taken for something else."""

    def __init__(
        self, share: float, clock: Callable[[], float] = time.monotonic, rng: random.Random | None = None
    ) -> None:
        self._share = share
        self._clock = clock
        self._rng = rng or random.Random()
        self._followed: dict[int, _Stay] = {}
        self._samples = ResidencySamples()
        self._skip = self._next_skip()

    def taken(self, blocks: Sequence[int]) -> None:
        if self._followed:
            self._end(blocks)
        at = self._skip
        while at < len(blocks):
            self._followed[blocks[at]] = _Stay(self._clock())
            at += 1 + self._next_skip()
        self._skip = at - len(blocks)

    def used(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            stay = self._followed.get(block)
            if stay is not None:
                now = self._clock()
                _keep(self._samples.reuse_gaps_s, now - stay.used)
                stay.used = now

    def released(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            stay = self._followed.get(block)
            if stay is not None:
                stay.used = self._clock()

    def cleared(self) -> None:
        self._end(tuple(self._followed))

    def take(self) -> ResidencySamples | None:
        """What was sampled since the last call; None when nothing was."""
        samples = self._samples
        if not (samples.lifetimes_s or samples.reuse_gaps_s):
            return None
        self._samples = ResidencySamples()
        return samples

    def _end(self, blocks: Iterable[int]) -> None:
        followed = self._followed.keys() & set(blocks)
        now = self._clock() if followed else 0.0
        for block in followed:
            stay = self._followed.pop(block)
            _keep(self._samples.lifetimes_s, now - stay.begin)
            _keep(self._samples.idle_s, now - stay.used)

    def _next_skip(self) -> int:
        """Blocks until the next one to follow: geometric, so that a draw is made per sample and not per block."""
        if self._share >= 1:
            return 0
        return int(math.log(1.0 - self._rng.random()) / math.log(1.0 - self._share))


def _keep(samples: list[float], value: float) -> None:
    samples.append(value)
    if len(samples) > MAX_SAMPLES:
        del samples[0]

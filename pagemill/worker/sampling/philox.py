"""Counter-based random numbers: Philox-4x32-10 keyed by a request's seed, counted by token position.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). No state is kept
anywhere, so a request draws the same noise alone, in any batch, after a preemption and after a restart.
"""

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFF_FFFF)
_HIGH = np.uint64(32)
_ROUNDS = 10

UInt64Array = npt.NDArray[np.uint64]


def philox(counters: tuple[UInt64Array, ...], keys: tuple[UInt64Array, UInt64Array]) -> tuple[UInt64Array, ...]:
    """Ten rounds on four 32-bit counters with two 32-bit keys, each held in uint64 arrays of one shape."""
    c0, c1, c2, c3 = counters
    k0, k1 = keys
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (product1 >> _HIGH) ^ c1 ^ k0, product1 & _LOW, (product0 >> _HIGH) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def uniform(seeds: UInt64Array, positions: npt.NDArray[np.int64], stream: int = 0) -> npt.NDArray[np.float64]:
    """One number in (0, 1) for each (seed, position); `stream` tells uses of the same position apart.

    seeds, positions: [L]. Returns [L] float64: multiples of 2**-32 plus 2**-33, so neither 0 nor 1.
    """
    counts = positions.astype(np.uint64)
    zeros = np.zeros_like(counts)
    counters = (counts & _LOW, counts >> _HIGH, zeros + np.uint64(stream), zeros)
    words = philox(counters, (seeds & _LOW, seeds >> _HIGH))
    return (words[0].astype(np.float64) + 0.5) * 2.0**-32

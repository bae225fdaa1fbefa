"""Known answers of Philox-4x32-10 (the kat_vectors of the Random123 distribution) and the uniform numbers."""

import numpy as np
import pytest

from pagemill.worker.sampling.philox import philox, uniform

KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter, key, answer):
    words = philox(
        tuple(np.array([word], np.uint64) for word in counter), tuple(np.array([word], np.uint64) for word in key)
    )
    assert tuple(int(word[0]) for word in words) == answer


def test_uniform_is_a_function_of_seed_and_position_alone():
    seeds = np.array([1, 2, 2**63 + 5, 1], np.uint64)
    positions = np.array([7, 7, 0, 8])
    together = uniform(seeds, positions)
    alone = [uniform(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


def test_uniform_is_inside_the_open_interval_and_flat():
    numbers = uniform(np.full(100_000, 42, np.uint64), np.arange(100_000))
    assert 0 < numbers.min() < numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    chi_square = ((counts - 5000.0) ** 2 / 5000.0).sum()
    assert chi_square < 50  # 19 degrees of freedom: 0.9999 quantile is 50.8


def test_streams_differ():
    seed, position = np.array([3], np.uint64), np.array([11])
    assert uniform(seed, position, stream=0) != uniform(seed, position, stream=1)

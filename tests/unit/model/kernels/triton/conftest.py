"""Rules for tests of Triton kernels."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def unwritten() -> Iterator[None]:
    """Memory that nobody has written is NaN, and the largest integer.

    Kernels may compute with such memory, of rows that fill up a tile, as long as nothing comes of it. What was there by
    chance has overflowed in the interpreter now and then, and a warning of numpy's is an error here."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)

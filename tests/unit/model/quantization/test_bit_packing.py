"""Integers of a few bits out of words, against the bits of one long integer."""

import numpy as np
import pytest
import torch

from pagemill.model.quantization.bit_packing import centred, first_read, pairs, unpack


@pytest.mark.parametrize("bits", range(2, 9))
def test_integers_lie_side_by_side(bits: int) -> None:
    integers = np.random.default_rng(bits).integers(0, 1 << bits, (3, 40))
    rows = []
    for row in integers.tolist():
        number = sum(value << bits * index for index, value in enumerate(row))
        rows.append(np.frombuffer(number.to_bytes(40, "little"), np.int32))
    packed = torch.from_numpy(np.stack(rows)[:, : -(-40 * bits // 32)].copy())
    found = unpack(packed, bits, 40)
    assert torch.equal(found, torch.from_numpy(integers).to(torch.uint8))
    assert torch.equal(centred(found, bits), torch.from_numpy(integers - (1 << bits - 1)).to(torch.int8))


def test_two_integers_in_a_byte_are_left_as_they_are() -> None:
    packed = torch.randint(-(1 << 31), (1 << 31) - 1, (3, 4), dtype=torch.int32)
    for first, count in ((0, 32), (2, 8), (8, 16), (6, 26)):
        found = pairs(packed, first, count)
        assert found is not None and found.data_ptr() == packed.data_ptr() + first // 2
        both = torch.stack([found & 15, found >> 4], -1).flatten(1)
        assert torch.equal(both, unpack(packed, 4)[:, first : first + count])
    assert pairs(packed, 1, 8) is None and pairs(packed, 0, 7) is None
    assert pairs(packed.t(), 0, 8) is None, "words of a row lie apart"
    part = pairs(packed[:, 1:3], 2, 8)
    assert part is not None and torch.equal(part, packed.view(torch.uint8)[:, 5:9])


def test_where_wanted_integers_begin() -> None:
    wanted = range(20, 40)
    assert first_read(wanted, 4, is_split=False) == 20
    assert first_read(wanted, 4, is_split=True) == 4, "in the word that holds the first"
    assert first_read(wanted, 3, is_split=True) == 20, "words were not taken apart"

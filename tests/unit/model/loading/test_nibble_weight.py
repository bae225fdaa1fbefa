"""Integers of 4 bits as files have them: what they stand for, arranged, and one under the other."""

import pytest
import torch
from torch import Tensor

from pagemill.model.kernels.pack_limits import ZeroWords
from pagemill.model.kernels.pack_linear import Words
from pagemill.model.loading.nibble_weight import NibbleWeight, WordWeight, unpacked
from pagemill.model.loading.packed_weight import PackedWeight, neighbours

ROWS, WIDTH, GROUP = 16, 64, 32
AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Of an octet, in the order of the half bytes of a word."""


def words(kind: Words, seed: int = 0, *, zeros: bool = True, groups: Tensor | None = None) -> WordWeight:
    generator = torch.Generator().manual_seed(seed)
    shape = (WIDTH // 8, ROWS) if kind is Words.OF_INPUTS else (WIDTH, ROWS // 8)
    stored = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).int()
    scales = torch.rand(WIDTH // GROUP, ROWS, generator=generator).half()
    points = torch.randint(-(1 << 31), 1 << 31, (len(scales), ROWS // 8), generator=generator).int()
    groups = neighbours(WIDTH, GROUP) if groups is None else groups
    return WordWeight(kind, stored, scales, groups, ZeroWords(points, 1) if zeros else None)


def floats(weight: WordWeight) -> Tensor:
    """[ROWS, WIDTH], by the definition."""
    made = torch.empty(ROWS, WIDTH)
    for output in range(ROWS):
        for place in range(WIDTH):
            if weight.kind is Words.OF_INPUTS:
                word, half_byte = weight.words[place // 8, output], place % 8
            else:
                word, half_byte = weight.words[place, output // 8], AWQ_OUTPUTS.index(output % 8)
            group = int(weight.groups[place])
            zero = 8
            if weight.zeros is not None:
                zero = int(weight.zeros.words[group, output // 8]) >> 4 * (output % 8) & 15
            made[output, place] = ((int(word) >> 4 * half_byte & 15) - zero) * float(weight.scales[group, output])
    return made


KINDS = pytest.mark.parametrize("kind", Words)


@KINDS
@pytest.mark.parametrize("zeros", [False, True])
def test_what_words_stand_for(kind: Words, zeros: bool) -> None:
    groups = neighbours(WIDTH, GROUP)[torch.randperm(WIDTH, generator=torch.Generator().manual_seed(1))]
    for weight in (words(kind, zeros=zeros), words(kind, zeros=zeros, groups=groups)):
        assert (len(weight), weight.shape, weight.device.type) == (ROWS, (ROWS, WIDTH), "cpu")
        assert torch.equal(weight.dequantized(torch.float32), floats(weight))


@KINDS
def test_rows_that_stay_are_not_touched(kind: Words) -> None:
    weight = words(kind)
    assert weight.with_rows(lambda rows: rows) is weight
    turned = weight.with_rows(lambda rows: rows.flip(0))
    assert torch.equal(turned.dequantized(torch.float32), floats(weight).flip(0))


@KINDS
def test_words_one_under_the_other(kind: Words) -> None:
    first, second = words(kind), words(kind, 1)
    joined = first.above([second])
    assert isinstance(joined, WordWeight)
    assert torch.equal(joined.dequantized(torch.float32), torch.cat([floats(first), floats(second)]))
    central = words(kind, 2, zeros=False)
    mixed = first.above([central, central.unpacked()])
    assert isinstance(mixed, PackedWeight)
    expected = torch.cat([floats(first), floats(central), floats(central)])
    assert torch.equal(mixed.dequantized(torch.float32), expected)
    assert first.above([words(kind, groups=torch.zeros(WIDTH, dtype=torch.int64))]) is None


def test_words_of_8_bits() -> None:
    stored = torch.randint(0, 256, (ROWS, WIDTH), dtype=torch.uint8)
    scales = torch.rand(WIDTH // GROUP, ROWS)
    groups = neighbours(WIDTH, GROUP)
    weight = WordWeight(Words.OF_INPUTS, stored.view(torch.int32).t().contiguous(), scales, groups, bits=8)
    expected = (stored.float() - 128) * scales.t().repeat_interleave(GROUP, 1)
    assert weight.shape == (ROWS, WIDTH)
    assert torch.equal(weight.dequantized(torch.float32), expected)
    joined = weight.above([weight])
    assert isinstance(joined, WordWeight)
    assert torch.equal(joined.dequantized(torch.float32), torch.cat([expected, expected]))
    four = words(Words.OF_INPUTS, zeros=False)
    mixed = weight.above([four])
    assert isinstance(mixed, PackedWeight)
    assert torch.equal(mixed.dequantized(torch.float32), torch.cat([expected, floats(four)]))


def test_words_of_another_kind_go_below_unpacked() -> None:
    first, second = words(Words.OF_INPUTS), words(Words.OF_OUTPUTS)
    joined = first.above([second])
    assert isinstance(joined, PackedWeight)
    assert torch.equal(joined.dequantized(torch.float32), torch.cat([floats(first), floats(second)]))


def test_pairs_with_zero_points() -> None:
    pairs = torch.randint(0, 256, (8, WIDTH // 2), dtype=torch.uint8)
    scales = torch.rand(8, WIDTH // GROUP)
    zeros = torch.randint(0, 16, scales.shape)
    stored = (zeros << 4 * torch.arange(8)[:, None]).sum(0).int().view(1, -1)
    weight = NibbleWeight(pairs, scales, neighbours(WIDTH, GROUP), zeros=ZeroWords(stored, 0))
    integers = torch.stack([pairs & 15, pairs >> 4], -1).flatten(1).float()
    expected = (integers - zeros.float().repeat_interleave(GROUP, 1)) * scales.repeat_interleave(GROUP, 1)
    assert torch.equal(weight.dequantized(torch.float32), expected)
    assert weight.with_rows(lambda rows: rows) is weight
    assert torch.equal(weight.with_rows(lambda rows: rows[1:3]).dequantized(torch.float32), expected[1:3])
    joined = weight.above([weight])
    assert isinstance(joined, NibbleWeight)
    assert torch.equal(joined.dequantized(torch.float32), torch.cat([expected, expected]))
    mixed = weight.above([weight.with_rows(lambda rows: rows.flip(0))])
    assert isinstance(mixed, PackedWeight)
    assert torch.equal(mixed.dequantized(torch.float32), torch.cat([expected, expected.flip(0)]))
    assert isinstance(weight.above([NibbleWeight(pairs, scales, weight.groups)]), PackedWeight)
    plain = torch.ones(2, 2)
    found = unpacked([weight, plain])
    assert isinstance(found[0], PackedWeight)
    assert found[1] is plain

"""Weights whose integers lie apart from their scales: which go to the kernels as they lie in files."""

import pytest
import torch

from pagemill.model.kernels.linear_int import FLOAT8, FLOAT8_UNIT, Q4_0, Q4_1, Q8_0
from pagemill.model.kernels.pack_limits import ZeroWords
from pagemill.model.kernels.pack_linear import Words
from pagemill.model.loading.codes import codes_of
from pagemill.model.loading.nibble_weight import NibbleWeight, WordWeight
from pagemill.model.loading.packed_weight import PackedWeight, neighbours

SCALES = torch.tensor([[0.5, 1.0], [2.0, 0.25]]).repeat(4, 1)
ROWS = len(SCALES)


def nibbles(width: int = 128, size: int = 64, scales: torch.Tensor = SCALES) -> NibbleWeight:
    pairs = torch.randint(0, 256, (ROWS, width // 2), dtype=torch.uint8)
    return NibbleWeight(pairs, scales, neighbours(width, size))


def test_halves_of_bytes_are_taken_as_they_lie() -> None:
    weight = nibbles()
    codes = codes_of(weight)
    assert codes is not None
    assert codes.kind == Q4_0
    assert codes.codes.data_ptr() == weight.pairs.data_ptr()
    assert torch.equal(codes.limits, SCALES.half())
    assert codes.groups.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(("dtype", "kind", "unit"), [(torch.int8, Q8_0, 1), (torch.float8_e4m3fn, FLOAT8, FLOAT8_UNIT)])
def test_bytes_are_taken_as_they_lie(dtype, kind, unit) -> None:
    values = torch.randint(-100, 100, (ROWS, 128)).to(dtype)
    codes = codes_of(PackedWeight(8, values, SCALES, neighbours(128, 64)))
    assert codes is not None
    assert (codes.kind, codes.codes.data_ptr()) == (kind, values.data_ptr())
    assert torch.equal(codes.limits, (SCALES * unit).half())


ZEROS = torch.tensor([[0, 15], [8, 11]]).repeat(4, 1)
LIMITS = torch.stack([SCALES.half(), (SCALES * -ZEROS.float()).half()], -1).view(torch.int32).squeeze(-1)
"""Scale and minimum."""


def zeros_of(dim: int) -> ZeroWords:
    """`ZEROS`, in words."""
    words = (ZEROS << 4 * torch.arange(8)[:, None]).sum(0).int().view(1, 2)
    return ZeroWords(words if dim == 0 else words.t().contiguous(), dim)


def test_zero_points_become_minima() -> None:
    pairs = nibbles()
    codes = codes_of(NibbleWeight(pairs.pairs, SCALES, pairs.groups, zeros=zeros_of(0)))
    assert codes is not None
    assert codes.kind == Q4_1
    assert torch.equal(codes.limits, LIMITS)
    far = torch.full_like(SCALES, 1e4)  # times 15, no 16-bit float holds it
    assert codes_of(NibbleWeight(pairs.pairs, far, pairs.groups, zeros=zeros_of(0))) is None


@pytest.mark.parametrize("kind", Words)
def test_words_are_taken_as_they_lie(kind: Words) -> None:
    words = torch.zeros((16, 8) if kind is Words.OF_INPUTS else (128, 1), dtype=torch.int32)
    scales = SCALES.t().contiguous()
    codes = codes_of(WordWeight(kind, words, scales, neighbours(128, 64), zeros_of(1)))
    assert codes is not None
    assert (codes.kind, codes.words, codes.codes.data_ptr(), codes.order) == (Q4_1, kind, words.data_ptr(), None)
    assert torch.equal(codes.limits, LIMITS.t())
    plain = codes_of(WordWeight(kind, words, scales, neighbours(128, 64)))
    assert plain is not None
    assert plain.kind == Q4_0
    assert torch.equal(plain.limits, scales.half())
    assert codes.goes_with(codes)
    assert not codes.goes_with(plain)


def test_inputs_in_the_order_of_their_groups() -> None:
    groups = torch.arange(128) % 2
    scales = SCALES.t().contiguous()
    codes = codes_of(WordWeight(Words.OF_INPUTS, torch.zeros(16, 8, dtype=torch.int32), scales, groups))
    assert codes is not None
    assert codes.order is not None
    assert codes.order.tolist() == [*range(0, 128, 2), *range(1, 128, 2)]
    assert codes.groups.tolist() == [0, 0, 1, 1]
    plain = codes_of(WordWeight(Words.OF_INPUTS, torch.zeros(16, 8, dtype=torch.int32), scales, neighbours(128, 64)))
    assert plain is not None
    assert not codes.goes_with(plain)
    other = codes_of(WordWeight(Words.OF_INPUTS, torch.zeros(16, 8, dtype=torch.int32), scales, groups.flip(0)))
    assert other is not None
    assert not codes.goes_with(other)
    assert codes_of(WordWeight(Words.OF_OUTPUTS, torch.zeros(128, 1, dtype=torch.int32), scales, groups)) is None


def test_halves_of_bytes_in_the_order_of_their_groups() -> None:
    pairs = nibbles()
    codes = codes_of(NibbleWeight(pairs.pairs, SCALES, torch.arange(128) % 2, zeros=zeros_of(0)))
    assert codes is not None
    assert codes.order is not None
    assert codes.order.tolist() == [*range(0, 128, 2), *range(1, 128, 2)]
    assert (codes.groups.tolist(), codes.codes.data_ptr()) == ([0, 0, 1, 1], pairs.pairs.data_ptr())


def test_bytes_in_the_order_of_their_groups() -> None:
    values = torch.randint(-100, 100, (ROWS, 128)).to(torch.int8)
    codes = codes_of(PackedWeight(8, values, SCALES, torch.arange(128) % 2))
    assert codes is not None
    assert codes.order is not None
    assert (codes.kind, codes.order[:2].tolist(), codes.groups.tolist()) == (Q8_0, [0, 2], [0, 0, 1, 1])
    assert codes_of(PackedWeight(8, values.to(torch.float8_e4m3fn), SCALES, torch.arange(128) % 2)) is None


def test_what_is_not_as_panels_have_it() -> None:
    assert codes_of(torch.zeros(2, 128)) is None
    assert codes_of(nibbles(size=48)) is None  # a block would have two scales
    assert codes_of(nibbles(width=48)) is None
    assert codes_of(nibbles(scales=SCALES * 1e6)) is None
    values = torch.zeros(ROWS, 128, dtype=torch.int8)
    assert codes_of(PackedWeight(8, values, SCALES, neighbours(128, 64), zeros=torch.zeros_like(SCALES))) is None
    assert codes_of(PackedWeight(4, values, SCALES, neighbours(128, 64))) is None
    words = torch.zeros(16, 2, dtype=torch.int32)
    assert codes_of(WordWeight(Words.OF_INPUTS, words, SCALES[:2], neighbours(128, 64))) is None  # no octet


def test_nibbles_are_what_they_are_unpacked() -> None:
    weight = nibbles()
    low, high = weight.pairs & 15, weight.pairs >> 4
    plain = weight.unpacked()
    assert torch.equal(plain.values[:, 0::2], low.to(torch.int8) - 8)
    assert torch.equal(plain.values[:, 1::2], high.to(torch.int8) - 8)
    assert torch.equal(weight.dequantized(torch.float32), plain.dequantized(torch.float32))
    assert (weight.shape, len(weight)) == ((ROWS, 128), ROWS)
    turned = weight.with_rows(lambda rows: rows.flip(0))
    assert torch.equal(turned.dequantized(torch.float32), plain.dequantized(torch.float32).flip(0))
    stacked = weight.above([turned, plain])
    assert isinstance(stacked, PackedWeight)
    assert torch.equal(stacked.values, torch.cat([plain.values, plain.values.flip(0), plain.values]))

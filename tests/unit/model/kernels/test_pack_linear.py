"""Panels made of rows against torch, per instruction set: every format, odd sizes, parts, rows that lie anywhere."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from pagemill.model.kernels.linear import SILU, pack_bf16
from pagemill.model.kernels.linear_int import (
    BLOCK,
    FLOAT8,
    FORMATS,
    Q4_0,
    Q4_1,
    Q8_0,
    BlockFormat,
    pack_blocks,
    pack_codes,
    pack_words,
)
from pagemill.model.kernels.linear_reference import unpacked_blocks
from pagemill.model.kernels.pack_linear import NO_GATE, PANEL, Words, num_panels, panel_rows

GATES = pytest.mark.parametrize("gate", [NO_GATE, SILU])
SIZES = pytest.mark.parametrize("size", [(2, 2), (32, 64), (70, 46), (200, 576), (34, 4098)], ids=str)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def any_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def split(rows: Tensor) -> list[Tensor]:
    """One above the other, one of them empty."""
    cuts = [0, len(rows) // 3, len(rows) // 3, len(rows) - 1, len(rows)]
    return [rows[begin:end] for begin, end in pairwise(cuts)]


def expected_words(words: Tensor, gate: int) -> Tensor:
    """[N, W, bytes] -> [P, W, outputs, bytes]."""
    ordered = panel_rows(words.flatten(1), gate)
    return ordered.view(-1, PANEL, *words.shape[1:]).transpose(1, 2).contiguous()


def expected_blocks(kind: BlockFormat, blocks: Tensor, gate: int) -> Tensor:
    each = blocks.view(len(blocks), -1, kind.block_bytes)
    limits, integers = each[..., : kind.limit_bytes], each[..., kind.limit_bytes :]
    panels = expected_words(limits, gate)
    words = expected_words(integers.reshape(len(blocks), -1, 4), gate)
    if kind == Q8_0:
        words = words ^ 128
    num_blocks = each.shape[1]
    return torch.cat([panels.flatten(2), words.view(len(words), num_blocks, -1)], -1)


@GATES
@SIZES
def test_bfloat16_pairs_side_by_side(isa: str, gate: int, size: tuple[int, int]) -> None:
    rows, cols = size
    stored = any_bytes(rows, cols * 2)
    weight = stored.view(torch.bfloat16)
    found = pack_bf16(weight, None, gate).tensors[0]
    expected = expected_words(stored.view(rows, -1, 4), gate)
    assert len(found) == num_panels(rows, gate)
    assert torch.equal(found.view(torch.uint8).flatten(), expected.flatten())
    stacked = pack_bf16(split(weight), None, gate)
    assert torch.equal(stacked.tensors[0].view(torch.uint8), found.view(torch.uint8))
    assert (stacked.struct.rows, stacked.out_features) == (rows, rows if gate == NO_GATE else rows // 2)


@pytest.mark.cases(one_in=3)
@GATES
@SIZES
@pytest.mark.parametrize("kind", FORMATS.values(), ids=lambda kind: kind.name)
def test_blocks_side_by_side(isa: str, kind: BlockFormat, gate: int, size: tuple[int, int]) -> None:
    rows, cols = size
    blocks = any_bytes(rows, -(-cols // BLOCK) * kind.block_bytes)
    found = pack_blocks(kind, blocks, cols, gate).tensors[0]
    assert torch.equal(found, expected_blocks(kind, blocks, gate))
    assert torch.equal(pack_blocks(kind, split(blocks), cols, gate).tensors[0], found)


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_rows_may_be_far_apart_and_begin_anywhere(isa: str, offset: int) -> None:
    weight = any_bytes(40, 2 * 70).view(torch.bfloat16)[:, offset : offset + 64]
    expected = pack_bf16(weight.contiguous()).tensors[0]
    assert torch.equal(pack_bf16(weight).tensors[0].view(torch.int16), expected.view(torch.int16))
    turned = weight.T.contiguous().T
    assert torch.equal(pack_bf16(turned).tensors[0].view(torch.int16), expected.view(torch.int16))


def in_blocks(kind: BlockFormat, codes: Tensor, limits: Tensor, groups: Tensor) -> Tensor:
    """Rows of blocks with their limits."""
    each = codes.view(len(codes), len(groups), -1)
    if kind in (Q4_0, Q4_1):
        nibbles = torch.stack([each & 15, each >> 4], -1).flatten(2)
        each = nibbles[..., : BLOCK // 2] | nibbles[..., BLOCK // 2 :] << 4
    of_blocks = limits[:, groups.long()].unsqueeze(-1).view(torch.uint8)
    return torch.cat([of_blocks, each], -1).flatten(1)


def limits_of(kind: BlockFormat, rows: int, num_groups: int) -> Tensor:
    """[rows, groups] of any values: scales, or scales and minima in 32 bits."""
    return any_bytes(rows, num_groups * kind.limit_bytes).view(torch.int32 if kind.limit_bytes == 4 else torch.float16)


@pytest.mark.cases(one_in=3)
@GATES
@pytest.mark.parametrize("kind", [Q4_0, Q4_1, Q8_0, FLOAT8], ids=lambda kind: kind.name)
@pytest.mark.parametrize("size", [(2, 32), (34, 64), (70, 96), (200, 576), (34, 4096)], ids=str)
def test_codes_and_their_limits_elsewhere(isa: str, kind: BlockFormat, gate: int, size: tuple[int, int]) -> None:
    rows, cols = size
    codes = any_bytes(rows, cols // 2 if kind in (Q4_0, Q4_1) else cols)
    codes[(codes & 127) == 127] = 126
    groups = torch.arange(cols // BLOCK, dtype=torch.int32) // 3
    limits = limits_of(kind, rows, int(groups[-1]) + 1)
    found = pack_codes(kind, split(codes), split(limits), groups, None, gate)
    assert found is not None
    expected = pack_blocks(kind, in_blocks(kind, codes, limits, groups), gate=gate)
    assert torch.equal(found.tensors[0], expected.tensors[0])
    assert (found.struct.rows, found.struct.cols) == (rows, cols)


@pytest.mark.cases(one_in=7)
@GATES
@pytest.mark.parametrize("kind", [Q4_0, Q4_1, Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("size", [(2, 32), (70, 96), (200, 576), (34, 4096)], ids=str)
def test_codes_of_inputs_in_any_order(isa: str, kind: BlockFormat, gate: int, size: tuple[int, int]) -> None:
    rows, cols = size
    integers = integers_of(kind, rows, cols)
    groups = torch.arange(cols // BLOCK, dtype=torch.int32) // 3
    limits = limits_of(kind, rows, int(groups[-1]) + 1)
    order = torch.randperm(cols, generator=torch.Generator().manual_seed(1))
    found = pack_codes(kind, split(in_bytes(kind, integers)), split(limits), groups, order, gate)
    assert found is not None
    expected = pack_blocks(kind, in_blocks(kind, in_bytes(kind, integers[:, order]), limits, groups), gate=gate)
    assert torch.equal(found.tensors[0], expected.tensors[0])


def integers_of(kind: BlockFormat, rows: int, cols: int) -> Tensor:
    """[out, in] uint8, of 4 bits or 8."""
    return any_bytes(rows, cols) & (255 if kind == Q8_0 else 15)


def in_bytes(kind: BlockFormat, integers: Tensor) -> Tensor:
    """[out, in] uint8 -> those of 4 bits two in a byte, the first in the lower half."""
    return integers if kind == Q8_0 else integers[:, 0::2] | integers[:, 1::2] << 4


def in_words(words: Words, integers: Tensor, bits: int = 4) -> Tensor:
    """[out, in] uint8 of so many bits -> as files have them, rows of which lie a little apart."""
    by_input = integers.t().int()
    if words is Words.OF_INPUTS:
        each = by_input.reshape(len(by_input) * bits // 32, 32 // bits, by_input.shape[1]).transpose(1, 2)
    else:
        each = by_input.reshape(len(by_input), by_input.shape[1] // 8, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
    made = (each << bits * torch.arange(32 // bits, dtype=torch.int32)).sum(-1, dtype=torch.int32)
    return torch.nn.functional.pad(made, (1, 2))[:, 1:-2]


@pytest.mark.cases(one_in=11)
@pytest.mark.parametrize(
    ("parts", "gate"),
    [
        ((8,), NO_GATE),
        ((40, 24, 0, 8), NO_GATE),  # parts begin within panels
        ((256, 64, 64), NO_GATE),  # whole vectors of octets
        ((1096, 1096), NO_GATE),
        ((16,), SILU),
        ((256, 256), SILU),
        ((1096, 1096), SILU),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("words", "kind"),
    [
        *((words, kind) for words in (Words.OF_INPUTS, "ordered") for kind in (Q4_0, Q4_1, Q8_0)),
        *((Words.OF_OUTPUTS, kind) for kind in (Q4_0, Q4_1)),
    ],
    ids=lambda one: one.name if isinstance(one, BlockFormat) else str(one),
)
@pytest.mark.parametrize("cols", [32, 96, 512])
def test_words_of_outputs_side_by_side(
    isa: str, words: Words | str, kind: BlockFormat, gate: int, parts: tuple[int, ...], cols: int
) -> None:
    rows = sum(parts)
    integers = integers_of(kind, rows, cols)
    groups = torch.arange(cols // BLOCK, dtype=torch.int32) // 3
    limits = limits_of(kind, rows, int(groups[-1]) + 1)
    order = torch.randperm(cols, generator=torch.Generator().manual_seed(1)) if words == "ordered" else None
    of_what = Words.OF_INPUTS if isinstance(words, str) else words
    stored = [in_words(of_what, part, 8 if kind == Q8_0 else 4) for part in integers.split(parts)]
    their_limits = [part.t() for part in limits.split(parts)]
    found = pack_words(kind, of_what, stored, their_limits, groups, order, gate)
    assert found is not None
    in_order = integers if order is None else integers[:, order]
    if kind == Q8_0:  # from 0 up in words, and around 0 in blocks
        in_order = in_order ^ 128
    made = unpacked_blocks(kind, found.tensors[0], (rows, cols), gate)
    assert torch.equal(made.flatten(1), in_blocks(kind, in_bytes(kind, in_order), limits, groups))
    assert (found.struct.rows, found.struct.cols, found.struct.format) == (rows, cols, kind.panels)


@pytest.mark.parametrize(("parts", "gate"), [((12,), NO_GATE), ((16, 4), NO_GATE), ((8,), SILU), ((24,), SILU)])
def test_octets_that_would_be_torn_apart(isa: str, parts: tuple[int, ...], gate: int) -> None:
    words = [torch.zeros(4, count, dtype=torch.int32) for count in parts]
    limits = [torch.zeros(1, count, dtype=torch.float16) for count in parts]
    groups = torch.zeros(1, dtype=torch.int32)
    assert pack_words(Q4_0, Words.OF_INPUTS, words, limits, groups, None, gate) is None


@pytest.mark.parametrize("code", [127, 255])
@pytest.mark.parametrize("place", [(0, 0), (33, 95)])
def test_an_8_bit_float_that_is_no_number_is_seen(isa: str, code: int, place: tuple[int, int]) -> None:
    codes = torch.full((40, 96), 126, dtype=torch.uint8)
    scales = torch.ones(40, 1, dtype=torch.float16)
    groups = torch.zeros(3, dtype=torch.int32)
    assert pack_codes(FLOAT8, [codes], [scales], groups) is not None
    codes[place] = code
    assert pack_codes(FLOAT8, [codes], [scales], groups) is None
    assert pack_codes(Q8_0, [codes], [scales], groups) is not None

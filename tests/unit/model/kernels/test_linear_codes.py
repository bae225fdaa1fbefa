"""Linear layers on small floats, and on integers with wide inputs, against their reference, per instruction set."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pagemill.model.kernels import linear_reference
from pagemill.model.kernels.linear import GELU_TANH, SILU, linear, weight_rows, with_bias, with_order
from pagemill.model.kernels.linear_int import (
    BLOCK,
    FLOAT8,
    NF4,
    PANEL_FORMATS,
    WIDE,
    BlockFormat,
    dequantize,
    pack_blocks,
)

pytestmark = pytest.mark.cases(one_in=4)

WIDE_NAMES = {kind.name for kind in WIDE.values()}
CODES = pytest.mark.parametrize("kind", [NF4, FLOAT8], ids=lambda kind: kind.name)
KINDS = pytest.mark.parametrize("kind", [NF4, FLOAT8, *WIDE.values()], ids=lambda kind: kind.name)
SIZES = [(1, 32), (33, 96), (200, 576), (70, 40), (64, 1)]
SMALLEST_NORMAL = 8
"""Bits of the least 8-bit float that is no subnormal number."""


def make_blocks(kind: BlockFormat, rows: int, cols: int, seed: int = 0) -> Tensor:
    """Any bytes, but NaN and subnormal numbers of 8-bit floats; positive scales and minima."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (rows, -(-cols // BLOCK), kind.block_bytes), dtype=torch.uint8, generator=generator)
    if kind == FLOAT8:
        codes = blocks[..., 2:]
        codes[((codes & 127) == 127) | ((codes & 127) < SMALLEST_NORMAL)] = 0
    limits = torch.rand((*blocks.shape[:2], kind.limit_bytes // 2), generator=generator).add_(0.1)
    blocks[..., : kind.limit_bytes] = limits.half().view(torch.uint8)
    return blocks.flatten(1)


def make_x(rows: int, cols: int) -> Tensor:
    """Rows of very different magnitude, a slice of a wider tensor."""
    generator = torch.Generator().manual_seed(1)
    magnitudes = torch.exp(torch.randn((rows, 1), generator=generator) * 4)
    return (torch.randn((rows, cols + 8), generator=generator) * magnitudes).bfloat16()[:, :cols]


def wanted(kind: BlockFormat, blocks: Tensor, x: Tensor) -> Tensor:
    return x.double() @ dequantize(kind, blocks)[:, : x.shape[1]].double().T


def assert_near(found: Tensor, kind: BlockFormat, blocks: Tensor, x: Tensor) -> None:
    """Sums of float32, of products that are exact, or whose inputs have 16 bits."""
    weight = dequantize(kind, blocks)[:, : x.shape[1]].double()
    terms = x.double().abs() @ weight.abs().T
    largest = x.double().abs().amax(-1, keepdim=True) * weight.abs().sum(1)
    error = (found - x.double() @ weight.T).abs()
    assert (error <= terms * 4e-6 + (largest * 2**-14 if kind.name in WIDE_NAMES else 0)).all()


@KINDS
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_against_the_dequantized_weight(isa: str, kind: BlockFormat, size: tuple[int, int]) -> None:
    rows, cols = size
    blocks = make_blocks(kind, rows, cols)
    packed = pack_blocks(kind, blocks, cols)
    for num_rows in (1, 2, 7, 40):
        x = make_x(num_rows, cols)
        found = linear(x, packed, torch.float32)
        assert_near(found, kind, blocks, x)
        plain = linear_reference.linear(x, packed.tensors[0], None, kind.name, size, out_dtype=torch.float32)
        assert_near(plain, kind, blocks, x)


@KINDS
def test_a_row_does_not_depend_on_its_company(isa: str, kind: BlockFormat) -> None:
    """At 1,000 rows the weights are read more than once, and unpacked."""
    packed = pack_blocks(kind, make_blocks(kind, 130, 576))
    x = make_x(1000, 576)
    together = linear(x, packed, torch.float32)
    for begin, end in ((0, 1), (5, 6), (997, 1000), (13, 18), (400, 409), (3, 250)):
        assert torch.equal(linear(x[begin:end], packed, torch.float32), together[begin:end])


@KINDS
@pytest.mark.parametrize("gate", [SILU, GELU_TANH])
def test_gate(isa: str, kind: BlockFormat, gate: int) -> None:
    blocks, x = make_blocks(kind, 2 * 52, 96), make_x(8, 96) / 64
    first, second = linear(x, pack_blocks(kind, blocks)).chunk(2, dim=1)
    act = functional.silu(first) if gate == SILU else functional.gelu(first, approximate="tanh")
    found = linear(x, pack_blocks(kind, blocks, gate=gate))
    # In the tail of GELU 1 + tanh cancels: what is left is a few units of rounding times the factors.
    tail = first.float().abs() * second.float().abs() * 1e-6
    assert ((found - act * second).float().abs() <= (act * second).float().abs() * 2**-7 + tail).all()


@KINDS
def test_inputs_that_are_not_finite_are_not_lost(isa: str, kind: BlockFormat) -> None:
    blocks = make_blocks(kind, 40, 64)
    x = torch.ones(3, 64).bfloat16()
    x[1, 5] = float("nan")
    x[2, 5] = float("inf")
    found = linear(x, pack_blocks(kind, blocks), torch.float32)
    assert found[0].isfinite().all()
    assert found[1].isnan().all()
    of_inf = dequantize(kind, blocks)[:, 5]
    assert not found[2][of_inf != 0].isfinite().any()


@CODES
def test_small_and_large_inputs(isa: str, kind: BlockFormat) -> None:
    blocks = make_blocks(kind, 40, 64)
    for magnitude in (2.0**-50, 2.0**40):
        x = (make_x(3, 64).sign() * magnitude).bfloat16()
        assert_near(linear(x, pack_blocks(kind, blocks), torch.float32), kind, blocks, x)


def test_subnormal_weights_are_zero_at_worst(isa: str) -> None:
    """Below 2^-6, of up to 448."""
    blocks = torch.zeros(32, 1, FLOAT8.block_bytes, dtype=torch.uint8)
    blocks[..., :2] = torch.tensor([256.0]).half().view(torch.uint8)
    blocks[..., 2:] = torch.arange(1, 8, dtype=torch.uint8).repeat(5)[:32]
    x = torch.ones(1, 32).bfloat16()
    found = linear(x, pack_blocks(FLOAT8, blocks.flatten(1)), torch.float32).double()
    exact = wanted(FLOAT8, blocks.flatten(1), x)
    assert (((found - exact).abs() <= exact * 1e-6) | (found == 0)).all()


@KINDS
def test_rows_of_the_weight(kind: BlockFormat, library: object) -> None:
    for cols in (96, 40):
        blocks = make_blocks(kind, 70, cols)
        indices = torch.tensor([69, 0, 31, 32, 0])
        found = weight_rows(indices, pack_blocks(kind, blocks, cols))
        assert torch.equal(found, dequantize(kind, blocks)[indices, :cols].bfloat16())


@pytest.mark.parametrize("kind", PANEL_FORMATS.values(), ids=lambda kind: kind.name)
def test_inputs_in_an_order_of_their_own(isa: str, kind: BlockFormat) -> None:
    """The same bits as of a row whose inputs were put in that order before, of few rows and of many."""
    cols = 96
    order = torch.randperm(cols, generator=torch.Generator().manual_seed(2))
    packed = with_bias(pack_blocks(kind, make_blocks(kind, 70, cols), cols), torch.randn(70))
    ordered = with_order(packed, order)
    for num_rows in (1, 7, 40):
        x = make_x(num_rows, cols)
        assert torch.equal(linear(x, ordered), linear(x[:, order], packed))
        assert not torch.equal(linear(x, ordered), linear(x, packed))

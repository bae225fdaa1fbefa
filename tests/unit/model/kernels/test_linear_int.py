"""Linear layers on integers against their reference, per instruction set: every format, odd sizes, any batch."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pagemill.model.kernels import reference
from pagemill.model.kernels.linear import GELU_TANH, SILU, linear, weight_rows, with_bias
from pagemill.model.kernels.linear_int import BLOCK, FORMATS, Q8_0, BlockFormat, dequantize, pack_blocks, quantize_q8

pytestmark = pytest.mark.cases(one_in=12)

KINDS = pytest.mark.parametrize("kind", FORMATS.values(), ids=lambda kind: kind.name)
# Outputs and inputs: less than a panel, a few panels, neither a multiple of what is processed at once.
SIZES = [(1, 32), (31, 64), (33, 96), (200, 576), (70, 40), (64, 1), (96, 1536)]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def make_blocks(kind: BlockFormat, rows: int, cols: int, seed: int = 0) -> Tensor:
    """Any bytes for the integers; scales and minima of either sign, a few of them zero or the smallest there is."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (rows, -(-cols // BLOCK), kind.block_bytes), dtype=torch.uint8, generator=generator)
    limits = torch.randn((*blocks.shape[:2], kind.limit_bytes // 2), generator=generator)
    limits[torch.rand(limits.shape, generator=generator) < 0.05] = 0.0
    limits[torch.rand(limits.shape, generator=generator) < 0.05] = 6e-8
    blocks[..., : kind.limit_bytes] = limits.half().view(torch.uint8)
    return blocks


def parts_of(kind: BlockFormat, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Integers [N, B, 32], scales and minima [N, B], all float32."""
    limits = blocks[..., : kind.limit_bytes].contiguous().view(torch.float16).float()
    packed = blocks[..., kind.limit_bytes :]
    if kind.name == "Q8_0":
        return packed.contiguous().view(torch.int8).float(), limits[..., 0], None
    nibbles = torch.cat([packed & 15, packed >> 4], -1).float()
    if kind.name == "Q4_0":
        return nibbles - 8, limits[..., 0], None
    return nibbles, limits[..., 0], limits[..., 1]


def make_x(rows: int, cols: int, seed: int = 1) -> Tensor:
    """Blocks of very different magnitude, a slice of a wider tensor."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.exp(torch.randn((rows, 1), generator=generator) * 4)
    return (torch.randn((rows, cols + 8), generator=generator) * magnitudes).bfloat16()[:, :cols]


def wanted(kind: BlockFormat, blocks: Tensor, x: Tensor) -> Tensor:
    return reference.quantized_linear(x, *parts_of(kind, blocks))


def assert_close(found: Tensor, expected: Tensor, x: Tensor) -> None:
    """Within rounding of float32 sums whose terms are as large as the inputs allow."""
    scale = x.float().abs().amax(-1, keepdim=True) * 128 * 3 * max(1, x.shape[1] ** 0.5)
    assert ((found - expected).abs() <= 3e-7 * scale).all()


@KINDS
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_against_reference(isa: str, threads: int, kind: BlockFormat, size: tuple[int, int]) -> None:
    rows, cols = size
    blocks = make_blocks(kind, rows, cols)
    packed = pack_blocks(kind, blocks.flatten(1), cols)
    for num_rows in (1, 2, 7, 40):
        x = make_x(num_rows, cols)
        assert_close(linear(x, packed, torch.float32), wanted(kind, blocks, x), x)


@KINDS
def test_a_row_does_not_depend_on_its_company(isa: str, threads: int, kind: BlockFormat) -> None:
    """At 1,000 rows the weights are read more than once, and unpacked."""
    packed = pack_blocks(kind, make_blocks(kind, 130, 576).flatten(1))
    x = make_x(1000, 576)
    together = linear(x, packed, torch.float32)
    assert not together.isnan().any()
    for begin, end in ((0, 1), (5, 6), (997, 1000), (13, 18), (400, 406), (3, 250)):
        assert torch.equal(linear(x[begin:end], packed, torch.float32), together[begin:end])


@KINDS
def test_bias_and_output_type(isa: str, kind: BlockFormat) -> None:
    blocks, bias, x = make_blocks(kind, 70, 64), torch.randn(70), make_x(9, 64)
    plain = linear(x, pack_blocks(kind, blocks.flatten(1)), torch.float32)
    biased = linear(x, with_bias(pack_blocks(kind, blocks.flatten(1)), bias))
    assert torch.equal(biased, (plain + bias).bfloat16())


@KINDS
@pytest.mark.parametrize("gate", [SILU, GELU_TANH])
def test_gate(isa: str, kind: BlockFormat, gate: int) -> None:
    blocks, x = make_blocks(kind, 2 * 52, 96), make_x(8, 96) / 64
    first, second = linear(x, pack_blocks(kind, blocks.flatten(1))).chunk(2, dim=1)
    act = functional.silu(first) if gate == SILU else functional.gelu(first, approximate="tanh")
    found = linear(x, pack_blocks(kind, blocks.flatten(1), gate=gate))
    # In the tail of GELU 1 + tanh cancels: what is left is a few units of rounding times the factors.
    tail = first.float().abs() * second.float().abs() * 1e-6
    assert ((found - act * second).float().abs() <= (act * second).float().abs() * 2**-7 + tail).all()


@KINDS
def test_inputs_of_every_magnitude(isa: str, kind: BlockFormat) -> None:
    """Zeros, subnormal numbers, 2^100 and beyond give finite results; of a row that is not finite, all is NaN."""
    blocks = make_blocks(kind, 40, 64)
    packed = pack_blocks(kind, blocks.flatten(1))
    x = torch.tensor([0.0, 1e-40, 1e-20, 1e20, 3e38, float("nan"), float("inf"), -1.0]).bfloat16()
    x = x.unsqueeze(1).repeat(1, 64)
    x[5:7, 1:] = 1.0
    found = linear(x, packed, torch.float32)
    assert torch.equal(found.isnan().all(1), torch.tensor([False] * 5 + [True, True, False]))
    assert found[:5].isfinite().all()
    assert not found[:2].any()
    for row in (2, 3, 7):
        assert_close(found[row : row + 1], wanted(kind, blocks, x[row : row + 1]), x[row : row + 1])


def test_quantized_inputs_are_near_the_inputs() -> None:
    x = make_x(50, 576)
    integers, scales = reference.quantize_rows(x)
    largest = integers.abs().amax(-1)
    assert ((largest >= 107) & (largest <= 127)).all()
    blocks = x.float().view(50, -1, 32)
    assert ((integers * scales - blocks).abs() <= scales * 0.501).all()


@KINDS
@pytest.mark.parametrize("cols", [96, 40])
def test_rows_of_the_weight(kind: BlockFormat, cols: int, library: object) -> None:
    blocks = make_blocks(kind, 70, cols).flatten(1)
    packed = pack_blocks(kind, blocks, cols)
    indices = torch.tensor([69, 0, 31, 32, 0])
    found = weight_rows(indices, packed)
    # The minimum is added with one rounding more than a fused operation has.
    assert torch.equal(found, dequantize(kind, blocks)[indices, :cols].bfloat16())
    for bad in (-1, 70):
        with pytest.raises(IndexError, match="70"):
            weight_rows(torch.tensor([0, bad]), packed)


def test_floats_as_blocks() -> None:
    torch.manual_seed(0)
    weight = torch.randn(50, 96) * torch.exp(torch.randn(50, 1))  # no scale is below what 16 bits hold in full
    weight[3] = 0
    near = dequantize(Q8_0, quantize_q8(weight))
    steps = weight.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
    assert ((near - weight).unflatten(1, (-1, 32)).abs() <= steps * 0.57 + 1e-7).all()
    assert torch.equal(dequantize(Q8_0, quantize_q8(near)), near)

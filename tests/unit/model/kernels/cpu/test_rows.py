"""Norms, activations, rotary embedding and argmax against their references, per instruction set."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pagemill.model.kernels import native, ops, reference

pytestmark = pytest.mark.cases(one_in=16)

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 576), (3, 64), (7, 100), (2, 1), (5, 17), (300, 576), (1, 4096), (0, 64)]


def assert_near(found: Tensor, wanted: Tensor) -> None:
    """float32: a few units in the last place. bfloat16: the same bits, but where the float32 before was near a tie."""
    assert found.dtype == wanted.dtype
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, wanted, rtol=3e-6, atol=3e-6)
        return
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-6)
    assert (found != wanted).sum() <= 2 + found.numel() // 100


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 2.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("wide_weight", [False, True])
def test_rms_norm(isa: str, dtype: torch.dtype, shape: tuple[int, int], wide_weight: bool) -> None:
    x, weight = noise(*shape, dtype=dtype), noise(shape[1], dtype=torch.float32 if wide_weight else dtype, seed=1)
    assert_near(native.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_of_a_sum(isa: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, weight = noise(*shape, dtype=dtype), noise(shape[1], dtype=dtype, seed=1)
    residual = noise(*shape, dtype=dtype, seed=2)
    wanted_residual = residual.clone()
    wanted = reference.rms_norm(x, weight, 1e-6, wanted_residual)
    found = native.rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(residual, wanted_residual)
    assert_near(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_per_head_of_a_slice(isa: str, dtype: torch.dtype) -> None:
    query = noise(11, 9 * 48, dtype=dtype)[:, 48 : 48 * 6].view(11, 5, 48)
    weight = noise(48, dtype=dtype, seed=1)
    found = native.rms_norm(query, weight, 1e-6)
    assert found.is_contiguous()
    assert_near(found, reference.rms_norm(query, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm(isa: str, dtype: torch.dtype, shape: tuple[int, int], bias: bool) -> None:
    x = noise(*shape, dtype=dtype) + 3
    residual = noise(*shape, dtype=dtype, seed=2)
    weight = noise(shape[1], dtype=dtype, seed=1)
    added = noise(shape[1], dtype=dtype, seed=3) if bias else None
    for before in (None, residual):
        total = x if before is None else x + before
        # torch's own in bfloat16 takes differences of squares.
        wanted = reference.layer_norm(total.float(), weight.float(), None if added is None else added.float(), 1e-5)
        assert_near(native.layer_norm(x, weight, added, 1e-5, before), wanted.to(dtype))
    assert torch.equal(residual, total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", native.ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_activated(isa: str, dtype: torch.dtype, activation: str, shape: tuple[int, int]) -> None:
    x = noise(*shape, dtype=dtype, scale=1.0)
    assert_near(native.activated(x, activation), reference.activated(x, activation))


def test_activations_far_from_zero(isa: str) -> None:
    x = torch.tensor([-torch.inf, -1e4, -30.0, -6.0, -0.0, 0.0, 6.0, 30.0, 1e4, torch.inf, torch.nan])
    for activation in ("relu", "relu2"):
        torch.testing.assert_close(
            native.activated(x, activation), reference.activated(x, activation), rtol=0, atol=0, equal_nan=True
        )
    finite = x[1:-2]
    torch.testing.assert_close(
        native.activated(finite, "gelu"), reference.activated(finite, "gelu"), rtol=1e-6, atol=1e-6
    )


def test_gelu_of_every_bfloat16(isa: str) -> None:
    """Off by hardly more than rounding takes, down to where little is left of it."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite()]
    found = native.activated(x, "gelu").double()
    wanted = torch.nn.functional.gelu(x.double())
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(found[x > -4], wanted[x > -4], rtol=2**-8 * 1.02, atol=1e-37)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 100, 3, 384])
def test_sums_of_requests(isa: str, dtype: torch.dtype, size: int) -> None:
    starts = torch.tensor([0, 5, 5, 6, 40, 43])
    slots = torch.tensor([3, 0, -1, 1, 4])
    x = noise(43, size, dtype=dtype)
    found, wanted = noise(6, size, seed=1), noise(6, size, seed=1)
    native.sum_rows_(found, x, starts, slots)
    reference.sum_rows_(wanted, x, starts, slots)
    assert torch.equal(found, wanted)
    whole = torch.zeros(2, size)
    native.sum_rows_(whole, x, torch.tensor([0, 20, 43]), torch.tensor([1, 0]))
    torch.testing.assert_close(whole, torch.stack([x[20:].float().sum(0), x[:20].float().sum(0)]), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(64, 64), (16, 16), (128, 128), (80, 80), (6, 6), (64, 32), (96, 24)])
@pytest.mark.parametrize("wide_table", [False, True])
def test_rotate(isa: str, dtype: torch.dtype, size: tuple[int, int], wide_table: bool) -> None:
    head_size, turned = size
    angles = noise(19, turned // 2, seed=3, scale=50.0).repeat(1, 2)
    table_dtype = torch.float32 if wide_table else dtype
    cos, sin = angles.cos().to(table_dtype), angles.sin().to(table_dtype)
    qkv = noise(19, 7, head_size, dtype=dtype)
    wanted = qkv.clone()
    reference.rotate_(wanted[:, 1:4], cos, sin)
    native.rotate_(qkv[:, 1:4], cos, sin)
    assert_near(qkv, wanted)
    assert torch.equal(qkv[:, 4:], wanted[:, 4:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_gated(isa: str, dtype: torch.dtype, gelu: bool, shape: tuple[int, int]) -> None:
    x = noise(shape[0], 2 * shape[1], dtype=dtype)
    assert_near(native.gated(x, gelu), reference.gated(x, gelu))


@pytest.mark.parametrize("gelu", [False, True])
def test_activation_at_the_extremes(isa: str, gelu: bool) -> None:
    gate = torch.tensor([0.0, -0.0, 1e-8, -1e-8, 20.0, -20.0, 90.0, -90.0, 1e4, -1e4, 3e38, -3e38])
    x = torch.cat([gate, torch.ones(len(gate))]).unsqueeze(0)
    torch.testing.assert_close(native.gated(x, gelu), reference.gated(x, gelu), rtol=1e-5, atol=1e-7)


def test_silu_of_every_bfloat16(isa: str) -> None:
    x = torch.arange(-(2**15), 2**15).short().view(torch.bfloat16).view(256, 256)
    x = x[x.isfinite()].view(-1, 256)
    x = torch.cat([x, torch.ones_like(x)], 1)
    assert_near(native.gated(x, False), reference.gated(x, False))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 49152), (1, 200_001), (5, 1003), (64, 49152), (0, 10)])
def test_argmax(isa: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    logits = noise(*shape, dtype=dtype, scale=30.0)
    assert torch.equal(native.argmax(logits), logits.argmax(-1))
    assert torch.equal(native.argmax(logits[:, : shape[1] // 2 + 1]), logits[:, : shape[1] // 2 + 1].argmax(-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [[0, 1], [100_000, 199_999], [77, 150_000], [199_998, 199_999]])
def test_argmax_of_equals_is_the_first(isa: str, dtype: torch.dtype, columns: list[int]) -> None:
    logits = noise(1, 200_000, dtype=dtype)
    logits[0, columns] = 100.0
    assert native.argmax(logits).tolist() == [columns[0]]


def test_argmax_of_a_constant_row_is_the_start(isa: str) -> None:
    assert native.argmax(torch.zeros(2, 1000)).tolist() == [0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("column", [0, 17, 1000, 1002])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_no_distribution_has_no_argmax(isa: str, dtype: torch.dtype, column: int, value: float) -> None:
    logits = noise(3, 1003, dtype=dtype)
    logits[1, column] = value
    expected = reference.argmax(logits)
    assert (expected == -1).tolist() == [False, True, False]
    assert torch.equal(native.argmax(logits), expected)
    assert native.argmax(logits[1:2]).tolist() == [-1]
    assert native.argmax(torch.full((2, 1003), float("-inf"), dtype=dtype)).tolist() == [-1, -1]


@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 31), (3, 32), (5, 1003), (64, 49152), (0, 40)])
def test_a_mask_refuses_what_has_no_bit(isa: str, num_rows: int, size: int) -> None:
    logits = noise(num_rows, size + 7, scale=30.0)
    width = -(-size // 32)
    words = torch.randint(-(2**31), 2**31, (num_rows, width), dtype=torch.int64).int()
    words[:, ::3] = 0
    words[:, 1::3] = -1
    expected = logits.clone()
    reference.mask_(expected[:, :size], words)
    native.mask_(logits[:, :size], words)
    assert torch.equal(logits, expected)
    bits = (words.unsqueeze(-1).numpy().view("uint32") >> torch.arange(32).numpy()) & 1
    refused = torch.from_numpy(bits == 0).reshape(num_rows, width * 32)[:, :size]
    assert torch.equal(logits[:, :size] == -torch.inf, refused)


def test_narrowing_rounds_as_torch(isa: str) -> None:
    """Every upper half with ties, near ties and odd neighbours: x * 1 + 0 through the norm of a sum."""
    upper = torch.arange(0, 0x7F00, 7, dtype=torch.int32) << 16
    bits = torch.cat([upper + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    wide = bits.view(torch.float32)
    wide = wide[wide > 1e-30]
    high = wide.to(torch.bfloat16)
    rest = (wide - high.float()).to(torch.bfloat16)
    residual = rest.unsqueeze(0).clone()
    native.rms_norm(high.unsqueeze(0), torch.ones(len(high), dtype=torch.bfloat16), 1e-6, residual)
    assert torch.equal(residual[0], high + rest)


@pytest.mark.parametrize("function", [native.argmax, lambda x: native.gated(x, False)])
def test_one_long_call_uses_all_threads_and_agrees(isa: str, function: Callable[[Tensor], Tensor]) -> None:
    x, before = noise(9, 70_000), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = function(x)
        torch.set_num_threads(3)
        assert torch.equal(function(x), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("limit", [0.5, 30.0])
def test_soft_cap(isa: str, shape: tuple[int, int], limit: float) -> None:
    logits = noise(*shape, scale=20.0)
    found = native.soft_cap(logits, limit)
    torch.testing.assert_close(found, torch.tanh(logits / limit) * limit, rtol=3e-6, atol=3e-6)
    assert found.abs().le(limit).all()


def test_soft_cap_of_rows_in_wider_ones() -> None:
    """As ranks have them that hold unequal parts of a vocabulary."""
    logits = noise(3, 50, scale=20.0)[:, :41]
    torch.testing.assert_close(ops.soft_cap(logits, 30.0), torch.tanh(logits / 30.0) * 30.0, rtol=3e-6, atol=3e-6)

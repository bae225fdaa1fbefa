"""Limits made of scales and zero points against torch, per instruction set: every type, every exponent, odd sizes."""

import pytest
import torch
from torch import Tensor

from pagemill.model.kernels.pack_limits import IN_ORDER, ZeroWords, pack_limits
from pagemill.model.loading.packed_weight import as_halves
from pagemill.model.loading.zero_words import PLACES, zero_integers

BITS_OF_16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
EDGES = (0.0, -0.0, 65503.9, 65504.0, 65519.9, 65520.0, 65536.0, 2.0**-14, 2.0**-15, 2.0**-24, 2.0**-25, 3 * 2.0**-25)
"""Around the largest of 16-bit floats, and the smallest."""
NO_HALVES = (1e-40, 6e-6, 1e30, float("inf"), -float("inf"), float("nan"))


def expected(scales: Tensor, zeros: ZeroWords | None = None, unit: float = 1.0) -> Tensor | None:
    exact = scales.float() * unit
    halves = as_halves(exact)
    if halves is None or zeros is None:
        return halves
    points = zero_integers(zeros, scales.shape[zeros.dim])
    minima = as_halves(exact * ((points.t() if zeros.dim else points).float() + 8).neg_())
    return None if minima is None else torch.stack([halves, minima], -1).view(torch.int32).squeeze(-1)


def check(scales: Tensor, zeros: ZeroWords | None = None, unit: float = 1.0) -> bool:
    """Whether 16-bit floats hold them, which both say."""
    found, wanted = pack_limits(scales, zeros, unit), expected(scales, zeros, unit)
    assert (found is None) == (wanted is None)
    if found is not None and wanted is not None:
        assert found.dtype == wanted.dtype
        assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))
    return found is not None


@pytest.mark.cases(one_in=3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("unit", [1.0, 256.0])
def test_scales_of_every_type(isa: str, dtype: torch.dtype, unit: float) -> None:
    # The upper bits of float32 are those of bfloat16: with all of these, all exponents are there.
    kind = torch.float16 if dtype == torch.float16 else torch.bfloat16
    every = BITS_OF_16.view(kind).to(dtype)
    # One at a time would take long: those that are held go together, and of the others some by themselves.
    exact = every.float() * unit
    errors = (exact.half().float() - exact).abs()
    held = errors <= exact.abs() * 2.0**-11
    assert check(every[held].view(1, -1), unit=unit)
    assert check(every[held][:3000].view(120, 25), unit=unit)
    for scale in every[~held][::61]:
        assert not check(torch.cat([every[held][:40], scale.view(1)]).view(1, -1), unit=unit)


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize("scale", [*EDGES, *NO_HALVES])
def test_edges_of_16_bit_floats(isa: str, scale: float) -> None:
    held = check(torch.tensor([[1.0, scale, -2.0]]))
    assert held != (scale in (*NO_HALVES, 65520.0, 65536.0, 2.0**-25, 3 * 2.0**-25) or scale != scale)


def words(outputs: int, groups: int, dim: int) -> Tensor:
    made = torch.randint(-(1 << 31), 1 << 31, (groups, outputs // 8), generator=torch.Generator().manual_seed(0)).int()
    return made if dim else made.t().contiguous()


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("places", [IN_ORDER, PLACES], ids=str)
@pytest.mark.parametrize("added", [0, 1])
@pytest.mark.parametrize(("outputs", "groups"), [(8, 1), (24, 3), (136, 32), (64, 5)])
def test_zero_points_become_minima(
    isa: str, dim: int, places: tuple[int, ...], added: int, outputs: int, groups: int
) -> None:
    zeros = ZeroWords(words(outputs, groups, dim), dim, places, added)
    shape = (groups, outputs) if dim else (outputs, groups)
    scales = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert check(scales, zeros)
    assert check(scales.half(), zeros)
    # As they lie in a larger tensor, of which this is a part.
    wide = torch.nn.functional.pad(scales, (3, 2))[:, 3:-2]
    wide_words = torch.nn.functional.pad(zeros.words, (1, 4))[:, 1:-4]
    assert check(wide, ZeroWords(wide_words, dim, places, added))
    if dim == 0 and outputs > 8:  # a part, which begins and ends within a word
        assert check(scales[3:-2], ZeroWords(zeros.words, dim, places, added, first=3))
    turned = scales.t().contiguous().t()
    assert check(turned, ZeroWords(zeros.words.t().contiguous().t(), dim, places, added))


def test_a_minimum_that_16_bit_floats_do_not_hold(isa: str) -> None:
    scales = torch.full((8, 2), 10_000.0)
    stored = torch.zeros(1, 2, dtype=torch.int32)
    assert check(scales, ZeroWords(stored, 0))
    stored[0, 1] = 7 << 12
    assert not check(scales, ZeroWords(stored, 0))
